"""Who runs when: pure policy from what the host knows to the next `StepPlan`. Engine thread only; imports no jax.

Order is first come, first served within a priority. Every plan lets all running rows decode, and beside them prefills
at most `prefill_tokens` prompt tokens, so a running stream waits for at most one prefill step between two tokens.

The host is one block late: `schedule` counts on every token it dispatched, `commit` learns later which rows stopped
earlier. What such a plan says about a row that has ended is harmless: the device has dropped the row by itself.

Slots and pages are free for others the moment a sequence leaves, although plans in flight still name its row. That is
safe because the device runs plans in order: the last plan that names the row runs before the plan that grants its pages
or its slot to somebody else, and a row that is not in `Generate.active` neither reads nor writes.

When the pool is dry the newest sequence of the lowest priority goes back to the queue with the tokens it has, and is
later prefilled with them. The first in rank is never preempted and fits the pool alone, so it always ends: no deadlock.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from jetserve.engine.logprobs import token_logprobs
from jetserve.engine.pages import PagePool
from jetserve.engine.plan import Admission, Chunk, Generate, PageGrant, StepPlan, StepResult
from jetserve.engine.rows import Rows, Seat
from jetserve.engine.sequence import Sequence, positions_written
from jetserve.engine.sizing import Sizing
from jetserve.errors import InvalidRequest
from jetserve.request import FinishReason, Request, TokenLogprobs

_EMPTY = StepPlan()


class Update(NamedTuple):
    """News of one sequence. One without tokens says that the sequence got a slot for the first time."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    admissions: list[Admission] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    firsts: list[tuple[int, Seat]] = field(default_factory=list)  # as in `_Flight`


class _Flight(NamedTuple):
    """What `commit` must know of a dispatched plan: whose first tokens and whose rows its result holds."""

    plan: StepPlan
    firsts: tuple[tuple[int, Seat], ...]  # index in `StepResult.first_tokens`
    seats: tuple[Seat, ...]


class Scheduler:
    """Owns the queue, the rows and the pages.

    `schedule` and `commit` are called in turns, `commit` with the results of the plans in their order, at most one
    plan behind.
    """

    def __init__(self, sizing: Sizing) -> None:
        self.sizing = sizing
        self.pool = PagePool(sizing.pages)
        self.rows = Rows(sizing.slots, sizing.page_size)
        self.waiting_tokens = 0
        self.preemptions = 0
        self._waiting: list[Sequence] = []  # by rank
        self._prefilling: list[Sequence] = []  # have a slot, lack a part of their prompt; by admission
        self._flights: deque[_Flight] = deque()
        self._started: list[Update] = []
        self._generate: Generate | None = None  # the last one, used again while nothing changes

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.rows.used_slots or self._flights)

    def require_fit(self, request: Request) -> None:
        """Raises: InvalidRequest when the request would not fit the pool even alone. May be called from any thread."""
        pages = self._pages(positions_written(request))
        if pages > self.sizing.usable_pages:
            raise InvalidRequest(
                f"a prompt of {len(request.prompt_token_ids)} tokens with max_tokens={request.max_tokens} needs "
                f"{pages} KV pages of {self.sizing.page_size} tokens, the pool has {self.sizing.usable_pages}; "
                f"lower max_tokens, shorten the prompt or raise engine.kv_pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that fits."""
        bisect.insort(self._waiting, sequence, key=_rank)
        self.waiting_tokens += len(sequence.prefix)

    def abort(self, sequence: Sequence) -> bool:
        """Ends a sequence now; its slot and pages are free when this returns. False if it had ended before."""
        if sequence.finish_reason is not None:
            return False
        sequence.finish_reason = FinishReason.ABORT
        if sequence.slot is None:
            del self._waiting[bisect.bisect_left(self._waiting, sequence.rank, key=_rank)]
            self.waiting_tokens -= len(sequence.prefix)
        else:
            self._release(sequence)
        return True

    def take_started(self) -> list[Update]:
        """Sequences that got their first slot since the last call."""
        started, self._started = self._started, []
        return started

    def schedule(self, now: float) -> StepPlan:
        """Decides the next step and counts on it.

        An empty plan means that there is nothing to do before results in flight were committed.
        """
        steps = self._steps()
        lacking = self.rows.shortage(steps)
        if steps > self.sizing.generate_steps[0] and sum(lacking.values()) > self.pool.free_pages:
            steps = self.sizing.generate_steps[0]
            lacking = self.rows.shortage(steps)
        is_dry = sum(lacking.values()) > self.pool.free_pages
        if is_dry:
            if self._flights:
                return _EMPTY  # a row may have ended and free its pages; and then preempting loses no tokens
            lacking = self._preempt(lacking)
        draft = _Draft()
        self._grow(lacking, draft)
        if self._prefilling or self._waiting:
            self._prefill(draft, now, may_admit=not is_dry)
        active = self.rows.active
        if not (active.slots or draft.chunks):
            return _EMPTY
        plan = StepPlan(
            admissions=tuple(draft.admissions),
            grants=tuple(draft.grants),
            chunks=tuple(draft.chunks),
            generate=self._decode(active.slots, steps),
        )
        self._flights.append(_Flight(plan, tuple(draft.firsts), active.seats))
        if active.slots:
            self.rows.advance(steps)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Takes in what the oldest plan in flight sampled.

        Sequences that ended leave their slots and pages. Results for a sequence that left its slot meanwhile are
        dropped. A sequence whose first token and first decoded tokens are in the same plan has two updates, in order.
        """
        flight = self._flights.popleft()
        assert flight.plan is plan, "results are committed in the order of their plans"
        updates: list[Update] = []
        if flight.firsts:
            self._commit_firsts(flight.firsts, result, updates)
        if plan.generate is not None:
            self._commit_rows(flight.seats, plan.generate.steps, result, updates)
        return updates

    def check(self) -> None:
        """Raises: AssertionError when a slot or page is lost, or the books disagree in any other way."""
        self.rows.check()
        self.pool.check(page for sequence in self.rows.residents for page in sequence.pages)
        assert self.waiting_tokens == sum(len(sequence.prefix) for sequence in self._waiting)
        assert [s.rank for s in self._waiting] == sorted(s.rank for s in self._waiting)
        assert all(s.slot is None and not s.pages and s.finish_reason is None for s in self._waiting)
        assert all(s.slot is not None and not s.is_prefilled for s in self._prefilling)

    def _commit_firsts(self, firsts: tuple[tuple[int, Seat], ...], result: StepResult, updates: list[Update]) -> None:
        tokens = result.first_tokens.tolist()
        arrays = result.first_logprobs
        for at, (_, sequence, incarnation) in firsts:
            if sequence.incarnation != incarnation:
                continue
            token = tokens[at]
            wanted = sequence.request.params.logprobs
            logprobs: tuple[TokenLogprobs, ...] = ()
            if wanted is not None:
                assert arrays is not None, f"{sequence} wants logprobs, the result has none"
                logprobs = (token_logprobs(arrays, at, token, wanted),)
            reason = sequence.append([token])
            if reason is not None:
                self._release(sequence)
            updates.append(Update(sequence, [token], logprobs, reason))

    def _commit_rows(self, seats: tuple[Seat, ...], steps: int, result: StepResult, updates: list[Update]) -> None:
        """The loop over every running row of every step: keep it lean."""
        counts = result.counts.tolist()
        rows = result.tokens.T.tolist()  # [rows, steps]
        arrays = result.logprobs
        for slot, sequence, incarnation in seats:
            if sequence.incarnation != incarnation:
                continue
            tokens = rows[slot]
            count = counts[slot]
            if count != steps:
                tokens = tokens[:count]
                assert tokens, f"the device had dropped {sequence}, the host saw no end"
            logprobs: tuple[TokenLogprobs, ...] = ()
            if arrays is not None and (wanted := sequence.request.params.logprobs) is not None:
                logprobs = tuple(token_logprobs(arrays, (at, slot), token, wanted) for at, token in enumerate(tokens))
            reason = sequence.append(tokens)
            if reason is not None:
                self._release(sequence)
            else:
                assert count == steps, f"the device stopped {sequence} after {count} of {steps} tokens"
            updates.append(Update(sequence, tokens, logprobs, reason))

    def _steps(self) -> int:
        """Tokens per row of the next generate: as many as no row ends within, the fewest while prompts wait."""
        sizes = self.sizing.generate_steps
        if len(sizes) == 1 or self._waiting or self._prefilling or not self.rows.active.slots:
            return sizes[0]
        return sizes[max(0, bisect.bisect_right(sizes, self.rows.fewest_left()) - 1)]

    def _decode(self, slots: tuple[int, ...], steps: int) -> Generate | None:
        if not slots:
            return None
        last = self._generate
        if last is None or last.active is not slots or last.steps != steps:
            sizes = self.sizing.generate_rows
            last = self._generate = Generate(sizes[bisect.bisect_right(sizes, slots[-1])], steps, slots)
        return last

    def _grow(self, lacking: dict[int, int], draft: _Draft) -> None:
        for slot, count in lacking.items():
            sequence = self.rows.sequence_at(slot)
            start = len(sequence.pages)
            self.rows.extend(sequence, self.pool.alloc(count))
            draft.grants += _grants(sequence, start, start + count)

    def _preempt(self, lacking: dict[int, int]) -> dict[int, int]:
        """Sends the last in rank back to the queue until what the others lack is free. Returns what they lack."""
        lacking = dict(lacking)
        residents = sorted(self.rows.residents, key=_rank)
        while sum(lacking.values()) > self.pool.free_pages:
            victim = residents.pop()
            assert residents, f"{victim} does not fit the pool alone"
            assert victim.slot is not None
            lacking.pop(victim.slot, None)
            self._release(victim)
            victim.rewind()
            self.add(victim)
            self.preemptions += 1
        return lacking

    def _prefill(self, draft: _Draft, now: float, *, may_admit: bool) -> None:
        """Fills the step's prefill budget: prompts under way first, then the queue."""
        budget = min(self.sizing.prefill_tokens, self.sizing.prefill_sizes[-1])
        running = len(self.rows.active.slots)
        under_way = deque(self._prefilling)
        while budget and len(draft.chunks) < self.sizing.prefill_rows:
            if under_way:
                sequence = under_way.popleft()
            elif may_admit and self._waiting and self._has_room(self._waiting[0], running):
                sequence = self._waiting.pop(0)
                draft.admissions.append(self._admit(sequence, now))
            else:
                break
            budget -= self._add_chunk(sequence, budget, draft)

    def _has_room(self, sequence: Sequence, running: int) -> bool:
        """Whether to admit: pages for it and one more per running row, lest the next steps preempt it again."""
        if not self.rows.free_slots:
            return False
        needed = self._pages(self._reach(sequence))
        return needed + running <= self.pool.free_pages or not self.rows.used_slots

    def _admit(self, sequence: Sequence, now: float) -> Admission:
        self.waiting_tokens -= len(sequence.prefix)
        # All pages of the prefix are taken at once, so that a prompt under way never stops for want of pages; the
        # device is told of them chunk by chunk, which bounds the grants of one plan.
        sequence.pages = self.pool.alloc(self._pages(self._reach(sequence)))
        self.rows.seat(sequence)
        self._prefilling.append(sequence)
        if sequence.scheduled_seconds is None:
            sequence.scheduled_seconds = now
            self._started.append(Update(sequence, []))
        return sequence.admission()

    def _add_chunk(self, sequence: Sequence, budget: int, draft: _Draft) -> int:
        """Prefills what the budget allows of a sequence. Returns how many tokens that is."""
        assert sequence.slot is not None, sequence
        start = sequence.prefilled
        end = min(start + budget, len(sequence.prefix))
        sequence.prefilled = end
        is_last = sequence.is_prefilled
        # With the last chunk come the pages of the decode step in the same plan.
        draft.grants += _grants(sequence, self._pages(start), len(sequence.pages) if is_last else self._pages(end))
        if is_last:
            draft.firsts.append((len(draft.chunks), Seat(sequence.slot, sequence, sequence.incarnation)))
            self._prefilling.remove(sequence)
            self.rows.activate(sequence)
        draft.chunks.append(Chunk(sequence.slot, start, sequence.prefix[start:end], is_last))
        return end - start

    def _reach(self, sequence: Sequence) -> int:
        """Positions written by the whole prefill and the generate of the same plan."""
        return min(len(sequence.prefix) + self.sizing.generate_steps[0], sequence.max_positions)

    def _pages(self, positions: int) -> int:
        return -(-positions // self.sizing.page_size)

    def _release(self, sequence: Sequence) -> None:
        """Takes slot and pages from a sequence. Why that is safe at once: see the top of this module."""
        if not sequence.is_prefilled:
            self._prefilling.remove(sequence)
        self.rows.vacate(sequence)
        self.pool.free(sequence.leave())


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _grants(sequence: Sequence, start: int, end: int) -> list[PageGrant]:
    assert sequence.slot is not None, sequence
    return [PageGrant(sequence.slot, index, sequence.pages[index]) for index in range(start, end)]
