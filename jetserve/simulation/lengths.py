"""How long prompts and answers are: distributions that reproduce what is known of a data set. Imports no jax.

Draws are stratified: of n lengths one is from each n-th part of the distribution, in random order. So a short trace has
the stated quantiles too, and two seeds differ in order more than in load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_NORMAL = NormalDist()


class Lengths(Protocol):
    """Draws lengths."""

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """i64[count], each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Meets stated quantiles and the mean, exactly.

    Between two quantiles a < b the inverse distribution runs as a + (b - a) * u^power; the one power for all of them is
    what gives the mean.

    Attributes:
      points: (probability, length), ascending, from probability 0 to 1.
    """

    points: tuple[tuple[float, float], ...]
    mean: float

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        at, values = (np.array(column) for column in zip(*self.points, strict=True))
        u = _probabilities(rng, count)
        piece = np.clip(np.searchsorted(at, u, side="right") - 1, 0, len(at) - 2)
        part = (u - at[piece]) / (at[piece + 1] - at[piece])
        drawn = values[piece] + (values[piece + 1] - values[piece]) * part**self.power
        return _whole(drawn)

    @property
    def power(self) -> float:
        """Each piece's mean is a + (b - a) / (power + 1); weighted, they are the whole mean."""
        at, values = (np.array(column) for column in zip(*self.points, strict=True))
        weights = np.diff(at)
        share = (self.mean - weights @ values[:-1]) / (weights @ np.diff(values))
        assert 0 < share < 1, f"a mean of {self.mean} contradicts {self.points}"
        return float(1 / share - 1)


@dataclass(frozen=True, slots=True)
class ClippedLogNormal:
    """A lognormal length, values beyond `low` and `high` moved there; its width is what gives the mean after that."""

    median: float
    mean: float
    low: float
    high: float

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = np.exp(math.log(self.median) + self.sigma * _normals(rng, count))
        return _whole(np.clip(drawn, self.low, self.high))

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm. The clipped mean grows with it until the clips weigh too much."""
        low, high = 0.01, 3.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.mean else (low, middle)
        assert math.isclose(self._mean(low), self.mean, rel_tol=1e-6), f"no width gives {self}"
        return low

    def _mean(self, sigma: float) -> float:
        mu = math.log(self.median)
        a, b = (math.log(self.low) - mu) / sigma, (math.log(self.high) - mu) / sigma
        inside = math.exp(mu + sigma**2 / 2) * (_NORMAL.cdf(b - sigma) - _NORMAL.cdf(a - sigma))
        return self.low * _NORMAL.cdf(a) + inside + self.high * (1 - _NORMAL.cdf(b))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A lognormal length given by the mean and deviation before it is clipped."""

    mean: float
    deviation: float
    low: float
    high: float

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        sigma = math.sqrt(math.log(1 + (self.deviation / self.mean) ** 2))
        drawn = np.exp(math.log(self.mean) - sigma**2 / 2 + sigma * _normals(rng, count))
        return _whole(np.clip(drawn, self.low, self.high))


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal length, clipped."""

    mean: float
    deviation: float
    low: float
    high: float

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return _whole(np.clip(self.mean + self.deviation * _normals(rng, count), self.low, self.high))


def _probabilities(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return (rng.permutation(count) + rng.random(count)) / count


def _normals(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    inside = np.clip(_probabilities(rng, count), 1e-15, 1 - 1e-15)
    return np.array([_NORMAL.inv_cdf(u) for u in inside.tolist()])


def _whole(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(1, np.rint(values)).astype(np.int64)
