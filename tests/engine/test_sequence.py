"""What one sample knows of itself."""

from __future__ import annotations

import pytest

from jetserve.engine.sequence import Sequence, max_positions
from jetserve.request import FinishReason, ModelLimits, Request, SamplingParams

LIMITS = ModelLimits(vocab_size=100, max_length=32, eos_token_ids=(99,), max_prompt_tokens=31)


def sequence(prompt: list[int], **params: object) -> Sequence:
    made = SamplingParams(**{"max_tokens": 4, "seed": 7, **params})  # type: ignore[arg-type]
    return Sequence(Request.create(prompt, made, LIMITS, now=0.0), index=0, order=0)


def test_last_token_is_never_written() -> None:
    assert max_positions(sequence([1, 2, 3]).request) == 3 + 4 - 1


def test_stop_id_ends_with_stop_and_is_kept() -> None:
    one = sequence([1])
    assert one.append([5]) is None
    assert one.append([99]) is FinishReason.STOP
    assert one.generated == [5, 99]


def test_limit_ends_with_length() -> None:
    one = sequence([1])
    assert one.append([5, 6, 7]) is None
    assert one.append([8]) is FinishReason.LENGTH


def test_stop_id_as_the_last_possible_token_is_stop() -> None:
    one = sequence([1])
    assert one.append([5, 6, 7, 99]) is FinishReason.STOP


def test_rewound_sequence_prefills_prompt_and_generated_tokens() -> None:
    one = sequence([1, 2])
    one.slot, one.prefilled = 3, 2
    one.append([7, 8])
    incarnation = one.incarnation
    one.leave()
    one.rewind()
    assert (one.prefix, one.prefilled, one.slot) == ((1, 2, 7, 8), 0, None)
    assert one.incarnation != incarnation
    assert one.preemptions == 1
    one.slot = 0
    admission = one.admission()
    assert (admission.slot, admission.generated, admission.prompt_tokens, admission.seed) == (0, 2, 2, 7)
    assert admission.stop_token_ids == (99,)


def test_rank_is_priority_then_arrival() -> None:
    def ranked(priority: int, order: int) -> Sequence:
        request = Request.create([1], SamplingParams(max_tokens=1), LIMITS, priority=priority, now=0.0)
        return Sequence(request, 0, order)

    late, early, urgent = ranked(0, 1), ranked(0, 0), ranked(-1, 2)
    assert sorted([late, early, urgent], key=lambda s: s.rank) == [urgent, early, late]


@pytest.mark.parametrize(
    ("start", "end", "tokens"), [(0, 2, (1, 2)), (1, 4, (2, 3, 7)), (3, 5, (7, 8)), (4, 9, (8, 9))]
)
def test_tokens_run_on_from_prompt_to_answer(start: int, end: int, tokens: tuple[int, ...]) -> None:
    one = sequence([1, 2, 3])
    one.append([7, 8, 9])
    assert one.tokens(start, end) == tokens


def test_positions_written_are_what_was_committed_then_all_but_the_last_token() -> None:
    one = sequence([1, 2, 3])
    one.held.written = 2
    assert one.positions_written == 2
    one.held.written = 3
    assert one.positions_written == 3
    one.append([7])
    assert one.positions_written == 3
    one.append([8])
    assert one.positions_written == 4
