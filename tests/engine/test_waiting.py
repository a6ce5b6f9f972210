"""Who is next, and that nobody waits for ever."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from jetserve.config import SchedulerSettings
from jetserve.engine.sequence import Sequence
from jetserve.engine.waiting import WaitingQueue
from jetserve.request import ModelLimits, Request, SamplingParams

LIMITS = ModelLimits(vocab_size=1000, max_length=64, eos_token_ids=(), max_prompt_tokens=63)


def sequence(order: int, priority: int = 0, length: int = 1) -> Sequence:
    params = SamplingParams(max_tokens=1)
    return Sequence(Request.create((1,) * length, params, LIMITS, priority=priority, now=0.0), 0, order)


def queue(policy: str = "fcfs", ageing: int = 16, cached: dict[int, int] | None = None) -> WaitingQueue:
    settings = SchedulerSettings.model_validate({"policy": policy, "ageing": ageing})
    return WaitingQueue(settings, lambda sequence: (cached or {}).get(sequence.order, 0))


def drain(waiting: WaitingQueue) -> list[int]:
    """Admits everybody; their orders as they come out."""
    found = []
    while (chosen := waiting.next(lambda _: False)) is not None:
        waiting.admit(chosen)
        waiting.check()
        found.append(chosen.order)
    return found


def test_lower_priority_numbers_then_earlier_ones_go_first() -> None:
    waiting = queue()
    for order, priority in enumerate((0, 5, -1, 0)):
        waiting.add(sequence(order, priority))
    assert drain(waiting) == [2, 0, 3, 1]


def test_longest_cached_prefix_goes_first_within_a_priority() -> None:
    waiting = queue("longest_prefix", cached={1: 32, 2: 48, 3: 32, 4: 64})
    for order in range(4):
        waiting.add(sequence(order))
    waiting.add(sequence(4, priority=1))
    assert drain(waiting) == [2, 1, 3, 0, 4]


def test_whoever_came_first_is_passed_over_so_many_times_and_no_more() -> None:
    waiting = queue(ageing=3)
    meek = sequence(0, priority=9)
    waiting.add(meek)
    for order in range(1, 6):
        waiting.add(sequence(order))
    assert drain(waiting) == [1, 2, 0, 3, 4, 5]
    assert meek.is_aged


def test_who_is_first_anyway_does_not_age() -> None:
    waiting = queue(ageing=1)
    sequences = [sequence(order) for order in range(4)]
    for one in sequences:
        waiting.add(one)
    assert drain(waiting) == [0, 1, 2, 3]


def test_held_sequence_is_passed_over_but_an_aged_one_is_not() -> None:
    waiting = queue(ageing=2)
    first, second, third = sequence(0), sequence(1), sequence(2)
    for one in (first, second, third):
        waiting.add(one)
    assert waiting.next(lambda s: s is first) is second
    assert waiting.next(lambda _: True) is None
    waiting.admit(second)
    assert waiting.next(lambda _: True) is first


def test_tokens_are_those_of_the_prefixes_that_wait() -> None:
    waiting = queue()
    long = sequence(1, length=7)
    waiting.add(sequence(0, length=3))
    waiting.add(long)
    assert (waiting.tokens, len(waiting)) == (10, 2)
    waiting.remove(long)
    assert (waiting.tokens, [s.order for s in waiting]) == (3, [0])


@given(
    policy=st.sampled_from(["fcfs", "longest_prefix"]),
    ageing=st.integers(1, 5),
    script=st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3), st.integers(0, 3)), max_size=60),
)
def test_nobody_starves(policy: str, ageing: int, script: list[tuple[int, int, int]]) -> None:
    """A sequence behind k others is admitted after at most (k + 1) * ageing admissions, whoever comes later."""
    cached: dict[int, int] = {}
    waiting = queue(policy, ageing, cached)
    allowed: dict[int, int] = {}  # order -> the admission that must be it at the latest
    admitted = 0

    def admit() -> None:
        nonlocal admitted
        chosen = waiting.next(lambda _: False)
        if chosen is not None:
            waiting.admit(chosen)
            admitted += 1
            assert admitted <= allowed.pop(chosen.order)

    for order, (priority, found, admissions) in enumerate(script):
        cached[order] = found * 16
        allowed[order] = admitted + (len(waiting) + 1) * ageing
        waiting.add(sequence(order, priority))
        for _ in range(admissions):
            admit()
    while len(waiting):
        admit()
    assert not allowed
