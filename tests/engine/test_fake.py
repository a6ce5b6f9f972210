"""The fake device does what the contract says, and sees what breaks it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jetserve.engine.fake import ContractViolation, FakeExecutor, FreeExecutor
from jetserve.engine.plan import Admission, Chunk, Generate, PageGrant, StepPlan
from jetserve.engine.sizing import Sizing
from jetserve.request import SamplingParams

SIZING = Sizing(
    slots=4,
    max_length=16,
    page_size=4,
    pages=9,
    prefill_sizes=(4, 8),
    prefill_rows=2,
    prefill_tokens=8,
    generate_rows=(1, 2, 4),
    generate_steps=(1, 3),
)


def admission(slot: int, prompt_tokens: int, max_tokens: int = 5, **changes: Any) -> Admission:
    params = SamplingParams(max_tokens=max_tokens, **changes)
    return Admission(slot, params, stop_token_ids=(9,), seed=0, prompt_tokens=prompt_tokens)


def planned(
    admissions: tuple[Admission, ...] = (),
    grants: tuple[PageGrant, ...] = (),
    chunks: tuple[Chunk, ...] = (),
    generate: Generate | None = None,
    **moves: Any,
) -> StepPlan:
    return StepPlan(admissions, grants, chunks=chunks, generate=generate, **moves)


def first_plan(max_tokens: int = 5, token: int = 2, steps: int = 1, **changes: Any) -> StepPlan:
    """One token of prompt in slot 0, and a generate."""
    return planned(
        (admission(0, 1, max_tokens, **changes),),
        (PageGrant(0, 0, 1), PageGrant(0, 1, 2)),
        (Chunk(0, 0, (token,), True),),
        Generate(1, steps, (0,)),
    )


def test_tokens_count_up() -> None:
    result = FakeExecutor(SIZING, 10).execute(first_plan(steps=3)).result()
    assert result.first_tokens.tolist() == [3]
    assert result.tokens.tolist() == [[4], [5], [6]]
    assert result.counts.tolist() == [3]


def test_row_stops_at_stop_id_and_at_max_tokens() -> None:
    result = FakeExecutor(SIZING, 10).execute(first_plan(token=6, steps=3)).result()
    assert result.first_tokens.tolist() == [7]
    assert (result.tokens[:2, 0].tolist(), result.counts.tolist()) == ([8, 9], [2])
    assert FakeExecutor(SIZING, 10).execute(first_plan(max_tokens=2, steps=3)).result().counts.tolist() == [1]


def test_ended_row_yields_nothing_more() -> None:
    fake = FakeExecutor(SIZING, 10)
    fake.execute(first_plan(max_tokens=1))
    assert fake.execute(planned(generate=Generate(1, 1, (0,)))).result().counts.tolist() == [0]


def test_stop_id_cannot_come_before_min_tokens() -> None:
    result = FakeExecutor(SIZING, 20).execute(first_plan(token=7, steps=3, min_tokens=2)).result()
    assert (result.first_tokens.tolist(), result.tokens[:, 0].tolist()) == ([8], [10, 11, 12])


def test_next_token_sees_the_whole_sequence() -> None:
    fake = FakeExecutor(SIZING, 100, next_token=lambda tokens, admission: sum(tokens) + admission.seed)
    result = fake.execute(first_plan(steps=3)).result()
    assert result.first_tokens.tolist() == [2]
    assert result.tokens[:, 0].tolist() == [4, 8, 16]


def test_logprobs_come_with_plans_that_ask() -> None:
    assert FakeExecutor(SIZING, 10).execute(first_plan()).result().logprobs is None
    result = FakeExecutor(SIZING, 10).execute(first_plan(logprobs=2)).result()
    assert result.logprobs is not None
    assert result.first_logprobs is not None
    assert result.first_logprobs.chosen.tolist() == [-1.0]
    assert result.logprobs.top_ids[0, 0, :3].tolist() == [4, 5, 6]
    assert result.logprobs.top[0, 0, :3].tolist() == [-1.0, -2.0, -3.0]


def test_failure_comes_with_the_result_of_its_plan() -> None:
    fake = FakeExecutor(SIZING, 10, fail_at=1)
    fake.execute(first_plan()).result()
    pending = fake.execute(planned(generate=Generate(1, 1, (0,))))
    with pytest.raises(RuntimeError, match="plan 1"):
        pending.result()


def test_results_come_one_step_time_after_another() -> None:
    slept: list[float] = []
    fake = FakeExecutor(SIZING, 10, step_seconds=2.0, clock=lambda: 100.0, sleep=slept.append)
    pending = [fake.execute(first_plan()), fake.execute(planned(generate=Generate(1, 1, (0,))))]
    for step in pending:
        step.result()
    assert slept == [2.0, 4.0]


ADMIT = (admission(0, 1), admission(1, 1))
PAGES = (PageGrant(0, 0, 1), PageGrant(1, 0, 2))
BOTH = (Chunk(0, 0, (1,), True), Chunk(1, 0, (1,), True))
ONE = Generate(1, 1, (0,))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (planned(), "empty"),
        (planned((admission(4, 1),)), "out of range"),
        (planned((admission(0, 1), admission(0, 1))), "twice"),
        (planned(chunks=BOTH), "never admitted"),
        (planned(ADMIT, (PageGrant(0, 0, 0),), BOTH), "trash"),
        (planned(ADMIT, (PageGrant(0, 0, 9),), BOTH), "no such page"),
        (planned(ADMIT, (PageGrant(0, 1, 1),), BOTH), "gap"),
        (planned(ADMIT, (PageGrant(0, 0, 1),), BOTH), "has no page"),
        (planned(ADMIT, (PageGrant(0, 0, 1), PageGrant(1, 0, 1)), BOTH), "somebody else"),
        (planned(ADMIT, PAGES, (*BOTH, BOTH[0])), "at most 2 are"),
        (planned(ADMIT, PAGES, (Chunk(0, 0, (1,) * 9, True),)), "do not fit"),
        (planned(ADMIT, PAGES, (BOTH[0], BOTH[0])), "two chunks"),
        (planned(ADMIT, PAGES, (Chunk(0, 1, (1,), True),)), "starts at 1"),
        (planned(ADMIT, PAGES, (Chunk(0, 0, (), True),)), "is empty"),
        (planned(ADMIT, PAGES, (Chunk(0, 0, (10,), True),)), "vocabulary"),
        (planned(ADMIT, PAGES, (Chunk(0, 0, (1, 2), True),)), "is the last"),
        (planned(ADMIT, PAGES, (Chunk(0, 0, (1,), False),), ONE), "before its last chunk"),
        (planned(ADMIT, PAGES, BOTH, Generate(3, 1, (0,))), "rows=3 is not compiled"),
        (planned(ADMIT, PAGES, BOTH, Generate(2, 2, (0,))), "steps=2 is not compiled"),
        (planned(ADMIT, PAGES, BOTH, Generate(1, 1, ())), "no rows"),
        (planned(ADMIT, PAGES, BOTH, Generate(2, 1, (1, 0))), "ascending"),
        (planned(ADMIT, PAGES, BOTH, Generate(1, 1, (1,))), "rows=1 take part"),
        (planned((admission(0, 4), admission(1, 1)), PAGES, (Chunk(0, 0, (1,) * 4, True),), ONE), "has no page"),
    ],
)
def test_broken_plan_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(ContractViolation, match=message):
        FakeExecutor(SIZING, 10).execute(plan)


def test_page_taken_from_a_row_that_still_runs_is_found() -> None:
    fake = FakeExecutor(SIZING, 10)
    fake.execute(planned(ADMIT, PAGES, BOTH))
    with pytest.raises(ContractViolation, match="somebody else"):
        fake.execute(
            planned((admission(2, 1),), (PageGrant(2, 0, 1),), (Chunk(2, 0, (1,), True),), Generate(4, 1, (0, 2)))
        )


def test_slot_and_pages_of_a_row_that_runs_no_more_may_be_reused() -> None:
    fake = FakeExecutor(SIZING, 10)
    fake.execute(first_plan())
    result = fake.execute(first_plan(token=5)).result()
    assert (result.first_tokens.tolist(), result.tokens.tolist()) == ([6], [[7]])


def test_free_executor_samples_as_the_fake_does() -> None:
    plans = [first_plan(steps=3), planned(generate=Generate(2, 3, (0,)))]
    for fake, free in [(FakeExecutor(SIZING, 10), FreeExecutor(SIZING, 10))]:
        for plan in plans:
            a, b = fake.execute(plan).result(), free.execute(plan).result()
            assert a.first_tokens.tolist() == b.first_tokens.tolist()
            assert a.counts.tolist() == b.counts.tolist()
            for row, count in enumerate(a.counts.tolist()):
                assert np.array_equal(a.tokens[:count, row], b.tokens[:count, row])
