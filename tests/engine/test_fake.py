"""The fake device does what the contract says, and sees what breaks it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jetserve.engine.fake import FakeExecutor, FreeExecutor
from jetserve.engine.fake_pages import ContractViolation
from jetserve.engine.plan import Admission, Chunk, Generate, HostMove, PageCopy, PageGrant, StepPlan
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
    host_blocks=2,
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


# Sequences that share pages. The writer is in slot 0 with six prompt tokens in pages 1 and 2; others come behind it.
PROMPT = (1, 2, 3, 4, 5, 6)


def written() -> FakeExecutor:
    """Its tokens hang on all tokens before."""
    fake = FakeExecutor(SIZING, 10, next_token=lambda tokens, _: sum(at * token for at, token in enumerate(tokens)) % 9)
    fake.execute(planned((admission(0, 6),), (PageGrant(0, 0, 1), PageGrant(0, 1, 2)), (Chunk(0, 0, PROMPT, True),)))
    return fake


def cached(slot: int, tokens: int, prompt_tokens: int = 6, **changes: Any) -> Admission:
    seen = changes.pop("seen", ())
    return admission(slot, prompt_tokens, **changes)._replace(cached=tokens, seen=seen)


def hit(tokens: int, grants: tuple[PageGrant, ...], prompt: tuple[int, ...] = PROMPT, **moves: Any) -> StepPlan:
    """A prompt of slot 1 of which so many tokens are cached."""
    return planned((cached(1, tokens, len(prompt)),), grants, (Chunk(1, tokens, prompt[tokens:], True),), **moves)


SHARED = (PageGrant(1, 0, 1), PageGrant(1, 1, 3))  # page 1 is the writer's, page 3 is new
COPIED = (PageCopy(2, 3),)


@pytest.mark.parametrize("end", [(6,), (9, 9)])
@pytest.mark.parametrize("tokens", [4, 5])
def test_row_reads_cached_tokens_from_shared_and_copied_pages(tokens: int, end: tuple[int, ...]) -> None:
    prompt = (*PROMPT[:5], *end)
    right = written().execute(hit(0, (PageGrant(1, 0, 4), PageGrant(1, 1, 5)), prompt)).result()
    found = written().execute(hit(tokens, SHARED, prompt, copies=COPIED if tokens > 4 else ())).result()
    assert found.first_tokens.tolist() == right.first_tokens.tolist()


def test_writer_and_reader_of_a_page_decode_side_by_side() -> None:
    alone, fake = written(), written()
    fake.execute(hit(5, SHARED, copies=COPIED))
    for _ in range(2):
        right = alone.execute(planned(generate=Generate(1, 1, (0,)))).result()
        result = fake.execute(planned(generate=Generate(2, 1, (0, 1)))).result()
        assert result.tokens[0].tolist() == [right.tokens[0, 0]] * 2


def test_page_may_be_copied_from_and_granted_to_somebody_else_in_a_plan() -> None:
    """The writer has left, its first page is shared and its second one given away."""
    fake = written()
    plan = hit(5, SHARED, copies=COPIED)
    plan = planned(
        (*plan.admissions, admission(0, 1)),
        (*SHARED, PageGrant(0, 0, 2)),
        (*plan.chunks, Chunk(0, 0, (8,), True)),
        copies=COPIED,
    )
    right = written().execute(hit(5, SHARED, copies=COPIED)).result()
    assert fake.execute(plan).result().first_tokens[0] == right.first_tokens[0]


def test_pages_go_to_host_memory_and_come_back() -> None:
    """Both pages leave, somebody else overwrites them, and they come back elsewhere, one of them to be copied."""
    fake = written()
    fake.execute(
        planned(
            (admission(0, 5),),
            (PageGrant(0, 0, 1), PageGrant(0, 1, 2)),
            (Chunk(0, 0, (9,) * 5, True),),
            saves=(HostMove(1, 0), HostMove(2, 1)),
        )
    )
    fake.execute(planned((cached(1, 5),), loads=(HostMove(4, 0), HostMove(5, 1))))
    grants = (PageGrant(1, 0, 4), PageGrant(1, 1, 6))
    warm = fake.execute(
        planned(grants=grants, chunks=(Chunk(1, 5, PROMPT[5:], True),), copies=(PageCopy(5, 6),))
    ).result()
    assert warm.first_tokens.tolist() == written().execute(hit(4, SHARED)).result().first_tokens.tolist()


def test_load_reads_its_block_before_the_save_of_the_same_plan() -> None:
    fake = written()
    fake.execute(planned((admission(2, 1),), saves=(HostMove(1, 0),)))
    fake.execute(planned((admission(2, 1),), saves=(HostMove(2, 0),), loads=(HostMove(4, 0),)))
    fake.execute(hit(4, (PageGrant(1, 0, 4), PageGrant(1, 1, 5))))


def test_seen_tokens_must_be_those_of_the_pages() -> None:
    def plan(seen: tuple[int, ...], **params: Any) -> StepPlan:
        return planned((cached(1, 4, seen=seen, **params),), SHARED, (Chunk(1, 4, PROMPT[4:], True),))

    written().execute(plan(PROMPT[:4], frequency_penalty=0.5))
    for seen, params, message in (
        ((1, 2, 3, 9), {"repetition_penalty": 2.0}, "other tokens"),
        ((), {"presence_penalty": 1.0}, "0 tokens seen, not 4"),
        (PROMPT[:4], {}, "4 tokens seen, not 0"),
    ):
        with pytest.raises(ContractViolation, match=message):
            written().execute(plan(seen, **params))


TWO_LOADS = (HostMove(4, 0), HostMove(4, 0))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (hit(6, SHARED), "nothing is left to prefill"),
        (hit(4, SHARED, (1, 2, 3, 4, 5, 6), copies=(PageCopy(1, 2), PageCopy(1, 4), PageCopy(1, 5))), "at most 2 are"),
        (planned((cached(1, 4),), SHARED, (Chunk(1, 0, PROMPT, True),)), "starts at 0"),
        (planned((cached(1, 4),), (), (Chunk(1, 4, PROMPT[4:], True),)), "begins with 0 pages"),
        # A page that was never written, and one that is not at its place.
        (hit(4, (PageGrant(1, 0, 5), PageGrant(1, 1, 3))), "nothing was written at cached position 0"),
        (hit(4, (PageGrant(1, 0, 2), PageGrant(1, 1, 3)), (5, 6, 1, 1, 1)), "behind another prefix"),
        # The end of a prefix is shared and not copied, or the copy is missing.
        (hit(6, (PageGrant(1, 0, 1), PageGrant(1, 1, 2)), (*PROMPT, 7)), "is no copy"),
        (hit(5, SHARED), "nothing was written at cached position 4"),
        (hit(5, SHARED, copies=(PageCopy(7, 3),)), "holds nothing"),
        (hit(5, SHARED, copies=(PageCopy(2, 0),)), "trash"),
        (hit(5, SHARED, copies=(PageCopy(9, 3),)), "no such page"),
        (hit(5, SHARED, copies=COPIED * 2), "copied to one"),
        (hit(4, SHARED, saves=(HostMove(1, 2),)), "no such block"),
        (hit(4, SHARED, saves=(HostMove(0, 1),)), "trash"),
        (hit(4, SHARED, saves=(HostMove(8, 1),)), "holds nothing"),
        (hit(4, SHARED, saves=(HostMove(1, 1), HostMove(2, 1))), "to one block"),
        (hit(4, SHARED, loads=(HostMove(4, 0),)), "nothing was saved"),
        (hit(4, SHARED, saves=(HostMove(1, 0),), loads=(HostMove(4, 0),)), "nothing was saved"),
    ],
)
def test_broken_sharing_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(ContractViolation, match=message):
        written().execute(plan)


def test_prompt_cannot_use_pages_that_its_own_plan_loads() -> None:
    fake = written()
    fake.execute(planned((admission(2, 1),), saves=(HostMove(1, 0),)))
    with pytest.raises(ContractViolation, match="nothing was written"):
        fake.execute(hit(4, (PageGrant(1, 0, 4), PageGrant(1, 1, 3)), loads=(HostMove(4, 0),)))
    with pytest.raises(ContractViolation, match="to one page"):
        fake.execute(planned((admission(2, 1),), loads=TWO_LOADS))


def test_prompt_cannot_use_pages_that_its_own_plan_writes() -> None:
    fake = FakeExecutor(SIZING, 10)
    with pytest.raises(ContractViolation, match="nothing was written"):
        fake.execute(
            planned(
                (admission(0, 4), cached(1, 4, 5)),
                (PageGrant(0, 0, 1), *SHARED),
                (Chunk(0, 0, PROMPT[:4], True), Chunk(1, 4, (5,), True)),
            )
        )


@pytest.mark.parametrize(
    "thief",
    [
        planned((admission(2, 1),), (PageGrant(2, 0, 1),), (Chunk(2, 0, PROMPT[:1], True),)),  # the same token, even
        planned((admission(2, 1),), copies=(PageCopy(2, 1),)),
        planned((admission(2, 1),), loads=(HostMove(1, 0),)),
    ],
)
def test_shared_page_that_is_written_under_a_reader_is_found(thief: StepPlan) -> None:
    fake = written()
    fake.execute(planned((admission(2, 1),), saves=(HostMove(1, 0),)))
    fake.execute(hit(4, SHARED))
    fake.execute(thief)
    with pytest.raises(ContractViolation, match=r"page=1 .* somebody else"):
        fake.execute(planned(generate=Generate(2, 1, (1,))))
