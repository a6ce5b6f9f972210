"""Who sits in which slot and how far its pages reach. Host side, engine thread only; imports no jax.

The numbers that every decode step touches are kept in arrays over slots, so that a step over 256 rows costs a handful
of array operations; Python looks at single rows only when one starts, ends or needs a page.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jetserve.engine.sequence import Sequence


class Seat(NamedTuple):
    """A sequence in a slot, as one plan saw it."""

    slot: int
    sequence: Sequence
    incarnation: int


class ActiveRows(NamedTuple):
    """The rows that decode, ascending, in the three forms their readers want."""

    slots: tuple[int, ...]
    array: NDArray[np.int64]
    seats: tuple[Seat, ...]


class Rows:
    """The slots of the decode batch.

    Every slot counts positions of its sequence:
        [0, written)          written, or will be by what is scheduled
        [written, capacity)   has pages
        limit                 `written` when the sequence must have ended
    """

    def __init__(self, slots: int, page_size: int) -> None:
        self._page_size = page_size
        self._sequences: list[Sequence | None] = [None] * slots
        self._free = list(range(slots))  # a heap: the lowest free slot goes first, so that small batches stay low
        self._written = np.zeros(slots, np.int64)
        self._capacity = np.zeros(slots, np.int64)
        self._limit = np.zeros(slots, np.int64)
        self._is_active = np.zeros(slots, np.bool_)
        self._active: ActiveRows | None = None  # None: to be made anew

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def used_slots(self) -> int:
        return len(self._sequences) - len(self._free)

    @property
    def residents(self) -> list[Sequence]:
        """Every sequence that has a slot."""
        return [sequence for sequence in self._sequences if sequence is not None]

    @property
    def active(self) -> ActiveRows:
        """Rows whose prompt is scheduled whole and that may yield more tokens than are scheduled."""
        if self._active is None:
            index = np.flatnonzero(self._is_active)
            slots = tuple(index.tolist())
            seats = []
            for slot in slots:
                sequence = self._sequences[slot]
                assert sequence is not None
                seats.append(Seat(slot, sequence, sequence.incarnation))
            self._active = ActiveRows(slots, index, tuple(seats))
        return self._active

    def seat(self, sequence: Sequence) -> int:
        """Gives the sequence the lowest free slot, with the pages it holds. The row is not active yet."""
        assert sequence.slot is None, sequence
        slot = heapq.heappop(self._free)
        sequence.slot = slot
        self._sequences[slot] = sequence
        self._capacity[slot] = len(sequence.held.pages) * self._page_size
        self._limit[slot] = sequence.max_positions
        return slot

    def vacate(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence."""
        slot = sequence.slot
        assert slot is not None, sequence
        assert self._sequences[slot] is sequence, sequence
        self._sequences[slot] = None
        self._deactivate(slot)
        heapq.heappush(self._free, slot)

    def activate(self, sequence: Sequence) -> None:
        """The whole prefix is scheduled, and with it one sampled token: lets the row decode if more may follow."""
        slot = sequence.slot
        assert slot is not None, sequence
        self._written[slot] = len(sequence.prefix)
        if len(sequence.prefix) < self._limit[slot]:
            self._is_active[slot] = True
            self._active = None

    def extend(self, sequence: Sequence) -> None:
        """The sequence has got more pages."""
        self._capacity[sequence.slot] = len(sequence.held.pages) * self._page_size

    def shortage(self, steps: int) -> dict[int, int]:
        """Pages that active rows lack for `steps` more tokens: slot -> number, slots ascending."""
        index = self.active.array
        reach = np.minimum(self._written[index] + steps, self._limit[index])
        over = reach - self._capacity[index]
        short = np.flatnonzero(over > 0)
        if not short.size:
            return {}
        pages = -(-over[short] // self._page_size)
        return dict(zip(index[short].tolist(), pages.tolist(), strict=True))

    def fewest_left(self) -> int:
        """Tokens until the first active row must end."""
        index = self.active.array
        return int((self._limit[index] - self._written[index]).min())

    @property
    def context_tokens(self) -> int:
        """Positions that one more token of every active row attends to."""
        index = self.active.array
        return int(self._written[index].sum()) + len(index)

    @property
    def longest_context(self) -> int:
        """Positions that one more token of the active row with the most attends to; 0 without rows."""
        index = self.active.array
        return int(self._written[index].max()) + 1 if index.size else 0

    def advance(self, steps: int) -> None:
        """Counts `steps` tokens on every active row as scheduled; those that reach their limit stop being active."""
        index = self.active.array
        written = np.minimum(self._written[index] + steps, self._limit[index])
        self._written[index] = written
        for position in np.flatnonzero(written == self._limit[index]):
            self._deactivate(int(index[position]))

    def sequence_at(self, slot: int) -> Sequence:
        sequence = self._sequences[slot]
        assert sequence is not None, f"{slot=} is empty"
        return sequence

    def check(self) -> None:
        """Raises: AssertionError when a slot is lost or its numbers do not fit its sequence."""
        empty = [slot for slot, sequence in enumerate(self._sequences) if sequence is None]
        assert sorted(self._free) == empty, f"free slots are {sorted(self._free)}, empty ones {empty}"
        for slot, sequence in enumerate(self._sequences):
            if sequence is None:
                assert not self._is_active[slot], f"{slot=} is active and empty"
                continue
            assert sequence.slot == slot, sequence
            assert self._capacity[slot] == len(sequence.held.pages) * self._page_size, sequence
            if self._is_active[slot]:
                assert sequence.is_prefilled, sequence
                assert self._written[slot] <= self._capacity[slot], sequence

    def _deactivate(self, slot: int) -> None:
        if self._is_active[slot]:
            self._is_active[slot] = False
            self._active = None
