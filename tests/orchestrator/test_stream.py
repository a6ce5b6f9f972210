"""What the reader of a stream gets, whatever its pace."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from typing import Any

import pytest

from jetserve.errors import RequestAborted
from jetserve.request import Delta, FinishReason, Usage

SLOW_READERS = 50


def joined(deltas: list[Delta], index: int = 0) -> tuple[str, list[int], FinishReason | None]:
    mine = [delta for delta in deltas if delta.index == index]
    assert all(delta.finish_reason is None for delta in mine[:-1])
    return (
        "".join(delta.text for delta in mine),
        [token for delta in mine for token in delta.token_ids],
        mine[-1].finish_reason,
    )


async def test_stream_is_the_answer_piece_by_piece(serve: Any, collect: Any) -> None:
    async with serve() as served:
        deltas = await collect(await served.submit("a", 5))
    assert joined(deltas) == ("bcdef", [98, 99, 100, 101, 102], FinishReason.LENGTH)
    assert deltas[-1].usage == Usage(prompt_tokens=1, completion_tokens=5)
    assert [delta.stop_reason for delta in deltas] == [None] * len(deltas)


async def test_every_token_of_a_gated_device_comes_by_itself(serve: Any, collect: Any) -> None:
    async with serve(gated=True) as served:
        stream = await served.submit("a", 4)
        served.gate.let(1)
        seen = []
        async for delta in stream:
            seen.append((delta.text, delta.usage.completion_tokens))
            served.gate.let(1)
    # the first plan samples two: one by prefill, one by decoding
    assert seen == [("bc", 2), ("d", 3), ("e", 4)]


async def test_reader_that_comes_late_gets_all_in_one_delta(serve: Any, collect: Any) -> None:
    async with serve() as served:
        stream = await served.submit("a", 9)
        await served.until_idle()
        assert [(d.text, d.finish_reason) for d in await collect(stream)] == [("bcdefghij", FinishReason.LENGTH)]


async def test_samples_are_told_apart_and_each_ends_once(serve: Any, collect: Any) -> None:
    async with serve(next_token=lambda tokens, a: (tokens[-1] + 1 + a.seed % 4) % 128) as served:
        stream = await served.submit("a", 4, n=3, seed=0)
        seeds = [stream.request.sample_seed(i) % 4 for i in range(3)]
        assert seeds == [0, 1, 2]
        deltas = await collect(stream)
    for index, seed in enumerate(seeds):
        tokens = [97 + (seed + 1) * (i + 1) for i in range(4)]
        assert joined(deltas, index)[1:] == (tokens, FinishReason.LENGTH)
    assert [d.finish_reason for d in deltas].count(FinishReason.LENGTH) == 3


async def test_model_end_token_has_no_stop_reason_and_no_text(serve: Any, collect: Any) -> None:
    async with serve(next_token=lambda tokens, a: 0 if len(tokens) == 4 else tokens[-1] + 1) as served:
        deltas = await collect(await served.submit("a", 9))
    assert joined(deltas) == ("bcd", [98, 99, 100, 0], FinishReason.STOP)
    assert deltas[-1].stop_reason is None


async def test_stop_token_id_of_the_request_is_the_stop_reason(serve: Any, collect: Any) -> None:
    async with serve() as served:
        deltas = await collect(await served.submit("a", 9, stop_token_ids=(100,)))
    assert joined(deltas) == ("bc", [98, 99, 100], FinishReason.STOP)
    assert deltas[-1].stop_reason == 100


async def test_stop_string_ends_the_text_before_it(serve: Any, collect: Any) -> None:
    async with serve() as served:
        deltas = await collect(await served.submit("a", 20, stop=("ef", "zz")))
    assert joined(deltas) == ("bcd", [98, 99, 100, 101, 102], FinishReason.STOP)
    assert deltas[-1].stop_reason == "ef"
    assert deltas[-1].usage == Usage(1, 5)


async def test_stop_string_is_kept_when_asked_for(serve: Any, collect: Any) -> None:
    async with serve() as served:
        deltas = await collect(await served.submit("a", 20, stop=("ef",), include_stop=True))
    assert joined(deltas) == ("bcdef", [98, 99, 100, 101, 102], FinishReason.STOP)


async def test_stop_string_in_a_block_of_steps_drops_the_tokens_after_it(serve: Any, collect: Any, sizing: Any) -> None:
    async with serve(sizing=dataclasses.replace(sizing, generate_steps=(1, 8))) as served:
        stream = await served.submit("a", 20, stop=("d",), logprobs=0)
        deltas = await collect(stream)
    assert joined(deltas) == ("bc", [98, 99, 100], FinishReason.STOP)
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == [98, 99, 100]


async def test_stop_string_ends_generation_although_nobody_reads(serve: Any, collect: Any) -> None:
    async with serve(gated=True) as served:
        stream = await served.submit("a", 100, stop=("d",))
        served.gate.let(2)  # b and c; d
        await served.until(lambda: served.orchestrator.status().generated_tokens == 3)
        served.gate.let(2)  # what was dispatched meanwhile
        await served.until_idle()
        assert len(served.fake.plans) <= 4
        assert joined(await collect(stream)) == ("bc", [98, 99, 100], FinishReason.STOP)


async def test_stop_string_ends_its_own_sample_only(serve: Any, collect: Any) -> None:
    async with serve(next_token=lambda tokens, a: (tokens[-1] + 1 + a.seed % 4) % 128) as served:
        stream = await served.submit("a", 6, n=2, seed=0, stop=("b",))
        assert [stream.request.sample_seed(i) % 4 for i in range(2)] == [0, 1]
        deltas = await collect(stream)
    assert joined(deltas, 0) == ("", [98], FinishReason.STOP)
    assert joined(deltas, 1)[1:] == ([99, 101, 103, 105, 107, 109], FinishReason.LENGTH)


async def test_logprobs_come_with_their_tokens(serve: Any, collect: Any) -> None:
    async with serve() as served:
        deltas = await collect(await served.submit("a", 3, logprobs=2))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert entries == [(t, -1.0, ((t, -1.0), (t + 1, -2.0))) for t in (98, 99, 100)]


async def test_slow_readers_get_every_token(serve: Any, collect: Any) -> None:
    """R34: a reader that is slower than the engine gets all 100 tokens and the end."""

    async def read_slowly(stream: Any) -> list[Delta]:
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            for _ in range(7):
                await asyncio.sleep(0)
        return deltas

    async with serve() as served:
        streams = [await served.submit([1], 100, ignore_eos=True) for _ in range(SLOW_READERS)]
        answers = await asyncio.gather(*map(read_slowly, streams))
    for deltas in answers:
        _, tokens, reason = joined(deltas)
        assert (tokens, reason) == (list(range(2, 102)), FinishReason.LENGTH)
        assert deltas[-1].usage == Usage(1, 100)


async def test_closed_stream_frees_its_slot_within_two_steps(serve: Any, collect: Any) -> None:
    """R64: the reader closes the stream."""
    async with serve(gated=True) as served:
        stream = await served.submit("a", 200)
        served.gate.let(2)
        await anext(stream)
        await stream.aclose()
        served.gate.let(2)
        await served.until_idle()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert len(served.fake.plans) <= 5
    assert [record.reason for record in served.metrics.requests] == ["abort"]


async def test_stream_that_nobody_holds_frees_its_slot(serve: Any, collect: Any) -> None:
    """R64: the reader vanishes without a word."""
    async with serve(gated=True) as served:
        stream = await served.submit("a", 200)
        served.gate.let(2)
        await anext(stream)
        del stream
        gc.collect()
        await served.until(lambda: bool(served.metrics.requests))
        served.gate.let(2)
        await served.until_idle()
        assert len(served.fake.plans) <= 5


async def test_cancelled_reader_frees_its_slot(serve: Any, collect: Any) -> None:
    """R64: the task that reads is cancelled, as a server does when a client disconnects."""
    async with serve(gated=True) as served:

        async def serve_client() -> None:
            async with await served.submit("a", 200) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(serve_client())
        served.gate.let(3)
        await served.until(lambda: served.slots_used == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        served.gate.let(2)
        await served.until_idle()


async def test_closing_a_finished_stream_aborts_nothing(serve: Any, collect: Any) -> None:
    async with serve() as served:
        stream = await served.submit("a", 3)
        await served.until_idle()
        await stream.aclose()
        await stream.aclose()
    assert [record.reason for record in served.metrics.requests] == ["length"]


async def test_tokens_before_an_abort_come_before_its_error(serve: Any, collect: Any) -> None:
    async with serve(gated=True) as served:
        stream = await served.submit("a", 50, request_id="x")
        served.gate.let(1)
        await served.until(lambda: served.orchestrator.status().generated_tokens == 2)
        assert served.orchestrator.abort("x") is True
        assert (await anext(stream)).text == "bc"
        for _ in range(2):
            with pytest.raises(RequestAborted, match="x was aborted"):
                await anext(stream)


async def test_second_reader_is_refused(serve: Any, collect: Any) -> None:
    async with serve(gated=True) as served:
        stream = await served.submit("a", 3)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two readers"):
            await anext(stream)
        served.gate.open()
        assert (await first).text[0] == "b"
        await collect(stream)


async def test_cancelled_wait_loses_no_token(serve: Any, collect: Any) -> None:
    async with serve(gated=True) as served:
        stream = await served.submit("a", 4)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        served.gate.open()
        assert joined(await collect(stream)) == ("bcde", [98, 99, 100, 101], FinishReason.LENGTH)
