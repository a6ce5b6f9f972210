"""Named workloads look like what they stand for."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from jetserve.errors import ConfigError
from jetserve.simulation import workloads
from jetserve.simulation.trace import Span, span_token_ids
from jetserve.simulation.workloads import WORKLOADS, named

NAMES = [
    "azure-conversation", "azure-code", "mooncake-conversation", "sharegpt", "shared-prefix", "multi-turn", "agentic",
    "mlperf-llama2-70b",
]  # fmt: skip
# Mean, {percentile: length} as published, of prompts and answers; and how far the largest of them is reached.
PUBLISHED = {
    "azure-conversation": (
        (1154.7, {10: 207, 50: 1020, 90: 2734, 95: 4083, 99: 4142, 100: 14050}),
        (211.1, {50: 129, 90: 424, 99: 601, 100: 1000}),
    ),
    "azure-code": (
        (2047.8, {10: 147, 50: 1469, 90: 5188, 95: 7303, 99: 7436, 100: 7437}),
        (27.9, {50: 13, 90: 55, 99: 251, 100: 1899}),
    ),
    "mooncake-conversation": (
        (12035, {10: 964, 50: 6909, 90: 27367, 95: 39550, 99: 85400, 100: 126195}),
        (342.6, {50: 350, 90: 597, 99: 1119, 100: 2000}),
    ),
    "sharegpt": ((230, {50: 60}), (203, {50: 130})),
    "mlperf-llama2-70b": ((280, {}), (294.45, {})),
}


def test_all_names_are_there():
    assert list(WORKLOADS) == NAMES


def test_an_unknown_name_is_answered_with_the_list():
    with pytest.raises(ConfigError, match=f"no workload 'azure'; there are {', '.join(NAMES)}"):
        named("azure")


@pytest.mark.parametrize("name", PUBLISHED)
def test_lengths_have_the_published_quantiles(name):
    trace = named(name).generate(20_000, seed=3)
    lengths = (
        [request.prompt_tokens for request in trace.requests],
        [request.output_tokens for request in trace.requests],
    )
    for values, (mean, quantiles) in zip(lengths, PUBLISHED[name], strict=True):
        assert np.mean(values) == pytest.approx(mean, rel=0.05)
        for percentile, length in quantiles.items():
            assert np.percentile(values, percentile) == pytest.approx(length, rel=0.05), percentile
        assert max(values) <= max(quantiles.values(), default=1024) or 100 not in quantiles


@pytest.mark.parametrize("name", ["azure-conversation", "azure-code", "mooncake-conversation"])
def test_prompt_and_answer_lengths_are_independent(name):
    requests = named(name).generate(20_000, seed=1).requests
    found = np.corrcoef([(request.prompt_tokens, request.output_tokens) for request in requests], rowvar=False)
    assert abs(found[0, 1]) < 0.03


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_is_the_workloads_own_or_the_one_asked_for(name):
    workload = named(name)
    assert workload.generate(200).rate_requests_per_second == pytest.approx(workload.rate_requests_per_second)
    assert workload.generate(200, rate=3.5).rate_requests_per_second == pytest.approx(3.5)


@pytest.mark.parametrize(("name", "variation"), [("azure-conversation", 1.09), ("azure-code", 13.2), ("sharegpt", 1.0)])
def test_arrivals_are_as_bursty_as_published(name, variation):
    arrivals = [request.arrival_seconds for request in named(name).generate(60_000, seed=5).requests]
    gaps = np.diff(arrivals)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.12)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_draws_the_same_trace_again_and_another_one_does_not(name):
    workload = named(name)
    assert workload.generate(60, seed=7) == workload.generate(60, seed=7)
    assert workload.generate(60, seed=7) != workload.generate(60, seed=8)


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_has_as_many_requests_as_asked_for(name):
    assert len(named(name).generate(57).requests) == 57
    assert len(named(name).generate(1).requests) == 1


def shared_in_blocks(trace, block=workloads.MOONCAKE_BLOCK):
    """Share of the prompt tokens in whole leading blocks that an earlier prompt had, told by their tokens."""
    seen, found, total = set(), 0, 0
    for request in trace.requests:
        ids = np.concatenate([span_token_ids(span) for span in request.prompt])
        total += len(ids)
        digest, is_hit = hashlib.blake2b(digest_size=8), True
        for at in range(len(ids) // block):
            digest.update(ids[at * block : (at + 1) * block].tobytes())
            name = digest.digest()
            is_hit = is_hit and name in seen
            found += block * is_hit
            seen.add(name)
    return found / total


@pytest.mark.parametrize("seed", [0, 1])
def test_mooncake_prompts_share_as_much_as_the_trace(seed):
    assert shared_in_blocks(named("mooncake-conversation").generate(3000, seed)) == pytest.approx(0.374, abs=0.02)


def test_shared_prefix_is_jetstreams_benchmark():
    requests = named("shared-prefix").generate(2000).requests
    shared = [sum(span.tokens for span in request.prompt if span.key == "text") for request in requests]
    assert {request.prompt_tokens for request in requests} == {8000}
    assert {request.output_tokens for request in requests} == {50}
    # Normal(6000, 8000/3), clipped to [0, 8000]: a bit more than a fifth is above the clip.
    assert np.mean([tokens == 8000 for tokens in shared]) == pytest.approx(0.227, abs=0.03)
    assert np.median(shared) == pytest.approx(6000, rel=0.05)


def test_multi_turn_sessions_share_a_system_prompt_within_their_group():
    requests = named("multi-turn").generate(400).requests
    first = requests[:10]
    assert {request.session for request in first} == {"session-0"}
    assert first[0].prompt == (Span("system/0", 100), Span("question/0/0", 50))
    assert [request.prompt for request in first[1:3]] == [(Span("question/0/1", 50),), (Span("question/0/2", 50),)]
    systems = [request.prompt[0].key for request in requests if len(request.prompt) == 2]
    assert systems == [f"system/{session % 10}" for session in range(40)]


def test_agentic_sessions_are_as_described():
    requests = named("agentic").generate(20_000, seed=2).requests
    openings = [request for request in requests if len(request.prompt) == 3]
    begun = [request.prompt[1].tokens for request in openings]
    assert {request.prompt[0] for request in openings} == {Span("system/0", 8359)}
    assert (min(begun), max(begun)) == (5000, 45_000)
    assert len(requests) / len(openings) == pytest.approx(38, rel=0.03)
    questions = [request.prompt[-1].tokens for request in requests]
    assert min(questions) >= 64
    assert max(questions) <= 24_000
    answers = [request.output_tokens for request in requests]
    assert (min(answers), max(answers)) == (62, 3600)
    assert np.mean(answers) == pytest.approx(585, rel=0.02)


def test_mlperf_brings_its_limits():
    workload = named("mlperf-llama2-70b")
    assert (workload.ttft_limit_ms, workload.tpot_limit_ms) == (2000, 200)
    assert workload.rate_requests_per_second == 14.5
