"""How long a running stream waits for its next token, with the real scheduler on a simulated clock (R35)."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jetserve.engine.cost import LinearCost, StepTimes
from jetserve.engine.plan import StepShape
from jetserve.engine.sizing import Sizing
from jetserve.simulation.run import Outcome, run
from jetserve.simulation.trace import Span, TraceRequest
from tests.simulation.conftest import make_setup, trace_of

STREAMS, PROMPT, ANSWER = 8, 1000, 600
SIZES = (32, 128, 512)
SIZING = {
    "slots": 16, "max_length": 2048, "page_size": 16, "pages": 2000, "prefill_sizes": SIZES, "prefill_rows": 8,
    "prefill_tokens": 512, "generate_rows": (8, 16), "generate_steps": (1, 8),
}  # fmt: skip
TIMES = StepTimes(
    step=0.002,
    prefill={32: 0.02, 128: 0.06, 512: 0.22},
    generate={(1, 8): 0.02, (1, 16): 0.03, (8, 8): 0.15, (8, 16): 0.23},
    prefill_position=2e-8,
    generate_position=0.0,
)


def seconds(tokens: int, steps: int) -> float:
    """S(p, n) of pacing.py at its longest: all slots decode, and the tokens are the last ones of a long prompt."""
    size = next((size for size in (0, *SIZES) if size >= tokens), 0)
    return LinearCost(TIMES).seconds(StepShape(size, tokens * PROMPT, 16, steps, 0))


@pytest.mark.parametrize("every", [0.1, 0.4, 1.0, 3.0])
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({}, max(seconds(512, 1), seconds(0, 8))),
        ({"prefill_tokens": 128}, max(seconds(128, 1), seconds(0, 8))),
        ({"tpot_target_ms": 1.0}, seconds(32, 1)),
        ({"tpot_target_ms": 100.0}, 0.1),
        ({"tpot_target_ms": 1e9}, max(seconds(512, 1), seconds(0, 8))),
        ({"tpot_target_ms": 100.0, "ttft_target_ms": 1500.0}, seconds(512, 1)),
        ({"tpot_target_ms": 100.0, "ttft_target_ms": 1.0}, 0.1),
        ({"policy": "longest_prefix", "tpot_target_ms": 100.0, "ageing": 2}, 0.1),
    ],
)
def test_longest_gap_of_running_streams_is_bounded_while_long_prompts_keep_coming(
    settings: dict[str, object], bound: float, every: float
) -> None:
    """R35: streams wait for one chunk at most, and every prompt gets through."""
    streams = [TraceRequest(0.0, (Span(f"stream {at}", 16),), ANSWER) for at in range(STREAMS)]
    prompts = [TraceRequest(1.0 + every * at, (Span(f"prompt {at}", PROMPT),), 1) for at in range(30)]
    sizing = dataclasses.replace(Sizing(**SIZING), prefill_tokens=settings.get("prefill_tokens", 512))
    setup = make_setup(dataclasses.asdict(sizing), times=TIMES, **settings)

    done = run(trace_of(*streams, *prompts), setup)

    assert {record.outcome for record in done.records} == {Outcome.FINISHED}
    gaps = [two - one for record in done.records[:STREAMS] for one, two in itertools.pairwise(record.message_seconds)]
    assert max(gaps) <= bound * (1 + 1e-9)
