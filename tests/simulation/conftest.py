"""A tiny engine whose times can be added up by hand."""

from __future__ import annotations

import dataclasses

from jetserve.config import SchedulerSettings
from jetserve.engine.cost import StepTimes
from jetserve.engine.sizing import Sizing
from jetserve.simulation.run import Setup
from jetserve.simulation.trace import Trace, TraceRequest

PREFILL_SECONDS = 1.0
GENERATE_SECONDS = 0.1
TINY = Sizing(
    slots=2, max_length=64, page_size=4, pages=65, prefill_sizes=(8,), prefill_rows=2, prefill_tokens=8,
    generate_rows=(2,), generate_steps=(1,),
)  # fmt: skip
TIMES = StepTimes(
    step=0.0,
    prefill={8: PREFILL_SECONDS},
    generate={(1, 2): GENERATE_SECONDS},
    prefill_position=0.0,
    generate_position=0.0,
)


def make_setup(sizing=None, host_seconds=0.0, seed=0, times=TIMES, **settings) -> Setup:
    """Settings of the scheduler by name, sizes in `sizing`, and what else a Setup has."""
    sizes = dataclasses.replace(TINY, **(sizing or {}))
    return Setup(sizes, SchedulerSettings(**settings), times, host_seconds, seed)


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("test", requests)
