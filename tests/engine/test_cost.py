"""Learning how long steps take, against step times that are known."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetserve.engine.cost import LinearCost, ModelWork, StepTimes, nominal_times, prior_times
from jetserve.engine.plan import StepShape
from jetserve.engine.sizing import Sizing

SIZES = (32, 128, 512)
PROGRAMS = tuple((steps, rows) for steps in (1, 4) for rows in (2, 8, 32))
TRUTH = StepTimes(
    step=0.002,
    prefill={32: 0.030, 128: 0.090, 512: 0.350},
    generate={(steps, rows): steps * (0.020 + 0.002 * rows) for steps, rows in PROGRAMS},
    prefill_position=2e-7,
    generate_position=3e-7,
    walked_position=2e-7,
)
SIZING = Sizing(
    slots=32,
    max_length=2048,
    page_size=16,
    pages=4097,
    prefill_sizes=SIZES,
    prefill_rows=8,
    prefill_tokens=512,
    generate_rows=(2, 8, 32),
    generate_steps=(1, 4),
)


def scaled(times: StepTimes, factor: float) -> StepTimes:
    return StepTimes(
        step=times.step * factor,
        prefill={size: seconds * factor for size, seconds in times.prefill.items()},
        generate={program: seconds * factor for program, seconds in times.generate.items()},
        prefill_position=times.prefill_position * factor,
        generate_position=times.generate_position * factor,
        walked_position=times.walked_position * factor,
    )


def true_seconds(times: StepTimes, shape: StepShape) -> float:
    """The sum, written out."""
    seconds = times.step
    if shape.prefill_size:
        seconds += times.prefill[shape.prefill_size] + times.prefill_position * shape.prefill_context
    if shape.generate_steps:
        seconds += times.generate[shape.generate_steps, shape.generate_rows]
        seconds += times.generate_position * shape.generate_context
        seconds += times.walked_position * shape.generate_rows * shape.generate_longest
    return seconds


def shapes(seed: int, count: int) -> Iterator[StepShape]:
    """Prefill alone, decoding alone and both, over contexts up to 2,000 positions."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.choice(("prefill", "generate", "both"))
        size = draw.choice(SIZES) if kind != "generate" else 0
        steps, rows = draw.choice(PROGRAMS) if kind != "prefill" else (0, 0)
        longest = draw.randint(1, 2000)
        context = rows * draw.randint(1, longest)
        yield StepShape(size, size * draw.randint(1, 2000), rows, steps, steps * context, steps * longest)


def wrong_prior(seed: int, factor: float = 1.0) -> StepTimes:
    """Each term is off by a factor of its own, about 1.6 either way, and all together by `factor`."""
    draw = random.Random(seed)

    def off(seconds: float) -> float:
        return seconds * factor * math.exp(draw.gauss(0, 0.5))

    return StepTimes(
        step=off(TRUTH.step),
        prefill={size: off(seconds) for size, seconds in TRUTH.prefill.items()},
        generate={program: off(seconds) for program, seconds in TRUTH.generate.items()},
        prefill_position=off(TRUTH.prefill_position),
        generate_position=off(TRUTH.generate_position),
        walked_position=off(TRUTH.walked_position),
    )


def teach(
    cost: LinearCost,
    times: StepTimes,
    *,
    seed: int = 0,
    count: int = 800,
    noise: float = 0.0,
    hiccups: float = 0.0,
) -> None:
    """Shows measured steps: `noise` is the deviation of their logarithm, `hiccups` the share that takes tenfold."""
    draw = random.Random(seed + 1000)
    for shape in shapes(seed, count):
        seconds = true_seconds(times, shape) * math.exp(draw.gauss(0, noise))
        cost.observe(shape, seconds * (10 if draw.random() < hiccups else 1))


def worst_error(cost: LinearCost, times: StepTimes) -> float:
    """Largest relative error over shapes that were not shown."""
    return max(abs(cost.seconds(shape) / true_seconds(times, shape) - 1) for shape in shapes(99, 300))


def mean_error(cost: LinearCost, times: StepTimes) -> float:
    errors = [abs(cost.seconds(shape) / true_seconds(times, shape) - 1) for shape in shapes(99, 300)]
    return sum(errors) / len(errors)


def test_before_any_measurement_the_prior_predicts() -> None:
    cost = LinearCost(TRUTH)

    for shape in shapes(1, 100):
        assert cost.seconds(shape) == pytest.approx(true_seconds(TRUTH, shape), rel=1e-12)
    assert cost.times == TRUTH
    assert not cost.is_measured


def test_predictions_count_as_measured_after_sixteen_steps() -> None:
    cost = LinearCost(TRUTH)
    teach(cost, TRUTH, count=15)
    assert not cost.is_measured

    teach(cost, TRUTH, count=1)

    assert cost.is_measured


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
def test_every_term_is_recovered_from_noisy_steps(factor: float, seed: int) -> None:
    cost = LinearCost(wrong_prior(seed, factor))

    teach(cost, TRUTH, seed=seed, count=1500, noise=0.02)

    found = cost.times
    assert worst_error(cost, TRUTH) < 0.03
    assert found.prefill == pytest.approx(TRUTH.prefill, rel=0.03)
    assert found.generate == pytest.approx(TRUTH.generate, rel=0.03)
    assert found.prefill_position == pytest.approx(TRUTH.prefill_position, rel=0.03)
    # These two rise and fall together.
    assert found.generate_position == pytest.approx(TRUTH.generate_position, rel=0.1)
    assert found.walked_position == pytest.approx(TRUTH.walked_position, rel=0.1)
    assert found.step == pytest.approx(TRUTH.step, rel=0.5)  # a hundredth of a step


@pytest.mark.parametrize("factor", [0.02, 0.3, 4.0, 50.0])
def test_programs_never_seen_follow_the_scale_of_those_that_were(factor: float) -> None:
    cost = LinearCost(TRUTH)
    shape = StepShape(0, 0, 8, 1, 8 * 300)

    for _ in range(10):
        cost.observe(shape, factor * true_seconds(TRUTH, shape))

    unseen = StepShape(512, 512 * 256, 32, 4, 4 * 32 * 700)
    assert cost.seconds(unseen) == pytest.approx(factor * true_seconds(TRUTH, unseen), rel=0.3)
    assert cost.seconds(shape) == pytest.approx(factor * true_seconds(TRUTH, shape), rel=0.02)


def test_a_program_that_differs_from_the_scale_gets_its_own_time() -> None:
    cost = LinearCost(TRUTH)
    different = dataclasses.replace(TRUTH, prefill={**TRUTH.prefill, 128: 0.045})

    teach(cost, different, count=300)

    assert cost.times.prefill == pytest.approx(different.prefill, rel=0.02)


def test_one_hiccup_hardly_moves_what_was_learnt() -> None:
    cost = LinearCost(wrong_prior(0))
    teach(cost, TRUTH, noise=0.02)
    shape = StepShape(128, 128 * 64, 8, 1, 8 * 300)
    before = cost.seconds(shape)

    cost.observe(shape, 10 * before)

    assert cost.seconds(shape) == pytest.approx(before, rel=0.002)


def test_steps_that_take_tenfold_now_and_then_are_ignored() -> None:
    cost = LinearCost(wrong_prior(0))

    teach(cost, TRUTH, count=1500, noise=0.05, hiccups=0.05)

    assert worst_error(cost, TRUTH) < 0.08
    assert mean_error(cost, TRUTH) < 0.03


def test_a_hiccup_in_the_first_step_is_forgotten() -> None:
    cost = LinearCost(TRUTH)
    shape = StepShape(0, 0, 8, 1, 8 * 300)

    for factor in (100.0, *[1.0] * 25):
        cost.observe(shape, factor * true_seconds(TRUTH, shape))

    assert cost.seconds(shape) == pytest.approx(true_seconds(TRUTH, shape), rel=0.05)


@pytest.mark.parametrize("factor", [0.2, 0.67, 1.5, 5.0])
def test_a_machine_that_changes_its_speed_is_followed_within_sixty_steps(factor: float) -> None:
    cost = LinearCost(wrong_prior(0))
    teach(cost, TRUTH, noise=0.1)

    teach(cost, scaled(TRUTH, factor), seed=5, count=60, noise=0.1)

    assert mean_error(cost, scaled(TRUTH, factor)) < 0.06


def test_a_slow_drift_is_followed() -> None:
    cost = LinearCost(TRUTH)
    draw = random.Random(1)
    factor = 1.0
    for shape in shapes(3, 4000):
        factor *= 1.0002  # doubles in 3,466 steps
        cost.observe(shape, factor * true_seconds(TRUTH, shape) * math.exp(draw.gauss(0, 0.03)))

    assert factor > 2
    assert mean_error(cost, scaled(TRUTH, factor)) < 0.1


def test_one_program_that_becomes_slower_is_learnt_while_the_others_stay() -> None:
    cost = LinearCost(TRUTH)
    teach(cost, TRUTH)
    slower = dataclasses.replace(TRUTH, prefill={**TRUTH.prefill, 512: 3 * TRUTH.prefill[512]})

    teach(cost, slower, seed=7, count=150)

    assert worst_error(cost, slower) < 0.05


def test_what_is_not_measured_is_not_forgotten() -> None:
    cost = LinearCost(wrong_prior(0))
    teach(cost, TRUTH, count=1500)
    prefill = StepShape(512, 512 * 300, 0, 0, 0)
    draw = random.Random(2)

    for _ in range(5000):
        shape = StepShape(0, 0, 8, 1, 8 * draw.randint(1, 2000))
        cost.observe(shape, true_seconds(TRUTH, shape) * math.exp(draw.gauss(0, 0.1)))

    assert cost.seconds(prefill) == pytest.approx(true_seconds(TRUTH, prefill), rel=0.03)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_teaches_nothing(seconds: float) -> None:
    cost = LinearCost(TRUTH)
    teach(cost, TRUTH, count=15)
    before = cost.times

    cost.observe(StepShape(32, 100, 0, 0, 0), seconds)

    assert cost.times == before
    assert not cost.is_measured


def test_sizes_between_and_beyond_those_known_lie_on_a_line() -> None:
    cost = LinearCost(
        StepTimes(
            step=0.0,
            prefill={32: 3.0, 128: 6.0},
            generate={(1, 2): 1.0, (1, 10): 2.0, (4, 2): 4.0, (4, 10): 8.0},
            prefill_position=0.0,
            generate_position=0.0,
        )
    )

    assert cost.seconds(StepShape(80)) == pytest.approx(4.5)
    assert cost.seconds(StepShape(16)) == pytest.approx(2.5)
    assert cost.seconds(StepShape(512)) == pytest.approx(18.0)
    assert cost.seconds(StepShape(generate_steps=1, generate_rows=6)) == pytest.approx(1.5)
    assert cost.seconds(StepShape(generate_steps=4, generate_rows=6)) == pytest.approx(6.0)
    assert cost.seconds(StepShape(generate_steps=2, generate_rows=6)) == pytest.approx(3.0)
    assert cost.seconds(StepShape(generate_steps=8, generate_rows=10)) == pytest.approx(16.0)


def test_a_single_known_size_is_scaled() -> None:
    cost = LinearCost(StepTimes(0.0, {128: 6.0}, {(4, 8): 4.0}, 0.0, 0.0))

    assert cost.seconds(StepShape(32)) == pytest.approx(1.5)
    assert cost.seconds(StepShape(generate_steps=1, generate_rows=8)) == pytest.approx(1.0)


def test_measuring_a_size_that_is_not_known_teaches_its_neighbours() -> None:
    cost = LinearCost(scaled(TRUTH, 2.0))
    cost.observe(StepShape(80, 80 * 40, 0, 0, 0), 0.062)

    assert cost.seconds(StepShape(80, 80 * 40, 0, 0, 0)) == pytest.approx(0.062, rel=0.01)
    assert cost.times.prefill[32] < 2 * TRUTH.prefill[32]
    assert cost.times.prefill[128] < 2 * TRUTH.prefill[128]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((0, *SIZES, 7, 4096)),
            st.integers(0, 10**9),
            st.sampled_from(((0, 0), *PROGRAMS, (2, 5), (64, 1))),
            st.integers(0, 10**9),
            st.floats(1e-300, 1e300),
        ),
        max_size=60,
    )
)
def test_whatever_is_measured_predictions_stay_positive_and_finite(
    measured: list[tuple[int, int, tuple[int, int], int, float]],
) -> None:
    cost = LinearCost(TRUTH)

    for size, prefill_context, (steps, rows), generate_context, seconds in measured:
        cost.observe(StepShape(size, prefill_context, rows, steps, generate_context), seconds)

    times = cost.times
    terms = [times.step, times.prefill_position, times.generate_position]
    terms += [*times.prefill.values(), *times.generate.values()]
    assert all(0 < term < math.inf for term in terms)
    for size, prefill_context, (steps, rows), generate_context, _ in measured:
        predicted = cost.seconds(StepShape(size, prefill_context, rows, steps, generate_context))
        assert times.step <= predicted < math.inf


def test_predictions_hold_over_a_long_run_of_changing_work() -> None:
    cost = LinearCost(wrong_prior(0))
    draw = random.Random(3)
    mixed = shapes(4, 10**9)
    for step in range(16_000):
        phase = step // 1000 % 4
        if phase == 0:
            shape = StepShape(0, 0, 8, 1, 8 * draw.randint(10, 2000))
        elif phase == 1:
            shape = StepShape(512, 512 * draw.randint(10, 3000), 0, 0, 0)
        elif phase == 2:
            shape = StepShape(0, 0, 32, 4, 32 * 4 * 500)
        else:
            shape = next(mixed)
        cost.observe(shape, true_seconds(TRUTH, shape) * math.exp(draw.gauss(0, 0.1)))

    assert worst_error(cost, TRUTH) < 0.06


def test_prior_of_a_model_on_a_chip_is_what_its_peaks_allow() -> None:
    # A chip of 100 FLOP/s and 10 bytes/s; 7 + 3 parameters of 2 bytes are read in 2 s.
    work = ModelWork(
        layer_parameters=7,
        head_parameters=3,
        bytes_per_parameter=2,
        kv_bytes_per_token=4,
        attention_flops_per_position=20,
    )

    times = prior_times(SIZING, work, flops_per_second=100.0, bytes_per_second=10.0)

    assert times.prefill[32] == pytest.approx((2 * 7 * 32 + 2 * 3 * 8) / 100)  # multiplying decides
    assert times.generate[1, 2] == pytest.approx(2.0)  # reading the weights does: 2 rows take 0.4 s
    assert times.generate[4, 2] == pytest.approx(8.0)
    assert times.generate[1, 32] == pytest.approx(2 * 10 * 32 / 100)
    assert times.prefill_position == pytest.approx(0.2)
    assert times.generate_position == pytest.approx(0.4)
    assert times.walked_position == pytest.approx(0.4)


def test_without_knowledge_time_grows_with_tokens_rows_and_steps() -> None:
    times = nominal_times(SIZING)

    assert list(times.prefill.values()) == sorted(times.prefill.values())
    assert times.generate[1, 2] < times.generate[1, 8] < times.generate[1, 32] < times.generate[4, 32]
    assert set(times.generate) == set(PROGRAMS)
