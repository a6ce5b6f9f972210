"""The tiny models of the goldens: config.json of each, and weights and tokens that anyone can draw again.

Shared by make.py (which runs them in transformers) and by the tests (which run them here). NumPy only.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VOCAB = 61


class Case(NamedTuple):
    """One tiny model, run on `prompt` tokens at once and then on `steps` more, one by one."""

    config: dict[str, object]
    prompt: int = 20
    steps: int = 8


def _llama(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | changes


def _gemma(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    } | changes


CASES: dict[str, Case] = {
    "llama-mha-untied": Case(_llama(num_key_value_heads=4)),
    "llama-gqa2-tied": Case(_llama(tie_word_embeddings=True, rope_theta=500000.0)),
    "llama-gqa4-wide-heads": Case(_llama(num_key_value_heads=1, head_dim=16, rope_scaling=None)),
    "llama-rope-default": Case(_llama(rope_scaling={"rope_type": "default"})),
    "llama-rope-llama3": Case(
        _llama(
            head_dim=16,
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        prompt=40,
    ),
    "llama-rope-llama3-factor16-tied": Case(
        _llama(
            tie_word_embeddings=True,
            num_key_value_heads=1,
            head_dim=16,
            rope_scaling={
                "type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        ),
        prompt=40,
    ),
    "llama-rope-linear": Case(_llama(rope_scaling={"type": "linear", "factor": 4.0})),
    "llama-rope-linear-new": Case(
        _llama(rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 7000.0})
    ),
    # 12 tokens at once, then one by one past max_position_embeddings=16, from where the base grows.
    "llama-rope-dynamic": Case(
        _llama(max_position_embeddings=16, rope_scaling={"type": "dynamic", "factor": 2.0}), prompt=12, steps=16
    ),
    "llama-rope-yarn": Case(
        _llama(
            head_dim=16,
            max_position_embeddings=64,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        prompt=40,
    ),
    "llama-rope-yarn-tuned": Case(
        _llama(
            head_dim=16,
            rope_scaling={
                "type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        ),
        prompt=40,
    ),
    "llama-rope-yarn-attention-factor": Case(
        _llama(rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8})
    ),
    "llama-biases": Case(_llama(attention_bias=True, mlp_bias=True)),
    "gemma3-gqa2": Case(_gemma(num_hidden_layers=4)),
    "gemma3-mha": Case(_gemma(num_key_value_heads=4)),
    "gemma3-gqa4-linear": Case(_gemma(num_key_value_heads=1, rope_scaling={"rope_type": "linear", "factor": 8.0})),
    "gemma3-logits-softcap": Case(_gemma(final_logit_softcapping=2.0, query_pre_attn_scalar=40)),
    "gemma3-layer-types": Case(
        _gemma(
            num_hidden_layers=3,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=16,
        ),
        prompt=12,
        steps=16,
    ),
    "gemma3-rope-parameters": Case(
        _gemma(
            rope_theta=None,
            rope_local_base_freq=None,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 200000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        )
    ),
    "gemma3-untied-bias": Case(_gemma(tie_word_embeddings=False, attention_bias=True)),
    "gemma3-window-only": Case(_gemma(sliding_window_pattern=6, sliding_window=2)),
    "gemma3-default-pattern": Case(_gemma(num_hidden_layers=7, sliding_window_pattern=None, sliding_window=5)),
}

# Rope settings as published, at their real sizes; only frequencies are compared.
ROPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": _llama(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    ),
    "llama-3.2-1b": _llama(
        hidden_size=2048,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    ),
    "yarn-llama-2-7b-64k": _llama(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=65536,
        rope_scaling={"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    ),
    "linear-16k": _llama(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=4096,
        rope_scaling={"factor": 4.0, "type": "linear"},
    ),
    "partial-rotary": _llama(
        hidden_size=2048,
        num_attention_heads=16,
        rope_theta=123456.0,
        partial_rotary_factor=0.25,
        rope_scaling={"factor": 2.0, "rope_type": "linear"},
    ),
}


def config_json(case: Case) -> dict[str, object]:
    """config.json of a case: keys set to None were left out."""
    return {key: value for key, value in case.config.items() if value is not None or key == "rope_scaling"}


def tokens(name: str) -> NDArray[np.int32]:
    """i32[prompt + steps]."""
    case = CASES[name]
    return (_bits(f"{name}/tokens", case.prompt + case.steps) % np.uint64(VOCAB)).astype(np.int32)


def weight(case: str, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The parameter that Hugging Face calls `name`.

    Matrices are uniform with variance 1/in, so that logits are of order one; norms and biases are away from their
    neutral values, so that leaving one out shows.
    """
    unit = (_bits(f"{case}/{name}", int(np.prod(shape))) >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    values = unit.reshape(shape)
    if name.endswith("norm.weight"):
        neutral = 0.0 if case.startswith("gemma3") else 1.0
        values = neutral + 0.4 * values
    elif len(shape) == 1:
        values = 0.4 * values
    else:
        values = values * np.sqrt(3.0 / shape[-1])
    return values.astype(np.float32)


def _bits(name: str, count: int) -> NDArray[np.uint64]:
    # Raw bits of PCG64, which NumPy promises to keep; its distributions it does not.
    return np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
