"""KV events of a whole server: its addresses, and what a router knows of its cache."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

import msgspec
import pytest

from jetserve import config
from jetserve.engine.engine import Engine, LoadedModel
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.errors import ConfigError
from jetserve.orchestrator.engine_thread import Load, ReportProgress
from jetserve.server import serving
from tests.server.kv_reader import FREE, cached_blocks, folded, generate, served
from tests.server.numbers import VOCAB_SIZE, loaded_model, sizing


@pytest.mark.parametrize("setting", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://127.0.0.1:{taken}", "the address is in use"),
        ("tcp://192.0.2.1:5557", "this machine has no such address or interface"),
        ("tcp://eth99:5557", "this machine has no such address or interface"),
        ("ipc:///nowhere/at/all", "No such file or directory"),
    ],
)
def test_an_address_that_cannot_be_had_is_one_clear_line(setting: str, address: str, why: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = address.format(taken=taken.getsockname()[1])
        settings = [f"kv_events.{k}={v}" for k, v in ({"endpoint": FREE, setting: address}).items()]
        with pytest.raises(ConfigError) as caught:
            serving.run(
                config.load(None, ["server.grpc_port=0", "server.http_port=0", *settings]), lambda report: None, print
            )

    assert f"kv_events.{setting}={address}: {why}" in str(caught.value)
    assert "as in tcp://*:5557" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_ports_are_given_back_when_one_cannot_be_had() -> None:
    with socket.socket() as taken, socket.socket() as ours:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ours.bind(("127.0.0.1", 0))
        free = f"tcp://127.0.0.1:{ours.getsockname()[1]}"
        ours.close()
        settings = [f"kv_events.endpoint={free}", f"server.grpc_port={taken.getsockname()[1]}", "server.http_port=0"]
        for _ in range(2):  # the second time KV events could not be published either, were it not so
            with pytest.raises(ConfigError, match="grpc_port"):
                serving.run(config.load(None, settings), lambda report: None, print)


def on_fake_device(sizes: Sizing) -> Load:
    """A model whose cache is looked at."""

    def load(_report: ReportProgress) -> LoadedModel:
        model = loaded_model(lambda shapes: FakeExecutor(shapes, VOCAB_SIZE), sizes)
        engine = Engine(Scheduler(sizes, is_observed=True), FakeExecutor(sizes, VOCAB_SIZE))
        return dataclasses.replace(model, engine=engine)

    return load


@pytest.mark.parametrize("host_blocks", [0, 20])
def test_events_of_a_server_fold_to_what_its_cache_holds(run, host_blocks: int) -> None:
    async def check() -> None:
        sizes = dataclasses.replace(sizing(), pages=40, host_blocks=host_blocks)
        async with served(on_fake_device(sizes)) as (server, reader):
            for at in [*range(8), *range(8)]:  # more than the pool holds
                prompt = list(range(80 * at, 80 * at + 70))
                await generate(server, prompt)
                await generate(server, [*prompt[:40], 5, 6, 7])
                await generate(server, prompt, cache_salt=f"tenant {at % 2}")
            index = await folded(reader)
            assert index.blocks == cached_blocks(server)
            assert len(index.blocks["GPU"]) > 20
            assert len(index.blocks["CPU"]) <= host_blocks
            assert bool(index.blocks["CPU"]) == bool(host_blocks)
            assert server.orchestrator.status().evicted_pages > 0

            await server.orchestrator.flush_cache()
            async with asyncio.timeout(20):  # it may answer before it tells
                while (await folded(reader)).blocks != {"GPU": {}, "CPU": {}}:
                    pass
            await generate(server, list(range(70)))
            assert (await folded(reader)).blocks == cached_blocks(server)

    run(check())


def test_the_first_batch_says_that_nothing_is_cached(run) -> None:
    async def check() -> None:
        async with served(on_fake_device(sizing())) as (server, reader):
            await generate(server, list(range(40)))
            first, second, *_ = await asyncio.to_thread(reader.replay, 0)
            assert msgspec.msgpack.decode(first[2])[1] == [{"type": "AllBlocksCleared"}]
            assert msgspec.msgpack.decode(second[2])[1][0]["token_ids"] == list(range(32))

    run(check())


def test_the_announcement_names_both_addresses(run) -> None:
    async def check() -> None:
        async with served(on_fake_device(sizing())) as (server, _):
            events = server.kv_events
            assert events is not None
            line = serving._listening(config.load(), server).splitlines()[-1]
            assert line == f"  ZMQ   {events.endpoint}  KV events, replay {events.replay_endpoint}"

    run(check())
