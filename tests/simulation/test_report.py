"""Every number of a report, worked out again another way."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest

from jetserve.engine.cost import StepTimes
from jetserve.simulation.report import Limits, Report, Spread, report, spread
from jetserve.simulation.run import Outcome, run
from jetserve.simulation.trace import Span, TraceRequest
from jetserve.simulation.workloads import named
from tests.simulation.conftest import make_setup, trace_of

SIZES = {"slots": 8, "max_length": 512, "page_size": 8, "pages": 257, "generate_rows": (2, 8)}
SIZES |= {"prefill_sizes": (8, 32), "prefill_tokens": 32, "prefill_rows": 4}
TIMES = StepTimes(
    step=0.001,
    prefill={8: 0.02, 32: 0.05},
    generate={(1, 2): 0.01, (1, 8): 0.02},
    prefill_position=1e-6,
    generate_position=1e-6,
)
LIMITS = Limits(ttft_ms=2000, tpot_ms=45)


@pytest.fixture(scope="module", params=[("multi-turn", 12.0), ("sharegpt", 2.5)])
def ran(request):
    name, rate = request.param
    made = make_setup(
        SIZES, host_seconds=0.001, seed=3, times=TIMES, max_waiting_requests=12, default_timeout_seconds=7.0
    )
    return run(named(name).generate(150, seed=5, rate=rate), made)


@pytest.fixture(scope="module")
def found(ran):
    return report(ran, LIMITS, config="c.yaml", cost="m.yaml")


def percentile(values, percent):
    """On the line between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_of(values):
    return pytest.approx((statistics.fmean(values), *(percentile(values, percent) for percent in (50, 90, 95, 99))))


def finished(ran):
    return [record for record in ran.records if record.outcome is Outcome.FINISHED]


def times(record):
    """TTFT, TPOT and E2E in seconds."""
    first, last = record.message_seconds[0], record.message_seconds[-1]
    tokens = len(record.token_ids)
    e2e = last - record.arrival_seconds
    ttft = first - record.arrival_seconds
    return ttft, (e2e - ttft) / (tokens - 1) if tokens > 1 else 0.0, e2e


def test_the_runs_hold_what_is_to_be_told_apart(ran, found):
    assert len(finished(ran)) > 20
    assert found.refused + found.expired > 0
    assert 0 < found.good_share < 1


def test_latencies(ran, found):
    ttft, tpot, e2e = zip(*map(times, finished(ran)), strict=True)
    assert dataclasses.astuple(found.ttft_ms) == spread_of([1e3 * value for value in ttft])
    assert dataclasses.astuple(found.tpot_ms) == spread_of([1e3 * value for value in tpot])
    assert dataclasses.astuple(found.e2e_ms) == spread_of([1e3 * value for value in e2e])
    gaps = [
        1e3 * (after - before)
        for record in finished(ran)
        for before, after in zip(record.message_seconds, record.message_seconds[1:], strict=False)
    ]
    assert dataclasses.astuple(found.itl_ms) == spread_of(gaps)
    assert found.largest_gap_ms == pytest.approx(max(gaps))
    waits = [1e3 * (record.scheduled_seconds - record.arrival_seconds) for record in finished(ran)]
    assert dataclasses.astuple(found.queue_ms) == spread_of(waits)


def test_goodput_and_throughput(ran, found):
    sent = [record for record in ran.records if record.outcome is not Outcome.UNSENT]
    seconds = max(record.end_seconds for record in sent) - min(record.arrival_seconds for record in sent)
    good = []
    for record in finished(ran):
        ttft, tpot, _ = times(record)
        if ttft * 1e3 <= LIMITS.ttft_ms and tpot * 1e3 <= LIMITS.tpot_ms:
            good.append(record)
    assert found.duration_seconds == pytest.approx(seconds)
    assert found.goodput == pytest.approx(len(good) / seconds)
    assert found.goodput_tokens_per_second == pytest.approx(sum(len(one.token_ids) for one in good) / seconds)
    assert found.good_share == pytest.approx(len(good) / len(sent))
    assert found.requests_per_second == pytest.approx(len(finished(ran)) / seconds)
    assert found.output_tokens == sum(len(one.token_ids) for one in ran.records)
    assert found.output_tokens_per_second == pytest.approx(found.output_tokens / seconds)
    started = [ran.records[at] for at in ran.starts]
    assert set(ran.starts) >= {at for at, one in enumerate(ran.records) if one.scheduled_seconds is not None}
    assert len(set(ran.starts)) == len(ran.starts)
    assert found.prompt_tokens == sum(len(one.prompt_token_ids) for one in started)
    assert found.input_tokens_per_second == pytest.approx(found.prompt_tokens / seconds)


def test_the_ideal_cache_is_a_trie_of_all_that_was_said(ran, found):
    trie = {}
    ideal = 0
    for at in ran.starts:
        record = ran.records[at]
        node, depth = trie, 0
        for token in record.prompt_token_ids[:-1]:
            if token not in node:
                break
            node, depth = node[token], depth + 1
        ideal += depth
        node = trie
        for token in (*record.prompt_token_ids, *record.token_ids[:-1]):
            node = node.setdefault(token, {})
    assert found.ideal_computed_prompt_tokens == found.prompt_tokens - ideal
    assert found.ideal_hit_rate == pytest.approx(ideal / found.prompt_tokens)


def test_prompt_tokens_are_computed_or_were_cached(ran, found):
    cached = sum(record.cached_tokens for record in ran.records)
    assert found.hit_rate == pytest.approx(cached / found.prompt_tokens)
    if not found.preemptions:  # those who expired may have computed a part only
        assert found.computed_prompt_tokens <= found.prompt_tokens - cached


def test_padding(ran, found):
    buckets = [16, 32, 64, 128, 256, 512]
    lengths = [len(ran.records[at].prompt_token_ids) for at in ran.starts]
    padded = [min(bucket for bucket in buckets if bucket >= length) for length in lengths]
    assert found.power_of_two_padded_share == pytest.approx(1 - sum(lengths) / sum(padded))
    assert 0 <= found.padded_share < 1
    # Whole programs were run: 8 or 32 tokens each.
    run_over = found.computed_prompt_tokens / (1 - found.padded_share)
    assert run_over == pytest.approx(round(run_over))
    assert round(run_over) % 8 == 0


def test_occupancy(found):
    assert (found.slots, found.pages) == (8, 256)
    assert 0 < found.slots_mean <= found.slots_max <= 8
    assert 0 < found.pages_mean <= found.pages_max <= 256
    assert 0 < found.device_busy_share <= 1


def test_the_inputs_are_named(found):
    assert (found.config, found.cost, found.seed) == ("c.yaml", "m.yaml", 3)
    assert found.rate_requests_per_second == pytest.approx({"multi-turn": 12, "sharegpt": 2.5}[found.workload])
    assert (found.ttft_limit_ms, found.tpot_limit_ms) == (2000, 45)


def test_the_json_has_every_field_with_nine_digits(found):
    told = json.loads(json.dumps(found.as_dict()))
    assert list(told) == [field.name for field in dataclasses.fields(Report)]
    assert list(told["ttft_ms"]) == ["mean", "p50", "p90", "p95", "p99"]
    assert told["goodput"] == pytest.approx(found.goodput, rel=1e-8)
    assert told["tpot_ms"]["p99"] == float(f"{found.tpot_ms.p99:.9g}")


def test_without_limits_every_finished_request_is_good(ran):
    found = report(ran, Limits(), config="c", cost="m")
    assert found.goodput == found.requests_per_second


def test_limits_count_what_just_meets_them():
    assert Limits(100, 10).are_met(100, 10)
    assert not Limits(100, 10).are_met(100.1, 10)
    assert not Limits(100, 10).are_met(100, 10.1)
    assert Limits(None, 10).are_met(1e9, 10)


def test_a_run_in_which_nothing_finished_is_reported_too():
    request = TraceRequest(1.0, (Span("a", 8),), 9, timeout_seconds=0.5)
    found = report(run(trace_of(request), make_setup()), Limits(), config="c", cost="m")
    assert (found.requests, found.finished, found.expired, found.goodput) == (1, 0, 1, 0.0)
    assert found.ttft_ms == Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    assert found.rate_requests_per_second is None


def test_spread_of_nothing_is_zero():
    assert spread([]) == Spread(0.0, 0.0, 0.0, 0.0, 0.0)
