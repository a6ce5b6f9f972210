"""The decoder stack against transformers' float32 logits, and its own invariants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.typing import NDArray

from jetserve.models import hugging_face, transformer
from jetserve.models.random_init import random_weights
from jetserve.models.spec import ModelConfig, parameter_table
from jetserve.models.transformer import Attend, LayerInfo, Weights

LLAMAS = [
    "llama-mha-untied",
    "llama-gqa2-tied",
    "llama-gqa4-wide-heads",
    "llama-rope-default",
    "llama-rope-llama3",
    "llama-rope-llama3-factor16-tied",
    "llama-rope-linear",
    "llama-rope-linear-new",
    "llama-rope-dynamic",
    "llama-rope-yarn",
    "llama-rope-yarn-tuned",
    "llama-rope-yarn-attention-factor",
    "llama-biases",
]
GEMMAS = [
    "gemma3-gqa2",
    "gemma3-mha",
    "gemma3-gqa4-linear",
    "gemma3-logits-softcap",
    "gemma3-layer-types",
    "gemma3-rope-parameters",
    "gemma3-untied-bias",
    "gemma3-window-only",
    "gemma3-default-pattern",
]
LENGTH = 64
Cache = tuple[Array, Array]


def attend_dense(config: ModelConfig) -> Attend[Cache]:
    """Attention of one sequence over a cache [L, LENGTH, K, H] of all positions, plainly written."""

    def bind(positions: Array) -> Attend[Cache]:
        def attend(layer: LayerInfo, q: Array, k: Array, v: Array, cache: Cache) -> tuple[Array, Cache]:
            keys, values = (c.at[layer.index, positions].set(new) for c, new in zip(cache, (k, v), strict=True))
            groups = q.shape[1] // k.shape[1]
            k_all, v_all = (jnp.repeat(c[layer.index], groups, axis=1) for c in (keys, values))
            scores = jnp.einsum("tnh,snh->nts", q, k_all, precision="highest") * config.attention_scale
            if config.attention_softcap is not None:
                scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
            distance = positions[:, None] - jnp.arange(LENGTH)[None, :]
            seen = (distance >= 0) & ((layer.window == 0) | (distance < layer.window))
            weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
            return jnp.einsum("nts,snh->tnh", weights, v_all, precision="highest"), (keys, values)

        return attend

    return bind


def run(
    config: ModelConfig, weights: Weights[Array], tokens: NDArray[np.int32], chunks: list[int]
) -> NDArray[np.float32]:
    """Logits of all tokens, run in chunks of the given sizes on one cache."""
    first = weights.layers if isinstance(weights.layers, Mapping) else weights.layers[0]
    num_kv_heads = first["k_proj"].shape[-2] // config.head_dim
    empty = jnp.zeros((config.num_layers, LENGTH, num_kv_heads, config.head_dim))
    bind = attend_dense(config)

    # Nothing here runs long enough to repay an optimising compilation.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True})
    def step(weights: Weights[Array], tokens: Array, positions: Array, cache: Cache) -> tuple[Array, Cache]:
        hidden, cache = transformer.forward(config, weights, tokens, positions, bind(positions), cache)
        return transformer.logits(config, weights, hidden), cache

    out, cache, at = [], (empty, empty), 0
    for size in chunks:
        positions = np.arange(at, at + size, dtype=np.int32)
        logits, cache = step(weights, tokens[at : at + size], positions, cache)
        out.append(np.asarray(logits))
        at += size
    return np.concatenate(out)


def golden_weights(tiny: ModuleType, name: str, config: ModelConfig, *, stacked: bool) -> Weights[Array]:
    """The case's weights, put in place by the Hugging Face names."""
    table, names = parameter_table(config), hugging_face.weight_names(config)
    model = {ours: jnp.asarray(tiny.weight(name, names.model[ours], spec.shape)) for ours, spec in table.model.items()}
    layers = tuple(
        {
            ours: jnp.asarray(tiny.weight(name, names.layer[ours].format(layer=layer), spec.shape))
            for ours, spec in table.layer.items()
        }
        for layer in range(config.num_layers)
    )
    if not stacked:
        return Weights(model=model, layers=layers)
    return Weights(model=model, layers={ours: jnp.stack([layer[ours] for layer in layers]) for ours in table.layer})


def test_every_golden_is_tested(tiny: ModuleType) -> None:
    assert sorted(tiny.CASES) == sorted(LLAMAS + GEMMAS)


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
@pytest.mark.parametrize("name", LLAMAS + GEMMAS)
def test_logits_equal_transformers(
    tiny: ModuleType, golden_logits: dict[str, NDArray[np.float32]], name: str, stacked: bool
) -> None:
    """The prompt at once, then token by token: both within 1e-4."""
    case = tiny.CASES[name]
    config = hugging_face.read_config(tiny.config_json(case))
    weights = golden_weights(tiny, name, config, stacked=stacked)

    logits = run(config, weights, tiny.tokens(name), [case.prompt] + [1] * case.steps)

    expected = np.concatenate([golden_logits[f"{name}/prefill"], golden_logits[f"{name}/decode"]])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
