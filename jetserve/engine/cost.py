"""How long a step takes, by its shape: a prior, what is learnt from measured steps, a guess for what was not seen.

A step's time is a sum: a part of every step, one per compiled prefill and generate program, and one per position that
prompt and decoded tokens attend to. Rows that decode either walk their own positions, or all those of the longest one,
as plain XLA does: each has a term, and measurements tell which of the two counts. `StepTimes` is that sum, `LinearCost`
learns its terms. Host side; imports no jax.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jetserve.engine.plan import StepShape
from jetserve.engine.sizing import Sizing

_DISPATCH_SECONDS = 2e-4  # of one step, before anything was measured
_LEAST_SECONDS, _MOST_SECONDS = 1e-12, 1e6  # a term is never 0: it is learnt as a multiple of its prior

# What the filter of `LinearCost` believes, in natural logarithms: 0.1 is about 10 %.
_SCALE_DEVIATION = 6.0  # of all terms together: the prior may be wrong by a factor of 400
_TERM_DEVIATION = 1.0  # of each term beside the others
_NOISE_DEVIATION = 0.15  # of one measurement, at first; then as it is seen to be, within limits
_LEAST_NOISE, _MOST_NOISE = 0.03**2, 0.3**2
_NOISE_SHARE = 0.01  # of what is believed of noise, that comes from the newest measurement
_FAR_DEVIATIONS = 3.0  # a measurement further off counts the less, the further it is
_FAR_ERROR = 1.0  # and so does one that is off by this much, whatever is believed
_TRUSTED = 3  # the first ones set the scale, however far off
_LEAST_VARIANCE = 1e-6
_MOST_ERROR = 8.0  # of one measurement, that is believed
_LEAST_GAIN = 0.005  # a measurement corrects its prediction by this part at least: 200 of them are remembered
_USUAL_DEVIATIONS = 1.0  # of a measurement
_CHANGED_DEVIATIONS = 10.0  # beyond the usual, summed up on one side: times have changed
_CHANGED = 0.05  # and so much of the doubt about the prior is back
_MEASURED_AFTER = 16

_STEP, _PREFILL_POSITION, _GENERATE_POSITION, _WALKED_POSITION, _FIRST_PROGRAM = range(5)  # places of terms in a vector
_ALL = -1


class StepCost(Protocol):
    """Predicts step times and learns from those that were measured."""

    @property
    def is_measured(self) -> bool:
        """Whether predictions rest on measurements rather than on a prior."""
        ...

    def seconds(self, shape: StepShape) -> float:
        """Of one step with this shape."""
        ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes in that a step with this shape took so long."""
        ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the terms of a step.

    Attributes:
      step: of every step: dispatch, and what the device does whatever it runs.
      prefill: by the program's tokens.
      generate: by the program's (steps, rows).
      prefill_position, generate_position: for one token to attend to one position, over all layers.
      walked_position: for each row of the generate program, active or not, and position of the longest one.
    """

    step: float
    prefill: Mapping[int, float]
    generate: Mapping[tuple[int, int], float]
    prefill_position: float
    generate_position: float
    walked_position: float = 0.0


def nominal_times(sizing: Sizing) -> StepTimes:
    """For when nothing is known: time grows with the tokens, and starting a program costs as much as 32 of them."""
    token_seconds = 1e-4
    return StepTimes(
        step=_DISPATCH_SECONDS,
        prefill={tokens: token_seconds * (32 + tokens) for tokens in sizing.prefill_sizes},
        generate={
            (steps, rows): steps * token_seconds * (32 + rows)
            for steps in sizing.generate_steps
            for rows in sizing.generate_rows
        },
        prefill_position=token_seconds * 1e-4,
        generate_position=token_seconds * 1e-4,
        walked_position=token_seconds * 1e-4,
    )


class ModelWork(NamedTuple):
    """What one chip does for a model.

    Attributes:
      layer_parameters: that every token is multiplied with.
      head_parameters: that sampled positions are multiplied with.
      kv_bytes_per_token: keys and values of one position in all layers.
      attention_flops_per_position: for one token to attend to one position, in all layers.
    """

    layer_parameters: int
    head_parameters: int
    bytes_per_parameter: int
    kv_bytes_per_token: int
    attention_flops_per_position: int


def prior_times(sizing: Sizing, work: ModelWork, *, flops_per_second: float, bytes_per_second: float) -> StepTimes:
    """What a chip's peaks allow: multiplying, or reading the weights, whichever takes longer.

    Counted from the model and not by the compiler, whose figures are off by more. Measured with jax 0.10.2, for
    Llama 3 8B on a v5e:2x4: `cost_analysis` counts the body of the layer loop once (29 of 890 GFLOP a chip in a
    prefill of 512) and takes much of the cache for read (14 GB where weights are 2); for SmolLM2 135M on CPU it says
    91 GB a step where weights are 0.27, and takes 50 ms a program to say so.
    """
    weight_bytes = (work.layer_parameters + work.head_parameters) * work.bytes_per_parameter

    def seconds(tokens: int, sampled: int) -> float:
        flops = 2.0 * (work.layer_parameters * tokens + work.head_parameters * sampled)
        return max(flops / flops_per_second, weight_bytes / bytes_per_second)

    attending = work.attention_flops_per_position / flops_per_second
    return StepTimes(
        step=_DISPATCH_SECONDS,
        prefill={tokens: seconds(tokens, sizing.prefill_rows) for tokens in sizing.prefill_sizes},
        generate={
            (steps, rows): steps * seconds(rows, rows)
            for steps in sizing.generate_steps
            for rows in sizing.generate_rows
        },
        # The tokens of a chunk read a position together, rows that decode each their own.
        prefill_position=attending,
        generate_position=max(attending, work.kv_bytes_per_token / bytes_per_second),
        walked_position=max(attending, work.kv_bytes_per_token / bytes_per_second),
    )


class LinearCost:
    """Learns the terms of `StepTimes` from measured steps.

    An extended Kalman filter over the logarithms of the terms: they stay positive, and an error is one by a factor, as
    those of priors are. The terms are believed to be wrong together first (one scale), then each by itself, so the
    first measurements of one program correct the others too. Two things differ from the textbook: a measurement far off
    counts the less the further it is, so that a hiccup moves little, and the gain never falls below a floor, so that
    what was learnt long ago fades, but only in what is measured again. When measurement after measurement is far off on
    the same side, times have changed, and part of the doubt is back that the prior was met with.

    Sizes that are not among the prior's are predicted on the line through the two nearest ones.
    """

    def __init__(self, prior: StepTimes) -> None:
        self._table = _Table(prior)
        self._terms = self._table.initial(prior)
        self._seconds: list[float] = self._terms.tolist()
        count = len(self._terms)
        self._prior_covariance = np.full((count, count), _SCALE_DEVIATION**2) + np.eye(count) * _TERM_DEVIATION**2
        self._covariance = self._prior_covariance.copy()
        self._noise = _NOISE_DEVIATION**2
        self._observations = 0
        self._above, self._below = [0.0] * (count + 1), [0.0] * (count + 1)  # by main term, and of all: see `_watch`

    @property
    def is_measured(self) -> bool:
        return self._observations >= _MEASURED_AFTER

    @property
    def times(self) -> StepTimes:
        """The terms as learnt so far."""
        return self._table.times(self._seconds)

    def seconds(self, shape: StepShape) -> float:
        """Of one step with this shape. Never below the part that every step has."""
        table, seconds = self._table, self._seconds
        size, prefill_context, rows, steps, generate_context, longest = shape
        total = least = seconds[_STEP]
        total += seconds[_PREFILL_POSITION] * prefill_context + seconds[_GENERATE_POSITION] * generate_context
        total += seconds[_WALKED_POSITION] * rows * longest
        if size:
            at = table.prefill.get(size)
            total += seconds[at] if at is not None else _sum(table.prefill_weights(size), seconds)
        if steps:
            at = table.generate.get((steps, rows))
            total += seconds[at] if at is not None else _sum(table.generate_weights(steps, rows), seconds)
        return total if total > least else least

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes in that a step with this shape took so long. A time that is not above 0 is none."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self._observations += 1
        # The part of the prediction that each term is: the slope of its logarithm by theirs.
        parts = [(term, amount * self._seconds[term]) for term, amount in self._table.weights(shape)]
        predicted = max(sum(seconds for _, seconds in parts), self._seconds[_STEP])
        slope = np.zeros(len(self._seconds))
        for term, part in parts:
            slope[term] = part / predicted
        error = min(max(math.log(seconds / predicted), -_MOST_ERROR), _MOST_ERROR)
        reach = self._covariance.dot(slope)
        variance = max(float(slope.dot(reach)), _LEAST_VARIANCE)
        noise = self._noise
        far = error / min(_FAR_DEVIATIONS * math.sqrt(variance + noise), _FAR_ERROR)
        self._watch(max(parts, key=operator.itemgetter(1))[0], _FAR_DEVIATIONS * min(max(far, -1.0), 1.0))
        widened = max(variance, noise * _LEAST_GAIN / (1 - _LEAST_GAIN))
        growth = widened / variance
        spread = (widened + noise) * (1.0 if self._observations <= _TRUSTED else max(far * far, 1.0))
        self._move(reach * (growth * error / spread))
        # Widened along `slope` alone (directional forgetting), then narrowed by the measurement.
        self._covariance += reach[:, None] * (reach * ((growth - 1) / variance - growth * growth / spread))
        if self.is_measured:
            seen = error * error if abs(far) <= 1 else 2 * noise
            self._noise = min(max(noise + _NOISE_SHARE * (seen - noise), _LEAST_NOISE), _MOST_NOISE)

    def _move(self, by: NDArray[np.float64]) -> None:
        self._terms = self._terms * np.exp(by)
        self._seconds = self._terms.tolist()
        if min(self._seconds) < _LEAST_SECONDS or max(self._seconds) > _MOST_SECONDS:
            self._terms = self._terms.clip(_LEAST_SECONDS, _MOST_SECONDS)
            self._seconds = self._terms.tolist()

    def _watch(self, term: int, deviations: float) -> None:
        """Sums up how far measurements are off, and takes the hint when they keep to one side (CUSUM, Page 1954)."""
        for at in (term, _ALL):
            above = self._above[at] = max(0.0, self._above[at] + deviations - _USUAL_DEVIATIONS)
            below = self._below[at] = max(0.0, self._below[at] - deviations - _USUAL_DEVIATIONS)
            if above > _CHANGED_DEVIATIONS or below > _CHANGED_DEVIATIONS:
                self._above, self._below = [0.0] * len(self._above), [0.0] * len(self._below)
                self._covariance += _CHANGED * (self._prior_covariance - self._covariance)
                return


class _Table:
    """Which term is where in the vectors of `LinearCost`."""

    def __init__(self, prior: StepTimes) -> None:
        self._sizes = tuple(sorted(prior.prefill))
        self._steps = tuple(sorted({steps for steps, _ in prior.generate}))
        self._rows = tuple(sorted({rows for _, rows in prior.generate}))
        self.prefill = {size: _FIRST_PROGRAM + at for at, size in enumerate(self._sizes)}
        first = _FIRST_PROGRAM + len(self.prefill)
        programs = ((steps, rows) for steps in self._steps for rows in self._rows)
        self.generate = {program: first + at for at, program in enumerate(programs)}

    def initial(self, prior: StepTimes) -> NDArray[np.float64]:
        programs = [prior.prefill[size] for size in self.prefill] + [prior.generate[key] for key in self.generate]
        terms = [prior.step, prior.prefill_position, prior.generate_position, prior.walked_position, *programs]
        return np.maximum(terms, _LEAST_SECONDS)

    def times(self, seconds: list[float]) -> StepTimes:
        return StepTimes(
            step=seconds[_STEP],
            prefill={size: seconds[at] for size, at in self.prefill.items()},
            generate={program: seconds[at] for program, at in self.generate.items()},
            prefill_position=seconds[_PREFILL_POSITION],
            generate_position=seconds[_GENERATE_POSITION],
            walked_position=seconds[_WALKED_POSITION],
        )

    def weights(self, shape: StepShape) -> list[tuple[int, float]]:
        """The terms of a step of this shape, each once, and how often they are in it."""
        size, prefill_context, rows, steps, generate_context, longest = shape
        found = [(_STEP, 1.0), (_PREFILL_POSITION, prefill_context), (_GENERATE_POSITION, generate_context)]
        found.append((_WALKED_POSITION, rows * longest))
        if size:
            at = self.prefill.get(size)
            found += [(at, 1.0)] if at is not None else self.prefill_weights(size)
        if steps:
            at = self.generate.get((steps, rows))
            found += [(at, 1.0)] if at is not None else self.generate_weights(steps, rows)
        return found

    def prefill_weights(self, size: int) -> list[tuple[int, float]]:
        return [(self.prefill[near], amount) for near, amount in _between(self._sizes, size)]

    def generate_weights(self, steps: int, rows: int) -> list[tuple[int, float]]:
        return [
            (self.generate[near_steps, near_rows], by_steps * by_rows)
            for near_steps, by_steps in _between(self._steps, steps)
            for near_rows, by_rows in _between(self._rows, rows)
        ]


def _sum(weights: list[tuple[int, float]], seconds: list[float]) -> float:
    return sum(seconds[term] * amount for term, amount in weights)


def _between(sizes: tuple[int, ...], value: int) -> list[tuple[int, float]]:
    """The sizes around a value and how much of each makes it, on a line; beyond the ends on the line of the last two.

    Example: sizes (32, 128), value 56 is three quarters of 32 and a quarter of 128.
    """
    if value in sizes:
        return [(value, 1.0)]
    if len(sizes) == 1:
        return [(sizes[0], value / sizes[0])]
    at = min(max(bisect.bisect(sizes, value), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    part = (value - low) / (high - low)
    return [(low, 1.0 - part), (high, part)]
