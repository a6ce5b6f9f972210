"""Exact schedules, worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jetserve.config import SchedulerSettings
from jetserve.engine.plan import Chunk, Generate, LogprobArrays, PageGrant, StepPlan, StepResult
from jetserve.engine.scheduler import Scheduler, Update
from jetserve.engine.sequence import Sequence
from jetserve.engine.sizing import Sizing
from jetserve.errors import InvalidRequest
from jetserve.request import MAX_LOGPROBS, FinishReason, ModelLimits, Request, SamplingParams

LIMITS = ModelLimits(vocab_size=1000, max_length=64, eos_token_ids=(999,), max_prompt_tokens=63)


def scheduler(**changes: Any) -> Scheduler:
    shapes: dict[str, Any] = {
        "slots": 4,
        "max_length": 64,
        "page_size": 4,
        "pages": 33,
        "prefill_sizes": (4, 8),
        "prefill_rows": 3,
        "prefill_tokens": 8,
        "generate_rows": (1, 2, 4),
        "generate_steps": (1,),
    }
    return Scheduler(Sizing(**{**shapes, **changes}))


class Feed:
    """Adds requests with running orders."""

    def __init__(self, to: Scheduler) -> None:
        self._to = to
        self._order = 0

    def __call__(self, prompt: tuple[int, ...], max_tokens: int, priority: int = 0, **params: Any) -> Sequence:
        made = SamplingParams(max_tokens=max_tokens, temperature=0, **params)
        request = Request.create(prompt, made, LIMITS, priority=priority, now=0.0)
        sequence = Sequence(request, 0, self._order)
        self._order += 1
        self._to.add(sequence)
        return sequence


def result(plan: StepPlan, first: tuple[int, ...] = (), rows: dict[int, tuple[int, ...]] | None = None) -> StepResult:
    """What the device says of a plan: first tokens by chunk, and tokens by slot."""
    steps, height = (plan.generate.steps, plan.generate.rows) if plan.generate else (0, 0)
    tokens, counts = np.full((steps, height), -1, np.int32), np.zeros(height, np.int32)
    for slot, values in (rows or {}).items():
        counts[slot] = len(values)
        tokens[: len(values), slot] = values
    return StepResult(np.array(first, np.int32), tokens, counts)


def news(updates: list[Update]) -> list[tuple[int, list[int], FinishReason | None]]:
    return [(update.sequence.order, update.token_ids, update.finish_reason) for update in updates]


def test_short_prompts_are_packed_and_decode_in_the_same_plan() -> None:
    s = scheduler()
    add = Feed(s)
    a, b = add((1, 2, 3), 5), add((4, 5, 6, 7), 5)
    plan = s.schedule(10.0)
    assert [(x.slot, x.prompt_tokens, x.generated) for x in plan.admissions] == [(0, 3, 0), (1, 4, 0)]
    assert plan.chunks == (Chunk(0, 0, (1, 2, 3), True), Chunk(1, 0, (4, 5, 6, 7), True))
    # a: positions 0..3, one page; b: 0..4, two pages
    assert plan.grants == (PageGrant(0, 0, 1), PageGrant(1, 0, 2), PageGrant(1, 1, 3))
    assert plan.generate == Generate(2, 1, (0, 1))
    assert (a.scheduled_seconds, b.scheduled_seconds) == (10.0, 10.0)
    assert [u.sequence for u in s.take_started()] == [a, b]
    assert s.take_started() == []
    s.check()


def test_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    s = scheduler()
    add = Feed(s)
    add((1, 2), 20)
    plan0 = s.schedule(0)
    add(tuple(range(100, 119)), 2)  # 19 tokens: 8 + 8 + 3
    plan1 = s.schedule(0)
    assert plan1.chunks == (Chunk(1, 0, tuple(range(100, 108)), False),)
    assert plan1.grants == (PageGrant(1, 0, 2), PageGrant(1, 1, 3))
    assert plan1.generate == Generate(1, 1, (0,))  # slot 1 is not active yet, so one row is enough
    s.commit(plan0, result(plan0, (3,), {0: (4,)}))
    plan2 = s.schedule(0)
    assert plan2.chunks == (Chunk(1, 8, tuple(range(108, 116)), False),)
    s.commit(plan1, result(plan1, (-1,), {0: (5,)}))
    plan3 = s.schedule(0)
    assert plan3.chunks == (Chunk(1, 16, tuple(range(116, 119)), True),)
    assert plan3.generate == Generate(2, 1, (0, 1))
    # 19 prompt positions and the first generated one are 20: five pages, all there; slot 0 reaches position 5
    assert plan3.grants == (PageGrant(1, 4, 6),)
    s.check()


def test_budget_left_by_one_prompt_begins_the_next() -> None:
    s = scheduler()
    add = Feed(s)
    add((1, 2, 3, 4, 5), 1)
    add((11, 12, 13, 14, 15, 16), 1)
    plan = s.schedule(0)
    assert plan.chunks == (Chunk(0, 0, (1, 2, 3, 4, 5), True), Chunk(1, 0, (11, 12, 13), False))
    plan = s.schedule(0)
    assert plan.chunks == (Chunk(1, 3, (14, 15, 16), True),)
    assert plan.generate is None


def test_chunks_of_one_plan_are_at_most_prefill_rows() -> None:
    s = scheduler()
    add = Feed(s)
    for token in range(4):
        add((token,), 3)
    assert [chunk.slot for chunk in s.schedule(0).chunks] == [0, 1, 2]
    assert [chunk.slot for chunk in s.schedule(0).chunks] == [3]


def test_prefill_budget_below_the_largest_size_holds() -> None:
    s = scheduler(prefill_tokens=3)
    Feed(s)((1, 2, 3, 4, 5), 3)
    assert s.schedule(0).prefill_tokens == 3


def test_single_token_request_never_decodes() -> None:
    s = scheduler()
    one = Feed(s)((1, 2, 3, 4), 1)
    plan = s.schedule(0)
    assert plan.generate is None
    assert plan.grants == (PageGrant(0, 0, 1),)  # position 4 is never written
    assert s.schedule(0).is_empty
    assert news(s.commit(plan, result(plan, (9,)))) == [(0, [9], FinishReason.LENGTH)]
    assert one.slot is None
    assert not s.has_work
    s.check()


def test_rows_that_must_have_ended_are_not_listed() -> None:
    s = scheduler()
    add = Feed(s)
    add((1,), 3)  # first token and two decoded ones
    add((2,), 9)
    plans = [s.schedule(0), s.schedule(0), s.schedule(0)]
    assert [plan.generate for plan in plans] == [Generate(2, 1, (0, 1)), Generate(2, 1, (0, 1)), Generate(2, 1, (1,))]


def test_plan_that_changes_nothing_reuses_the_last_generate() -> None:
    s = scheduler()
    Feed(s)((1,), 9)
    first, second = s.schedule(0), s.schedule(0)
    assert second.generate is first.generate


def test_late_result_of_an_ended_row_is_dropped_and_its_slot_reused_at_once() -> None:
    s = scheduler(slots=1, generate_rows=(1,))
    add = Feed(s)
    first = add((1,), 9)
    plan0 = s.schedule(0)
    plan1 = s.schedule(0)  # dispatched before plan 0 was read
    assert news(s.commit(plan0, result(plan0, (5,), {0: (999,)}))) == [(0, [5], None), (0, [999], FinishReason.STOP)]
    assert first.slot is None
    add((2,), 9)
    plan2 = s.schedule(0)
    assert plan2.admissions[0].slot == 0
    assert news(s.commit(plan1, result(plan1, (), {0: ()}))) == []
    assert news(s.commit(plan2, result(plan2, (6,), {0: (7,)}))) == [(1, [6], None), (1, [7], None)]


def test_lowest_free_slot_is_given_and_generate_is_the_smallest_that_covers() -> None:
    s = scheduler()
    add = Feed(s)
    rows = [add((1,), 9), add((2,), 9), add((3,), 9)]
    assert s.schedule(0).generate == Generate(4, 1, (0, 1, 2))
    s.abort(rows[2])
    s.abort(rows[0])
    assert s.schedule(0).generate == Generate(2, 1, (1,))
    add((4,), 9)
    plan = s.schedule(0)
    assert plan.admissions[0].slot == 0
    assert plan.generate == Generate(2, 1, (0, 1))


def test_most_steps_that_no_row_ends_within_when_nothing_waits() -> None:
    s = scheduler(generate_steps=(1, 2, 4))
    add = Feed(s)
    add((1,), 9)
    steps = []
    for _ in range(4):
        plan = s.schedule(0)
        assert plan.generate
        steps.append(plan.generate.steps)
    assert steps == [1, 4, 2, 1]  # 1 first token + 1 with the prefill, then 7 left: 4, 2 and 1
    assert s.schedule(0).is_empty


def test_fewest_steps_while_a_prompt_waits() -> None:
    s = scheduler(slots=1, generate_rows=(1,), generate_steps=(1, 4))
    add = Feed(s)
    add((1,), 30)
    s.schedule(0)
    add((2,), 30)
    assert s.schedule(0).generate == Generate(1, 1, (0,))


def test_block_of_steps_that_ends_early_is_cut_to_its_count() -> None:
    s = scheduler(generate_steps=(1, 4))
    Feed(s)((1,), 20)
    plan0, plan1 = s.schedule(0), s.schedule(0)
    s.commit(plan0, result(plan0, (2,), {0: (3,)}))
    assert news(s.commit(plan1, result(plan1, (), {0: (4, 999)}))) == [(0, [4, 999], FinishReason.STOP)]


def test_pages_grow_with_what_may_be_written() -> None:
    s = scheduler()
    Feed(s)((1, 2, 3), 9)
    grants = [s.schedule(0).grants for _ in range(6)]
    # plan 0 writes positions 0..3, plan i position 3 + i
    assert grants == [(PageGrant(0, 0, 1),), (PageGrant(0, 1, 2),), (), (), (), (PageGrant(0, 2, 3),)]


def test_pages_never_reach_beyond_the_last_written_position() -> None:
    s = scheduler(generate_steps=(1, 4))
    Feed(s)((1, 2, 3), 6)  # positions 0..7
    plans = [s.schedule(0) for _ in range(2)]
    assert [plan.generate.steps for plan in plans if plan.generate] == [1, 4]
    assert sum(len(plan.grants) for plan in plans) == 2


def test_waiting_goes_by_priority_then_arrival() -> None:
    s = scheduler(slots=1, generate_rows=(1,))
    add = Feed(s)
    add((1,), 1)
    add((2,), 1, priority=5)
    add((3,), 1, priority=-1)
    order = []
    for _ in range(3):
        plan = s.schedule(0)
        order.append(plan.chunks[0].token_ids)
        s.commit(plan, result(plan, (0,)))
    assert order == [(3,), (1,), (2,)]


def test_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    s = scheduler()
    add = Feed(s)
    add(tuple(range(100, 140)), 2, priority=5)
    assert [chunk.slot for chunk in s.schedule(0).chunks] == [0]
    add((1, 2, 3), 2)
    add((4, 5), 2, priority=7)
    # 3 tokens of the urgent one, 5 of the long one; the meek one would get no chunk and stays in the queue
    assert [(chunk.slot, len(chunk.token_ids)) for chunk in s.schedule(0).chunks] == [(1, 3), (0, 5)]
    assert s.waiting == 1


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix"])
def test_long_prompt_under_way_ends_however_many_urgent_ones_come(policy: str) -> None:
    ageing = 4
    settings = SchedulerSettings.model_validate({"ageing": ageing, "policy": policy})
    s = Scheduler(scheduler().sizing, settings)
    add = Feed(s)
    add(tuple(range(100, 140)), 1, priority=5)
    most = ageing * 40 // s.sizing.prefill_tokens
    for number in range(most):
        plan = s.schedule(0)
        if any(chunk.is_last and chunk.slot == 0 for chunk in plan.chunks):
            return
        s.commit(plan, result(plan, (7,) * len(plan.chunks)))
        for _ in range(3):
            add((number, 2, 3, 4, 5, 6, 7, 8), 1)
    raise AssertionError(f"not prefilled after {most} plans")


def test_admission_keeps_one_page_for_each_running_row() -> None:
    s = scheduler(pages=5)  # four usable
    add = Feed(s)
    add((1,), 9)  # takes one page now
    s.schedule(0)
    add((3, 4, 5, 6, 7, 8, 9), 2)  # two pages of three free ones, one is kept for the row: fits
    assert len(s.schedule(0).admissions) == 1
    add((1,), 2)  # one page of one free, and one row runs: waits
    assert s.schedule(0).admissions == ()
    assert s.memory.pool.free_pages == 1
    assert s.waiting == 1


def two_rows_in_a_full_pool() -> tuple[Scheduler, Sequence, Sequence]:
    """Old and young have generated two tokens each; three pages of four tokens, both need their second page next."""
    s = scheduler(pages=4, slots=2, generate_rows=(2,), prefill_rows=2)
    add = Feed(s)
    old, young = add((1, 2), 7), add((5, 6), 7)
    plan = s.schedule(0)
    assert len(plan.admissions) == 2
    assert news(s.commit(plan, result(plan, (10, 20), {0: (11,), 1: (21,)}))) == [
        (0, [10], None),
        (1, [20], None),
        (0, [11], None),
        (1, [21], None),
    ]
    plan = s.schedule(0)
    assert (plan.grants, plan.generate) == ((), Generate(2, 1, (0, 1)))  # position 3
    s.commit(plan, result(plan, (), {0: (12,), 1: (22,)}))
    return s, old, young


def test_dry_pool_preempts_the_newest_and_resumes_it_with_its_tokens() -> None:
    s, old, young = two_rows_in_a_full_pool()
    plan = s.schedule(0)  # both want position 4, one page is free
    assert plan.grants[0].slot == 0
    assert plan.generate == Generate(2, 1, (0,))
    assert (young.slot, young.preemptions, s.preemptions, s.waiting) == (None, 1, 1, 1)
    s.check()
    assert news(s.commit(plan, result(plan, (), {0: (999,)}))) == [(0, [999], FinishReason.STOP)]
    plan = s.schedule(0)
    assert [(x.slot, x.prompt_tokens, x.generated, x.cached) for x in plan.admissions] == [(0, 2, 3, 4)]
    assert plan.chunks == (Chunk(0, 4, (22,), True),)  # the page it had was not needed meanwhile
    assert s.take_started() == [Update(old, []), Update(young, [])]  # once each
    assert news(s.commit(plan, result(plan, (23,), {0: (24,)}))) == [(1, [23], None), (1, [24], None)]
    assert young.generated == [20, 21, 22, 23, 24]


def test_preempted_sequence_waits_until_it_would_not_be_preempted_again() -> None:
    s, old, young = two_rows_in_a_full_pool()
    plans = [s.schedule(0) for _ in range(5)]  # old decodes positions 4..7, two of three pages are its own
    assert [plan.is_empty for plan in plans] == [False, False, False, False, True]
    assert (old.preemptions, young.preemptions, s.waiting, s.memory.available_pages) == (0, 1, 1, 1)


def test_row_needing_pages_while_another_may_have_ended_preempts_nobody() -> None:
    s = scheduler(pages=4, slots=2, generate_rows=(2,), prefill_rows=2)
    add = Feed(s)
    add((1, 2, 3), 9)
    young = add((5,), 9)
    plan0 = s.schedule(0)  # old: positions 0..3; young: 0..1
    plan1 = s.schedule(0)  # old: its second page, the last free one
    assert s.memory.pool.free_pages == 0
    s.commit(plan0, result(plan0, (10, 20), {0: (11,), 1: (21,)}))
    plan2 = s.schedule(0)
    s.commit(plan1, result(plan1, (), {0: (12,), 1: (22,)}))
    assert s.schedule(0).is_empty  # young wants position 4, plan 2 is in flight
    s.commit(plan2, result(plan2, (), {0: (999,), 1: (23,)}))
    plan3 = s.schedule(0)
    assert plan3.grants[0][:2] == (1, 1)
    assert (young.preemptions, s.preemptions) == (0, 0)


def test_lower_priority_is_preempted_before_a_newer_one() -> None:
    s = scheduler(pages=4, slots=2, generate_rows=(2,), prefill_rows=2)
    add = Feed(s)
    meek = add((1, 2), 7, priority=1)
    bold = add((5, 6), 7)
    for tokens in ((10, 11), (12,)):
        plan = s.schedule(0)
        first = tokens[:1] * 2 if plan.chunks else ()
        s.commit(plan, result(plan, first, {0: tokens[-1:], 1: tokens[-1:]}))
    s.schedule(0)
    assert (meek.preemptions, bold.preemptions) == (1, 0)


def test_request_larger_than_the_pool_is_refused_with_numbers() -> None:
    s = scheduler(pages=5)
    fits = Request.create((1, 2, 3), SamplingParams(max_tokens=14), LIMITS, now=0.0)  # 16 positions
    s.require_fit(fits)
    too_long = Request.create((1, 2, 3), SamplingParams(max_tokens=15), LIMITS, now=0.0)
    with pytest.raises(
        InvalidRequest, match=r"3 tokens with max_tokens=15 needs 5 KV pages of 4 tokens, the pool has 4"
    ):
        s.require_fit(too_long)


def test_aborted_sequence_frees_slot_and_pages_at_once() -> None:
    s = scheduler()
    add = Feed(s)
    running, chunked = add((1, 2), 9), add(tuple(range(10, 30)), 9)
    waiting = [add((3,), 9) for _ in range(3)]
    s.schedule(0)
    for sequence in (waiting[1], running, chunked, *waiting):
        s.abort(sequence)
        s.check()
    assert s.abort(running) is False
    assert (s.memory.used_pages, s.rows.used_slots, s.waiting, s.waiting_tokens) == (0, 0, 0, 0)


def test_abort_between_dispatch_and_result_drops_the_result() -> None:
    s = scheduler()
    one = Feed(s)((1, 2), 9)
    plan = s.schedule(0)
    s.abort(one)
    assert s.commit(plan, result(plan, (5,), {0: (6,)})) == []
    assert one.generated == []
    assert not s.has_work


def test_waiting_tokens_count_the_queue() -> None:
    s = scheduler(slots=1, generate_rows=(1,))
    add = Feed(s)
    for length in (3, 5, 7):
        add(tuple(range(length)), 2)
    assert (s.waiting, s.waiting_tokens) == (3, 15)
    s.schedule(0)
    assert (s.waiting, s.waiting_tokens) == (2, 12)


def test_logprobs_go_to_those_who_asked() -> None:
    s = scheduler()
    add = Feed(s)
    add((1,), 9, logprobs=2)
    add((2,), 9)
    add((3,), 9, logprobs=0)
    plan = s.schedule(0)
    ids = np.arange(MAX_LOGPROBS, dtype=np.int32)

    def arrays(*shape: int) -> LogprobArrays:
        tiled = np.broadcast_to(ids, (*shape, MAX_LOGPROBS))
        return LogprobArrays(np.full(shape, -0.5, np.float32), tiled, (-tiled).astype(np.float32))

    plain = result(plan, (5, 6, 7), {0: (8,), 1: (9,), 2: (10,)})
    updates = s.commit(
        plan, StepResult(plain.first_tokens, plain.tokens, plain.counts, arrays(3), arrays(1, plain.tokens.shape[1]))
    )
    assert [u.logprobs for u in updates] == [
        ((5, -0.5, ((0, 0.0), (1, -1.0))),),
        (),
        ((7, -0.5, ()),),
        ((8, -0.5, ((0, 0.0), (1, -1.0))),),
        (),
        ((10, -0.5, ()),),
    ]


def test_device_that_drops_a_row_the_host_thinks_alive_is_found() -> None:
    s = scheduler()
    Feed(s)((1,), 9)
    plan = s.schedule(0)
    with pytest.raises(AssertionError, match="host saw no end"):
        s.commit(plan, result(plan, (5,), {0: ()}))
