"""The bench itself: what it counts is right, and it runs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.models import random_init, transformer
from jetserve.models.spec import Family, ModelConfig
from tests.bench import bound, report
from tests.bench.load import drive
from tests.bench.workloads import HOST_WORKLOADS, MODEL_WORKLOADS, QUICK, Workload
from tests.links import ROOT

TINY = ModelConfig(
    family=Family.LLAMA,
    vocab_size=32,
    num_layers=3,
    embed_dim=16,
    mlp_dim=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    attention_scale=8**-0.5,
    windows=(0, 3, 0),
    attention_softcap=20.0,
)


@pytest.mark.parametrize("workload", [*MODEL_WORKLOADS, *HOST_WORKLOADS, QUICK], ids=lambda workload: workload.name)
def test_prompts_are_fixed_by_the_seed_and_share_nothing(workload: Workload) -> None:
    prompts = workload.prompts(1000)

    assert prompts == workload.prompts(1000)
    assert len(prompts) == workload.requests
    assert {len(prompt) for prompt in prompts} == {workload.prompt_tokens}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == workload.requests


def test_every_workload_has_a_name_of_its_own() -> None:
    names = [workload.name for workload in (*MODEL_WORKLOADS, *HOST_WORKLOADS, QUICK)]

    assert len(set(names)) == len(names)


def test_all_tokens_messages_and_gaps_are_counted() -> None:
    async def stream(prompt: list[int]) -> AsyncIterator[int]:
        for tokens in (1, 3, 0, 4):
            await asyncio.sleep(0)
            yield tokens

    seen = asyncio.run(drive(stream, Workload("w", 1, 4, 8, concurrency=3, rounds=2), vocab_size=50))

    assert (seen.tokens, seen.messages) == (48, 24)
    assert len(seen.first_token) == 6
    assert len(seen.inter_token) == 6 * 7


def test_a_stream_that_lost_a_token_is_no_measurement() -> None:
    async def stream(prompt: list[int]) -> AsyncIterator[int]:
        yield 7

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(drive(stream, Workload("w", 1, 4, 8, concurrency=1, rounds=1), vocab_size=50))

    assert "brought 7 tokens, expected 8" in str(caught.value.exceptions[0])


def test_a_spread_has_the_percentiles() -> None:
    figure = report.spread("step", "ms", [value / 1000 for value in range(101)], 1e3)

    assert (figure.median, figure.p90, figure.p99) == pytest.approx((50, 90, 99))


def test_the_bare_loop_computes_what_the_model_does() -> None:
    weights = random_init.random_weights(TINY, jnp.float32, 0, stacked=False)
    tokens, steps = jnp.array([5, 9], jnp.int32), 6
    shape = (2, 16, TINY.num_kv_heads, TINY.head_dim)
    cache: bound.Cache = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(TINY.num_layers))
    step = jax.jit(partial(bound._step, TINY))
    rows = [np.asarray(tokens)]
    for position in range(steps):
        tokens, cache = step(weights, tokens, position, cache)
        rows.append(np.asarray(tokens))

    for row, fed in enumerate(np.stack(rows, axis=1)):
        assert _greedy(weights, fed[:-1]) == fed[1:].tolist(), f"row {row}"


def _greedy(weights: transformer.Weights, fed: np.ndarray) -> list[int]:
    """The next token after each position, by a whole forward pass with an explicit mask."""
    ages = np.arange(len(fed))[:, None] - np.arange(len(fed))

    def attend(info, q, k, v, carry):
        k, v = (jnp.repeat(x, TINY.num_heads // TINY.num_kv_heads, axis=1) for x in (k, v))
        scores = jnp.einsum("tnh,snh->nts", q, k) * TINY.attention_scale
        scores = TINY.attention_softcap * jnp.tanh(scores / TINY.attention_softcap)
        seen = (ages >= 0) & ((info.window == 0) | (ages < info.window))
        weights = jnp.exp(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v), carry

    @jax.jit
    def run(tokens):
        hidden, _ = transformer.forward(TINY, weights, tokens, jnp.arange(len(fed)), attend, None)
        return transformer.logits(TINY, weights, hidden)

    return np.asarray(run(jnp.asarray(fed))).argmax(-1).tolist()


@pytest.mark.slow
def test_the_host_bench_runs(tmp_path: Path) -> None:
    file = tmp_path / "host.json"

    subprocess.run(
        [sys.executable, "-m", "tests.bench", "host", "--quick", "--json", str(file)],
        cwd=ROOT, check=True, capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip

    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["machine"]["cores"]
    assert [one["workload"] for one in written["measurements"]] == ["quick", "quick-1ms"]
    assert all(figure["median"] >= 0 for one in written["measurements"] for figure in one["figures"])
