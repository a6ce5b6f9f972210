"""Measuring step times, on a device whose times are known."""

from __future__ import annotations

import dataclasses

import pytest

from jetserve.config import SchedulerSettings
from jetserve.engine.calibration import Calibration, Measurement, calibrate, fit
from jetserve.engine.cost import LinearCost, StepTimes, nominal_times
from jetserve.engine.engine import Engine
from jetserve.engine.plan import StepShape
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.request import ModelLimits
from jetserve.simulation.device import SimulatedClock, SimulatedExecutor

SIZING = Sizing(
    slots=8, max_length=256, page_size=16, pages=129, prefill_sizes=(16, 64), prefill_rows=4, prefill_tokens=64,
    generate_rows=(2, 8), generate_steps=(1, 4),
)  # fmt: skip
TRUTH = StepTimes(
    step=0.001,
    prefill={16: 0.010, 64: 0.030},
    generate={(1, 2): 0.020, (1, 8): 0.026, (4, 2): 0.080, (4, 8): 0.100},
    prefill_position=2e-6,
    generate_position=1e-6,
    walked_position=5e-6,
)
HOST_SECONDS = 0.0005


def engine_of(sizing: Sizing = SIZING, times: StepTimes = TRUTH) -> Engine:
    clock = SimulatedClock()
    executor = SimulatedExecutor(sizing, LinearCost(times), clock, host_seconds=HOST_SECONDS)
    return Engine(Scheduler(sizing, SchedulerSettings()), executor, clock=clock)


def limits_of(sizing: Sizing) -> ModelLimits:
    return ModelLimits(100, min(sizing.max_length, sizing.max_pool_tokens), (5,), sizing.max_length - 1)


def calibrated(sizing: Sizing = SIZING, times: StepTimes = TRUTH) -> Calibration:
    return calibrate(engine_of(sizing, times), limits_of(sizing))


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrated()


def test_every_program_is_measured_often(found: Calibration) -> None:
    assert set(found.prefill_counts) == {16, 64}
    assert set(found.generate_counts) == set(TRUTH.generate)
    assert min(found.prefill_counts.values()) >= 8
    assert min(found.generate_counts.values()) >= 8


def test_the_times_found_are_those_of_the_device(found: Calibration) -> None:
    assert found.error < 0.01
    assert found.times.prefill == pytest.approx(TRUTH.prefill, rel=0.05)
    assert found.times.generate == pytest.approx(TRUTH.generate, rel=0.05)
    assert found.times.prefill_position == pytest.approx(TRUTH.prefill_position, rel=0.1)
    shape = StepShape(generate_rows=8, generate_steps=1, generate_context=8 * 200, generate_longest=200)
    assert LinearCost(found.times).seconds(shape) == pytest.approx(LinearCost(TRUTH).seconds(shape), rel=0.02)


def test_a_row_that_ends_early_saves_nothing_where_rows_walk_together(found: Calibration) -> None:
    """Contexts of one round differ, else nothing would tell the longest from the sum of all."""
    alone = StepShape(generate_rows=8, generate_steps=1, generate_context=200, generate_longest=200)
    assert LinearCost(found.times).seconds(alone) == pytest.approx(LinearCost(TRUTH).seconds(alone), rel=0.03)


def test_the_host_is_measured_beside_the_device(found: Calibration) -> None:
    assert found.host_seconds == pytest.approx(HOST_SECONDS)


def test_a_fifth_of_the_steps_tests_the_rest(found: Calibration) -> None:
    assert found.fitted == pytest.approx(found.steps * 4 / 5, abs=1)


def test_the_engine_is_left_as_it_was_but_for_what_it_learnt() -> None:
    engine = engine_of()
    cost = engine.scheduler.pacer.cost
    said: list[float] = []

    calibrate(engine, limits_of(SIZING), lambda _what, done: said.append(done))

    assert not engine.has_work
    assert engine.status().cached_pages == 0
    assert engine.scheduler.pacer.cost is cost
    assert cost.is_measured
    assert said == sorted(said)
    assert (said[0], said[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 1, "generate_rows": (1,), "prefill_rows": 1},
        {"pages": 9},  # 128 tokens for all
        {"max_length": 32, "generate_steps": (1,)},
        {"prefill_tokens": 16},
        {"prefix_cache": False},
    ],
    ids=str,
)
def test_any_size_can_be_measured(changes: dict[str, object]) -> None:
    sizing = dataclasses.replace(SIZING, **changes)
    times = dataclasses.replace(
        TRUTH, generate={(n, rows): n * 0.02 for n in sizing.generate_steps for rows in sizing.generate_rows}
    )

    found = calibrated(sizing, times)

    assert found.steps > 0
    assert all(found.generate_counts.values())
    assert found.error < 0.05


def test_a_program_that_cannot_run_is_counted_as_none() -> None:
    """One page holds one sequence of three tokens and one that is not written."""
    smallest = dataclasses.replace(SIZING, max_length=4, page_size=4, pages=2, generate_steps=(1,))

    found = calibrated(smallest, dataclasses.replace(TRUTH, generate={(1, 2): 0.02, (1, 8): 0.026}))

    assert found.prefill_counts[16] > 0
    assert found.prefill_counts[64] == 0
    assert found.generate_counts[1, 2] > 0
    assert found.generate_counts[1, 8] == 0
    assert found.times.prefill[64] > found.times.prefill[16]  # a guess, by its prior


def test_the_order_of_measurements_does_not_matter_much() -> None:
    """A filter forgets; the fit must not hold the last round for the whole."""
    early = [Measurement(StepShape(prefill_size=16), 0.011) for _ in range(400)]
    late = [Measurement(StepShape(prefill_size=16), 0.015) for _ in range(400)]

    forth, back = (fit(nominal_times(SIZING), order, 0.0).times for order in (early + late, late + early))

    shape = StepShape(prefill_size=16)
    assert LinearCost(forth).seconds(shape) == pytest.approx(0.0129, rel=0.05)
    assert LinearCost(back).seconds(shape) == pytest.approx(0.0129, rel=0.05)
