"""The bound on what may wait, and when to come back."""

from __future__ import annotations

import pytest

from jetserve.config import SchedulerSettings
from jetserve.errors import Overloaded
from jetserve.orchestrator.intake import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Intake
from jetserve.request import ModelLimits, Request, SamplingParams

LIMITS = ModelLimits(vocab_size=10, max_length=100, eos_token_ids=(), max_prompt_tokens=99)


def request(tokens: int = 1, n: int = 1) -> Request:
    return Request.create([1] * tokens, SamplingParams(max_tokens=1, n=n), LIMITS, now=0.0)


def full(interval_seconds: float) -> Intake:
    """A queue of 20 that is full, and starts one request per interval."""
    intake = Intake(SchedulerSettings(max_waiting_requests=20))
    for number in range(500):
        intake.enter(request())
        intake.start(request(), number * interval_seconds)
    for _ in range(20):
        intake.enter(request())
    return intake


def refusal(intake: Intake) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        intake.require_room(0, 1, 1)
    return caught.value


def test_free_slots_are_not_the_queue() -> None:
    intake = full(1.0)
    intake.require_room(1, 1, 1)
    assert "20 requests are waiting, at most 20 may" in str(refusal(intake))


def test_empty_queue_takes_any_one_request() -> None:
    intake = Intake(SchedulerSettings(max_waiting_requests=2, max_waiting_tokens=5))
    intake.require_room(0, 64, 99)
    intake.enter(request(99, n=64))
    assert (intake.unstarted, intake.unstarted_tokens) == (64, 64 * 99)
    refusal(intake)
    intake.start(request(99, n=64), 0.0)
    intake.leave(request(99, n=64), 63)
    assert (intake.unstarted, intake.unstarted_tokens) == (0, 0)


def test_retry_is_when_half_the_queue_will_have_started() -> None:
    assert refusal(full(2.0)).retry_after_seconds == pytest.approx(20.0)


def test_retry_is_never_at_once_and_never_far_off() -> None:
    assert refusal(full(0.001)).retry_after_seconds == MIN_RETRY_SECONDS
    assert refusal(full(100.0)).retry_after_seconds == MAX_RETRY_SECONDS
