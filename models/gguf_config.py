"""What a GGUF file's metadata says: hyperparameters and tensor names of the "llama" and "gemma3" architectures.

Imports no jax. Keys as in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what llama.cpp takes for an absent
key (its llama-hparams and per-architecture loaders) is what an absent key means here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jetserve.errors import CheckpointError
from jetserve.gguf_header import GgufHeader, GgufValue
from jetserve.models.spec import Family, ModelConfig, RopeScaling

ROPE_FREQUENCIES = "rope_freqs.weight"  # llama3 rope scaling, spelled out as one divisor per frequency

MODEL_NAMES = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER_NAMES = {
    "attention_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "post_attention_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}
LAYER_NAMES = {name: "blk.{layer}." + stored for name, stored in _LAYER_NAMES.items()}

_END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GEMMA3_PATTERN = 6  # every sixth layer is global
_GEMMA3_27B_LAYERS = 62  # the one size whose attention scale does not come from head_dim
_GEMMA3_LOCAL_THETA = 10_000.0
# Meta's values for Llama 3.1 to 3.3, which llama.cpp's converter takes for what config.json leaves out; the file holds
# only what follows from them.
_LLAMA3_ORIGINAL_LENGTH, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def read_config(path: Path, header: GgufHeader, rope_divisors: NDArray[np.float32] | None) -> ModelConfig:
    """Reads the hyperparameters.

    Args:
      path: for messages, and the model's name if the file gives none.
      rope_divisors: the content of `rope_freqs.weight`, when the file has it.
    Raises: CheckpointError naming the key, the value and what would be right.
    """
    keys = _Keys(path, header.metadata)
    if keys.whole("split.count", 1) > 1:
        raise CheckpointError(
            f"{path} is one of {keys.whole('split.count')} parts; join them with llama.cpp's llama-gguf-split --merge"
        )
    if keys.architecture == "llama":
        return _llama(keys, header, rope_divisors)
    if keys.architecture == "gemma3":
        return _gemma3(keys, header)
    raise CheckpointError(f"{path} has architecture {keys.architecture!r}; supported are llama, gemma3")


def _llama(keys: _Keys, header: GgufHeader, rope_divisors: NDArray[np.float32] | None) -> ModelConfig:
    if keys.whole("{arch}.expert_count", 0):
        raise CheckpointError(f"{keys.path} is a mixture of experts, which is not supported; use a dense model")
    num_layers = keys.size("{arch}.block_count")
    head_dim = _head_dim(keys)
    theta = keys.number("{arch}.rope.freq_base", 10_000.0)
    scaling = _scaling(keys)
    if rope_divisors is not None:
        if scaling is not None:
            raise CheckpointError(f"{keys.path} has both {ROPE_FREQUENCIES} and {scaling.kind} rope scaling")
        scaling = _llama3_scaling(keys.path, rope_divisors, theta, head_dim)
    return ModelConfig(
        family=Family.LLAMA,
        vocab_size=_vocab_size(keys.path, header),
        num_layers=num_layers,
        embed_dim=keys.size("{arch}.embedding_length"),
        mlp_dim=keys.size("{arch}.feed_forward_length"),
        num_heads=keys.size("{arch}.attention.head_count"),
        num_kv_heads=_kv_heads(keys),
        head_dim=head_dim,
        max_position=keys.size("{arch}.context_length"),
        rms_norm_eps=keys.number("{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        attention_scale=keys.number("{arch}.attention.scale", 0.0) or head_dim**-0.5,
        windows=(0,) * num_layers,
        rope_scaling=scaling,
        tied_head=MODEL_NAMES["head"] not in header.tensors,
        attention_bias=LAYER_NAMES["q_bias"].format(layer=0) in header.tensors,
        mlp_bias=LAYER_NAMES["gate_bias"].format(layer=0) in header.tensors,
        eos_token_ids=_end_tokens(keys),
        bos_token_id=keys.token("tokenizer.ggml.bos_token_id"),
        name=keys.text("general.name", keys.path.stem),
    )


def _gemma3(keys: _Keys, header: GgufHeader) -> ModelConfig:
    num_layers, embed_dim = keys.size("{arch}.block_count"), keys.size("{arch}.embedding_length")
    num_heads, head_dim = keys.size("{arch}.attention.head_count"), _head_dim(keys)
    query_scalar = embed_dim // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim
    return ModelConfig(
        family=Family.GEMMA3,
        vocab_size=_vocab_size(keys.path, header),
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=keys.size("{arch}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(keys),
        head_dim=head_dim,
        max_position=keys.size("{arch}.context_length"),
        rms_norm_eps=keys.number("{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("{arch}.rope.freq_base", 10_000.0),
        local_rope_theta=keys.number("{arch}.rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
        attention_scale=keys.number("{arch}.attention.scale", 0.0) or query_scalar**-0.5,
        windows=_gemma3_windows(keys, num_layers),
        activation="gelu_tanh",
        rope_scaling=_scaling(keys),
        logits_softcap=keys.number("{arch}.final_logit_softcapping", 0.0) or None,
        norm_offset=1.0,
        qk_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(embed_dim),
        tied_head=MODEL_NAMES["head"] not in header.tensors,
        eos_token_ids=_end_tokens(keys),
        bos_token_id=keys.token("tokenizer.ggml.bos_token_id"),
        name=keys.text("general.name", keys.path.stem),
    )


def _head_dim(keys: _Keys) -> int:
    shared = keys.size("{arch}.embedding_length") // keys.size("{arch}.attention.head_count")
    head_dim = keys.whole("{arch}.attention.key_length", shared)
    for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        if keys.whole(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{keys.path}: {keys.full(key)} is {keys.whole(key)}, must be the key length, {head_dim}"
            )
    return head_dim


def _kv_heads(keys: _Keys) -> int:
    num_heads = keys.size("{arch}.attention.head_count")
    num_kv_heads = keys.whole("{arch}.attention.head_count_kv", num_heads)
    if not 0 < num_kv_heads <= num_heads or num_heads % num_kv_heads:
        raise CheckpointError(f"{keys.path}: {num_heads} query heads are not a multiple of {num_kv_heads} kv heads")
    return num_kv_heads


def _vocab_size(path: Path, header: GgufHeader) -> int:
    embedding = header.tensors.get(MODEL_NAMES["embedding"])
    if embedding is None:
        raise CheckpointError(f"{path} holds no tensor {MODEL_NAMES['embedding']}: it is a vocabulary without a model")
    return embedding.shape[0]


def _end_tokens(keys: _Keys) -> tuple[int, ...]:
    ids = [keys.token(f"tokenizer.ggml.{key}") for key in _END_TOKEN_KEYS]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _gemma3_windows(keys: _Keys, num_layers: int) -> tuple[int, ...]:
    window = keys.whole("{arch}.attention.sliding_window", 0)
    key = "{arch}.attention.sliding_window_pattern"
    pattern = keys.get(key, _GEMMA3_PATTERN)
    if isinstance(pattern, list):  # one flag a layer
        if len(pattern) != num_layers:
            raise CheckpointError(f"{keys.path}: {keys.full(key)} has {len(pattern)} entries for {num_layers} layers")
        local = [bool(flag) for flag in pattern]
    else:
        period = keys.whole(key, _GEMMA3_PATTERN)
        local = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    return tuple(window if is_local else 0 for is_local in local)


def _scaling(keys: _Keys) -> RopeScaling | None:
    kind = keys.text("{arch}.rope.scaling.type", "linear")
    factor = keys.number("{arch}.rope.scaling.factor", 0.0) or keys.number("{arch}.rope.scale_linear", 0.0) or 1.0
    original = keys.whole("{arch}.rope.scaling.original_context_length", keys.size("{arch}.context_length"))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    if kind == "yarn":
        _refuse(keys, "{arch}.rope.scaling.yarn_log_multiplier", 0.0)
        _refuse(keys, "{arch}.rope.scaling.yarn_ext_factor", 1.0)
        # llama.cpp multiplies its own temperature (arXiv:2309.00071 eq. 22) with attn_factor.
        temperature = keys.number("{arch}.rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
        return RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=keys.number("{arch}.rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("{arch}.rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=temperature,
        )
    raise CheckpointError(f"{keys.path}: rope scaling {kind!r} is not supported; known are none, linear, yarn")


def _refuse(keys: _Keys, key: str, neutral: float) -> None:
    value = keys.number(key, neutral)
    if value != neutral:
        raise CheckpointError(f"{keys.path}: {keys.full(key)} is {value}, only {neutral} is supported")


def _llama3_scaling(path: Path, divisors: NDArray[np.float32], theta: float, head_dim: int) -> RopeScaling:
    """Finds the parameters whose divisors these are (Meta's `apply_scaling` turned round)."""
    factor = float(divisors.max())
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_ORIGINAL_LENGTH * frequencies / (2 * math.pi)
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{path}: {ROPE_FREQUENCIES} is not the llama3 rope scaling of {_LLAMA3_ORIGINAL_LENGTH} positions with "
            f"factors {_LLAMA3_LOW:g} and {_LLAMA3_HIGH:g}; load the Hugging Face checkpoint instead"
        )
    return RopeScaling(
        "llama3", factor, _LLAMA3_ORIGINAL_LENGTH, low_freq_factor=_LLAMA3_LOW, high_freq_factor=_LLAMA3_HIGH
    )


class _Keys:
    """Metadata read with types; "{arch}" in a key is the architecture. An absent key without default is an error."""

    def __init__(self, path: Path, metadata: Mapping[str, GgufValue]) -> None:
        self.path = path
        self._metadata = metadata
        self.architecture = ""
        self.architecture = self.text("general.architecture")

    def full(self, key: str) -> str:
        return key.replace("{arch}", self.architecture)

    def get(self, key: str, default: GgufValue | None = None) -> GgufValue:
        value = self._metadata.get(self.full(key), default)
        if value is None:
            raise CheckpointError(f"{self.path} has no metadata key {self.full(key)}; it is not a complete model")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._error(key, value, "a whole number")
        return value

    def size(self, key: str) -> int:
        value = self.whole(key)
        if value < 1:
            raise self._error(key, value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._error(key, value, "a number of at least 0")
        # Stored as float32: the shortest decimal that rounds to it is what was meant (1e-06, not 9.99999997e-07).
        return float(str(np.float32(value)))

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._error(key, value, "a text")
        return value

    def token(self, key: str) -> int | None:
        return self.whole(key) if self.full(key) in self._metadata else None

    def _error(self, key: str, value: GgufValue, needed: str) -> CheckpointError:
        shown = f"an array of {len(value)}" if isinstance(value, list) else repr(value)
        return CheckpointError(f"{self.path}: {self.full(key)} is {shown}; {needed} is needed")
