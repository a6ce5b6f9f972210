"""Who waits for a slot, and who is to get one next. Host side, engine thread only; imports no jax.

Lower priority numbers go first; within a priority the order is one of

    fcfs             first come, first served
    longest_prefix   most tokens found in the prefix cache, among the first `_LOOKED_AT`; ties by arrival

So that nobody starves, whoever came first of all is passed over by at most `ageing - 1` admissions in a row. Then it is
`is_aged`: it is the next one whatever its priority or prefix, and is preempted last. A sequence that came behind k
others is therefore admitted after at most (k + 1) * ageing admissions.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from itertools import islice

from jetserve.config import SchedulerSettings
from jetserve.engine.sequence import Sequence

_LOOKED_AT = 64  # a look costs about 2 us


class WaitingQueue:
    """Sequences without a slot.

    Args:
      cached_tokens: how much of a sequence's prefix is in the cache.
    """

    def __init__(self, settings: SchedulerSettings, cached_tokens: Callable[[Sequence], int]) -> None:
        self.tokens = 0  # to be prefilled, were nothing cached
        self._ageing = settings.ageing
        self._by_prefix = settings.policy == "longest_prefix"
        self._cached_tokens = cached_tokens
        self._ranked: list[Sequence] = []
        self._by_arrival: list[Sequence] = []
        self._passed_over = 0  # admissions since whoever came first was admitted

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Sequence]:
        """By rank."""
        return iter(self._ranked)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place."""
        bisect.insort(self._ranked, sequence, key=_rank)
        bisect.insort(self._by_arrival, sequence, key=_order)
        self.tokens += len(sequence.prefix)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits."""
        del self._ranked[bisect.bisect_left(self._ranked, sequence.rank, key=_rank)]
        del self._by_arrival[bisect.bisect_left(self._by_arrival, sequence.order, key=_order)]
        self.tokens -= len(sequence.prefix)

    def admit(self, sequence: Sequence) -> None:
        """Takes out a sequence that gets a slot."""
        self._passed_over = 0 if sequence is self._by_arrival[0] else self._passed_over + 1
        self.remove(sequence)

    def next(self, is_held: Callable[[Sequence], bool]) -> Sequence | None:
        """Who is to be admitted. Nobody may be admitted instead of it: it may be waiting for room.

        Args:
          is_held: whether a sequence had better wait, for a prefix that is being written. Not asked for aged ones.
        """
        if not self._ranked:
            return None
        if self._passed_over >= self._ageing - 1:
            self._age(self._by_arrival[0])
        first = self._ranked[0]
        if first.is_aged:
            return first
        if self._by_prefix:
            return self._longest_prefix(is_held)
        return next((sequence for sequence in islice(self._ranked, _LOOKED_AT) if not is_held(sequence)), None)

    def check(self) -> None:
        """Raises: AssertionError when the books disagree."""
        assert self.tokens == sum(len(sequence.prefix) for sequence in self._ranked)
        assert [s.rank for s in self._ranked] == sorted(s.rank for s in self._ranked)
        assert self._by_arrival == sorted(self._ranked, key=_order)
        assert all(s.slot is None and not s.held.pages and s.finish_reason is None for s in self._ranked)

    def _age(self, sequence: Sequence) -> None:
        if not sequence.is_aged:
            del self._ranked[bisect.bisect_left(self._ranked, sequence.rank, key=_rank)]
            sequence.is_aged = True
            bisect.insort(self._ranked, sequence, key=_rank)

    def _longest_prefix(self, is_held: Callable[[Sequence], bool]) -> Sequence | None:
        best, longest = None, -1
        for sequence in islice(self._ranked, _LOOKED_AT):
            if sequence.request.priority != self._ranked[0].request.priority:
                break
            if (found := self._cached_tokens(sequence)) > longest and not is_held(sequence):
                best, longest = sequence, found
        return best


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.rank


def _order(sequence: Sequence) -> int:
    return sequence.order
