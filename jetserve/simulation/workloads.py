"""Named workloads that stand for what people really serve: seeded, and their lengths as published. Imports no jax.

Sources, unless a workload says otherwise: Azure's are the LLM inference traces of 2023 (Azure/AzurePublicDataset), of
Mooncake its FAST'25 conversation trace (kvcache-ai/Mooncake); their quantiles were computed from the published files.
Where the source leaves something open, the choice is marked as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jetserve.errors import ConfigError
from jetserve.simulation.lengths import ClippedLogNormal, Lengths, LogNormal, Normal, Quantiles
from jetserve.simulation.trace import Piece, Span, Trace, TraceRequest

MOONCAKE_BLOCK = 512
Draw = Callable[[np.random.Generator, int], list[TraceRequest]]  # of so many requests, all arriving at second 0


@dataclass(frozen=True, slots=True)
class Workload:
    """One named kind of traffic.

    Attributes:
      draw: the requests, without their arrivals.
      rate_requests_per_second: the trace's own, unless the summary says that it is ours.
      burstiness: coefficient of variation of the time between two arrivals; 1 is Poisson, else gamma.
      requests: drawn when nobody says how many.
      ttft_limit_ms, tpot_limit_ms: that come with the workload.
    """

    name: str
    summary: str
    draw: Draw
    rate_requests_per_second: float
    burstiness: float = 1.0
    requests: int = 1000
    ttft_limit_ms: float | None = None
    tpot_limit_ms: float | None = None

    def generate(self, requests: int | None = None, seed: int = 0, rate: float | None = None) -> Trace:
        """Draws a trace.

        Args:
          rate: requests per second; the workload's own when None. The mean of what is drawn is exactly that.
        """
        rng = np.random.default_rng(seed)
        trace = Trace(self.name, tuple(self.draw(rng, requests or self.requests)))
        return _arrive(trace, rng, self.burstiness).at_rate(rate or self.rate_requests_per_second)


def named(name: str) -> Workload:
    """Raises: ConfigError naming the workloads there are."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _arrive(trace: Trace, rng: np.random.Generator, burstiness: float) -> Trace:
    """Gives every opening its time, at no particular rate yet."""
    openings = trace.openings
    shape = 1 / burstiness**2  # of a gamma distribution with that coefficient of variation
    gaps = rng.standard_gamma(shape, len(openings) - 1) / shape
    times = dict(zip(map(id, openings), [0.0, *np.cumsum(gaps).tolist()], strict=True))
    return Trace(trace.name, tuple(_at(request, times.get(id(request), 0.0)) for request in trace.requests))


def _at(request: TraceRequest, seconds: float) -> TraceRequest:
    return TraceRequest(seconds, request.prompt, request.output_tokens, request.session, request.think_seconds)


def _independent(prompt: Lengths, output: Lengths) -> Draw:
    """Prompts that share nothing, and lengths that do not depend on each other."""

    def draw(rng: np.random.Generator, count: int) -> list[TraceRequest]:
        lengths = zip(prompt.draw(rng, count).tolist(), output.draw(rng, count).tolist(), strict=True)
        return [TraceRequest(0.0, (Span(f"prompt/{at}", into),), out) for at, (into, out) in enumerate(lengths)]

    return draw


def _mooncake(rng: np.random.Generator, count: int) -> list[TraceRequest]:
    """All prompts begin with the same block, as those of the trace do. How they go on sharing is ours: some continue
    a request shortly before them, the longest of a few that are not longer, and then begin with its full blocks."""
    inputs, outputs = _MOONCAKE_PROMPT.draw(rng, count).tolist(), _MOONCAKE_OUTPUT.draw(rng, count).tolist()
    prompts: list[tuple[Span, ...]] = []
    for at, length in enumerate(inputs):
        begin: tuple[Span, ...] = (Span("system", min(length, MOONCAKE_BLOCK)),)
        recent = range(max(0, at - _MOONCAKE_RECENT), at)
        fitting = [one for one in recent if inputs[one] <= length]
        if rng.random() < _MOONCAKE_CONTINUES and fitting:
            some = rng.integers(len(fitting), size=_MOONCAKE_CHOICE).tolist()
            parent = max((fitting[one] for one in some), key=inputs.__getitem__)
            begin = _blocks(prompts[parent], inputs[parent] // MOONCAKE_BLOCK * MOONCAKE_BLOCK) or begin
        rest = length - sum(span.tokens for span in begin)
        prompts.append((*begin, Span(f"prompt/{at}", rest)) if rest else begin)
    return [TraceRequest(0.0, prompt, out) for prompt, out in zip(prompts, outputs, strict=True)]


def _blocks(prompt: tuple[Span, ...], tokens: int) -> tuple[Span, ...]:
    kept = []
    for span in prompt:
        length = min(span.tokens, tokens)
        if length:
            kept.append(Span(span.key, length))
        tokens -= length
    return tuple(kept)


def _shared_prefix(rng: np.random.Generator, count: int) -> list[TraceRequest]:
    """JetStream's prefix benchmark (benchmark_serving.py): prompts share a part of one text, the rest is their own."""
    shared = np.clip(np.rint(rng.normal(6000, 8000 / 3, count)), 0, 8000).astype(np.int64).tolist()
    requests = []
    for at, common in enumerate(shared):
        spans = (Span("text", common), Span(f"prompt/{at}", 8000 - common))
        requests.append(TraceRequest(0.0, tuple(span for span in spans if span.tokens), 50))
    return requests


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Conversations: a system prompt, then turns.

    Attributes:
      groups: so many system prompts, each shared by the sessions of a group.
      opening: what a session brings before its first turn; None for nothing.
      turns, question, output: of each session, and of each turn.
      think_seconds: mean of an exponential time between answer and next turn. Ours.
    """

    groups: int
    system_tokens: int
    opening: Lengths | None
    turns: Lengths
    question: Lengths
    output: Lengths
    think_seconds: float

    def __call__(self, rng: np.random.Generator, count: int) -> list[TraceRequest]:
        requests: list[TraceRequest] = []
        session = 0
        while len(requests) < count:
            turns = min(int(self.turns.draw(rng, 1)[0]), count - len(requests))
            questions, outputs = self.question.draw(rng, turns).tolist(), self.output.draw(rng, turns).tolist()
            thinks = (rng.standard_exponential(turns) * self.think_seconds).tolist()
            first: tuple[Piece, ...] = (Span(f"system/{session % self.groups}", self.system_tokens),)
            if self.opening is not None:
                first += (Span(f"opening/{session}", int(self.opening.draw(rng, 1)[0])),)
            for turn, (question, output, think) in enumerate(zip(questions, outputs, thinks, strict=True)):
                begin = () if turn else first
                prompt = (*begin, Span(f"question/{session}/{turn}", question))
                requests.append(TraceRequest(0.0, prompt, output, f"session-{session}", think if turn else 0.0))
            session += 1
        return requests


def _exactly(tokens: int) -> Lengths:
    return Normal(tokens, 0, tokens, tokens)


_MOONCAKE_PROMPT = Quantiles(
    ((0, 890), (0.1, 964), (0.5, 6909), (0.9, 27367), (0.95, 39550), (0.99, 85400), (1, 126195)), 12035
)
_MOONCAKE_OUTPUT = Quantiles(((0, 1), (0.5, 350), (0.9, 597), (0.99, 1119), (1, 2000)), 342.6)
_MOONCAKE_RECENT = 500
_MOONCAKE_CHOICE = 3
_MOONCAKE_CONTINUES = 0.775  # with it 37.4 % of the tokens are in whole blocks seen before, over 12,000 requests

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "azure-conversation",
            "Azure's chat requests: mean 1155 tokens in, 211 out",
            _independent(
                Quantiles(
                    ((0, 2), (0.1, 207), (0.5, 1020), (0.9, 2734), (0.95, 4083), (0.99, 4142), (1, 14050)), 1154.7
                ),
                Quantiles(((0, 7), (0.5, 129), (0.9, 424), (0.99, 601), (1, 1000)), 211.1),
            ),
            rate_requests_per_second=5.53,
            burstiness=1.09,
        ),
        Workload(
            "azure-code",
            "Azure's code completions, in bursts: mean 2048 tokens in, 28 out",
            _independent(
                Quantiles(
                    ((0, 3), (0.1, 147), (0.5, 1469), (0.9, 5188), (0.95, 7303), (0.99, 7436), (1, 7437)), 2047.8
                ),
                Quantiles(((0, 6), (0.5, 13), (0.9, 55), (0.99, 251), (1, 1899)), 27.9),
            ),
            rate_requests_per_second=2.57,
            burstiness=13.2,
        ),
        Workload(
            "mooncake-conversation",
            "long chats that share 37 % of their tokens: mean 12035 tokens in, 343 out",
            _mooncake,
            rate_requests_per_second=12031 / 3537,
        ),
        Workload(
            "sharegpt",
            "a stand-in for ShareGPT (means published, shape and rate ours): mean 230 tokens in, 203 out",
            _independent(ClippedLogNormal(60, 230, 4, 1024), ClippedLogNormal(130, 203, 4, 1024)),
            rate_requests_per_second=8.0,
        ),
        Workload(
            "shared-prefix",
            "JetStream's prefix benchmark: 8000 tokens, most of them of one text (rate ours), 50 out",
            _shared_prefix,
            rate_requests_per_second=2.0,
            requests=100,
        ),
        Workload(
            "multi-turn",
            "inference-perf's shared prefix with turns: 10 system prompts of 100 tokens, 50 in and 50 out, 10 turns "
            "(turns and rate ours)",
            _Sessions(10, 100, None, _exactly(10), _exactly(50), _exactly(50), think_seconds=1.0),
            rate_requests_per_second=10.0,
        ),
        Workload(
            "agentic",
            "inference-perf's conversation replay: 38 turns on a context that grows to 100 thousand tokens (rate ours)",
            _Sessions(
                1,
                8359,
                Normal(14_000, 15_000, 5_000, 45_000),
                Normal(38, 6, 25, 57),
                LogNormal(1652, 3000, 64, 24_000),
                LogNormal(585, 400, 62, 3600),
                think_seconds=2.0,
            ),
            rate_requests_per_second=2.0,
            requests=500,
        ),
        Workload(
            "mlperf-llama2-70b",
            "MLPerf Inference, Llama 2 70B server: OpenOrca, mean 294 tokens out (input lengths ours), at JetStream's "
            "14.5 requests/s, limits 2000 and 200 ms",
            _independent(ClippedLogNormal(190, 280, 4, 1023), ClippedLogNormal(225, 294.45, 3, 1023)),
            rate_requests_per_second=14.5,
            ttft_limit_ms=2000.0,
            tpot_limit_ms=200.0,
        ),
    )
}
