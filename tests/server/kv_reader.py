"""A router of our own, which reads KV events from the wire, and a server for it to read from."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import msgspec
import zmq

from jetserve import config
from jetserve.engine.kv_events import BlockStored
from jetserve.orchestrator.engine_thread import Load
from jetserve.request import SamplingParams, Usage
from jetserve.server import serving
from jetserve.server.kv_events import KvEventPublisher

FREE = "tcp://127.0.0.1:*"
END = [b"", b"", b"\xff" * 8, b""]  # of a replay
_PATIENCE_MS = 20_000


def number_of(frame: bytes) -> int:
    return struct.unpack(">Q", frame)[0]


def stored(name: int) -> BlockStored:
    return BlockStored((name,), None, (name, name))


def name_in(payload: bytes) -> int:
    """Of a batch of one `stored`."""
    _, [event], _ = msgspec.msgpack.decode(payload)
    return event["block_hashes"][0]


class Reader:
    """A router: subscribes, and asks for what it missed."""

    def __init__(self, publisher: KvEventPublisher, topic: bytes = b"", kind: int = zmq.DEALER) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.set_hwm(0)
        self.subscriber.subscribe(topic)
        self.subscriber.connect(publisher.endpoint)
        self.asker = self.context.socket(kind)
        self.asker.set_hwm(0)
        if publisher.replay_endpoint is not None:
            self.asker.connect(publisher.replay_endpoint)

    def read(self) -> list[bytes]:
        assert self.subscriber.poll(_PATIENCE_MS), "nothing was published"
        return self.subscriber.recv_multipart()

    def answer(self) -> list[bytes]:
        assert self.asker.poll(_PATIENCE_MS), "nothing was answered"
        return self.asker.recv_multipart()

    def replay(self, first: int) -> list[list[bytes]]:
        """Frames behind the empty one, of all batches from a number on."""
        self.asker.send_multipart([b"", first.to_bytes(8, "big")])
        answers = []
        while (answer := self.answer()) != END:
            assert answer[0] == b""
            answers.append(answer[1:])
        return answers

    def join(self, publisher: KvEventPublisher, name: int = 1) -> int:
        """Publishes until something arrives, for a subscription takes its time. Returns the last batch's number."""
        for count in range(1, _PATIENCE_MS // 10):
            publisher.publish([BlockStored((name,), None, (0, count))])
            if self.subscriber.poll(10):
                break
        while True:
            _, number, payload = self.read()
            if msgspec.msgpack.decode(payload)[1][0].get("token_ids") == [0, count]:
                return number_of(number)

    def close(self) -> None:
        self.context.destroy(linger=0)


Blocks = dict[str, dict[int, tuple[int | None, tuple[int, ...]]]]  # medium -> hash -> parent's hash, tokens


class Index:
    """What a router makes of the batches of one server. A batch that does not fit those before it is an error."""

    def __init__(self) -> None:
        self.blocks: Blocks = {"GPU": {}, "CPU": {}}

    def apply(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            hashes = event.get("block_hashes", [])
            assert len(set(hashes)) == len(hashes)
            assert 0 not in hashes
            if event["type"] == "AllBlocksCleared":
                self.blocks = {"GPU": {}, "CPU": {}}
            elif event["type"] == "BlockRemoved":
                for name in hashes:
                    del self.blocks[event["medium"]][name]
            else:
                size, parent = event["block_size"], event["parent_block_hash"]
                assert parent not in hashes
                assert parent is None or any(parent in blocks for blocks in self.blocks.values())
                for at, name in enumerate(hashes):
                    tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
                    assert self.blocks[event["medium"]].setdefault(name, (parent, tokens)) == (parent, tokens)
                    parent = name


def cached_blocks(server: serving.Server) -> Blocks:
    """What the server's cache really holds."""
    held: Blocks = {"GPU": {}, "CPU": {}}
    for node in server.orchestrator.model.engine.scheduler.memory.tree._walk():
        if node.hash:
            assert node.parent is not None
            parent = node.parent.hash if node.parent.parent is not None else None
            held["CPU" if node.page is None else "GPU"][node.hash] = parent, node.tokens
    return held


@contextlib.asynccontextmanager
async def served(load: Load, *settings: str) -> AsyncIterator[tuple[serving.Server, Reader]]:
    """A server that publishes, and a reader that was there before its model."""
    ports = ["server.grpc_port=0", "server.http_port=0"]
    addresses = [f"kv_events.endpoint={FREE}", f"kv_events.replay_endpoint={FREE}"]
    server = serving.Server(config.load(None, [*ports, *addresses, *settings]), load)
    assert server.kv_events is not None
    reader = Reader(server.kv_events)
    try:
        await server.start()
        await server.wait_until_ready()
        yield server, reader
    finally:
        await server.stop()
        reader.close()


async def generate(server: serving.Server, prompt: list[int], cache_salt: str | None = None) -> tuple[list[int], Usage]:
    """Returns 20 tokens, and what they cost, when the server is idle again."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    stream = await server.orchestrator.submit(prompt, params, cache_salt=cache_salt)
    deltas = [delta async for delta in stream]
    while server.orchestrator.status().slots_used:
        await asyncio.sleep(0.002)
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].usage


async def folded(reader: Reader) -> Index:
    """All batches so far."""
    index = Index()
    for _, _, payload in await asyncio.to_thread(reader.replay, 0):
        index.apply(payload)
    return index
