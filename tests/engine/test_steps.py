"""What single programs do to state and cache, seen through plans on the device."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jetserve.engine.plan import Admission, Chunk, Generate, PageCopy, PageGrant, StepPlan, StepResult
from jetserve.kernels import TRASH_PAGE
from jetserve.request import SamplingParams
from tests.engine.conftest import Served

PAGE = 4


@pytest.fixture
def device(llama: Served) -> Served:
    """Cache and state full of rubbish; every slot idle."""
    llama.poison(lambda x: np.full_like(x, False if x.dtype == bool else 8.25 if x.dtype.kind == "f" else TRASH_PAGE))
    return llama


def admission(
    slot: int, prompt: tuple[int, ...], stops: tuple[int, ...] = (), generated: int = 0, **params: Any
) -> Admission:
    made = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **params})
    return Admission(slot, made, stops, 5, len(prompt), generated)


def grants(slot: int, pages: list[int]) -> tuple[PageGrant, ...]:
    return tuple(PageGrant(slot, at, page) for at, page in enumerate(pages))


def run(device: Served, *plans: StepPlan) -> list[StepResult]:
    pending = [device.executor.execute(plan) for plan in plans]
    return [step.result() for step in pending]


def state(device: Served) -> dict[str, NDArray[np.generic]]:
    """Copies: the next step overwrites the buffers."""
    return {name: np.array(array) for name, array in vars(device.executor._state).items() if name != "sampling"}


def cache(device: Served) -> NDArray[np.float32]:
    return np.array(device.executor._kv)


def start(slot: int, prompt: tuple[int, ...], pages: list[int], **params: Any) -> StepPlan:
    return StepPlan((admission(slot, prompt, **params),), grants(slot, pages), chunks=(Chunk(slot, 0, prompt, True),))


PROMPT = (3, 1, 4, 1, 5, 9)


def test_last_chunk_samples_and_activates_its_row(device: Served) -> None:
    [result] = run(device, start(2, PROMPT, [7, 8]))
    right = int(np.argmax(device.truth.logits(PROMPT)[-1]))
    assert result.first_tokens[0] == right
    assert result.tokens.shape == (0, 0)
    now = state(device)
    assert now["active"].tolist() == [False, False, True, False]
    assert [now[name][2] for name in ("last_token", "length", "generated")] == [right, 7, 1]
    assert now["page_table"][2, :2].tolist() == [7, 8]


def test_chunk_before_the_last_leaves_its_row_idle(device: Served) -> None:
    run(device, StepPlan((admission(1, PROMPT),), grants(1, [7]), chunks=(Chunk(1, 0, PROMPT[:3], False),)))
    now = state(device)
    assert not now["active"].any()
    assert (now["length"][1], now["generated"][1]) == (1, 0)
    [result] = run(device, StepPlan((), (PageGrant(1, 1, 8),), chunks=(Chunk(1, 3, PROMPT[3:], True),)))
    assert result.first_tokens[0] == np.argmax(device.truth.logits(PROMPT)[-1])


def test_chunk_writes_its_pages_and_the_trash_page_only(device: Served) -> None:
    before = cache(device)
    run(device, start(0, PROMPT, [9, 5]))
    changed = np.argwhere(cache(device) != before)
    assert {int(page) for page in changed[:, 1]} - {TRASH_PAGE} == {9, 5}
    assert {int(offset) for _, page, _, _, offset, _ in changed if page == 9} == {0, 1, 2, 3}
    assert {int(offset) for _, page, _, _, offset, _ in changed if page == 5} == {0, 1}


def test_first_token_may_be_decoded_from_in_the_same_plan(device: Served) -> None:
    plan = start(3, PROMPT, [7, 8])
    together = replace(plan, generate=Generate(4, 1, (3,)))
    [result] = run(device, together)
    first = int(np.argmax(device.truth.logits(PROMPT)[-1]))
    second = int(np.argmax(device.truth.logits([*PROMPT, first])[-1]))
    assert result.first_tokens[0] == first
    assert result.tokens.tolist() == [[-1, -1, -1, second]]
    assert result.counts.tolist() == [0, 0, 0, 1]


def test_generate_leaves_rows_alone_that_are_not_named(device: Served) -> None:
    """Rows beyond the batch keep everything, and may go on later; rows below it that are left out end."""
    for slot in range(4):
        run(device, start(slot, PROMPT, [10 + 2 * slot, 11 + 2 * slot]))
    before, kv_before = state(device), cache(device)
    [result] = run(device, StepPlan(generate=Generate(2, 1, (0,))))
    after, kv_after = state(device), cache(device)
    assert result.counts.tolist() == [1, 0]
    assert after["active"].tolist() == [True, False, True, True]
    for name in ("last_token", "length", "generated", "page_table"):
        np.testing.assert_array_equal(after[name][1:], before[name][1:], err_msg=name)
    assert {int(page) for page in np.argwhere(kv_after != kv_before)[:, 1]} - {TRASH_PAGE} == {11}
    [last] = run(device, StepPlan(generate=Generate(4, 1, (2, 3))))
    assert last.counts.tolist() == [0, 0, 1, 1]
    assert last.tokens[0, 2] == result.tokens[0, 0]


def test_granted_page_is_there_for_the_step_of_its_plan(device: Served) -> None:
    prompt = PROMPT[:PAGE]
    run(device, start(1, prompt, [7]))
    run(device, StepPlan(grants=(PageGrant(1, 1, 30),), generate=Generate(2, 1, (1,))))
    now = state(device)
    assert now["page_table"][1, :2].tolist() == [7, 30]
    assert (cache(device)[:, 30, :, :, 0] != 8.25).all()
    assert (cache(device)[:, 30, :, :, 1:] == 8.25).all()


@pytest.mark.parametrize("ends_by", ["stop", "length"])
def test_ended_row_is_dropped_by_the_device_itself(device: Served, ends_by: str) -> None:
    """The host learns of it a step late, and meanwhile the row neither writes nor counts."""
    first = int(np.argmax(device.truth.logits(PROMPT)[-1]))
    second = int(np.argmax(device.truth.logits([*PROMPT, first])[-1]))
    ending: dict[str, Any] = {"stops": (second,)} if ends_by == "stop" else {"max_tokens": 2}
    assert first != second
    run(device, start(0, PROMPT, [7, 8], **ending))
    step = StepPlan(generate=Generate(2, 1, (0,)))
    [one] = run(device, step)
    before, kv_before = state(device), cache(device)
    [two] = run(device, step)
    assert (one.counts[0], two.counts[0]) == (1, 0)
    assert two.tokens.tolist() == [[-1, -1]]
    np.testing.assert_array_equal(cache(device)[:, 1:], kv_before[:, 1:])
    for name in ("last_token", "length", "generated", "active"):
        np.testing.assert_array_equal(state(device)[name], before[name], err_msg=name)


def test_counts_hold_prompt_marks_and_generated_numbers(device: Served) -> None:
    """In chunks, resumed behind two generated tokens; and only for the row with penalties."""
    prompt, again = (3, 3, 5, 60), (5, 70)
    own = admission(1, prompt, generated=2, frequency_penalty=0.1, presence_penalty=0.1)
    other = admission(2, PROMPT)
    untouched = state(device)["counts"][2]
    run(
        device,
        StepPlan((own, other), (*grants(1, [7, 8]), *grants(2, [9, 10])), chunks=(Chunk(1, 0, prompt[:3], False),)),
        StepPlan(chunks=(Chunk(1, 3, (prompt[3], *again), True), Chunk(2, 0, PROMPT, True))),
    )
    run(device, StepPlan(generate=Generate(4, 1, (1, 2))))
    now = state(device)
    expected = np.zeros(device.model.vocab_size, np.int64)
    expected[[3, 5, 60]] = 1
    for token in again:
        expected[token] += 2
    # The two tokens since, of which the state holds the newest.
    newest = int(now["last_token"][1])
    difference = now["counts"][1] - expected
    assert difference.sum() == 4
    assert difference[newest] in (2, 4)
    assert set(np.unique(difference)) <= {0, 2, 4}
    np.testing.assert_array_equal(now["counts"][2], untouched)


PENALTY = {"frequency_penalty": 0.1, "repetition_penalty": 1.2}


@pytest.mark.parametrize(("cached", "generated"), [(1, 0), (32, 0), (33, 0), (47, 0), (47, 20), (47, 46)])
def test_seen_tokens_count_as_prefilled_ones(device: Served, cached: int, generated: int) -> None:
    """Bit for bit, in as many calls as it takes; repeated tokens, and some that were generated before a preemption."""
    chance = random.Random(cached)
    prefix = tuple(chance.randrange(40) for _ in range(48))
    own = admission(1, prefix, generated=generated, max_tokens=60, **PENALTY)._replace(prompt_tokens=48 - generated)
    pages = list(range(100, 112))
    run(
        device,
        StepPlan((own,), grants(1, pages), chunks=(Chunk(1, 0, prefix[:32], False),)),
        StepPlan(chunks=(Chunk(1, 32, prefix[32:], True),)),
    )
    cold = state(device)["counts"]
    warm = own._replace(slot=3, cached=cached, seen=prefix[:cached])
    ends = [cached, *([20] if cached < 16 else []), 48]
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        chunk = Chunk(3, start, prefix[start:end], end == 48)
        run(device, StepPlan((warm,), grants(3, pages), chunks=(chunk,)) if index == 0 else StepPlan(chunks=(chunk,)))
    now = state(device)["counts"]
    np.testing.assert_array_equal(now[3], cold[1])
    np.testing.assert_array_equal(now[:3], cold[:3])


@pytest.mark.parametrize("cached", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 10])
def test_row_goes_on_behind_a_cached_prefix(device: Served, cached: int) -> None:
    """Full pages are shared, the one a prefix ends in is copied; shared pages and the writer keep what they have."""
    chance = random.Random(11)
    prompt = device.prompt(chance, 11)
    other = (*prompt[:cached], *device.prompt(chance, 11 - cached))
    run(device, start(0, prompt, [7, 8, 9]))
    before, kv_before = state(device), cache(device)
    whole, rest = divmod(cached, PAGE)
    pages = [*[7, 8, 9][:whole], *range(20, 23 - whole)]
    copies = (PageCopy([7, 8, 9][whole], 20),) if rest else ()
    warm = admission(2, other)._replace(cached=cached)
    plan = StepPlan((warm,), grants(2, pages), copies=copies, chunks=(Chunk(2, cached, other[cached:], True),))
    [result] = run(device, replace(plan, generate=Generate(4, 1, (0, 2))))
    first = int(np.argmax(device.truth.logits(other)[-1]))
    assert result.first_tokens[0] == first
    assert result.tokens[0, 2] == np.argmax(device.truth.logits([*other, first])[-1])
    now = state(device)
    assert (now["length"][2], now["generated"][2], now["active"][2]) == (13, 2, True)
    assert now["page_table"][2, :3].tolist() == pages
    np.testing.assert_array_equal(now["page_table"][0], before["page_table"][0])
    np.testing.assert_array_equal(cache(device)[:, [7, 8]], kv_before[:, [7, 8]])
    np.testing.assert_array_equal(cache(device)[:, 9, :, :, :3], kv_before[:, 9, :, :, :3])


def test_admission_behind_a_cached_prefix_initialises_every_field(device: Served) -> None:
    """R55: whatever the slot held before, and although its first chunk is in a later plan."""
    run(device, start(0, PROMPT, [7, 8]))
    before = state(device)
    warm = admission(1, PROMPT, generated=2)._replace(cached=PAGE)
    run(device, StepPlan((warm,), (PageGrant(1, 0, 7),)))
    now = state(device)
    right = {"last_token": 0, "length": 1, "active": False, "generated": 2, "max_tokens": 20}
    assert {name: now[name][1].item() for name in right} == right
    assert (now["page_table"][1] == TRASH_PAGE).all()
    for name in right:
        np.testing.assert_array_equal(np.delete(now[name], 1), np.delete(before[name], 1), err_msg=name)


def test_chunks_packed_together_equal_chunks_alone(device: Served) -> None:
    chance = random.Random(3)
    prompts = [device.prompt(chance, length) for length in (9, 1, 20)]
    alone = [
        run(device, start(slot, prompt, [20 + 5 * slot + at for at in range(5)]))[0]
        for slot, prompt in enumerate(prompts)
    ]
    plans = [start(slot, prompt, [40 + 5 * slot + at for at in range(5)]) for slot, prompt in enumerate(prompts)]
    packed = StepPlan(
        admissions=tuple(item for plan in plans for item in plan.admissions),
        grants=tuple(item for plan in plans for item in plan.grants),
        chunks=tuple(item for plan in plans for item in plan.chunks),
    )
    [together] = run(device, packed)
    assert together.first_tokens[:3].tolist() == [int(result.first_tokens[0]) for result in alone]
