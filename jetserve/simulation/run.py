"""Drives the real engine, scheduler and pool through a trace, on a simulated device and clock. Imports no jax.

It stands where the orchestrator stands in a server: it bounds the queue, keeps deadlines, and gives the engine what
arrived while a step ran only when the step is over. Time passes in the device and in nothing else, so a run has no
chance in it: equal inputs, equal results.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from jetserve.config import SchedulerSettings
from jetserve.engine.cost import LinearCost, StepTimes
from jetserve.engine.engine import Engine, EngineStatus
from jetserve.engine.scheduler import Scheduler, Update
from jetserve.engine.sizing import Sizing
from jetserve.errors import ConfigError
from jetserve.request import FinishReason, Request, SamplingParams
from jetserve.simulation.device import DeviceTotals, SimulatedClock, SimulatedExecutor
from jetserve.simulation.trace import Clipped, Trace, TraceRequest, token_ids

Progress = Callable[[int, int], None]  # requests that are over, of all


class Outcome(enum.StrEnum):
    """What became of a request.

    UNSENT are later turns of a session: an earlier one had no answer, or the session outgrew the context.
    """

    FINISHED = "finished"
    REFUSED = "refused"
    SHED = "shed"
    EXPIRED = "expired"
    UNSENT = "unsent"


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated.

    Attributes:
      times: of the device's steps; the scheduler starts from them too, and learns.
      host_seconds: that the host spends on each step.
      seed: of the answers' tokens.
    """

    sizing: Sizing
    settings: SchedulerSettings
    times: StepTimes
    host_seconds: float = 0.0
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Of prompt and answer together; the last token of an answer needs no place in the pool."""
        return min(self.sizing.max_length, self.sizing.max_pool_tokens + 1)


@dataclass(slots=True)
class Record:
    """One request and what became of it.

    Attributes:
      arrival_seconds, scheduled_seconds, end_seconds: when it was sent, got its slot, and was over.
      message_seconds: when its tokens came; those that came together are one message.
    """

    request: TraceRequest
    outcome: Outcome = Outcome.UNSENT
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    arrival_seconds: float = 0.0
    scheduled_seconds: float | None = None
    message_seconds: list[float] = field(default_factory=list)
    end_seconds: float = 0.0


@dataclass(slots=True)
class Occupancy:
    """How much of something was taken, over time."""

    total: int
    taken: int = 0
    most: int = 0
    integral: float = 0.0

    def take(self, taken: int) -> None:
        """So much is taken from now on."""
        self.taken = taken
        self.most = max(self.most, taken)

    def hold(self, seconds: float) -> None:
        """It stays so for so long."""
        self.integral += self.taken * seconds

    def mean(self, seconds: float) -> float:
        return self.integral / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A trace, run to its end.

    Attributes:
      records: in the trace's order.
      starts: indices of the records in the order in which they got slots.
      start_seconds, end_seconds: of the first arrival and the last end.
    """

    trace: Trace
    setup: Setup
    clipped: Clipped
    records: tuple[Record, ...]
    starts: tuple[int, ...]
    start_seconds: float
    end_seconds: float
    slots: Occupancy
    pages: Occupancy
    device: DeviceTotals
    status: EngineStatus

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def run(trace: Trace, setup: Setup, progress: Progress | None = None) -> Run:
    """Runs a trace.

    Args:
      trace: cut to the context first; `Run.clipped` says by how much.
    Raises: ConfigError when the context is too short for any request.
    """
    if setup.max_tokens < 2:
        raise ConfigError(
            "one token of prompt and one of answer do not fit; raise engine.max_length or engine.kv_pages"
        )
    clipped_trace, clipped = trace.clip(setup.max_tokens)
    simulation = _Simulation(clipped_trace, setup, progress)
    simulation.run()
    sent = [record for record in simulation.records if record.outcome is not Outcome.UNSENT]
    return Run(
        trace=trace,
        setup=setup,
        clipped=clipped,
        records=tuple(simulation.records),
        starts=tuple(simulation.starts),
        start_seconds=min((record.arrival_seconds for record in sent), default=0.0),
        end_seconds=max((record.end_seconds for record in sent), default=0.0),
        slots=simulation.slots,
        pages=simulation.pages,
        device=simulation.executor.totals,
        status=simulation.engine.status(),
    )


class QueueBound:
    """Says which requests a server would refuse because too many wait, by the rules of the orchestrator's intake.

    Args:
      slots: of the engine, all free.
    """

    def __init__(self, settings: SchedulerSettings, slots: int) -> None:
        self._settings = settings
        self.free_slots = slots
        self._unstarted = 0
        self._unstarted_tokens = 0

    def has_room(self, prompt_tokens: int) -> bool:
        """Whether one more request may wait."""
        waiting = self._unstarted - self.free_slots
        if waiting > 0 and waiting + 1 > self._settings.max_waiting_requests:
            return False
        tokens = self._unstarted_tokens + prompt_tokens
        return not self._unstarted or tokens <= self._settings.max_waiting_tokens

    def enter(self, prompt_tokens: int) -> None:
        """A request waits for its slot."""
        self._unstarted += 1
        self._unstarted_tokens += prompt_tokens

    def leave(self, prompt_tokens: int) -> None:
        """It got one, or ended without."""
        self._unstarted -= 1
        self._unstarted_tokens -= prompt_tokens


class _Event(NamedTuple):
    """An arrival or a deadline.

    Attributes:
      tie: numbers events as they become known; of those at one time the lower goes first.
      record: the index of the request's record.
    """

    seconds: float
    tie: int
    is_deadline: bool
    record: int


class _Simulation:
    """One run. A record is told by its index, which is its request's id."""

    def __init__(self, trace: Trace, setup: Setup, progress: Progress | None) -> None:
        sizing = setup.sizing
        self.clock = SimulatedClock()
        self.executor = SimulatedExecutor(
            sizing, LinearCost(setup.times), self.clock, host_seconds=setup.host_seconds, dispatched=self._look
        )
        scheduler = Scheduler(sizing, setup.settings, LinearCost(setup.times))
        self.engine = Engine(scheduler, self.executor, clock=self.clock)
        self.records = [Record(request) for request in trace.requests]
        self.starts: list[int] = []
        self.slots, self.pages = Occupancy(sizing.slots), Occupancy(sizing.usable_pages)
        self._setup = setup
        self._progress = progress
        self._queue = QueueBound(setup.settings, sizing.slots)
        self._live: set[int] = set()
        self._turns: dict[str, deque[int]] = {}
        self._events: list[_Event] = []  # a heap
        self._ties = itertools.count()
        self._over = 0
        self._schedule_openings()

    def run(self) -> None:
        while True:
            before = self.clock()
            self._take_events(before)
            if self.engine.has_work:
                updates = self.engine.step(before)
                now = self.clock()
                self._take_events(now, before_it=True)
                self._take(updates, now)
                self._queue.free_slots = self._setup.sizing.slots - self.engine.scheduler.rows.used_slots
            elif self._events:
                self.clock.advance_to(self._events[0].seconds)
            else:
                break
            self.slots.hold(self.clock() - before)
            self.pages.hold(self.clock() - before)
            self._look()
        self.engine.check()

    def _look(self) -> None:
        """Sees how much is taken. While a step runs that is what its plan took."""
        scheduler = self.engine.scheduler
        self.slots.take(scheduler.rows.used_slots)
        self.pages.take(scheduler.memory.used_pages)

    def _schedule_openings(self) -> None:
        for at, record in enumerate(self.records):
            session = record.request.session
            if session is not None and session in self._turns:
                self._turns[session].append(at)
                continue
            if session is not None:
                self._turns[session] = deque()
            self._put(record.request.arrival_seconds, at)

    def _put(self, seconds: float, at: int, *, is_deadline: bool = False) -> None:
        heapq.heappush(self._events, _Event(seconds, next(self._ties), is_deadline, at))

    def _take_events(self, until: float, *, before_it: bool = False) -> None:
        """Handles what happened up to a time, or before it."""
        while self._events:
            next_seconds = self._events[0].seconds
            if next_seconds > until or (before_it and next_seconds == until):
                return
            seconds, _, is_deadline, at = heapq.heappop(self._events)
            if not is_deadline:
                self._arrive(at, seconds)
            elif at in self._live:
                self.engine.abort(str(at))
                self._end(at, Outcome.EXPIRED, seconds)

    def _arrive(self, at: int, now: float) -> None:
        record = self.records[at]
        record.prompt_token_ids += token_ids(record.request.prompt)  # behind what a session has said so far
        record.arrival_seconds = now
        prompt_tokens = len(record.prompt_token_ids)
        if prompt_tokens + record.request.output_tokens > self._setup.max_tokens:
            self._end_session(at)
        elif not self._queue.has_room(prompt_tokens):
            self._settle(at, Outcome.REFUSED, now)
        else:
            self._live.add(at)
            self._queue.enter(prompt_tokens)
            request = self._request(at, record, now)
            if request.deadline_seconds is not None:
                self._put(request.deadline_seconds, at, is_deadline=True)
            self.engine.add(request)

    def _request(self, at: int, record: Record, now: float) -> Request:
        wanted = record.request
        timeout = wanted.timeout_seconds or self._setup.settings.default_timeout_seconds
        return Request(
            request_id=str(at),
            prompt_token_ids=record.prompt_token_ids,
            params=SamplingParams(
                max_tokens=wanted.output_tokens, temperature=0.0, ignore_eos=True, seed=(self._setup.seed << 32) + at
            ),
            stop_token_ids=(),
            arrival_seconds=now,
            deadline_seconds=None if timeout is None else now + timeout,
            priority=wanted.priority,
        )

    def _take(self, updates: list[Update], now: float) -> None:
        """Takes in what a step brought; requests that ran out of time while it ran hear no more of it."""
        for update in updates:
            at = int(update.sequence.request.request_id)
            record = self.records[at]
            if not update.token_ids and update.finish_reason is None:
                self.starts.append(at)
                record.cached_tokens = update.sequence.cached
                if at in self._live:
                    record.scheduled_seconds = update.sequence.scheduled_seconds
                    self._queue.leave(len(record.prompt_token_ids))
            elif at not in self._live:
                continue
            elif update.finish_reason is FinishReason.ABORT:
                self._end(at, Outcome.SHED, now)
            else:
                record.token_ids += update.token_ids
                if not record.message_seconds or record.message_seconds[-1] != now:
                    record.message_seconds.append(now)
                if update.finish_reason is not None:
                    self._end(at, Outcome.FINISHED, now)

    def _end(self, at: int, outcome: Outcome, now: float) -> None:
        record = self.records[at]
        self._live.remove(at)
        if record.scheduled_seconds is None:
            self._queue.leave(len(record.prompt_token_ids))
        self._settle(at, outcome, now)

    def _settle(self, at: int, outcome: Outcome, now: float) -> None:
        """A request is over; its session goes on if there was an answer."""
        record = self.records[at]
        record.outcome, record.end_seconds = outcome, now
        self._count_over(1)
        turns = self._turns.get(record.request.session or "")
        if not turns:
            return
        if outcome is not Outcome.FINISHED:
            self._count_over(len(turns))
            turns.clear()
            return
        follower = turns.popleft()
        self.records[follower].prompt_token_ids = record.prompt_token_ids + tuple(record.token_ids)
        self._put(now + self.records[follower].request.think_seconds, follower)

    def _end_session(self, at: int) -> None:
        """A turn does not fit the context: it is not sent, nor are those after it."""
        turns = self._turns[self.records[at].request.session or ""]
        self._count_over(1 + len(turns))
        turns.clear()

    def _count_over(self, requests: int) -> None:
        self._over += requests
        if self._progress is not None:
            self._progress(self._over, len(self.records))
