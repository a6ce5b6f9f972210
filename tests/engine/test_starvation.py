"""Nobody waits for ever: one request of the lowest rank against a flood that never ends."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings

from jetserve.config import SchedulerSettings
from jetserve.engine.engine import Engine
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.request import Request, SamplingParams
from tests.engine.test_engine import LIMITS, SIZING, SYSTEM, VOCAB

sizings = st.builds(
    lambda slots, **sizes: replace(
        SIZING, slots=slots, generate_rows=tuple(rows for rows in (1, 2, 4) if rows <= slots), **sizes
    ),
    slots=st.sampled_from([1, 2, 4]),
    pages=st.sampled_from([11, 12, 14, 20, 41]),
    host_blocks=st.sampled_from([0, 2, 6]),
    prefill_rows=st.integers(1, 3),
    generate_steps=st.sampled_from([(1,), (1, 3), (2, 4)]),
)
schedulings = st.builds(
    SchedulerSettings,
    ageing=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "longest_prefix"]),
    tpot_target_ms=st.sampled_from([None, 1e-9]),
    ttft_target_ms=st.sampled_from([None, 1.0]),
)


@given(sizings, schedulings, st.booleans(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_lowest_rank_ends_although_others_never_stop_coming(
    sizing: Sizing, scheduling: SchedulerSettings, shares: bool, seed: int
) -> None:
    """A long prompt of the lowest priority, in a pool that hardly holds it, while eight more urgent ones wait."""
    chance, numbers = random.Random(seed), itertools.count()
    clock = map(float, itertools.count()).__next__
    on = Engine(Scheduler(sizing, scheduling), FakeExecutor(sizing, VOCAB), clock=clock)

    def ask(shared: int, own: int, max_tokens: int, priority: int) -> Request:
        prompt = (*SYSTEM[:shared], *(chance.randrange(VOCAB) for _ in range(own)))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        name = str(next(numbers))
        return Request.create(prompt, params, LIMITS, request_id=name, priority=priority, now=0.0)

    def flood(waiting: int) -> None:
        while on.status().waiting < waiting:
            on.add(ask(chance.choice((0, 4, 8, 20)), chance.randrange(1, 12), chance.randrange(1, 8), -5))

    flood(6)
    patient = ask(20 if shares else 0, 10 if shares else 30, 6, 5)
    on.add(patient)
    most = 100 + 40 * scheduling.ageing  # the worst of 1,500 took 47 steps with ageing=1, 170 with 8
    for _ in range(most):
        flood(8)
        if any(update.sequence.request is patient and update.finish_reason for update in on.step(0.0)):
            return
    raise AssertionError(f"still waiting after {most} steps: {on.status()}")
