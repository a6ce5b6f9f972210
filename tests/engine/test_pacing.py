"""How much a step does, by hand for round numbers, at random against the rules, and over a simulated minute."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetserve import config
from jetserve.engine.cost import LinearCost, StepTimes
from jetserve.engine.pacing import Load, Pace, Pacer
from jetserve.engine.plan import StepShape
from jetserve.engine.sizing import Sizing

SIZES = (32, 128, 512)
SIZING = Sizing(
    slots=8,
    max_length=4096,
    page_size=16,
    pages=2049,
    prefill_sizes=SIZES,
    prefill_rows=8,
    prefill_tokens=512,
    generate_rows=(8,),
    generate_steps=(1, 4, 8),
)
# A step that decodes takes 21 s, and beside it prefill of 32, 128, 512 another 10, 30, 100 s.
ROUND = StepTimes(
    step=1.0,
    prefill={32: 10.0, 128: 30.0, 512: 100.0},
    generate={(1, 8): 20.0, (4, 8): 80.0, (8, 8): 160.0},
    prefill_position=0.0,
    generate_position=0.0,
)


class FixedCost:
    """Predicts `StepTimes` to the last bit, and learns nothing."""

    is_measured = True

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def seconds(self, shape: StepShape) -> float:
        times = self._times
        seconds = times.step
        if shape.prefill_size:
            seconds += times.prefill[shape.prefill_size] + times.prefill_position * shape.prefill_context
        if shape.generate_steps:
            seconds += times.generate[shape.generate_steps, shape.generate_rows]
            seconds += times.generate_position * shape.generate_context
        return seconds

    def observe(self, shape: StepShape, seconds: float) -> None:
        raise AssertionError("the pacer teaches nothing")


def pacer(
    times: StepTimes = ROUND, *, ttft: float | None = None, tpot: float | None = None, sizing: Sizing = SIZING
) -> Pacer:
    return Pacer(sizing, cost=FixedCost(times), ttft_target_seconds=ttft, tpot_target_seconds=tpot)


def decoding(
    tokens: int, *, start: int = 0, slack: float = math.inf, urgent: int = 0, left: int = 100, context: int = 0
) -> Load:
    """Eight rows decode, and so many prompt tokens are there."""
    return Load(8, 8, context, left, tokens, start, slack, urgent)


def idle(tokens: int) -> Load:
    """No row decodes."""
    return Load(0, 0, 0, 0, tokens, 0, math.inf)


@pytest.mark.parametrize(
    ("tokens", "taken"),
    [
        (1, 1),
        (31, 31),
        (32, 32),
        (33, 32),  # 10 + 10 against 30
        (64, 32),
        (65, 65),  # three times 10 against 30: as dear, and later
        (128, 128),
        (129, 128),  # 30 + 10 against 100
        (230, 128),  # 30 + 30
        (384, 128),  # three times 30
        (385, 385),  # and another 10: as dear as 100
        (511, 511),
        (512, 512),
        (513, 512),
        (9999, 512),
    ],
)
def test_the_cheaper_of_covering_and_filling_is_taken(tokens: int, taken: int) -> None:
    assert pacer().pace(decoding(tokens)) == Pace(taken, 1)


@pytest.mark.parametrize(("tokens", "taken"), [(33, 32), (64, 32), (65, 65), (96, 96), (129, 128), (385, 385)])
def test_without_rows_every_step_costs_its_own(tokens: int, taken: int) -> None:
    # 33: 11 + 11 against 31. 65: 33 against 31.
    assert pacer().pace(idle(tokens)) == Pace(taken, 1)


def test_where_sizes_cost_the_same_prompts_are_never_split() -> None:
    flat = dataclasses.replace(ROUND, prefill={32: 50.0, 128: 50.0, 512: 50.0})

    assert [pacer(flat).pace(decoding(tokens)).prefill_tokens for tokens in (33, 129, 230, 500)] == [33, 129, 230, 500]


def test_a_budget_between_two_sizes_fills_the_smaller_one() -> None:
    between = dataclasses.replace(SIZING, prefill_tokens=200)

    # 200 tokens in the program of 512 cost 100; 128 cost 30.
    assert pacer(sizing=between).pace(decoding(5000)).prefill_tokens == 128


def test_a_budget_below_the_smallest_size_is_kept() -> None:
    small = dataclasses.replace(SIZING, prefill_tokens=16)

    assert pacer(sizing=small).pace(decoding(5000)).prefill_tokens == 16
    assert pacer(sizing=small, tpot=1.0).pace(decoding(5000)).prefill_tokens == 16


def test_splitting_does_not_make_a_first_token_late() -> None:
    # What runs, 21; then 129 tokens at once, 121; or 128, 51, and 1, 31.
    assert pacer().pace(decoding(129)).prefill_tokens == 128
    slow = dataclasses.replace(ROUND, generate={**ROUND.generate, (1, 8): 100.0})
    # What runs, 101; at once 201, so 302; or 131 + 111, so 343.
    assert pacer(slow).pace(decoding(129, slack=344.0)).prefill_tokens == 128
    assert pacer(slow).pace(decoding(129, slack=342.0)).prefill_tokens == 129
    assert pacer(slow).pace(decoding(129, slack=301.0)).prefill_tokens == 128  # late in any case


@pytest.mark.parametrize(
    ("target", "taken"),
    [
        (1000.0, 512),
        (121.0, 512),
        (120.9, 128),
        (51.0, 128),
        (50.9, 32),
        (31.0, 32),
        (1.0, 32),  # never less than the smallest program
    ],
)
def test_chunks_keep_the_tpot_target(target: float, taken: int) -> None:
    assert pacer(tpot=target).pace(decoding(5000)).prefill_tokens == taken


def test_without_running_rows_no_target_holds_prompts_back() -> None:
    assert pacer(tpot=1.0).pace(idle(5000)).prefill_tokens == 512


def test_positions_attended_to_shorten_chunks_within_a_program() -> None:
    times = dataclasses.replace(ROUND, prefill={32: 20.0, 128: 30.0, 512: 100.0}, prefill_position=0.001)

    # 51 s for 128, and 0.001 s for each of 88 * 89 / 2 positions makes 54.9 s; of 89 * 90 / 2, 55.005 s.
    assert pacer(times, tpot=55.0).pace(decoding(5000)).prefill_tokens == 88
    # Behind 1,000 others: 88 tokens are too many already.
    assert pacer(times, tpot=55.0).pace(decoding(5000, start=1000)).prefill_tokens == 32


@pytest.mark.parametrize(
    ("slack", "taken"),
    [
        (math.inf, 128),
        (226.0, 128),  # what runs, 21, and four steps of 51 make 225
        (224.0, 512),  # at once: 21 + 121 = 142
        (142.0, 512),
        (141.0, 128),  # late at any pace: nobody is slowed down for it
        (-5.0, 128),
    ],
)
def test_the_tpot_target_yields_only_to_a_first_token_that_can_be_saved(slack: float, taken: int) -> None:
    both = pacer(ttft=500.0, tpot=55.0)

    assert both.pace(decoding(512, slack=slack)).prefill_tokens == taken


def test_it_yields_no_more_than_needed() -> None:
    finer = dataclasses.replace(SIZING, prefill_sizes=(32, 128, 256, 512))
    times = dataclasses.replace(ROUND, prefill={32: 10.0, 128: 30.0, 256: 55.0, 512: 100.0})
    both = pacer(times, ttft=500.0, tpot=55.0, sizing=finer)

    # What runs, 21, and 512 tokens: 225 by 128, 173 by 256, 142 at once.
    assert [both.pace(decoding(512, slack=slack)).prefill_tokens for slack in (225.0, 224.0, 173.0, 172.0)] == [
        128,
        256,
        256,
        512,
    ]


def test_only_tokens_up_to_the_urgent_prompt_count() -> None:
    both = pacer(ttft=500.0, tpot=55.0)

    assert both.pace(decoding(5000, slack=150.0, urgent=512)).prefill_tokens == 512
    assert both.pace(decoding(5000, slack=150.0, urgent=128)).prefill_tokens == 128
    assert both.pace(decoding(5000, slack=150.0)).prefill_tokens == 128


@pytest.mark.parametrize(
    ("left", "tpot", "ttft", "steps"),
    [
        (100, None, None, 8),
        (8, None, None, 8),
        (7, None, None, 4),
        (3, None, None, 1),
        (100, 161.0, None, 8),
        (100, 160.9, None, 4),
        (100, 81.0, None, 4),
        (100, 80.9, None, 1),
        (100, 1.0, None, 1),
        (100, None, 4 * 161.0, 8),
        (100, None, 4 * 160.9, 4),
        (100, None, 4 * 80.9, 1),
        (100, 161.0, 4 * 81.0, 4),
        (3, 161.0, None, 1),
    ],
)
def test_blocks_are_as_long_as_rows_and_targets_allow(
    left: int, tpot: float | None, ttft: float | None, steps: int
) -> None:
    assert pacer(tpot=tpot, ttft=ttft).pace(decoding(0, left=left)) == Pace(0, steps)


def test_blocks_count_the_positions_of_later_tokens() -> None:
    times = dataclasses.replace(ROUND, generate_position=0.01)

    # Four tokens for each of 8 rows that attend to 100 positions together: 400, and 8 * (1 + 2 + 3) of their own.
    assert pacer(times, tpot=81.0 + 4.48).pace(decoding(0, context=100)).generate_steps == 4
    assert pacer(times, tpot=81.0 + 4.47).pace(decoding(0, context=100)).generate_steps == 1


def test_prompts_that_wait_keep_blocks_short() -> None:
    assert pacer().pace(decoding(1, left=100)).generate_steps == 1


def test_nothing_to_do_is_the_smallest_block() -> None:
    assert pacer().pace(idle(0)) == Pace(0, 1)


def test_first_token_is_half_a_step_away_and_the_steps_up_to_it() -> None:
    assert pacer().first_token_seconds(decoding(0), 512, 100) == pytest.approx(10.5 + 121 + 51)
    assert pacer().first_token_seconds(idle(0), 0, 100) == pytest.approx(31)
    assert pacer(tpot=55.0).first_token_seconds(decoding(0), 512, 100) == pytest.approx(10.5 + 4 * 51 + 51)


def test_first_token_counts_the_positions_of_a_long_prompt() -> None:
    times = dataclasses.replace(ROUND, prefill_position=0.001)

    assert pacer(times).first_token_seconds(idle(0), 0, 2048) == pytest.approx(4 * 101 + 0.001 * 2048 * 2048 / 2)


def test_the_queue_drains_in_full_steps() -> None:
    assert pacer().drain_seconds(decoding(0), 1024) == pytest.approx(242)
    assert pacer().drain_seconds(decoding(0), 0) == 0.0


def test_targets_come_from_the_settings() -> None:
    tree = config.load(settings=["scheduler.ttft_target_ms=2000.0", "scheduler.tpot_target_ms=40.0"])

    made = Pacer.of(SIZING, tree.scheduler)

    assert (made.ttft_target_seconds, made.tpot_target_seconds) == (2.0, 0.04)
    assert not made.cost.is_measured
    assert Pacer.of(SIZING, config.load().scheduler).tpot_target_seconds is None


positive = st.floats(1e-4, 10.0)


@st.composite
def rising_times(draw: st.DrawFn) -> StepTimes:
    """Larger programs take longer, by any amounts."""
    small, middle, large = sorted(draw(st.tuples(positive, positive, positive)))
    one = draw(positive)
    return StepTimes(
        step=draw(st.floats(0, 1.0)),
        prefill={32: small, 128: middle, 512: large},
        generate={(1, 8): one, (4, 8): one * draw(st.floats(1, 4)), (8, 8): one * draw(st.floats(4, 8))},
        prefill_position=draw(st.sampled_from((0.0, 1e-6, 1e-3))),
        generate_position=draw(st.sampled_from((0.0, 1e-6, 1e-3))),
    )


loads = st.builds(
    lambda running, context, left, tokens, start, slack: Load(
        8 if running else 0, 8 if running else 0, context if running else 0, left, tokens, start, slack
    ),
    st.booleans(),
    st.integers(0, 10_000),
    st.integers(1, 50),
    st.integers(0, 2000),
    st.integers(0, 4000),
    st.floats(-10, 100) | st.just(math.inf),
)
targets = st.none() | st.floats(1e-3, 30.0)


def predicted(times: StepTimes, load: Load, pace: Pace) -> float:
    """Seconds of the step that a pace makes of a load."""
    tokens = pace.prefill_tokens
    steps = pace.generate_steps if load.running else 0
    context = sum(load.generate_context + load.running * step for step in range(steps))
    positions = sum(load.prefill_context + 1 + at for at in range(tokens))
    size = next((size for size in SIZES if size >= tokens), 0) if tokens else 0
    return FixedCost(times).seconds(StepShape(size, positions, load.generate_rows, steps, context))


@settings(max_examples=200, deadline=None)
@given(rising_times(), loads, targets, targets)
def test_every_step_does_something_and_not_too_much(
    times: StepTimes, load: Load, ttft: float | None, tpot: float | None
) -> None:
    pace = pacer(times, ttft=ttft, tpot=tpot).pace(load)

    assert min(1, load.prompt_tokens) <= pace.prefill_tokens <= min(load.prompt_tokens, 512)
    assert pace.prefill_tokens >= min(load.prompt_tokens, 32)
    assert pace.generate_steps in SIZING.generate_steps
    assert pace.generate_steps <= max(1, load.fewest_left)
    assert not (load.prompt_tokens and pace.generate_steps > 1)


@settings(max_examples=200, deadline=None)
@given(rising_times(), loads, st.floats(1e-3, 30.0))
def test_no_step_exceeds_the_tpot_target_but_the_smallest(times: StepTimes, load: Load, target: float) -> None:
    calm = load._replace(slack_seconds=math.inf)
    pace = pacer(times, tpot=target).pace(calm)
    least = Pace(min(32, load.prompt_tokens), 1)

    if load.running:
        assert predicted(times, calm, pace) <= max(target, predicted(times, calm, least)) * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(rising_times(), loads.filter(lambda load: 0 < load.prompt_tokens <= 512))
def test_packing_never_costs_more_than_covering(times: StepTimes, load: Load) -> None:
    calm = load._replace(slack_seconds=math.inf)
    policy = pacer(times)
    decode = predicted(times, calm, Pace(0, 1)) if load.running else 0.0
    whole = predicted(times, calm, Pace(load.prompt_tokens, 1)) - decode

    spent, left = 0.0, calm
    while left.prompt_tokens:
        pace = policy.pace(left)
        spent += predicted(times, left, pace) - decode
        left = left._replace(
            prompt_tokens=left.prompt_tokens - pace.prefill_tokens,
            prefill_context=left.prefill_context + pace.prefill_tokens,
        )

    assert spent <= whole * (1 + 1e-9) + 1e-12


@settings(max_examples=200, deadline=None)
@given(rising_times(), loads, targets, st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 500))
def test_more_tokens_never_mean_an_earlier_first_token(
    times: StepTimes, load: Load, tpot: float | None, ahead: int, own: int, more: int
) -> None:
    policy = pacer(times, tpot=tpot)
    first = policy.first_token_seconds(load, ahead, own)
    rounding = 1e-3 * 100 * 2  # positions are whole numbers, in up to 100 steps

    assert 0 <= first <= policy.first_token_seconds(load, ahead + more, own) + rounding
    assert first <= policy.first_token_seconds(load, ahead, own + more) + rounding
    assert policy.drain_seconds(load, ahead) <= policy.drain_seconds(load, ahead + more) + rounding


# What a small model does on two cores: 30 to 350 ms of prefill beside 36 ms of decoding.
REAL = StepTimes(
    step=0.001,
    prefill={32: 0.030, 128: 0.090, 512: 0.350},
    generate={(1, 8): 0.036, (4, 8): 0.140, (8, 8): 0.280},
    prefill_position=2e-7,
    generate_position=3e-7,
)
PROMPT = 1000
CONTEXT = 8 * 1500


class _Prompt(NamedTuple):
    arrived: float
    done: int


def longest_gap(policy: Pacer, *, every: float, ttft: float | None, until: float = 60.0) -> tuple[float, int]:
    """Eight streams decode while a prompt of 1,000 tokens arrives `every` so many seconds.

    The host dispatches a plan when it has read the result before the last, as `Engine.step` does.

    Returns: the longest gap between two arrivals of tokens of a stream, and the prompts that were prefilled.
    """
    cost = FixedCost(REAL)
    prompts: deque[_Prompt] = deque()
    ends: deque[float] = deque()  # of plans in flight
    arrivals, finished, now, device_free, last, longest = 0, 0, 0.0, 0.0, 0.0, 0.0
    while now < until:
        while arrivals * every <= now:
            prompts.append(_Prompt(arrivals * every, 0))
            arrivals += 1
        first = prompts[0] if prompts else None
        load = Load(
            running=8,
            generate_rows=8,
            generate_context=CONTEXT,
            fewest_left=1000,
            prompt_tokens=sum(PROMPT - prompt.done for prompt in list(prompts)[:8]),
            prefill_context=first.done if first else 0,
            slack_seconds=first.arrived + ttft - now if first and ttft is not None else math.inf,
            urgent_tokens=PROMPT - first.done if first else 0,
        )
        pace = policy.pace(load)
        left, positions = pace.prefill_tokens, 0
        while left:
            prompt = prompts.popleft()
            taken = min(left, PROMPT - prompt.done)
            positions += sum(range(prompt.done + 1, prompt.done + taken + 1))
            left -= taken
            if prompt.done + taken < PROMPT:
                prompts.appendleft(_Prompt(prompt.arrived, prompt.done + taken))
            else:
                finished += 1
        size = next((size for size in (0, *SIZES) if size >= pace.prefill_tokens), 0)
        steps = pace.generate_steps
        shape = StepShape(size, positions, 8, steps, steps * CONTEXT + 8 * steps * (steps - 1) // 2)
        device_free = max(device_free, now) + cost.seconds(shape)
        ends.append(device_free)
        if len(ends) > 1:
            now = max(now, ends.popleft())
            longest, last = max(longest, now - last), now
    return longest, finished


def step_bound(tokens: int, steps: int) -> float:
    """S(p, n) of the module's bound, for prompts of 1,000 tokens."""
    size = next(size for size in (0, *SIZES) if size >= tokens)
    context = steps * CONTEXT + 8 * steps * (steps - 1) // 2
    return FixedCost(REAL).seconds(StepShape(size, tokens * PROMPT, 8, steps, context))


@pytest.mark.parametrize("every", [0.3, 0.8, 1.2, 2.0, 10.0])
@pytest.mark.parametrize(
    ("ttft", "tpot", "bound"),
    [
        (None, None, lambda: max(step_bound(512, 1), step_bound(0, 8))),
        (1.5, None, lambda: step_bound(512, 1)),  # blocks take at most 0.375 s
        (None, 0.01, lambda: step_bound(32, 1)),
        (None, 0.08, lambda: 0.08),
        (None, 0.15, lambda: 0.15),
        (None, 0.5, lambda: 0.5),
        (1.5, 0.15, lambda: step_bound(512, 1)),
        (0.2, 0.15, lambda: 0.15),  # hopeless for prompts of 1,000 tokens, so no stream waits for them
    ],
)
def test_longest_gap_under_constant_long_prompts_is_bounded(  # R35
    ttft: float | None, tpot: float | None, bound: Callable[[], float], every: float
) -> None:
    policy = pacer(REAL, ttft=ttft, tpot=tpot)

    gap, finished = longest_gap(policy, every=every, ttft=ttft)

    assert gap <= bound() * (1 + 1e-9)
    # Prompts are not starved either: what the pace allows in a minute, or all but those on their way.
    slowest = 60 / max(step_bound(32, 1), 0.001) * 32 / PROMPT
    assert finished >= min(60 / every - 3, slowest * 0.9)


def test_pace_follows_what_was_learnt() -> None:
    cost = LinearCost(REAL)
    policy = Pacer(SIZING, cost=cost, tpot_target_seconds=0.15)
    assert policy.pace(decoding(5000)).prefill_tokens == 128

    for _ in range(20):
        shape = StepShape(128, 128 * 64, 8, 1, 0)
        cost.observe(shape, 3 * FixedCost(REAL).seconds(shape))

    assert policy.pace(decoding(5000)).prefill_tokens == 32
