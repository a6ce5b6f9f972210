"""Measures what steps take: runs an engine through requests that visit every program, then fits. Imports no jax.

The requests go through the real scheduler and executor, so a step is measured as it is when serving: dispatched before
the one before it was read. They are greedy, share no prefix, and come in rounds; a round fills so many slots that it
runs one size of generate, with contexts of many lengths, and the sizes of prefill come alone and beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jetserve.engine.cost import LinearCost, StepCost, StepTimes, nominal_times
from jetserve.engine.engine import Engine
from jetserve.engine.plan import StepShape
from jetserve.engine.sizing import Sizing
from jetserve.request import ModelLimits, Request, SamplingParams

Report = Callable[[str, float], None]

_FIRST_ID = 3  # below it vocabularies keep special tokens
_BLOCKS = 6  # of the largest generate, in each answer
_SINGLES = 20  # tokens of each answer beside the blocks, decoded by the smallest generate
_REPEATS = 4  # of each prefill size, in each way
_SHORT_TOKENS = 8
_CONTEXTS = (0.0, 0.3, 1.0)  # of the longest prompt; each is a round for each size of generate
_ROUND_PREFILLS = 16  # a round has no more prompt tokens than so many of the largest prefill
_PASSES = 4  # over the measurements, when they are fitted
_HELD_OUT = 5  # one of so many measurements is not fitted but predicted


class Measurement(NamedTuple):
    """One step."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What steps take.

    Attributes:
      host_seconds: of scheduling and dispatch, for each step.
      steps: that were measured; `fitted` of them taught the times, the others tested them.
      error: median over the others of how far the prediction was off, as a part of what was measured.
      counts: measured steps by prefill size, and by (steps, rows) of generate; 0 of those that never ran.
    """

    times: StepTimes
    host_seconds: float
    steps: int
    fitted: int
    error: float
    prefill_counts: dict[int, int]
    generate_counts: dict[tuple[int, int], int]


class Watch:
    """A `StepCost` that remembers what it was told, and leaves all else to another."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.seen: list[Measurement] = []

    @property
    def is_measured(self) -> bool:
        return self.cost.is_measured

    def seconds(self, shape: StepShape) -> float:
        return self.cost.seconds(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.seen.append(Measurement(shape, seconds))
        self.cost.observe(shape, seconds)


def calibrate(engine: Engine, limits: ModelLimits, report: Report = lambda _what, _fraction: None) -> Calibration:
    """Measures an idle engine. It is idle and its prefix cache empty afterwards; its own step times learn as well.

    Args:
      engine: its scheduler has no targets and sheds nothing, else some programs may never run.
      report: called with (what is being done, fraction of it done).
    """
    assert not engine.has_work, "an engine that serves cannot be measured"
    pacer, before = engine.scheduler.pacer, engine.status()
    watch = pacer.cost = Watch(pacer.cost)
    try:
        for prompts, answer_tokens, done in _rounds(engine.scheduler.sizing, limits):
            report("measuring step times", done)
            _run(engine, prompts, answer_tokens, limits)
    finally:
        pacer.cost = watch.cost
    report("measuring step times", 1.0)
    after = engine.status()
    prior = watch.cost.times if isinstance(watch.cost, LinearCost) else nominal_times(engine.scheduler.sizing)
    host_seconds = (after.host_seconds - before.host_seconds) / (after.steps - before.steps)
    return fit(prior, _settled(watch.seen), host_seconds)


def fit(prior: StepTimes, measured: list[Measurement], host_seconds: float) -> Calibration:
    """Fits step times to measured steps, in random order: what was measured last counts no more than the rest."""
    draw = random.Random(0)
    shuffled = draw.sample(measured, len(measured))
    held_out, fitted = shuffled[::_HELD_OUT], [one for at, one in enumerate(shuffled) if at % _HELD_OUT]
    cost = LinearCost(prior)
    for _ in range(_PASSES):
        for shape, seconds in draw.sample(fitted, len(fitted)):
            cost.observe(shape, seconds)
    off = [abs(cost.seconds(shape) / seconds - 1) for shape, seconds in held_out]
    prefills = [shape.prefill_size for shape, _ in measured]
    generates = [(shape.generate_steps, shape.generate_rows) for shape, _ in measured]
    return Calibration(
        times=cost.times,
        host_seconds=host_seconds,
        steps=len(measured),
        fitted=len(fitted),
        error=float(np.median(off)),
        prefill_counts={size: prefills.count(size) for size in prior.prefill},
        generate_counts={program: generates.count(program) for program in prior.generate},
    )


class _Round(NamedTuple):
    """Requests that are sent together: lengths of prompts, and of all their answers.

    Attributes:
      done: part of the whole work that came before.
    """

    prompts: list[int]
    answer_tokens: int
    done: float


def _rounds(sizing: Sizing, limits: ModelLimits) -> Iterator[_Round]:
    """What is sent, in turn, each when the round before is over."""
    rounds = [*_prefill_rounds(sizing, limits), *_generate_rounds(sizing, limits)]
    work = [sum(prompts) + len(prompts) * answer_tokens for prompts, answer_tokens in rounds]
    for at, (prompts, answer_tokens) in enumerate(rounds):
        yield _Round(prompts, answer_tokens, sum(work[:at]) / sum(work))


def _prefill_rounds(sizing: Sizing, limits: ModelLimits) -> Iterator[tuple[list[int], int]]:
    """Prompts that fill each prefill program: one, several packed together, and one so long that it takes several."""
    most = min(limits.max_prompt_tokens, limits.max_length - 2)
    for size in sizing.prefill_sizes:
        if size > sizing.prefill_tokens:
            break
        packed = min(sizing.prefill_rows, sizing.slots, size)
        ways = ([min(size, most)], _split(size, packed), [min(_REPEATS * size, most)])
        for prompts in ways:
            if max(prompts) <= most and sum(prompts) <= sizing.max_pool_tokens // 2:
                yield from [(prompts, 2)] * (_REPEATS if sum(prompts) == size else 1)


def _generate_rounds(sizing: Sizing, limits: ModelLimits) -> Iterator[tuple[list[int], int]]:
    """Requests that need each generate program, with short, middling and long contexts, the same and mixed."""
    answer = min(sizing.generate_steps[-1] * _BLOCKS + _SINGLES + sum(sizing.generate_steps), limits.max_length // 2)
    longest = min(limits.max_prompt_tokens, limits.max_length - answer)
    fewer = (0, *sizing.generate_rows)
    for below, rows in zip(fewer, sizing.generate_rows, strict=False):
        tokens = min(sizing.max_pool_tokens // 2, _ROUND_PREFILLS * sizing.prefill_tokens)
        for share in _CONTEXTS:
            for count in sorted({below + 1 + (rows - below - 1) // 2, rows}):
                high = max(1, min(round(longest * share), 2 * tokens // count))
                low = min(_SHORT_TOKENS, high)
                mixed = np.linspace(low, max(high, low), count).astype(int).tolist()
                yield mixed, answer


def _split(total: int, parts: int) -> list[int]:
    """Nearly equal parts."""
    return [total // parts + (at < total % parts) for at in range(parts)]


def _run(engine: Engine, prompts: list[int], answer_tokens: int, limits: ModelLimits) -> None:
    """Sends prompts of these lengths together and waits for their answers."""
    draw = np.random.default_rng(len(prompts) + sum(prompts))
    params = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
    for length in prompts:
        ids = draw.integers(min(_FIRST_ID, limits.vocab_size - 1), limits.vocab_size, length).tolist()
        engine.add(Request.create(ids, params, limits, now=0.0))
    while engine.has_work:
        engine.step(0.0)
    engine.flush()


def _settled(seen: list[Measurement]) -> list[Measurement]:
    """Without the first step of each program: it finds cold caches, and pages that nobody touched yet."""
    known: set[tuple[int, int, int]] = set()
    kept = []
    for one in seen:
        program = (one.shape.prefill_size, one.shape.generate_steps, one.shape.generate_rows)
        if program in known:
            kept.append(one)
        known.add(program)
    return kept
