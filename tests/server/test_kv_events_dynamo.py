"""What a router that is not ours makes of our events: Dynamo's indexer counts the tokens of prompts that are cached."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from jetserve import config
from jetserve.config import KvEventsSettings
from jetserve.engine import loading
from jetserve.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from jetserve.server.kv_events import KvEventPublisher
from tests.bench.tiny_model import write_tiny_model
from tests.server import dynamo
from tests.server.dynamo import Indexer
from tests.server.kv_reader import cached_blocks, folded, generate, served

pytestmark = pytest.mark.oracle

BLOCK = 4
_instances = itertools.count(1)


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexer]:
    with dynamo.running(tmp_path_factory.mktemp("dynamo")) as found:
        yield found


@pytest.fixture
def instance() -> int:
    return next(_instances)


def prompt(instance: int, tokens: int) -> tuple[int, ...]:
    """Of an instance's own, so that tests do not see each other's blocks."""
    return tuple(range(1000 * instance, 1000 * instance + tokens))


def block(instance: int, at: int) -> int:
    """The hash of the block at this place of its prompt."""
    return 2**63 + 1000 * instance + at + 1


def stored(instance: int, first: int, last: int, **fields: Any) -> BlockStored:
    """Blocks [first, last) of its prompt."""
    return BlockStored(
        tuple(block(instance, at) for at in range(first, last)),
        block(instance, first - 1) if first else None,
        prompt(instance, last * BLOCK)[first * BLOCK :],
        **fields,
    )


@contextlib.contextmanager
def publishing(**settings: Any) -> Iterator[KvEventPublisher]:
    free = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    publisher = KvEventPublisher(KvEventsSettings(**free | settings))
    publisher.start()
    try:
        publisher.publish([AllBlocksCleared()])
        yield publisher
    finally:
        publisher.stop()


def begin(indexer: Indexer, publisher: KvEventPublisher, instance: int, wanted: int = BLOCK) -> None:
    """Publishes the first block until it is heard of, for a subscription takes its time.

    Args:
      wanted: tokens of the prompt that are cached then.
    """

    def ask() -> dict[int, int]:
        publisher.publish([stored(instance, 0, 1)])
        return indexer.matched(prompt(instance, 100))

    indexer.until(ask, {instance: wanted})


def connect(indexer: Indexer, publisher: KvEventPublisher, instance: int, wanted: int = BLOCK) -> None:
    indexer.register(instance, publisher.endpoint, publisher.replay_endpoint, BLOCK)
    begin(indexer, publisher, instance, wanted)


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("topic", ["", "kv@10.0.0.1@demo"])
def test_blocks_are_counted_as_they_come_and_go(indexer: Indexer, instance: int, encoding: str, topic: str) -> None:
    with publishing(encoding=encoding, topic=topic) as publisher:
        connect(indexer, publisher, instance)
        publisher.publish([stored(instance, 1, 12)])
        indexer.wait_for({instance: 48}, prompt(instance, 51))
        assert indexer.matched(prompt(instance, 21)) == {instance: 20}
        publisher.publish([BlockRemoved((block(instance, 11), block(instance, 10)))])
        indexer.wait_for({instance: 40}, prompt(instance, 51))
        publisher.publish([stored(instance, 10, 11)])
        indexer.wait_for({instance: 44}, prompt(instance, 51))
        publisher.publish([AllBlocksCleared()])
        indexer.wait_for({}, prompt(instance, 51))


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_what_was_missed_is_replayed(indexer: Indexer, instance: int, encoding: str) -> None:
    with publishing(encoding=encoding) as publisher:
        for at in range(10):
            publisher.publish([stored(instance, at, at + 1)])
        publisher.publish([BlockRemoved((block(instance, 9),))])
        connect(indexer, publisher, instance, 36)


def test_a_process_started_later_begins_with_nothing(indexer: Indexer, instance: int) -> None:
    with publishing() as publisher:
        connect(indexer, publisher, instance)
        for at in range(1, 10):
            publisher.publish([stored(instance, at, at + 1)])
        indexer.wait_for({instance: 40}, prompt(instance, 40))
        address = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    with publishing(**address) as publisher:  # what it publishes first is missed
        begin(indexer, publisher, instance)
        publisher.publish([stored(instance, 1, 2)])
        indexer.wait_for({instance: 8}, prompt(instance, 40))


def test_an_adapter_has_prefixes_of_its_own(indexer: Indexer, instance: int) -> None:
    with publishing() as publisher:
        connect(indexer, publisher, instance)
        publisher.publish([BlockRemoved((block(instance, 0),)), stored(instance, 0, 3, adapter="french")])
        indexer.wait_for({instance: 12}, prompt(instance, 12), lora_name="french")
        assert indexer.matched(prompt(instance, 12)) == {}
        assert indexer.matched(prompt(instance, 12), lora_name="german") == {}


def test_a_salt_as_dynamo_marks_it_has_prefixes_of_its_own(indexer: Indexer, instance: int) -> None:
    with publishing() as publisher:
        connect(indexer, publisher, instance)
        publisher.publish([BlockRemoved((block(instance, 0),))])
        salt = "dynamo-cache-salt:tenant"
        publisher.publish([stored(instance, 0, 2, cache_salt=salt), stored(instance, 2, 3, cache_salt=salt)])
        indexer.wait_for({instance: 12}, prompt(instance, 12), cache_salt="tenant")
        assert indexer.matched(prompt(instance, 12)) == {}
        assert indexer.matched(prompt(instance, 12), cache_salt="other") == {}


def test_blocks_in_host_memory_are_a_tier_of_their_own(indexer: Indexer, instance: int) -> None:
    with publishing() as publisher:
        connect(indexer, publisher, instance)
        publisher.publish([stored(instance, 1, 3)])
        indexer.wait_for({instance: 12}, prompt(instance, 12))
        publisher.publish([BlockRemoved((block(instance, 2),)), stored(instance, 2, 3, medium=Medium.HOST)])
        indexer.wait_for({instance: 8}, prompt(instance, 12))
        indexer.until(lambda: indexer.tiers(prompt(instance, 12), instance), {"gpu": 8, "cpu": 12})
        publisher.publish([BlockRemoved((block(instance, 2),), Medium.HOST)])
        indexer.until(lambda: indexer.tiers(prompt(instance, 12), instance), {"gpu": 8, "cpu": 8})


def test_a_server_is_known_for_the_prefixes_it_has(
    indexer: Indexer, instance: int, run: Callable[[Coroutine], object], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The real engine on a tiny model."""
    model, page = f"model {instance}", 16
    write_tiny_model(tmp_path)
    settings = [
        f"model.name={tmp_path}",
        "model.random_weights=true",
        "model.dtype=float32",
        "engine.slots=2",
        "engine.max_length=160",
        f"engine.page_size={page}",
        "engine.kv_pages=16",
        "engine.prefill_sizes=[64]",
        "engine.strict_compile=true",
        f"engine.compilation_cache={request.config.cache.mkdir('jetserve-programs')}",
    ]
    tree = config.load(None, [*settings, "kv_events.endpoint=tcp://127.0.0.1:*"])

    async def check() -> None:
        async with served(lambda report: loaded, *settings) as (server, reader):
            events = server.kv_events
            assert events is not None
            await asyncio.to_thread(indexer.register, instance, events.endpoint, events.replay_endpoint, page, model)
            for at in range(300, 500):  # a subscription takes its time
                await generate(server, list(range(at, at + page)))
                if await asyncio.to_thread(indexer.matched, list(range(at, at + page)), model):
                    break
            prompt = list(range(70))
            other = [*prompt[:53], *range(90, 100)]

            first, _ = await generate(server, prompt)
            second, usage = await generate(server, other)

            assert usage.cached_tokens == 53
            known = functools.partial(asyncio.to_thread, indexer.wait_for, model=model)
            await known({instance: 48}, prompt[:53])  # of whole blocks
            await known({instance: 80}, [*prompt, *first])  # 70 tokens and 19 that were read when the last was sampled
            await known({instance: 80}, [*other, *second])  # 63 and 19
            assert (await folded(reader)).blocks == cached_blocks(server)

            for at in range(100, 500, 80):  # more than the pool holds
                await generate(server, list(range(at, at + 70)))
            await known({}, prompt)
            assert server.orchestrator.status().evicted_pages > 0
            assert (await folded(reader)).blocks == cached_blocks(server)

    try:
        loaded = loading.load(tree, lambda stage, fraction: None)
        run(check())
    finally:
        loading.use_compilation_cache(None)
