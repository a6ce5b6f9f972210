"""Who runs when: pure policy from what the host knows to the next `StepPlan`. Engine thread only; imports no jax.

Every plan lets all running rows decode, and beside them prefills prompt tokens of several sequences. waiting.py says
who is next, memory.py what of its prompt is cached and where the rest goes, pacing.py how much a step does: a running
stream waits for at most one prefill of that size between two blocks of tokens.

The host is one step late: `schedule` counts on every token it dispatched, `commit` learns later which rows stopped
earlier. What such a plan says about a row that has ended is harmless: the device has dropped the row by itself.

Slots and pages are free for others the moment a sequence leaves, although plans in flight still name its row. That is
safe because the device runs plans in order: the last plan that names the row runs before the plan that grants its pages
or its slot to somebody else, and a row that is not in `Generate.active` neither reads nor writes.

When the pool is dry, cached prefixes that nobody uses make room first. Then the last in rank goes back to the queue
with the tokens it has, and is later prefilled with them, as far as they are not still cached. The first in rank is
never preempted and fits the pool alone, so it always ends: no deadlock.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import NamedTuple

from jetserve.config import SchedulerSettings
from jetserve.engine.cost import StepCost
from jetserve.engine.draft import Draft, Part
from jetserve.engine.logprobs import token_logprobs
from jetserve.engine.memory import KvMemory
from jetserve.engine.pacing import Load, Pacer
from jetserve.engine.plan import Generate, StepPlan, StepResult
from jetserve.engine.rows import Rows, Seat
from jetserve.engine.sequence import Lateness, Sequence, max_positions
from jetserve.engine.sizing import Sizing
from jetserve.engine.waiting import WaitingQueue
from jetserve.errors import InvalidRequest
from jetserve.request import FinishReason, Request, TokenLogprobs

_EMPTY = StepPlan()


class Update(NamedTuple):
    """News of one sequence.

    One without tokens says that the sequence got a slot for the first time; with `ABORT`, that it was shed: it could
    not have met its limits any more.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


class _Flight(NamedTuple):
    """What `commit` must know of a dispatched plan: whose chunks and whose rows its result holds."""

    plan: StepPlan
    parts: tuple[Part, ...]
    seats: tuple[Seat, ...]


class Scheduler:
    """Owns the queue, the rows and the pages.

    `schedule` and `commit` are called in turns, `commit` with the results of the plans in their order, at most one
    plan behind.

    Args:
      cost: what steps cost; None for no idea, which is learnt.
      is_observed: collect events about cached blocks.
    """

    def __init__(
        self,
        sizing: Sizing,
        settings: SchedulerSettings | None = None,
        cost: StepCost | None = None,
        *,
        is_observed: bool = False,
    ) -> None:
        settings = settings or SchedulerSettings()
        self.sizing = sizing
        self.memory = KvMemory(sizing, is_observed=is_observed)
        self.rows = Rows(sizing.slots, sizing.page_size)
        self.pacer = Pacer.of(sizing, settings, cost)
        self.preemptions = 0
        self.padded_tokens = 0  # by prefills, to fill their programs
        self._settings = settings
        self._waiting = WaitingQueue(settings, self.memory.cached_tokens)
        self._prefilling: list[Sequence] = []  # have a slot, lack a part of their prompt; by admission
        self._flights: deque[_Flight] = deque()
        self._arrived: list[Sequence] = []  # since the last plan
        self._started: list[Update] = []
        self._turns = 0  # plans that prefilled something
        self._generate: Generate | None = None  # the last one, used again while nothing changes

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """To be prefilled for them, were nothing cached."""
        return self._waiting.tokens

    @property
    def retry_after_seconds(self) -> float | None:
        """Until half of those that wait will have started, as predicted; None while nobody waits."""
        if not self._waiting:
            return None
        return self.pacer.drain_seconds(self._load([], 0.0), self._waiting.tokens // 2)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.rows.used_slots or self._flights)

    def require_fit(self, request: Request) -> None:
        """Raises: InvalidRequest when the request would not fit the pool even alone. May be called from any thread."""
        pages = self.memory.pages(max_positions(request))
        if pages > self.sizing.usable_pages:
            raise InvalidRequest(
                f"a prompt of {len(request.prompt_token_ids)} tokens with max_tokens={request.max_tokens} needs "
                f"{pages} KV pages of {self.sizing.page_size} tokens, the pool has {self.sizing.usable_pages}; "
                f"lower max_tokens, shorten the prompt or raise engine.kv_pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that fits."""
        self._waiting.add(sequence)
        self._arrived.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Ends a sequence now; its slot and pages are free when this returns. False if it had ended before."""
        if sequence.finish_reason is not None:
            return False
        sequence.finish_reason = FinishReason.ABORT
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._release(sequence)
        return True

    def take_started(self) -> list[Update]:
        """Sequences that got their first slot, or were shed, since the last call."""
        started, self._started = self._started, []
        return started

    def schedule(self, now: float) -> StepPlan:
        """Decides the next step and counts on it.

        An empty plan means that there is nothing to do before results in flight were committed.
        """
        self.memory.begin_plan()
        if self._settings.shed_hopeless:
            self._shed_arrived(now)
        self._arrived.clear()
        draft = Draft(self.sizing)
        fewest = self.sizing.generate_steps[0]
        lacking = self.rows.shortage(fewest)
        is_dry = sum(lacking.values()) > self.memory.available_pages
        if is_dry:
            if self._flights:
                return _EMPTY  # a row may have ended and free its pages; and then preempting loses no tokens
            lacking = self._preempt(lacking)
        self._grow(lacking, draft)
        candidates = self._gather(draft, now, may_admit=not is_dry)
        pace = self.pacer.pace(self._load(candidates, now))
        steps = pace.generate_steps
        if self._waiting or self._prefilling:
            steps = fewest  # a row may end by itself, and somebody waits for its slot
        if steps > fewest:
            lacking = self.rows.shortage(steps)
            if sum(lacking.values()) <= self.memory.available_pages:
                self._grow(lacking, draft)
            else:
                steps = fewest
        self._fill(draft, candidates, pace.prefill_tokens)
        active = self.rows.active
        if draft.is_empty and not active.slots:
            return _EMPTY
        generate = self._decode(active.slots, steps)
        contexts = (self.rows.context_tokens, self.rows.longest_context) if generate else (0, 0)
        plan = draft.plan(self.memory.take_saves(), generate, *contexts)
        self.padded_tokens += draft.prefill_size - draft.prefill_tokens
        self._flights.append(_Flight(plan, tuple(draft.parts), active.seats))
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
        if flight.parts:
            self._commit_chunks(flight.parts, result, updates)
        if plan.generate is not None:
            self._commit_rows(flight.seats, plan.generate.steps, result, updates)
        return updates

    def check(self) -> None:
        """Raises: AssertionError when a slot or page is lost, or the books disagree in any other way."""
        self.rows.check()
        self.memory.check(self.rows.residents)
        self._waiting.check()
        assert all(s.slot is not None and not s.is_prefilled for s in self._prefilling)

    def _commit_chunks(self, parts: tuple[Part, ...], result: StepResult, updates: list[Update]) -> None:
        tokens = result.first_tokens.tolist()
        arrays = result.first_logprobs
        for at, (_, sequence, incarnation), end, is_last in parts:
            if sequence.incarnation != incarnation:
                continue
            self.memory.keep(sequence, end)
            if not is_last:
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

    def _load(self, candidates: list[Sequence], now: float) -> Load:
        """What there is to do in this step, for the pacer."""
        active = self.rows.active.slots
        slack, urgent = self._urgency(candidates, now)
        return Load(
            running=len(active),
            generate_rows=self._generate_rows(active),
            generate_context=self.rows.context_tokens if active else 0,
            generate_longest=self.rows.longest_context if active else 0,
            fewest_left=self.rows.fewest_left() if active else 0,
            prompt_tokens=sum(sequence.lacking for sequence in candidates),
            prefill_context=candidates[0].prefilled if candidates else 0,
            slack_seconds=slack,
            urgent_tokens=urgent,
        )

    def _urgency(self, candidates: list[Sequence], now: float) -> tuple[float, int]:
        """Seconds until the first of their first tokens should be there, and the tokens to be prefilled until then."""
        least, urgent, tokens = math.inf, 0, 0
        for sequence in candidates:
            tokens += sequence.lacking
            slack = self._due_seconds(sequence) - now
            if slack < least:
                least, urgent = slack, tokens
        return least, urgent

    def _due_seconds(self, sequence: Sequence) -> float:
        """When its first token should be there; infinite where nothing says so."""
        request, target = sequence.request, self.pacer.ttft_target_seconds
        due = math.inf if request.deadline_seconds is None else request.deadline_seconds
        if target is not None and not sequence.generated:
            due = min(due, request.arrival_seconds + target)
        return due

    def _shed_arrived(self, now: float) -> None:
        """Sheds those that came too late to get through the queue in time."""
        for sequence in self._arrived:
            if sequence.finish_reason is None:
                ahead = sum(len(other.prefix) for other in self._waiting if other.rank < sequence.rank)
                if self._is_hopeless(sequence, ahead, now):
                    self._shed(sequence)

    def _is_hopeless(self, sequence: Sequence, tokens_ahead: int, now: float) -> bool:
        """Whether by all that was measured the first token of its request would be late.

        That is its first sample's: those behind it are never given up, nor who has tokens already.
        """
        if sequence.index or sequence.generated or not self.pacer.cost.is_measured:
            return False
        own = len(sequence.prefix) - self.memory.cached_tokens(sequence)
        first = now + self.pacer.first_token_seconds(self._load([], now), tokens_ahead, own)
        due = self._due_seconds(sequence)
        sequence.lateness = Lateness(first, due) if first > due else None
        return first > due

    def _shed(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        sequence.finish_reason = FinishReason.ABORT
        self._started.append(Update(sequence, [], finish_reason=FinishReason.ABORT))

    def _generate_rows(self, slots: tuple[int, ...]) -> int:
        sizes = self.sizing.generate_rows
        return sizes[bisect.bisect_right(sizes, slots[-1])] if slots else 0

    def _decode(self, slots: tuple[int, ...], steps: int) -> Generate | None:
        if not slots:
            return None
        last = self._generate
        if last is None or last.active is not slots or last.steps != steps:
            last = self._generate = Generate(self._generate_rows(slots), steps, slots)
        return last

    def _grow(self, lacking: dict[int, int], draft: Draft) -> None:
        for slot, count in lacking.items():
            sequence = self.rows.sequence_at(slot)
            self.memory.extend(sequence, count)
            self.rows.extend(sequence)
            draft.grant(sequence, len(sequence.held.pages))

    def _preempt(self, lacking: dict[int, int]) -> dict[int, int]:
        """Sends the last in rank back to the queue until what the others lack is free. Returns what they lack."""
        lacking = dict(lacking)
        residents = sorted(self.rows.residents, key=_rank)
        while sum(lacking.values()) > self.memory.available_pages:
            victim = residents.pop()
            assert residents, f"{victim} does not fit the pool alone"
            assert victim.slot is not None
            lacking.pop(victim.slot, None)
            self._release(victim)
            victim.rewind()
            self.add(victim)
            self.preemptions += 1
        return lacking

    def _gather(self, draft: Draft, now: float, *, may_admit: bool) -> list[Sequence]:
        """Finds who may have a chunk in this plan, first those who go first: prompts under way, and of the queue."""
        budget, most = self.sizing.prefill_tokens, self.sizing.prefill_rows
        running, admitted = len(self.rows.active.slots), 0
        candidates = list(self._prefilling)
        tokens = sum(sequence.lacking for sequence in candidates)
        while may_admit and admitted < most and self.rows.free_slots:
            sequence = self._waiting.next(self.memory.is_being_written)
            if sequence is None:
                break
            if (tokens >= budget or len(candidates) >= most) and sequence.rank > max(map(_rank, candidates)):
                break  # it would get no chunk
            if self._settings.shed_hopeless and self._is_hopeless(sequence, 0, now):
                self._shed(sequence)
                continue
            if not self._has_room(sequence, running):
                break
            self._waiting.admit(sequence)
            admitted += 1
            if self._admit(sequence, draft, now):
                candidates.append(sequence)
                tokens += sequence.lacking
        self._turns += bool(candidates)
        # Now and then by arrival, so that those of better rank do not keep a prompt under way from its end.
        candidates.sort(key=_rank if self._turns % self._settings.ageing else _order)
        return candidates[:most]

    def _has_room(self, sequence: Sequence, running: int) -> bool:
        """Whether to admit: pages for it and one more per running row, lest the next steps preempt it again."""
        if not self.rows.used_slots:
            return True
        return self.memory.has_room(sequence, self._reach(sequence), running)

    def _admit(self, sequence: Sequence, draft: Draft, now: float) -> bool:
        """Gives a sequence slot and pages. True when its first chunk may be in the same plan."""
        # All pages of the prefix are taken at once, so that a prompt under way never stops for want of pages; the
        # device is told of them chunk by chunk, which bounds the grants of one plan.
        found = self.memory.seat(sequence, self._reach(sequence))
        sequence.prefilled = sequence.held.written
        self.rows.seat(sequence)
        self._prefilling.append(sequence)
        if sequence.scheduled_seconds is None:
            sequence.scheduled_seconds = now
            self._started.append(Update(sequence, []))
        draft.admit(sequence, found)
        return found.is_ready

    def _fill(self, draft: Draft, candidates: list[Sequence], budget: int) -> None:
        """Gives chunks to the candidates in turn until the budget is used up."""
        for sequence in candidates:
            if not budget:
                return
            tokens = min(budget, sequence.lacking)
            budget -= tokens
            end = sequence.prefilled + tokens
            # With the last chunk come the pages of the decode step in the same plan.
            is_last = end == len(sequence.prefix)
            draft.grant(sequence, len(sequence.held.pages) if is_last else self.memory.pages(end))
            draft.add_chunk(sequence, end)
            if is_last:
                self._prefilling.remove(sequence)
                self.rows.activate(sequence)

    def _reach(self, sequence: Sequence) -> int:
        """Positions written by the whole prefill and the generate of the same plan."""
        return min(len(sequence.prefix) + self.sizing.generate_steps[0], sequence.max_positions)

    def _release(self, sequence: Sequence) -> None:
        """Takes slot and pages from a sequence. Why that is safe at once: see the top of this module."""
        if not sequence.is_prefilled:
            self._prefilling.remove(sequence)
        self.rows.vacate(sequence)
        sequence.leave()
        self.memory.leave(sequence)


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.rank


def _order(sequence: Sequence) -> int:
    return sequence.order
