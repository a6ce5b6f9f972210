"""The scheduler alone: no device, no server. Imports no jax."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from jetserve.engine.engine import Engine
from jetserve.engine.fake import FreeExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.request import ModelLimits, Request, SamplingParams
from tests.bench.report import Figure, Measurement, spread

VOCAB_SIZE = 4096
_ANSWER_TOKENS = 192
_PAGE_SIZE = 128


def measure(slots: int, context_tokens: int, steps: int) -> Measurement:
    """Schedules and commits with every slot decoding, then with sequences that end and others that find their prompt.

    Args:
      context_tokens: of each prompt; half of it is shared with all others.
      steps: measured of each kind.
    """
    engine = _engine(slots, context_tokens)
    arrivals = _arrivals(context_tokens)
    for _ in range(slots):
        engine.add(next(arrivals))
    while (
        engine.status().waiting or engine.scheduler.rows.free_slots or len(engine.scheduler.rows.active.slots) < slots
    ):
        engine.step(0.0)
    decoding = [_step_seconds(engine) for _ in range(steps)]
    changing = []
    while len(changing) < steps:
        before = engine.status().running
        seconds = _step_seconds(engine)
        ended = before - engine.status().running
        if ended or engine.status().waiting:
            changing.append(seconds)
        for _ in range(ended):
            engine.add(next(arrivals))
    status = engine.status()
    figures = (
        spread("step, all rows decode", "us", decoding, 1e6),
        spread("step, rows end and begin", "us", changing, 1e6),
        Figure("prompt tokens found in the cache", "", status.cached_tokens / status.queried_tokens),
    )
    return Measurement("schedule", f"{slots} slots", f"prompts of {context_tokens} tokens", figures, "Python")


def _engine(slots: int, context_tokens: int) -> Engine:
    per_slot = -(-(context_tokens + _ANSWER_TOKENS) // _PAGE_SIZE)
    sizing = Sizing(
        slots=slots,
        max_length=context_tokens + _ANSWER_TOKENS,
        page_size=_PAGE_SIZE,
        pages=slots * (per_slot + 1) + 1,
        prefill_sizes=(8192,),
        prefill_rows=64,
        prefill_tokens=8192,
        generate_rows=(slots,),
        generate_steps=(1,),
    )
    return Engine(Scheduler(sizing), FreeExecutor(sizing, VOCAB_SIZE))


def _arrivals(context_tokens: int) -> Iterator[Request]:
    draw = random.Random(0)
    limits = ModelLimits(VOCAB_SIZE, context_tokens + _ANSWER_TOKENS, (), context_tokens)
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(context_tokens // 2)]
    while True:
        own = [draw.randrange(VOCAB_SIZE) for _ in range(context_tokens - len(shared))]
        params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0)
        yield Request.create([*shared, *own], params, limits, now=0.0)


def _step_seconds(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step(0.0)
    return time.perf_counter() - start
