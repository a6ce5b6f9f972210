"""The life of requests and of the orchestrator itself."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from typing import Any

import pytest

from jetserve.config import SchedulerSettings
from jetserve.errors import (
    CheckpointError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    Unavailable,
)
from jetserve.orchestrator import Orchestrator, State
from jetserve.orchestrator.orchestrator import HANG_FACTOR
from jetserve.request import FinishReason, SamplingParams


async def tokens_of(stream: Any, seen: list[int] | None = None) -> list[int]:
    """Reads to the end; `seen` has the tokens also when the end is an error."""
    seen = [] if seen is None else seen
    async for delta in stream:
        seen += delta.token_ids
    return seen


async def test_status_tells_slots_pages_and_queue(serve: Any) -> None:
    async with serve(gated=True) as served:
        async with served.held():
            streams = [await served.submit(f"{number}bcde", 9) for number in range(6)]
        await served.until(lambda: served.slots_used == 4)
        status = served.orchestrator.status()
        assert status.state is State.READY
        assert (status.slots_used, status.slots_total, status.running) == (4, 4, 4)
        assert (status.waiting_requests, status.waiting_tokens) == (2, 10)
        assert (status.pages_used, status.pages_total) == (8, 256)
        assert status.generated_tokens == 2  # of the request that held the engine
        served.gate.open()
        assert [len(await tokens_of(stream)) for stream in streams] == [9] * 6
        await served.until_idle()
        assert served.orchestrator.status().generated_tokens == 2 + 54


async def test_text_and_ids_are_the_same_prompt(serve: Any) -> None:
    async with serve() as served:
        for prompt in ("ab", [97, 98]):
            stream = await served.submit(prompt, 2)
            assert stream.request.prompt_token_ids == (97, 98)
            assert await tokens_of(stream) == [99, 100]


async def test_long_text_is_tokenised_beside_the_loop(serve: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match="the prompt has 40000 tokens, at most 255 fit"):
            await served.submit("a" * 40_000)


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(serve: Any, monkeypatch: Any) -> None:
    async with serve() as served:

        def encode(*_: Any, **__: Any) -> list[int]:
            pytest.fail("tokenised")

        monkeypatch.setattr(served.orchestrator.model.tokenizer, "encode", encode)
        with pytest.raises(InvalidRequest, match="the prompt has 1000000 characters, at most 255 tokens fit"):
            await served.submit("a" * 1_000_000)


async def test_half_a_surrogate_pair_is_an_invalid_request(serve: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match="at character 2"):
            await served.submit("ab\ud800")


async def test_bad_request_leaves_the_next_one_alone(serve: Any) -> None:
    async with serve() as served:
        for bad in ([], [128], [-1]):
            with pytest.raises(InvalidRequest):
                await served.submit(bad)
        assert await tokens_of(await served.submit("a", 2)) == [98, 99]


async def test_live_request_id_is_taken_and_free_again_after(serve: Any) -> None:
    async with serve(gated=True) as served:
        first = await served.submit("a", 3, request_id="x")
        with pytest.raises(InvalidRequest, match="'x' is running"):
            await served.submit("a", 3, request_id="x")
        served.orchestrator.abort("x")
        again = await served.submit("g", 3, request_id="x")
        served.gate.open()
        with pytest.raises(RequestAborted):
            await tokens_of(first)
        assert await tokens_of(again) == [104, 105, 106]
        assert served.orchestrator.abort("x") is False


async def test_lower_priority_number_runs_first(serve: Any, sizing: Any) -> None:
    async with serve(sizing=dataclasses.replace(sizing, slots=1, generate_rows=(1,)), gated=True) as served:
        running = await served.submit("a", 2)
        await served.until(lambda: served.slots_used == 1)
        ends: list[str] = []

        async def read(name: str, priority: int) -> None:
            await tokens_of(await served.submit("a", 2, priority=priority))
            ends.append(name)

        tasks = [asyncio.create_task(read(name, p)) for name, p in (("meek", 5), ("plain", 0), ("urgent", -5))]
        await served.until(lambda: served.orchestrator.status().waiting_requests == 3)
        served.gate.open()
        await asyncio.gather(tokens_of(running), *tasks)
        assert ends == ["urgent", "plain", "meek"]


async def test_full_pool_never_stops_progress(serve: Any, sizing: Any) -> None:
    """R60: long outputs over a pool for two; everything ends right, and nothing is held afterwards."""
    async with serve(sizing=dataclasses.replace(sizing, pages=21)) as served:
        streams = [await served.submit([1], 70, ignore_eos=True) for _ in range(16)]
        for answer in await asyncio.gather(*map(tokens_of, streams)):
            assert answer == list(range(2, 72))
        assert served.orchestrator.status().preemptions > 0
        assert sum(r.preemptions for r in served.metrics.requests) == served.orchestrator.status().preemptions


async def test_request_that_fills_the_cache_ends_with_length(serve: Any, sizing: Any) -> None:
    """R61: the context is the end of an answer; a request that needs more pages than there are is refused."""
    async with serve(sizing=dataclasses.replace(sizing, max_length=32, pages=9)) as served:
        stream = await served.orchestrator.submit([1], SamplingParams(temperature=0, ignore_eos=True))
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert deltas[-1].usage.completion_tokens == 31
    async with serve(sizing=dataclasses.replace(sizing, pages=9)) as served:
        with pytest.raises(InvalidRequest, match="needs 10 KV pages of 4 tokens, the pool has 8"):
            await served.submit([1], 40)
        assert len(await tokens_of(await served.submit([1], 32))) == 32


async def test_full_queue_turns_requests_away_at_once(serve: Any) -> None:
    """R62: 200 at once, 4 slots, a queue of 8."""
    async with serve(settings=SchedulerSettings(max_waiting_requests=8), gated=True) as served:
        accepted, refused = [], []
        for _ in range(200):
            try:
                accepted.append(await served.submit("a", 5))
            except Overloaded as error:
                refused.append(error)
        assert (len(accepted), len(refused)) == (12, 188)
        assert "8 requests are waiting, at most 8 may" in str(refused[0])
        assert all(1 <= error.retry_after_seconds <= 60 for error in refused)
        served.gate.open()
        assert await asyncio.gather(*map(tokens_of, accepted)) == [[98, 99, 100, 101, 102]] * 12
        await served.until_idle()
        assert await tokens_of(await served.submit("a", 1)) == [98]
    assert served.metrics.rejected == 188


async def test_queue_is_bounded_in_tokens_too(serve: Any) -> None:
    async with serve(settings=SchedulerSettings(max_waiting_tokens=100), gated=True) as served:
        streams = [await served.submit([1] * 120, 2)]  # an empty queue takes any one
        with pytest.raises(Overloaded, match="120 prompt tokens are waiting, at most 100 may"):
            await served.submit([1] * 3, 2)
        await served.until(lambda: served.slots_used == 1)
        streams += [await served.submit([1] * 50, 2), await served.submit([1] * 50, 2)]
        with pytest.raises(Overloaded):
            await served.submit([1], 2)
        served.gate.open()
        await asyncio.gather(*map(tokens_of, streams))


async def test_abort_at_any_moment_leaves_nothing_behind(serve: Any) -> None:
    """R66: aborts race with the start of requests, 2000 times, as many at once as there are slots."""
    async with serve() as served:
        chance = random.Random(1)

        async def one(number: int) -> None:
            stream = await served.submit("a", 30, request_id=f"{number}")
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            served.orchestrator.abort(f"{number}")
            try:
                await tokens_of(stream)
            except RequestAborted:
                return

        for start in range(0, 2000, 4):
            await asyncio.gather(*(one(number) for number in range(start, start + 4)))
        await served.until_idle()
        assert served.orchestrator.status().waiting_requests == 0
        assert await tokens_of(await served.submit("a", 2)) == [98, 99]


async def test_deadline_ends_running_and_queued_requests(serve: Any, sizing: Any) -> None:
    """R67: the error is a timeout and nothing else, and the slot is free in the next step."""
    async with serve(sizing=dataclasses.replace(sizing, slots=1, generate_rows=(1,)), gated=True) as served:
        running = await served.submit("a", 50, timeout_seconds=0.05)
        queued = await served.submit("a", 50, timeout_seconds=0.05)
        for stream in (running, queued):
            with pytest.raises(DeadlineExceeded, match="ran out of time"):
                await tokens_of(stream)
        served.gate.let(2)
        await served.until_idle()
    assert [record.reason for record in served.metrics.requests] == ["timeout", "timeout"]


async def test_request_without_deadline_gets_the_default(serve: Any) -> None:
    async with serve(settings=SchedulerSettings(default_timeout_seconds=0.01), gated=True) as served:
        stream = await served.submit("a", 5)
        with pytest.raises(DeadlineExceeded):
            await tokens_of(stream)


async def test_request_that_ends_in_time_has_no_deadline_left(serve: Any) -> None:
    async with serve() as served:
        stream = await served.submit("a", 2, timeout_seconds=1000)
        assert await tokens_of(stream) == [98, 99]
        assert [r.reason for r in served.metrics.requests] == ["length"]


async def test_hanging_step_turns_readiness_off_and_later_liveness(serve: Any) -> None:
    """R82: the device hangs in a step."""
    now = [100.0]
    async with serve(gated=True, clock=lambda: now[0], step_timeout_seconds=10) as served:
        orchestrator = served.orchestrator
        assert (orchestrator.is_ready, orchestrator.is_live) == (True, True)
        stream = await served.submit("a", 3)
        await served.until(lambda: served.slots_used == 1)
        await asyncio.sleep(0.01)  # the thread is in its second step by now, waiting for the first result
        now[0] = 110.0
        assert (orchestrator.is_ready, orchestrator.is_live) == (True, True)
        now[0] = 110.5
        assert (orchestrator.is_ready, orchestrator.is_live) == (False, True)
        now[0] = 100.5 + 10 * HANG_FACTOR
        assert orchestrator.is_live is False
        served.gate.open()
        assert await tokens_of(stream) == [98, 99, 100]
        await served.until_idle()
        assert (orchestrator.is_ready, orchestrator.is_live) == (True, True)


async def test_failed_engine_fails_every_stream_and_health(serve: Any) -> None:
    """R82: the device raises in a step. The reader gets what came before."""
    async with serve(fail_at=3) as served:
        streams = [await served.submit("a", 50) for _ in range(6)]
        seen: list[int] = []
        with pytest.raises(EngineFailed, match="RuntimeError: the fake device failed at plan 3"):
            await tokens_of(streams[0], seen)
        assert seen == [98, 99, 100, 101]
        for stream in streams[1:]:
            with pytest.raises(EngineFailed):
                await tokens_of(stream)
        orchestrator = served.orchestrator
        assert (orchestrator.state, orchestrator.is_live, orchestrator.is_ready) == (State.FAILED, False, False)
        assert [str(error) for error in served.failures] == ["the fake device failed at plan 3"]
        with pytest.raises(Unavailable, match="the engine has failed"):
            await served.submit("a")
        await orchestrator.stop()
        assert orchestrator.state is State.FAILED
    assert [record.reason for record in served.metrics.requests] == ["error"] * 6


async def test_loading_is_live_not_ready_and_says_how_far_it_is() -> None:
    """R83, the orchestrator's part."""
    go_on, is_loading = threading.Event(), threading.Event()

    def load(report: Any) -> Any:
        report("weights", 0.25)
        is_loading.set()
        go_on.wait(10)
        raise CheckpointError("model.safetensors is cut off")

    failures: list[BaseException] = []
    orchestrator = Orchestrator(load, on_failure=failures.append)
    await orchestrator.start()
    await asyncio.to_thread(is_loading.wait, 10)
    await asyncio.sleep(0)
    assert (orchestrator.state, orchestrator.is_live, orchestrator.is_ready) == (State.LOADING, True, False)
    assert orchestrator.progress == "weights 25%"
    with pytest.raises(Unavailable, match=r"loading \(weights 25%\)"):
        await orchestrator.submit("a", SamplingParams())
    with pytest.raises(Unavailable):
        _ = orchestrator.model
    go_on.set()
    with pytest.raises(CheckpointError, match="cut off"):
        await orchestrator.wait_until_ready()
    assert (orchestrator.state, orchestrator.is_live) == (State.FAILED, False)
    assert len(failures) == 1
    await orchestrator.stop()


async def test_stop_ends_loading_at_its_next_report() -> None:
    go_on = threading.Event()

    def load(report: Any) -> Any:
        go_on.wait(10)
        while True:
            report("weights", 0.5)

    orchestrator = Orchestrator(load)
    await orchestrator.start()
    waiter = asyncio.create_task(orchestrator.wait_until_ready())
    stop = asyncio.create_task(orchestrator.stop())
    await asyncio.sleep(0)
    go_on.set()
    await stop
    with pytest.raises(Unavailable, match="stopped"):
        await waiter
    assert orchestrator.state is State.STOPPED
    assert not any(thread.name == "jetserve-engine" for thread in threading.enumerate())


async def test_drain_lets_running_and_waiting_requests_finish(serve: Any) -> None:
    """R84, R85: readiness is off at once, tokens keep flowing, new requests are turned away."""
    async with serve(gated=True) as served:
        orchestrator = served.orchestrator
        async with served.held():
            streams = [await served.submit("a", 6) for _ in range(6)]
        await served.until(lambda: served.slots_used == 4)
        drain = asyncio.create_task(orchestrator.drain(10))
        await asyncio.sleep(0)
        assert (orchestrator.state, orchestrator.is_ready, orchestrator.is_live) == (State.DRAINING, False, True)
        with pytest.raises(Unavailable, match="draining"):
            await served.submit("a")
        served.gate.let(1)
        assert (await anext(streams[0])).token_ids[0] == 98
        assert not drain.done()
        served.gate.open()
        assert await drain is True
        assert [len(await tokens_of(stream)) for stream in streams[1:]] == [6] * 5
        await orchestrator.stop()
        assert orchestrator.state is State.STOPPED
        with pytest.raises(Unavailable, match="stopped"):
            await served.submit("a")


async def test_drain_that_runs_out_of_time_ends_the_rest_with_an_error(serve: Any) -> None:
    """R84: what does not finish in time gets an error, not silence."""
    async with serve(gated=True) as served:
        streams = [await served.submit("a", 200) for _ in range(6)]
        assert await served.orchestrator.drain(0.02) is False
        for stream in streams:
            with pytest.raises(Unavailable, match="before the request was finished"):
                await tokens_of(stream)
        served.gate.open()
        await served.until_idle()


async def test_idle_drain_ends_at_once(serve: Any) -> None:
    async with serve() as served:
        assert await served.orchestrator.drain(0.01) is True


async def test_gauges_return_to_zero_when_everything_was_aborted(serve: Any) -> None:
    """R86: without another request."""
    async with serve(gated=True) as served:
        async with served.held():
            streams = [await served.submit("abc", 100, request_id=f"{i}") for i in range(9)]
        await served.until(lambda: bool(served.metrics.steps) and served.metrics.steps[-1].running == 4)
        assert served.metrics.steps[-1].waiting == 5
        for i in range(9):
            assert served.orchestrator.abort(f"{i}")
        served.gate.let(3)
        await served.until_idle()
        last = served.metrics.steps[-1]
        assert (last.running, last.waiting, last.slots_used, last.pages_used) == (0, 0, 0, 0)
        shown = served.metrics.exposition().decode()
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            [line] = [line for line in shown.splitlines() if line.startswith(f"{gauge}{{")]
            assert float(line.split()[-1]) == 0
        for stream in streams:
            with pytest.raises(RequestAborted):
                await tokens_of(stream)
    assert [record.reason for record in served.metrics.requests] == ["abort"] * 10


async def test_metrics_hear_of_every_token_and_request(serve: Any) -> None:
    now = [100.0]
    async with serve(gated=True, clock=lambda: now[0]) as served:
        stream = await served.submit("abc", 4)
        await served.until(lambda: served.slots_used == 1)
        now[0] = 101.0
        served.gate.let(1)
        await served.until(lambda: len(served.metrics.first_tokens) == 1)
        now[0] = 103.0
        served.gate.open()
        await tokens_of(stream)
    metrics = served.metrics
    assert metrics.first_tokens == [1.0]
    assert metrics.gaps == [(0.0, 1), (2.0, 1), (0.0, 1)]
    assert sum(step.generated_tokens for step in metrics.steps) == 4
    assert sum(step.prefill_tokens for step in metrics.steps) == 3
    [record] = metrics.requests
    assert (record.reason, record.prompt_tokens, record.generated_tokens, record.max_tokens) == ("length", 3, 4, 4)
    assert (record.arrival_seconds, record.scheduled_seconds, record.first_token_seconds) == (100.0, 100.0, 101.0)
    assert record.finished_seconds == 103.0


@pytest.mark.soak
async def test_thousand_requests_of_which_a_third_is_cancelled_leak_nothing(serve: Any, sizing: Any) -> None:
    small = dataclasses.replace(sizing, slots=8, generate_rows=(2, 8), pages=60)
    async with serve(sizing=small) as served:
        chance = random.Random(3)
        threads, tasks = threading.active_count(), len(asyncio.all_tasks())

        async def one() -> None:
            start, length = chance.randrange(1, 20), chance.randrange(1, 40)
            cancel_after = chance.randrange(length + 1) if chance.random() < 0.3 else None
            tokens: list[int] = []
            async with await served.submit([start] * chance.randrange(1, 60), length, ignore_eos=True) as stream:
                while cancel_after is None or len(tokens) < cancel_after:
                    try:
                        tokens += (await anext(stream)).token_ids
                    except StopAsyncIteration:
                        break
            expected = list(range(start + 1, start + 1 + length))
            assert tokens == expected[: len(tokens)]
            assert cancel_after is not None or tokens == expected

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(100)))
        await served.until_idle()
        assert (threading.active_count(), len(asyncio.all_tasks())) == (threads, tasks)
        assert len(served.metrics.requests) == 1000


async def test_256_streams_at_once_are_complete_and_in_order(serve: Any, sizing: Any) -> None:
    large = dataclasses.replace(sizing, slots=64, generate_rows=(8, 64), pages=1000, prefill_rows=32)
    async with serve(sizing=large) as served:

        async def read(number: int) -> None:
            prompt = [1 + number % 20] * (1 + number % 30)
            stream = await served.submit(prompt, 20 + number % 30, ignore_eos=True)
            tokens: list[int] = []
            async for delta in stream:
                tokens += delta.token_ids
                for _ in range(5 if number % 4 == 0 else 0):  # every fourth is slow
                    await asyncio.sleep(0)
            assert tokens == list(range(prompt[0] + 1, prompt[0] + 21 + number % 30))

        await asyncio.gather(*map(read, range(256)))
        await served.until_idle()
