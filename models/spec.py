"""What a model is made of, as data: hyperparameters and the table of parameters. Imports no jax.

`parameter_table(config)` is the single source of every parameter's shape, with three readers: checkpoint loading,
sharding and random initialisation. Axis letters: L layers, N query heads, K kv heads, H head_dim, D embed, F mlp,
V vocab.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["vocab", "embed", "heads", "kv_heads", "mlp", None]


class Family(enum.StrEnum):
    """Which decoder stack a checkpoint is. Everything else that differs is data in `ModelConfig`."""

    LLAMA = "llama"
    GEMMA3 = "gemma3"


class ParamSpec(NamedTuple):
    """One parameter of one layer (or of the model, for those outside layers).

    Attributes:
      shape: weights are [out, in]: the contracted axis is last (fastest on XLA:CPU, free elsewhere).
      axes: logical axis of each dimension; sharding/ maps them to mesh axes. A "heads" or "kv_heads" dimension is
        heads x head_dim flattened, head-major.
      init: what random initialisation draws: normal(0, 1/sqrt(in)) or ones (scales) or zeros (Gemma's 1+w scales).
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Position scaling of the global rope.

    Attributes:
      kind: "linear", "dynamic", "yarn" or "llama3" (Hugging Face `rope_type`).
      factor: the context is stretched by it.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyperparameters of one decoder-only model.

    Attributes:
      windows: per layer, how many positions a query sees (itself included); 0 is all of them. Length L.
      rope_theta: base of the rope of layers with window 0 and, without `local_rope_theta`, of all.
      local_rope_theta: base for layers with a window (Gemma 3); never scaled.
      rotary_dim: leading dimensions of a head that rotate; head_dim unless the model rotates a part.
      attention_scale: what scores are multiplied with.
      attention_softcap, logits_softcap: cap * tanh(x / cap); None for none.
      norm_offset: added to every norm's weight (1.0 in Gemma, whose weights are stored around 0).
      qk_norm: RMS norm of each query and key head before the rope.
      post_norms: norms after attention and after the mlp, before the residual add (Gemma 3).
      embed_scale: embeddings are multiplied with it, rounded to the model's dtype.
      eos_token_ids: union of what config and generation config say.
    """

    family: Family
    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    attention_scale: float
    windows: tuple[int, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    rotary_dim: int | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    norm_offset: float = 0.0
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    tied_head: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    name: str = ""


class ParameterTable(NamedTuple):
    """Names are ours, flat: `model["embedding"]`, `layer["q_proj"]`."""

    model: dict[str, ParamSpec]
    layer: dict[str, ParamSpec]


def parameter_table(config: ModelConfig) -> ParameterTable:
    """Every parameter of the model with its shape and axes.

    Example: a Llama with K=2, H=64, D=256 has layer["k_proj"] == ParamSpec((128, 256), ("kv_heads", "embed")).
    """
    c = config
    query, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    norm_init: Literal["ones", "zeros"] = "zeros" if c.norm_offset else "ones"
    norm = ParamSpec((c.embed_dim,), ("embed",), norm_init)
    layer = {
        "attention_norm": norm,
        "q_proj": ParamSpec((query, c.embed_dim), ("heads", "embed")),
        "k_proj": ParamSpec((keys, c.embed_dim), ("kv_heads", "embed")),
        "v_proj": ParamSpec((keys, c.embed_dim), ("kv_heads", "embed")),
        "o_proj": ParamSpec((c.embed_dim, query), ("embed", "heads")),
        "mlp_norm": norm,
        "gate_proj": ParamSpec((c.mlp_dim, c.embed_dim), ("mlp", "embed")),
        "up_proj": ParamSpec((c.mlp_dim, c.embed_dim), ("mlp", "embed")),
        "down_proj": ParamSpec((c.embed_dim, c.mlp_dim), ("embed", "mlp")),
    }
    if c.qk_norm:
        layer["q_norm"] = layer["k_norm"] = ParamSpec((c.head_dim,), (None,), norm_init)
    if c.post_norms:
        layer["post_attention_norm"] = layer["post_mlp_norm"] = norm
    if c.attention_bias:
        layer["q_bias"] = ParamSpec((query,), ("heads",), "zeros")
        layer["k_bias"] = layer["v_bias"] = ParamSpec((keys,), ("kv_heads",), "zeros")
        layer["o_bias"] = ParamSpec((c.embed_dim,), ("embed",), "zeros")
    if c.mlp_bias:
        layer["gate_bias"] = layer["up_bias"] = ParamSpec((c.mlp_dim,), ("mlp",), "zeros")
        layer["down_bias"] = ParamSpec((c.embed_dim,), ("embed",), "zeros")
    model = {"embedding": ParamSpec((c.vocab_size, c.embed_dim), ("vocab", "embed")), "final_norm": norm}
    if not c.tied_head:
        model["head"] = ParamSpec((c.vocab_size, c.embed_dim), ("vocab", "embed"))
    return ParameterTable(model, layer)
