"""The simulated device keeps the contract of executors, and its own clock."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jetserve.engine.cost import LinearCost, StepTimes
from jetserve.engine.engine import Engine
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.plan import Admission, Chunk, Generate, StepPlan, StepShape
from jetserve.engine.scheduler import Scheduler
from jetserve.request import Request, SamplingParams
from jetserve.simulation.device import SimulatedClock, SimulatedExecutor
from jetserve.simulation.trace import VOCABULARY, draw_token_ids
from tests.simulation.conftest import TIMES, TINY

SEED = 99


def admission(slot=0, max_tokens=3, generated=0):
    return Admission(slot, SamplingParams(max_tokens=max_tokens, seed=SEED), (), SEED, 2, generated)


def prefill(slot=0, **more):
    return StepPlan(
        admissions=(admission(slot, **more),), chunks=(Chunk(slot, 0, (1, 2), True),), shape=StepShape(prefill_size=8)
    )


def decode(*slots):
    return StepPlan(generate=Generate(2, 1, slots), shape=StepShape(generate_rows=2, generate_steps=1))


def tokens_of(count):
    return draw_token_ids(np.uint64(SEED), np.arange(count)).tolist()


@pytest.fixture
def clock():
    return SimulatedClock()


def device(clock, times=TIMES, **more):
    return SimulatedExecutor(TINY, LinearCost(times), clock, **more)


def test_results_come_when_the_device_is_done(clock):
    executor = device(clock)
    first, second = executor.execute(prefill()), executor.execute(decode(0))
    assert clock() == 0.0  # nobody waited yet
    first.result()
    assert clock() == pytest.approx(1.0)
    second.result()
    assert clock() == pytest.approx(1.1)


def test_a_device_that_was_idle_starts_at_dispatch(clock):
    executor = device(clock)
    executor.execute(prefill()).result()
    clock.advance_to(5.0)
    executor.execute(decode(0)).result()
    assert clock() == pytest.approx(5.1)


def test_the_hosts_time_hides_behind_a_busy_device(clock):
    executor = device(clock, host_seconds=0.4)
    first, second = executor.execute(prefill()), executor.execute(decode(0))
    assert clock() == pytest.approx(0.8)
    first.result()
    assert clock() == pytest.approx(1.4)  # dispatched at 0.4
    second.result()
    assert clock() == pytest.approx(1.5)
    executor.execute(decode(0)).result()
    assert clock() == pytest.approx(2.0)  # now the device waits for the host


def test_the_clock_does_not_go_back(clock):
    clock.advance_to(2.0)
    clock.advance_to(1.0)
    assert clock() == 2.0


def test_tokens_depend_on_seed_and_place_alone(clock):
    executor = device(clock)
    first = executor.execute(prefill(slot=1)).result()
    assert first.first_tokens.tolist() == tokens_of(1)
    second = executor.execute(decode(1)).result()
    assert (second.tokens[0, 1], second.counts.tolist()) == (tokens_of(2)[1], [0, 1])
    # Taken up again elsewhere after two tokens, as after a preemption.
    again = executor.execute(prefill(slot=0, generated=2)).result()
    assert again.first_tokens.tolist() == tokens_of(3)[2:]


def test_a_row_ends_at_its_limit(clock):
    executor = device(clock)
    executor.execute(prefill(max_tokens=2))
    assert executor.execute(decode(0)).result().counts.tolist() == [1, 0]
    assert executor.execute(decode(0)).result().counts.tolist() == [0, 0]


def test_positions_cost_what_they_cost(clock):
    times = StepTimes(
        step=1.0, prefill={8: 2.0}, generate={(1, 2): 4.0}, prefill_position=0.01, generate_position=0.001
    )
    shape = StepShape(prefill_size=8, prefill_context=10, generate_rows=2, generate_steps=1, generate_context=100)
    executor = device(clock, times)
    executor.execute(StepPlan(chunks=(Chunk(0, 0, (1,), False),), shape=shape)).result()
    assert clock() == pytest.approx(1 + 2 + 4 + 0.1 + 0.1)


def test_what_was_prefilled_and_padded_is_counted(clock):
    executor = device(clock)
    executor.execute(prefill())
    executor.execute(decode(0))
    assert (executor.totals.steps, executor.totals.prefill_tokens, executor.totals.padded_tokens) == (2, 2, 6)
    assert executor.totals.busy_seconds == pytest.approx(1.1)


def test_it_answers_plans_as_the_fake_device_does():
    """The same requests through a scheduler on each: equal plans, equal tokens."""

    def run(make_executor):
        executor = make_executor()
        engine = Engine(Scheduler(TINY), executor, clock=SimulatedClock())
        rng = random.Random(4)
        sequences = []
        for at in range(12):
            prompt = tuple(rng.randrange(50) for _ in range(rng.randrange(1, 20)))
            params = SamplingParams(max_tokens=rng.randrange(1, 12), seed=at)
            sequences += engine.add(Request(str(at), prompt, params, (), 0.0))
            engine.step(0.0)
        while engine.has_work:
            engine.step(0.0)
        return [sequence.generated for sequence in sequences], engine.status()

    def next_token(tokens, admitted):
        place = len(tokens) - admitted.prompt_tokens
        return int(draw_token_ids(np.uint64(admitted.seed), np.array([place]))[0])

    simulated, status = run(lambda: device(SimulatedClock()))
    faked, faked_status = run(lambda: FakeExecutor(TINY, VOCABULARY, next_token=next_token))
    assert simulated == faked
    assert (status.steps, status.prefill_tokens) == (faked_status.steps, faked_status.prefill_tokens)
