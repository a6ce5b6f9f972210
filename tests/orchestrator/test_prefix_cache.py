"""The prefix cache through the engine thread: what is counted, and flushing at any moment."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from jetserve.errors import EngineFailed, Unavailable
from jetserve.request import Usage


async def last_usage(stream: Any) -> Usage:
    deltas = [delta async for delta in stream]
    return deltas[-1].usage


async def test_every_delta_says_how_much_was_cached(serve: Any, collect: Any) -> None:
    async with serve() as served:
        await collect(await served.submit("abcdefgh", 3))
        deltas = await collect(await served.submit("abcdefgX", 3))
        assert {delta.usage.cached_tokens for delta in deltas} == {7}
        assert [record.cached_tokens for record in served.metrics.requests] == [0, 7]


async def test_samples_of_a_prompt_share_its_pages(serve: Any, collect: Any) -> None:
    """The first one computes the prompt; of the others each knows what it found."""
    async with serve() as served:
        deltas = await collect(await served.submit("abcdefghi", 3, n=3))
        found = {delta.index: delta.usage.cached_tokens for delta in deltas}
        assert found[0] == 0
        assert found[1] == found[2] == 8
        assert [record.cached_tokens for record in served.metrics.requests] == [0]
        assert served.orchestrator.status().queried_tokens == 27
        assert served.orchestrator.status().cached_tokens == 16


async def test_resumed_sequences_are_not_counted_twice(serve: Any, sizing: Any) -> None:
    """What a preempted sequence finds of itself when it comes back is nobody's cached prompt."""
    async with serve(sizing=dataclasses.replace(sizing, pages=21)) as served:
        prompts = [[number, number, number] for number in range(1, 9)]
        streams = [await served.submit(prompt, 60, ignore_eos=True) for prompt in prompts]
        usages = await asyncio.gather(*map(last_usage, streams))
        status = served.orchestrator.status()
        assert status.preemptions > 0
        assert {usage.cached_tokens for usage in usages} == {0}
        assert (status.queried_tokens, status.cached_tokens) == (24, 0)
        assert sum(record.preemptions for record in served.metrics.requests) == status.preemptions


async def test_flush_answers_an_idle_engine_and_a_busy_one(serve: Any, collect: Any) -> None:
    async with serve(gated=True) as served:
        assert await served.orchestrator.flush_cache() == 0
        stream = await served.submit("abcdefgh", 9)
        await served.until(lambda: served.slots_used == 1)
        flush = asyncio.create_task(served.orchestrator.flush_cache())
        await asyncio.sleep(0)
        assert not flush.done()  # never in the middle of a step
        served.gate.open()
        assert await flush == 0  # all that is cached is in use
        assert (await last_usage(stream)).completion_tokens == 9
        await served.until_idle()
        assert (await last_usage(await served.submit("abcdefgh", 1))).cached_tokens == 0


async def test_flush_that_nobody_waits_for_is_done_all_the_same(serve: Any, collect: Any) -> None:
    async with serve() as served:
        await collect(await served.submit("abcdefgh", 3))
        flush = asyncio.create_task(served.orchestrator.flush_cache())
        await asyncio.sleep(0)
        flush.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flush
        await served.until(lambda: served.orchestrator.status().cached_pages == 0)
        assert (await last_usage(await served.submit("abcdefgh", 1))).cached_tokens == 0


async def test_flush_is_not_left_waiting_for_an_engine_that_fails(serve: Any) -> None:
    async with serve(gated=True, fail_at=0) as served:
        stream = await served.submit("a", 9)
        await served.until(lambda: len(served.fake.plans) == 2)
        flush = asyncio.create_task(served.orchestrator.flush_cache())
        await asyncio.sleep(0)
        served.gate.open()
        with pytest.raises(Unavailable, match="the engine has failed"):
            await flush
        with pytest.raises(EngineFailed):
            await last_usage(stream)


async def test_flush_is_not_left_waiting_for_an_engine_that_stops(serve: Any) -> None:
    async with serve(gated=True) as served:
        stream = await served.submit("a", 9)
        await served.until(lambda: len(served.fake.plans) == 2)
        stop = asyncio.create_task(served.orchestrator.stop())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="stopped"):
            await served.orchestrator.flush_cache()
        served.gate.open()
        await stop
        with pytest.raises(Unavailable):
            await last_usage(stream)
