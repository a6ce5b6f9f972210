"""GGUF metadata: defaults as llama.cpp has them, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from jetserve.errors import CheckpointError
from jetserve.gguf_header import GgufHeader, GgufValue, TensorInfo
from jetserve.models.gguf_config import read_config
from jetserve.models.spec import ModelConfig, RopeScaling

PATH = Path("model.gguf")
LLAMA: dict[str, GgufValue] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 2048,
    "llama.feed_forward_length": 8192,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
}
GEMMA: dict[str, GgufValue] = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 8,
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1000000.0,
}


def config(
    base: dict[str, GgufValue], divisors: NDArray[np.float32] | None = None, **changes: GgufValue | None
) -> ModelConfig:
    """Reads `base` with changes; "__" in a keyword is a dot, None takes a key away."""
    metadata = base | {key.replace("__", "."): value for key, value in changes.items() if value is not None}
    for key, value in changes.items():
        if value is None:
            del metadata[key.replace("__", ".")]
    header = GgufHeader(metadata, {"token_embd.weight": TensorInfo((1000, 64), 0, 0)}, 0)
    return read_config(PATH, header, divisors)


def llama3_divisors(theta: float, head_dim: int, factor: float, original: int = 8192) -> NDArray[np.float32]:
    """As conversion/llama.py of llama.cpp writes them, frequency by frequency."""
    found = []
    for i in range(0, head_dim, 2):
        wave_length = 2 * math.pi * theta ** (i / head_dim)
        if wave_length < original / 4:
            found.append(1.0)
        elif wave_length > original:
            found.append(factor)
        else:
            smooth = (original / wave_length - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_llama_takes_its_shapes_and_llama_cpp_s_defaults() -> None:
    got = config(LLAMA)
    assert (got.vocab_size, got.num_layers, got.embed_dim, got.mlp_dim) == (1000, 2, 2048, 8192)
    assert (got.num_heads, got.num_kv_heads, got.head_dim, got.max_position) == (32, 8, 64, 4096)
    assert (got.rms_norm_eps, got.rope_theta, got.attention_scale) == (1e-5, 10000.0, 0.125)
    assert (got.windows, got.rope_scaling, got.tied_head, got.name) == ((0, 0), None, True, "model")
    assert (got.norm_offset, got.qk_norm, got.post_norms, got.embed_scale) == (0.0, False, False, 1.0)


def test_kv_heads_are_the_query_heads_where_they_are_not_given() -> None:
    assert config(LLAMA, llama__attention__head_count_kv=None).num_kv_heads == 32


def test_head_dim_may_differ_from_embedding_over_heads() -> None:
    got = config(LLAMA, llama__attention__key_length=128, llama__attention__value_length=128)
    assert (got.head_dim, got.attention_scale) == (128, 128**-0.5)


def test_gemma3_is_local_but_for_every_sixth_layer() -> None:
    got = config(GEMMA)
    assert got.windows == (512, 512, 512, 512, 512, 0, 512, 512)
    assert (got.rope_theta, got.local_rope_theta) == (1e6, 1e4)
    assert (got.attention_scale, got.embed_scale, got.rms_norm_eps) == (1 / 16, math.sqrt(640), 1e-6)
    assert (got.norm_offset, got.qk_norm, got.post_norms, got.activation) == (1.0, True, True, "gelu_tanh")
    assert (got.logits_softcap, got.attention_softcap) == (None, None)


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (2, (512, 0, 512, 0, 512, 0, 512, 0)),
        ([True, True, False, False, True, True, True, False], (512, 512, 0, 0, 512, 512, 512, 0)),
    ],
)
def test_gemma3_s_pattern_can_be_given(pattern: GgufValue, windows: tuple[int, ...]) -> None:
    assert config(GEMMA, gemma3__attention__sliding_window_pattern=pattern).windows == windows


def test_gemma3_without_a_window_sees_everything() -> None:
    assert config(GEMMA, gemma3__attention__sliding_window=None).windows == (0,) * 8


def test_gemma3_27b_scales_attention_by_embedding_over_heads() -> None:
    got = config(
        GEMMA,
        gemma3__block_count=62,
        gemma3__embedding_length=5376,
        gemma3__attention__head_count=32,
        gemma3__attention__head_count_kv=16,
        gemma3__attention__key_length=128,
        gemma3__attention__value_length=128,
    )
    assert got.attention_scale == 168**-0.5


def test_gemma3_s_optional_keys_are_honoured() -> None:
    got = config(
        GEMMA,
        gemma3__attention__scale=0.25,
        gemma3__final_logit_softcapping=30.0,
        gemma3__rope__freq_base_swa=5000.0,
        gemma3__rope__scaling__type="linear",
        gemma3__rope__scaling__factor=8.0,
    )
    assert (got.attention_scale, got.logits_softcap, got.local_rope_theta) == (0.25, 30.0, 5000.0)
    assert got.rope_scaling == RopeScaling("linear", 8.0, 32768)


def test_end_tokens_are_the_union_of_end_of_text_turn_and_message() -> None:
    ids: dict[str, GgufValue] = {"eos_token_id": 5, "eot_token_id": 7, "eom_token_id": 5}
    got = config(
        LLAMA | {f"tokenizer.ggml.{key}": value for key, value in ids.items()}, tokenizer__ggml__bos_token_id=1
    )
    assert (got.eos_token_ids, got.bos_token_id) == ((5, 7), 1)
    assert (config(LLAMA).eos_token_ids, config(LLAMA).bos_token_id) == ((), None)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_rope_scaling_is_recovered_from_its_divisors(factor: float, head_dim: int) -> None:
    got = config(
        LLAMA,
        llama3_divisors(500_000.0, head_dim, factor),
        llama__rope__freq_base=500_000.0,
        llama__attention__key_length=head_dim,
        llama__attention__value_length=head_dim,
    )
    assert got.rope_scaling == RopeScaling("llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def test_other_divisors_are_refused() -> None:
    divisors = llama3_divisors(500_000.0, 64, 8.0, original=4096)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not the llama3 rope scaling of 8192 positions"):
        config(LLAMA, divisors, llama__rope__freq_base=500_000.0)


def test_old_and_new_linear_scaling_keys_mean_the_same() -> None:
    new = config(LLAMA, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert new.rope_scaling == RopeScaling("linear", 4.0, 4096)
    assert config(LLAMA, llama__rope__scale_linear=4.0).rope_scaling == new.rope_scaling
    assert config(LLAMA, llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0).rope_scaling is None


def test_yarn_s_temperature_is_llama_cpp_s() -> None:
    got = config(
        LLAMA,
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=16.0,
        llama__rope__scaling__original_context_length=256,
        llama__rope__scaling__attn_factor=0.5,
    ).rope_scaling
    assert got is not None
    assert (got.kind, got.factor, got.original_max_position) == ("yarn", 16.0, 256)
    assert (got.beta_fast, got.beta_slow) == (32.0, 1.0)
    assert got.attention_factor == pytest.approx(0.5 * (1 + 0.1 * math.log(16)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": None}, r"model\.gguf has no metadata key llama\.block_count"),
        ({"llama__block_count": "two"}, r"llama\.block_count is 'two'; a whole number is needed"),
        ({"llama__attention__head_count": 0}, r"llama\.attention\.head_count is 0; a whole number of at least 1"),
        ({"llama__feed_forward_length": [1, 2]}, r"llama\.feed_forward_length is an array of 2; a whole number"),
        ({"llama__attention__head_count_kv": 5}, "32 query heads are not a multiple of 5 kv heads"),
        ({"llama__attention__value_length": 32}, r"llama\.attention\.value_length is 32, must be the key length, 64"),
        ({"llama__rope__dimension_count": 32}, r"llama\.rope\.dimension_count is 32, must be the key length, 64"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"split__count": 3}, "one of 3 parts; join them with .*--merge"),
        ({"general__architecture": "qwen2"}, "architecture 'qwen2'; supported are llama, gemma3"),
        ({"general__architecture": None}, r"has no metadata key general\.architecture"),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(changes: dict[str, GgufValue | None], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config(LLAMA, None, **changes)


def test_a_vocabulary_without_a_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="it is a vocabulary without a model"):
        read_config(PATH, GgufHeader(LLAMA, {}, 0), None)
