"""A plan in the making. Host side, engine thread only; imports no jax."""

from __future__ import annotations

from typing import NamedTuple

from jetserve.engine.memory import Found
from jetserve.engine.plan import (
    Admission,
    Chunk,
    Generate,
    HostMove,
    PageCopy,
    PageGrant,
    StepPlan,
    StepShape,
)
from jetserve.engine.rows import Seat
from jetserve.engine.sequence import Sequence
from jetserve.engine.sizing import Sizing


class Part(NamedTuple):
    """A chunk that was dispatched: its place in the plan, whose it is, and where it ends."""

    at: int
    seat: Seat
    end: int
    is_last: bool


class Draft:
    """Collects what a plan is to do.

    Attributes:
      parts: what `commit` must know of the chunks.
      prefill_tokens: of the chunks so far.
    """

    def __init__(self, sizing: Sizing) -> None:
        self.parts: list[Part] = []
        self.prefill_tokens = 0
        self._sizing = sizing
        self._admissions: list[Admission] = []
        self._grants: list[PageGrant] = []
        self._copies: list[PageCopy] = []
        self._loads: list[HostMove] = []
        self._chunks: list[Chunk] = []
        self._prefill_context = 0

    @property
    def is_empty(self) -> bool:
        return not (self._admissions or self._chunks)

    @property
    def prefill_size(self) -> int:
        """Of the smallest program that holds the chunks; 0 for none."""
        sizes = (0, *self._sizing.prefill_sizes)
        return next(size for size in sizes if size >= self.prefill_tokens)

    def admit(self, sequence: Sequence, found: Found) -> None:
        """Initialises the sequence's slot, and brings what it found in the cache to its pages."""
        self._admissions.append(sequence.admission())
        self._copies += found.copies
        self._loads += found.loads

    def grant(self, sequence: Sequence, end: int) -> None:
        """Tells the device the entries of the page table below `end` that it does not know yet."""
        slot, pages = sequence.slot, sequence.held.pages
        assert slot is not None, sequence
        self._grants += [PageGrant(slot, index, pages[index]) for index in range(sequence.held.granted, end)]
        sequence.held.granted = max(end, sequence.held.granted)

    def add_chunk(self, sequence: Sequence, end: int) -> None:
        """Prefills what the sequence lacks of its prefix, up to `end`. Its pages are granted apart."""
        assert sequence.slot is not None, sequence
        start, sequence.prefilled = sequence.prefilled, end
        is_last = sequence.is_prefilled
        seat = Seat(sequence.slot, sequence, sequence.incarnation)
        self.parts.append(Part(len(self._chunks), seat, end, is_last))
        self._chunks.append(Chunk(sequence.slot, start, sequence.prefix[start:end], is_last))
        self.prefill_tokens += end - start
        self._prefill_context += (start + 1 + end) * (end - start) // 2

    def plan(
        self, saves: tuple[HostMove, ...], generate: Generate | None, context_tokens: int, longest_context: int
    ) -> StepPlan:
        """What was collected, as a plan.

        Args:
          context_tokens: positions that one token of every row of `generate` attends to.
          longest_context: of the row with the most.
        """
        rows, steps = (generate.rows, generate.steps) if generate is not None else (0, 0)
        return StepPlan(
            admissions=tuple(self._admissions),
            grants=tuple(self._grants),
            saves=saves,
            copies=tuple(self._copies),
            chunks=tuple(self._chunks),
            generate=generate,
            loads=tuple(self._loads),
            shape=StepShape(
                self.prefill_size, self._prefill_context, rows, steps, context_tokens * steps, longest_context * steps
            ),
        )
