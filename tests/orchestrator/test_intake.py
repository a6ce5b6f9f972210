"""The bound on what may wait, and when to come back."""

from __future__ import annotations

import dataclasses

import pytest

from jetserve.config import SchedulerSettings
from jetserve.engine.sequence import Lateness, Sequence
from jetserve.errors import Overloaded
from jetserve.orchestrator.intake import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Intake, hopeless
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


def refusal(intake: Intake, predicted_seconds: float | None = None) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        intake.require_room(0, 1, 1, predicted_seconds)
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


def test_retry_is_no_sooner_than_the_engine_predicts() -> None:
    assert refusal(full(2.0), 25.0).retry_after_seconds == 25.0
    assert refusal(full(2.0), 3.0).retry_after_seconds == pytest.approx(20.0)  # slots take longer than prefill
    assert refusal(full(2.0), 1000.0).retry_after_seconds == MAX_RETRY_SECONDS


def test_tokens_of_a_full_queue_count_as_well() -> None:
    intake = Intake(SchedulerSettings(max_waiting_tokens=100))
    intake.enter(request(90))
    with pytest.raises(Overloaded, match="90 prompt tokens are waiting, at most 100 may") as caught:
        intake.require_room(0, 1, 11, 7.5)
    assert caught.value.retry_after_seconds == 7.5


def test_shed_request_is_told_the_prediction_and_the_limit() -> None:
    sequence = Sequence(dataclasses.replace(request(), request_id="mine", arrival_seconds=100.0), 0, 0)
    sequence.lateness = Lateness(predicted_seconds=103.25, due_seconds=100.5)
    error = hopeless(sequence, 4.0)
    assert str(error).startswith(
        "request mine was given up: its first token is predicted 3.250 s after its arrival, at "
    )
    assert "most 0.500 s are allowed" in str(error)
    assert error.retry_after_seconds == 4.0
