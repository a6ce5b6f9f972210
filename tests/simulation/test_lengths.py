"""Lengths reproduce what is published of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetserve.simulation.lengths import ClippedLogNormal, LogNormal, Normal, Quantiles


def drawn(lengths, count=20_000, seed=0):
    return lengths.draw(np.random.default_rng(seed), count)


def test_quantiles_and_mean_are_met_exactly_in_the_limit():
    lengths = Quantiles(((0, 10), (0.5, 100), (0.9, 400), (1, 1000)), 180)
    values = drawn(lengths, 100_000)
    assert np.percentile(values, [50, 90]) == pytest.approx([100, 400], abs=1)
    assert (values.min(), values.max()) == (10, 1000)
    assert values.mean() == pytest.approx(180, rel=1e-3)


@given(
    steps=st.lists(st.integers(1, 1000), min_size=2, max_size=6),
    share=st.floats(0.1, 0.9),
)
def test_any_mean_between_the_quantiles_can_be_had(steps, share):
    values = np.cumsum(steps).astype(float)
    at = np.linspace(0, 1, len(values))
    weights = np.diff(at)
    mean = float(weights @ values[:-1] + share * (weights @ np.diff(values)))
    power = Quantiles(tuple(zip(at.tolist(), values.tolist(), strict=True)), mean).power
    assert weights @ (values[:-1] + np.diff(values) / (power + 1)) == pytest.approx(mean)


def test_a_mean_that_contradicts_the_quantiles_is_our_own_mistake():
    with pytest.raises(AssertionError, match="contradicts"):
        _ = Quantiles(((0, 10), (1, 20)), 25).power


@pytest.mark.parametrize(("median", "mean", "low", "high"), [(60, 230, 4, 1024), (130, 203, 4, 1024)])
def test_a_clipped_lognormal_has_its_median_mean_and_bounds(median, mean, low, high):
    values = drawn(ClippedLogNormal(median, mean, low, high), 100_000)
    assert np.median(values) == pytest.approx(median, rel=0.03)
    assert values.mean() == pytest.approx(mean, rel=0.02)
    assert (values.min(), values.max()) == (low, high)


def test_a_lognormal_has_its_mean_and_deviation_before_it_is_clipped():
    values = drawn(LogNormal(100, 50, 1, 1e9), 100_000)
    assert (values.mean(), values.std()) == pytest.approx((100, 50), rel=0.02)
    assert np.log(values).std() == pytest.approx(math.sqrt(math.log(1.25)), rel=0.02)


def test_a_normal_is_clipped():
    values = drawn(Normal(14_000, 15_000, 5_000, 45_000))
    assert (values.min(), values.max()) == (5_000, 45_000)


@pytest.mark.parametrize("count", [1, 7, 100])
def test_a_few_lengths_already_have_the_quantiles(count):
    lengths = Quantiles(((0, 0), (1, 1000)), 500)
    values = sorted(drawn(lengths, count).tolist())
    assert all(1000 * at / count - 1 <= value <= 1000 * (at + 1) / count + 1 for at, value in enumerate(values))


def test_the_order_of_lengths_is_random():
    values = drawn(Quantiles(((0, 0), (1, 1000)), 500), 2000)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05


def test_no_length_is_below_one():
    assert drawn(Normal(0, 1, -5, 5)).min() == 1
