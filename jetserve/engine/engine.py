"""Steps the scheduler and the executor; reads results one step late. Host side, engine thread only; imports no jax."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jetserve.engine.kv_events import KvEvent
from jetserve.engine.plan import Executor, PendingStep, StepPlan
from jetserve.engine.scheduler import Scheduler, Update
from jetserve.engine.sequence import Sequence
from jetserve.request import ModelLimits, Request
from jetserve.tokenizer import Tokenizer


class EngineStatus(NamedTuple):
    """How things stand, and totals since the start.

    Attributes:
      running, waiting: sequences with and without a slot.
      waiting_tokens: to be prefilled for the waiting ones.
      steps, prefill_tokens, generated_tokens: of plans whose results were read; tokens of aborted sequences are not
        counted as generated.
      device_seconds: that the device was seen busy: from a step's dispatch, or the end of the one before, to its
        result.
      host_seconds: spent in `Engine.step` without waiting for the device.
      pages_used, pages_free, cached_pages: that cannot be had, in use by sequences; that nobody holds; that the prefix
        tree holds, those in use too.
      queried_tokens, cached_tokens: of prompts that were looked up in the prefix cache, and found; once for each
        sample, when it first got a slot. `host_cached_tokens` of them came back from host memory.
      evicted_pages: that left the tree, or went to host memory; saved and loaded ones went to and came from there.
      padded_tokens: of prefills, beside `prefill_tokens`.
      retry_after_seconds: until half of the waiting sequences will have started, as predicted; None without a
        prediction.
    """

    slots_total: int
    pages_used: int
    pages_total: int
    running: int
    waiting: int
    waiting_tokens: int
    steps: int
    prefill_tokens: int
    generated_tokens: int
    preemptions: int
    device_seconds: float
    host_seconds: float
    compilations_after_warmup: int
    pages_free: int = 0
    cached_pages: int = 0
    evicted_pages: int = 0
    host_pages_used: int = 0
    host_pages_total: int = 0
    host_saved_pages: int = 0
    host_loaded_pages: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    padded_tokens: int = 0
    retry_after_seconds: float | None = None


class _InFlight(NamedTuple):
    plan: StepPlan
    pending: PendingStep
    dispatched_seconds: float


@dataclass(slots=True)
class _Totals:
    """As in `EngineStatus`."""

    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    device_seconds: float = 0.0
    host_seconds: float = 0.0


class Engine:
    """Requests in, tokens out.

    Args:
      clock: for durations only.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._live: dict[str, list[Sequence]] = {}  # by request id; only sequences that have not ended
        self._in_flight: deque[_InFlight] = deque()
        self._arrivals = 0
        self._totals = _Totals()
        self._last_result_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight)

    def require_fit(self, request: Request) -> None:
        """Raises: InvalidRequest when the request would not fit the pool even alone. May be called from any thread."""
        self.scheduler.require_fit(request)

    def add(self, request: Request) -> tuple[Sequence, ...]:
        """Queues the request's samples.

        Raises: InvalidRequest when it can never fit.
        """
        self.require_fit(request)
        assert request.request_id not in self._live, f"{request.request_id} is running already"
        sequences = [Sequence(request, index, self._arrivals + index) for index in range(request.params.n)]
        self._arrivals += len(sequences)
        self._live[request.request_id] = list(sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)
        return tuple(sequences)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Ends a request, or one sample of it; slots and pages are free when this returns. No update follows.

        Returns: False when there was nothing (left) to end.
        """
        ended = [s for s in self._live.get(request_id, ()) if index is None or s.index == index]
        for sequence in ended:
            self.scheduler.abort(sequence)
            self._forget(sequence)
        return bool(ended)

    def step(self, now: float) -> list[Update]:
        """Dispatches the next plan, then reads the result of the one before.

        Where there is nothing to dispatch, what is in flight is read at once. The first step after idling therefore
        has no tokens yet.

        Args:
          now: on the clock of `Request.arrival_seconds`.
        """
        start = self._clock()
        plan = self.scheduler.schedule(now)
        updates = self.scheduler.take_started()
        self._forget_ended(updates)
        if not plan.is_empty:
            self._in_flight.append(_InFlight(plan, self._executor.execute(plan), start))
        assert self._in_flight or not self._live, "sequences are live and nothing can run"
        waited = 0.0
        if self._in_flight and (plan.is_empty or len(self._in_flight) > 1):
            asked = self._clock()
            flight = self._in_flight.popleft()
            result = flight.pending.result()
            arrived = self._clock()
            waited = arrived - asked
            sampled = self.scheduler.commit(flight.plan, result)
            self._forget_ended(sampled)
            self._count(flight, sampled, arrived)
            updates += sampled
        self._totals.host_seconds += self._clock() - start - waited
        return updates

    def flush(self) -> int:
        """Forgets all cached prefixes; those in use are freed when their sequences end. Returns pages freed at once."""
        return self.scheduler.memory.flush()

    def take_kv_events(self) -> list[KvEvent]:
        """What happened to cached blocks since the last call; nothing unless the scheduler is observed."""
        return self.scheduler.memory.take_events()

    def status(self) -> EngineStatus:
        scheduler, totals = self.scheduler, self._totals
        memory = scheduler.memory
        return EngineStatus(
            slots_total=scheduler.sizing.slots,
            pages_used=memory.used_pages,
            pages_total=memory.pool.total_pages,
            running=scheduler.rows.used_slots,
            waiting=scheduler.waiting,
            waiting_tokens=scheduler.waiting_tokens,
            steps=totals.steps,
            prefill_tokens=totals.prefill_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=scheduler.preemptions,
            device_seconds=totals.device_seconds,
            host_seconds=totals.host_seconds,
            compilations_after_warmup=self._executor.compilations_after_warmup,
            pages_free=memory.pool.free_pages,
            cached_pages=memory.tree.nodes,
            evicted_pages=memory.totals.evicted_pages,
            host_pages_used=memory.tree.hosted,
            host_pages_total=scheduler.sizing.host_blocks,
            host_saved_pages=memory.totals.saved_pages,
            host_loaded_pages=memory.totals.loaded_pages,
            queried_tokens=memory.totals.queried_tokens,
            cached_tokens=memory.totals.cached_tokens,
            host_cached_tokens=memory.totals.host_cached_tokens,
            padded_tokens=scheduler.padded_tokens,
            retry_after_seconds=scheduler.retry_after_seconds,
        )

    def check(self) -> None:
        """Raises: AssertionError when slots or pages are lost."""
        self.scheduler.check()

    def _count(self, flight: _InFlight, sampled: list[Update], arrived: float) -> None:
        totals = self._totals
        totals.steps += 1
        totals.prefill_tokens += flight.plan.prefill_tokens
        device_seconds = arrived - max(flight.dispatched_seconds, self._last_result_seconds)
        totals.device_seconds += device_seconds
        self.scheduler.pacer.cost.observe(flight.plan.shape, device_seconds)
        self._last_result_seconds = arrived
        totals.generated_tokens += sum(len(update.token_ids) for update in sampled)

    def _forget_ended(self, updates: list[Update]) -> None:
        for update in updates:
            if update.finish_reason is not None:
                self._forget(update.sequence)

    def _forget(self, sequence: Sequence) -> None:
        live = self._live[sequence.request.request_id]
        live.remove(sequence)
        if not live:
            del self._live[sequence.request.request_id]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients may ask about the model.

    Attributes:
      family: decoder stack, as in models/spec.py.
      parameters: how many numbers the weights are.
      devices: kind and number, as "TPU v5e x8".
    """

    family: str
    parameters: int
    dtype: str
    vocab_size: int
    max_length: int
    devices: str


class Footprint(NamedTuple):
    """What `sizing.resolve` has to know of a model on its chips.

    Attributes:
      platform: "tpu", "cpu" or "gpu".
      max_position: the model's own limit of positions.
      page_bytes_per_token: keys and values of one token in all layers, on all chips together.
      cache_bytes: what the memory budget left for the cache; None where the configuration decided.
    """

    platform: str
    max_position: int
    page_bytes_per_token: int
    cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can serve.

    Attributes:
      footprint: None when there is no model behind it.
    """

    engine: Engine
    tokenizer: Tokenizer
    limits: ModelLimits
    name: str
    info: ModelInfo
    footprint: Footprint | None = None
