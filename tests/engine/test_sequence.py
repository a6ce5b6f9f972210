"""What one sample knows of itself."""

from __future__ import annotations

from jetserve.engine.sequence import Sequence, positions_written
from jetserve.request import FinishReason, ModelLimits, Request, SamplingParams

LIMITS = ModelLimits(vocab_size=100, max_length=32, eos_token_ids=(99,), max_prompt_tokens=31)


def sequence(prompt: list[int], **params: object) -> Sequence:
    made = SamplingParams(**{"max_tokens": 4, "seed": 7, **params})  # type: ignore[arg-type]
    return Sequence(Request.create(prompt, made, LIMITS, now=0.0), index=0, order=0)


def test_last_token_is_never_written() -> None:
    assert positions_written(sequence([1, 2, 3]).request) == 3 + 4 - 1


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
    one.slot, one.pages, one.prefilled = 3, [4, 5], 2
    one.append([7, 8])
    incarnation = one.incarnation
    assert one.leave() == [4, 5]
    one.rewind()
    assert (one.prefix, one.prefilled, one.slot, one.pages) == ((1, 2, 7, 8), 0, None, [])
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
