"""What a run says, in numbers. Definitions are those of `vllm bench serve`. Imports no jax.

Of requests that finished: TTFT from arrival to the first token; E2E to the last; TPOT is (E2E - TTFT) / (tokens - 1),
0 for one token; ITL are the times between a request's messages, where tokens that came together are one. Goodput counts
finished requests within all limits, over the time from the first arrival to the last end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from jetserve.simulation.ideal import InfiniteCache, power_of_two_bucket
from jetserve.simulation.run import Outcome, Record, Run


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request has to meet to be good; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def are_met(self, ttft_ms: float, tpot_ms: float) -> bool:
        return (self.ttft_ms is None or ttft_ms <= self.ttft_ms) and (self.tpot_ms is None or tpot_ms <= self.tpot_ms)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many values; all 0 when there are none."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Report:
    """Every field is a key of the JSON. Times are simulated ones.

    Attributes:
      workload: its name, or the file of the trace.
      rate_requests_per_second: offered, later turns counted with the first ones; None when all came at once.
      requests: of the trace: the sum of finished, refused, shed, expired and unsent.
      goodput, goodput_tokens_per_second: requests within the limits, and their generated tokens, per second.
      good_share: of the requests that were sent.
      largest_gap_ms: between two messages of any request.
      hit_rate, ideal_hit_rate: prompt tokens found in the cache, of all; the ideal cache is infinite and exact.
      computed_prompt_tokens: prefilled, after preemptions again; ideal_computed_prompt_tokens: with the ideal cache.
      padded_share: of what prefill programs ran over; power_of_two_padded_share: were each prompt padded by itself.
      slots_mean, slots_max, pages_mean, pages_max: in use, pages that only the cache holds left out.
      evicted_pages: that left the cache, for host memory where there is some.
      host_saved_pages, host_loaded_pages: moved to host memory and back; the moves cost no simulated time.
      device_busy_share: of the duration.
      clipped_*: what max_length cut off the trace.
    """

    workload: str
    config: str
    cost: str
    seed: int
    rate_requests_per_second: float | None
    ttft_limit_ms: float | None
    tpot_limit_ms: float | None
    duration_seconds: float
    requests: int
    finished: int
    refused: int
    shed: int
    expired: int
    unsent: int
    goodput: float
    goodput_tokens_per_second: float
    good_share: float
    requests_per_second: float
    output_tokens_per_second: float
    input_tokens_per_second: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    queue_ms: Spread
    largest_gap_ms: float
    hit_rate: float
    ideal_hit_rate: float
    prompt_tokens: int
    computed_prompt_tokens: int
    ideal_computed_prompt_tokens: int
    output_tokens: int
    padded_share: float
    power_of_two_padded_share: float
    slots: int
    slots_mean: float
    slots_max: int
    pages: int
    pages_mean: float
    pages_max: int
    preemptions: int
    evicted_pages: int
    host_saved_pages: int
    host_loaded_pages: int
    steps: int
    device_busy_share: float
    clipped_prompts: int
    clipped_prompt_tokens: int
    clipped_outputs: int
    clipped_output_tokens: int

    def as_dict(self) -> dict[str, object]:
        """For JSON. Numbers have nine digits: more say nothing."""
        return asdict(self, dict_factory=_rounded)


def report(run: Run, limits: Limits, *, config: str, cost: str) -> Report:
    """Sums a run up.

    Args:
      config, cost: where they were read from, to be named in the report.
    """
    records = run.records
    finished = [record for record in records if record.outcome is Outcome.FINISHED]
    started = [records[at] for at in run.starts]
    ttft = [ttft_ms(record) for record in finished]
    tpot = [tpot_ms(record) for record in finished]
    gaps = [gap for record in finished for gap in (np.diff(record.message_seconds) * 1e3).tolist()]
    good = [record for record, *times in zip(finished, ttft, tpot, strict=True) if limits.are_met(*times)]
    prompt_tokens = sum(len(record.prompt_token_ids) for record in started)
    ideal = ideal_cached_tokens(started)
    output_tokens = sum(len(record.token_ids) for record in records)
    buckets = sum(power_of_two_bucket(len(record.prompt_token_ids)) for record in started)
    seconds, device = run.seconds, run.device
    counts = {outcome: sum(record.outcome is outcome for record in records) for outcome in Outcome}
    return Report(
        workload=run.trace.name,
        config=config,
        cost=cost,
        seed=run.setup.seed,
        rate_requests_per_second=run.trace.rate_requests_per_second,
        ttft_limit_ms=limits.ttft_ms,
        tpot_limit_ms=limits.tpot_ms,
        duration_seconds=seconds,
        requests=len(records),
        finished=counts[Outcome.FINISHED],
        refused=counts[Outcome.REFUSED],
        shed=counts[Outcome.SHED],
        expired=counts[Outcome.EXPIRED],
        unsent=counts[Outcome.UNSENT],
        goodput=_ratio(len(good), seconds),
        goodput_tokens_per_second=_ratio(sum(len(record.token_ids) for record in good), seconds),
        good_share=_ratio(len(good), len(records) - counts[Outcome.UNSENT]),
        requests_per_second=_ratio(len(finished), seconds),
        output_tokens_per_second=_ratio(output_tokens, seconds),
        input_tokens_per_second=_ratio(prompt_tokens, seconds),
        ttft_ms=spread(ttft),
        tpot_ms=spread(tpot),
        itl_ms=spread(gaps),
        e2e_ms=spread([(record.end_seconds - record.arrival_seconds) * 1e3 for record in finished]),
        queue_ms=spread([((record.scheduled_seconds or 0.0) - record.arrival_seconds) * 1e3 for record in finished]),
        largest_gap_ms=max(gaps, default=0.0),
        hit_rate=_ratio(sum(record.cached_tokens for record in started), prompt_tokens),
        ideal_hit_rate=_ratio(ideal, prompt_tokens),
        prompt_tokens=prompt_tokens,
        computed_prompt_tokens=device.prefill_tokens,
        ideal_computed_prompt_tokens=prompt_tokens - ideal,
        output_tokens=output_tokens,
        padded_share=_ratio(device.padded_tokens, device.padded_tokens + device.prefill_tokens),
        power_of_two_padded_share=_ratio(buckets - prompt_tokens, buckets),
        slots=run.slots.total,
        slots_mean=run.slots.mean(seconds),
        slots_max=run.slots.most,
        pages=run.pages.total,
        pages_mean=run.pages.mean(seconds),
        pages_max=run.pages.most,
        preemptions=run.status.preemptions,
        evicted_pages=run.status.evicted_pages,
        host_saved_pages=run.status.host_saved_pages,
        host_loaded_pages=run.status.host_loaded_pages,
        steps=device.steps,
        device_busy_share=_ratio(device.busy_seconds - max(0.0, device.done_seconds - run.end_seconds), seconds),
        **{f"clipped_{name}": number for name, number in run.clipped._asdict().items()},
    )


def ttft_ms(record: Record) -> float:
    """Of a request that finished."""
    return (record.message_seconds[0] - record.arrival_seconds) * 1e3


def tpot_ms(record: Record) -> float:
    """Of a request that finished."""
    seconds = record.message_seconds[-1] - record.message_seconds[0]
    return seconds * 1e3 / max(1, len(record.token_ids) - 1)


def ideal_cached_tokens(started: Sequence[Record]) -> int:
    """Prompt tokens that an infinite cache would have had, requests taken in the order in which they started.

    The last token of an answer is never written to a cache, so not even this one has it.
    """
    cache, found = InfiniteCache(), 0
    for record in started:
        found += cache.match(record.prompt_token_ids)
        cache.add((*record.prompt_token_ids, *record.token_ids[:-1]))
    return found


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles."""
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    points = np.percentile(values, (50, 90, 95, 99))
    return Spread(float(np.mean(values)), *(float(point) for point in points))


def _rounded(items: list[tuple[str, object]]) -> dict[str, object]:
    return {key: float(f"{value:.9g}") if isinstance(value, float) else value for key, value in items}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
