"""Requests that could not meet their limits, and when to come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from jetserve.config import SchedulerSettings
from jetserve.engine.engine import Engine
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.plan import StepShape
from jetserve.engine.scheduler import Scheduler
from jetserve.errors import DeadlineExceeded, Overloaded
from jetserve.request import FinishReason
from tests.engine.test_engine import SIZING, VOCAB, answers, next_token, request, solo


class OneSecondSteps:
    """A step cost that nothing can change."""

    is_measured = True

    def seconds(self, shape: StepShape) -> float:
        return 1.0 if shape.prefill_size or shape.generate_rows else 0.0

    def observe(self, shape: StepShape, seconds: float) -> None:
        pass


SHEDDING = SchedulerSettings(shed_hopeless=True, ttft_target_ms=500)


async def read(stream: Any) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def test_hopeless_request_ends_overloaded_with_the_numbers(serve: Any) -> None:
    async with serve(settings=SHEDDING, cost=OneSecondSteps(), clock=lambda: 100.0) as served:
        for n in (1, 3):
            stream = await served.submit("abcdefgh", 5, n=n, request_id="mine")
            with pytest.raises(Overloaded) as caught:
                await read(stream)
            assert "request mine was given up: its first token is predicted 1.000 s after its arrival" in str(
                caught.value
            )
            assert "at most 0.500 s are allowed" in str(caught.value)
            assert 1 <= caught.value.retry_after_seconds <= 60
        await served.until_idle()
        status = served.orchestrator.status()
        assert (status.shed_requests, status.waiting_requests, status.waiting_tokens) == (2, 0, 0)
        assert (served.metrics.shed, served.metrics.rejected) == (2, 0)
        assert [record.reason for record in served.metrics.requests] == ["abort", "abort"]


def test_samples_behind_the_first_are_not_late_for_its_first_token() -> None:
    """With one slot the second sample begins when the first has ended, long after the target."""
    settings = SchedulerSettings(shed_hopeless=True, ttft_target_ms=1500)
    sizing = replace(SIZING, slots=1, generate_rows=(1,))
    on = Engine(Scheduler(sizing, settings, OneSecondSteps()), FakeExecutor(sizing, VOCAB, next_token=next_token))
    asked = request((1, 2), 4, n=2, ignore_eos=True)
    on.add(asked)
    updates = [update for now in range(20) for update in on.step(float(now))]
    assert answers([one for one in updates if one.token_ids]) == {
        (asked.request_id, index): (solo(asked, index), FinishReason.LENGTH) for index in range(2)
    }


async def test_a_request_is_shed_by_its_own_deadline_too(serve: Any) -> None:
    settings = SchedulerSettings(shed_hopeless=True)
    async with serve(settings=settings, cost=OneSecondSteps(), clock=lambda: 100.0) as served:
        stream = await served.submit("a", 5, timeout_seconds=0.75)
        with pytest.raises(Overloaded, match=r"predicted 1\.000 s after its arrival, at most 0\.750 s are allowed"):
            await read(stream)
        assert await read(await served.submit("a", 5, timeout_seconds=30.0)) == [98, 99, 100, 101, 102]


async def test_without_shedding_a_late_request_runs_and_its_deadline_is_a_deadline(serve: Any) -> None:
    settings = SchedulerSettings(ttft_target_ms=1)
    async with serve(settings=settings, cost=OneSecondSteps(), gated=True) as served:
        late = await served.submit("a", 5, timeout_seconds=0.02)
        with pytest.raises(DeadlineExceeded):
            await read(late)
        served.gate.open()
        assert await read(await served.submit("a", 2)) == [98, 99]
        assert served.orchestrator.status().shed_requests == 0


async def test_full_queue_says_when_the_engine_will_have_caught_up(serve: Any) -> None:
    """R62: half of what waits are 640 prompt tokens, which are 20 plans of 32."""
    settings = SchedulerSettings(max_waiting_requests=20)
    async with serve(settings=settings, cost=OneSecondSteps(), gated=True) as served:
        async with served.held():
            first = [await served.submit([number] * 8, 20) for number in range(1, 5)]
        await served.until(lambda: served.slots_used == 4)
        second = [await served.submit([10 + number] * 64, 2) for number in range(20)]
        served.gate.let(2)  # the step that runs, and one that has heard of them
        await served.until(lambda: served.metrics.steps[-1].waiting == 20)
        with pytest.raises(Overloaded) as caught:
            await served.submit([1], 2)
        assert "20 requests are waiting, at most 20 may" in str(caught.value)
        assert caught.value.retry_after_seconds == pytest.approx(20.0)
        served.gate.open()
        assert [len(answer) for answer in await asyncio.gather(*map(read, first + second))] == [20] * 4 + [2] * 20
