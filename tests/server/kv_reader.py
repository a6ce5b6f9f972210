"""A router of our own: reads KV events from the wire, knowing nothing of how they are written but the map encoding."""

from __future__ import annotations

import struct

import msgspec
import zmq

from jetserve.engine.kv_events import BlockStored
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
            publisher.publish([BlockStored((name,), None, (name, count))])
            if self.subscriber.poll(10):
                break
        while True:
            _, number, payload = self.read()
            if msgspec.msgpack.decode(payload)[1][0]["token_ids"] == [name, count]:
                return number_of(number)

    def close(self) -> None:
        self.context.destroy(linger=0)
