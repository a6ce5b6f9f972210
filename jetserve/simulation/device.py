"""A device that takes time and holds no tensors: an `Executor` over a clock of its own. Imports no jax.

The device runs one step at a time, each for as long as the cost says; the host spends a fixed time on each and then
waits for results as the real one does. Nothing sleeps: waiting moves the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jetserve.engine.cost import StepCost
from jetserve.engine.plan import Generate, StepPlan, StepResult
from jetserve.engine.sizing import Sizing
from jetserve.simulation.trace import draw_token_ids


class SimulatedClock:
    """Seconds since the start. Moves when told, never back."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance_to(self, seconds: float) -> None:
        """Moves on; a time that is past leaves the clock alone."""
        self._now = max(self._now, seconds)


@dataclass(slots=True)
class DeviceTotals:
    """What the device did.

    Attributes:
      prefill_tokens, padded_tokens: of prompts in chunks, and beside them in the programs' sizes.
      busy_seconds: summed over the steps.
      done_seconds: when the last one is over.
    """

    steps: int = 0
    prefill_tokens: int = 0
    padded_tokens: int = 0
    busy_seconds: float = 0.0
    done_seconds: float = 0.0


class SimulatedExecutor:
    """Takes plans and time.

    A token depends on its request's seed and on its place in the answer alone, so an answer is the same whatever was
    scheduled around it, and known in advance. Rows end at max_tokens; stop ids are not looked at.

    Args:
      cost: of each step on the device.
      host_seconds: that the host spends on each step, while the device may be busy with the one before.
      dispatched: called with each plan, before time passes.
    """

    compilations_after_warmup = 0

    def __init__(
        self,
        sizing: Sizing,
        cost: StepCost,
        clock: SimulatedClock,
        *,
        host_seconds: float = 0.0,
        dispatched: Callable[[], None] = lambda: None,
    ) -> None:
        self.totals = DeviceTotals()
        self._cost = cost
        self._clock = clock
        self._host_seconds = host_seconds
        self._dispatched = dispatched
        self._seeds = np.zeros(sizing.slots, np.uint64)
        self._sampled = np.zeros(sizing.slots, np.int64)
        self._limit = np.zeros(sizing.slots, np.int64)

    def execute(self, plan: StepPlan) -> SimulatedStep:
        self._dispatched()
        for admission in plan.admissions:
            slot = admission.slot
            self._seeds[slot] = admission.seed
            self._sampled[slot] = admission.generated
            assert admission.params.max_tokens is not None, "requests have it set"
            self._limit[slot] = admission.params.max_tokens
        first_tokens = np.zeros(len(plan.chunks), np.int32)
        for at, chunk in enumerate(plan.chunks):
            if chunk.is_last:
                slots = np.array([chunk.slot])
                first_tokens[at] = draw_token_ids(self._seeds[slots], self._sampled[slots])[0]
                self._sampled[slots] += 1
        if plan.generate is None:
            result = StepResult(first_tokens, np.zeros((0, 0), np.int32), np.zeros(0, np.int32))
        else:
            result = self._generate(first_tokens, plan.generate)
        return SimulatedStep(result, self._clock, self._run(plan))

    def _generate(self, first_tokens: NDArray[np.int32], generate: Generate) -> StepResult:
        rows, steps, active = generate
        slots = np.array(active)
        sampled = self._sampled[slots]
        counts, tokens = np.zeros(rows, np.int32), np.zeros((steps, rows), np.int32)
        counts[slots] = np.minimum(np.maximum(self._limit[slots] - sampled, 0), steps)
        tokens[:, slots] = draw_token_ids(self._seeds[slots], sampled + np.arange(steps)[:, None])
        self._sampled[slots] = sampled + counts[slots]
        return StepResult(first_tokens, tokens, counts)

    def _run(self, plan: StepPlan) -> float:
        """Puts a plan behind those before it. Returns when it will be done."""
        seconds = self._cost.seconds(plan.shape)
        self._clock.advance_to(self._clock() + self._host_seconds)
        totals, tokens = self.totals, plan.prefill_tokens
        totals.done_seconds = max(self._clock(), totals.done_seconds) + seconds
        totals.steps += 1
        totals.busy_seconds += seconds
        totals.prefill_tokens += tokens
        if tokens:
            totals.padded_tokens += plan.shape.prefill_size - tokens
        return totals.done_seconds


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step in flight."""

    _result: StepResult
    _clock: SimulatedClock
    _done_seconds: float

    def result(self) -> StepResult:
        self._clock.advance_to(self._done_seconds)
        return self._result
