"""What Hugging Face checkpoints say: `config.json` to `ModelConfig`, and what they call each weight. Imports no jax.

Absent keys get the defaults of the Hugging Face class, because config.json may leave those out. A key that would change
the numbers and is not understood is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jetserve.errors import CheckpointError
from jetserve.models.spec import Family, ModelConfig, RopeScaling, parameter_table

# Both the class name and the model_type of each; the multimodal Gemma 3 is read as its text part.
_LLAMA = ("LlamaForCausalLM", "llama")
_GEMMA3_TEXT = ("Gemma3ForCausalLM", "gemma3_text")
_GEMMA3 = ("Gemma3ForConditionalGeneration", "gemma3")

# Defaults of Gemma3TextConfig; Gemma 3 files list only what differs from them.
_GEMMA3_DEFAULTS: dict[str, object] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_LLAMA_DEFAULTS: dict[str, object] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SCALINGS: dict[str, Literal["linear", "dynamic", "yarn", "llama3"]] = {
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
}

_MODEL_NAMES = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
# Hugging Face means different norms by "post_attention_layernorm".
_FAMILY_NAMES = {
    Family.LLAMA: {"mlp_norm": "post_attention_layernorm.weight"},
    Family.GEMMA3: {
        "post_attention_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "post_mlp_norm": "post_feedforward_layernorm.weight",
    },
}
# Tensors some files carry that no text model needs: rope tables of old Llama files, the image half of Gemma 3.
_UNUSED = re.compile(r".*\.rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..*")
_LANGUAGE_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)


class NameTable(NamedTuple):
    """Our parameter name -> Hugging Face name; names of layers hold "{layer}", the 0-based index."""

    model: dict[str, str]
    layer: dict[str, str]


def weight_names(config: ModelConfig) -> NameTable:
    """The Hugging Face name of every parameter of `parameter_table(config)`."""
    table = parameter_table(config)
    layer = _LAYER_NAMES | _FAMILY_NAMES[config.family]
    return NameTable(
        {name: _MODEL_NAMES[name] for name in table.model},
        {name: "model.layers.{layer}." + layer[name] for name in table.layer},
    )


def text_name(name: str) -> str | None:
    """A tensor's name as `weight_names` has it, whatever the file's nesting; None if no text model needs the tensor.

    Example: both "language_model.model.norm.weight" and "model.language_model.norm.weight" are "model.norm.weight".
    """
    if _UNUSED.fullmatch(name):
        return None
    for nested, plain in _LANGUAGE_PREFIXES:
        if name.startswith(nested):
            return plain + name.removeprefix(nested)
    return name


def read_config(config: Mapping[str, object], generation_config: Mapping[str, object] | None = None) -> ModelConfig:
    """Reads the hyperparameters.

    Args:
      config: config.json.
      generation_config: generation_config.json, when there is one; its end tokens join those of `config`.
    Raises: CheckpointError naming the key, the value and what would be right.
    """
    kind = _kind(config)
    if config.get("quantization_config"):
        raise CheckpointError(
            "config.json has a quantization_config: weights quantised in this way are not supported; "
            "use the unquantised checkpoint or a GGUF file"
        )
    outer = _Keys(config, {})
    keys = _Keys(config, _LLAMA_DEFAULTS if kind == _LLAMA else _GEMMA3_DEFAULTS)
    if kind == _GEMMA3:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(f"config.json: text_config is {text!r}; a gemma3 model needs a mapping there")
        # Whether the head is tied stands outside of the text part in newer files.
        outside = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        keys = _Keys({**text, **outside}, _GEMMA3_DEFAULTS)
    eos = keys.token_ids("eos_token_id") + outer.token_ids("eos_token_id")
    if generation_config is not None:
        eos += _Keys(generation_config, {}, "generation_config.json").token_ids("eos_token_id")
    bos = outer.token_ids("bos_token_id") or keys.token_ids("bos_token_id")
    name = config.get("_name_or_path")
    return dataclasses.replace(
        _llama(keys) if kind == _LLAMA else _gemma3(keys),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        name=name if isinstance(name, str) else "",
    )


def _kind(config: Mapping[str, object]) -> tuple[str, str]:
    kinds = (_LLAMA, _GEMMA3_TEXT, _GEMMA3)
    architectures, model_type = config.get("architectures"), config.get("model_type")
    named = architectures if isinstance(architectures, list) and architectures else [model_type]
    for kind in kinds:
        if named[0] in kind:
            return kind
    known = ", ".join(architecture for architecture, _ in kinds)
    raise CheckpointError(
        f"config.json: architectures is {architectures!r} and model_type {model_type!r}; supported are {known}"
    )


def _llama(keys: _Keys) -> ModelConfig:
    num_heads, embed_dim = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    head_dim = keys.whole("head_dim", embed_dim // num_heads)
    num_layers = keys.whole("num_hidden_layers")
    rope = keys.section("rope_parameters").joined(keys.section("rope_scaling"))
    scaling = _scaling(keys, rope, stretched=False)
    return ModelConfig(
        family=Family.LLAMA,
        vocab_size=keys.whole("vocab_size"),
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=keys.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(keys, num_heads),
        head_dim=head_dim,
        max_position=scaling.max_position,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=_theta(keys, rope),
        attention_scale=head_dim**-0.5,
        windows=(0,) * num_layers,
        activation=_activation(keys, "hidden_act"),
        rope_scaling=scaling.scaling,
        rotary_dim=_rotary_dim(keys, rope, head_dim),
        tied_head=keys.flag("tie_word_embeddings"),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


def _gemma3(keys: _Keys) -> ModelConfig:
    if keys.flag("use_bidirectional_attention"):
        raise CheckpointError(
            "config.json: use_bidirectional_attention is true; that is an embedding model, which cannot generate"
        )
    num_heads, embed_dim, num_layers = (
        keys.whole(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    head_dim = keys.whole("head_dim")
    rope, local_rope = _gemma3_ropes(keys)
    scaling = _scaling(keys, rope, stretched=True)
    return ModelConfig(
        family=Family.GEMMA3,
        vocab_size=keys.whole("vocab_size"),
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=keys.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(keys, num_heads),
        head_dim=head_dim,
        max_position=scaling.max_position,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=_theta(keys, rope),
        local_rope_theta=_theta(keys, local_rope, "rope_local_base_freq"),
        attention_scale=keys.number("query_pre_attn_scalar") ** -0.5,
        windows=_windows(keys, num_layers),
        activation=_activation(keys, "hidden_activation"),
        rope_scaling=scaling.scaling,
        rotary_dim=_rotary_dim(keys, rope, head_dim),
        attention_softcap=keys.optional_number("attn_logit_softcapping"),
        logits_softcap=keys.optional_number("final_logit_softcapping"),
        norm_offset=1.0,
        qk_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(embed_dim),
        tied_head=keys.flag("tie_word_embeddings"),
        attention_bias=keys.flag("attention_bias"),
    )


def _kv_heads(keys: _Keys, num_heads: int) -> int:
    num_kv_heads = keys.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    return num_kv_heads


def _activation(keys: _Keys, key: str) -> Literal["silu", "gelu_tanh"]:
    value = keys.get(key)
    if value not in _ACTIVATIONS:
        raise CheckpointError(f"config.json: {key} is {value!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[str(value)]


def _windows(keys: _Keys, num_layers: int) -> tuple[int, ...]:
    types = keys.get("layer_types")
    if types is None:
        old_key = "_sliding_window_pattern"  # written by some versions
        pattern = keys.whole(old_key if keys.get(old_key) is not None else "sliding_window_pattern")
        types = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(f"config.json: layer_types is {types!r}; one entry per layer is needed ({num_layers=})")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointError(
                f"config.json: layer_types has {kind!r}; supported are full_attention, sliding_attention"
            )
    window = keys.whole("sliding_window") if "sliding_attention" in types else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _gemma3_ropes(keys: _Keys) -> tuple[_Keys, _Keys]:
    """Rope parameters of the layers with full attention and of those with a window.

    Old files have one set, for full attention; new ones nest one per layer type; some carry both forms.
    """
    new, old = keys.section("rope_parameters"), keys.section("rope_scaling")
    full = new.joined(new.section("full_attention")).joined(old).joined(old.section("full_attention"))
    local = new.section("sliding_attention")
    if local.kind != "default":
        raise CheckpointError(
            f"config.json: rope_parameters.sliding_attention has rope_type {local.kind!r}; only default is supported"
        )
    return full, local


def _theta(keys: _Keys, rope: _Keys, key: str = "rope_theta") -> float:
    return rope.number("rope_theta", keys.number(key))


def _rotary_dim(keys: _Keys, rope: _Keys, head_dim: int) -> int | None:
    part = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * part)
    if part > 1 or rotary_dim % 2 or rotary_dim == 0:
        raise CheckpointError(
            f"config.json: partial_rotary_factor is {part}; of {head_dim=} it must leave an even number of dimensions"
        )
    return None if rotary_dim == head_dim else rotary_dim


class _Stretch(NamedTuple):
    scaling: RopeScaling | None
    max_position: int


def _scaling(keys: _Keys, rope: _Keys, *, stretched: bool) -> _Stretch:
    """Rope scaling and the longest context.

    max_position_embeddings is the length before linear, dynamic and YaRN scaling, except where the family states the
    length after it (`stretched`) and with llama3, which always does.
    """
    length = keys.whole("max_position_embeddings")
    if rope.kind == "default":
        return _Stretch(None, length)
    kind = _SCALINGS.get(rope.kind)
    if kind is None:
        raise CheckpointError(
            f"config.json: rope type {rope.kind!r} is not supported; known are default, {', '.join(_SCALINGS)}"
        )
    original = rope.whole("original_max_position_embeddings", keys.whole("original_max_position_embeddings", length))
    if kind == "dynamic":
        original = length
    factor = rope.number("factor", length / original if kind == "yarn" and original < length else None)
    if factor < 1:
        raise CheckpointError(f"config.json: rope factor is {factor}; at least 1 is needed")
    scaling = RopeScaling(
        kind,
        factor,
        original,
        low_freq_factor=rope.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
    if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"config.json: rope high_freq_factor is {scaling.high_freq_factor}; it must exceed "
            f"low_freq_factor={scaling.low_freq_factor}"
        )
    if stretched or kind == "llama3":
        return _Stretch(scaling, length)
    return _Stretch(scaling, max(length, int(original * factor)))


class _Keys:
    """A mapping read with types.

    An absent key takes the default, and so does a null one unless null says "none of it"; without one it is an error.
    """

    def __init__(self, values: Mapping[str, object], defaults: Mapping[str, object], file: str = "config.json") -> None:
        self._values = values
        self._defaults = defaults
        self._file = file

    def get(self, key: str) -> object:
        """The value as it stands: null stays None."""
        return self._values[key] if key in self._values else self._defaults.get(key)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(key, value, "a whole number of at least 1 is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._error(key, value, "a number above 0 is needed")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false is needed")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of them or none."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise self._error(key, value, "a token id or a list of them is needed")
        return tuple(ids)

    def section(self, key: str) -> _Keys:
        """A mapping inside; empty when absent or null."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._error(key, value, "a mapping is needed")
        return _Keys(value, {}, self._file)

    def joined(self, other: _Keys) -> _Keys:
        """Both; where they differ, the other's. Neither has defaults."""
        mine = dict(self._values)
        if other.get("type") or other.get("rope_type"):
            mine.pop("rope_type", None)
            mine.pop("type", None)
        return _Keys(mine | dict(other._values), {}, self._file)

    @property
    def kind(self) -> str:
        """`rope_type`, or `type` as older files spell it."""
        kind = self.get("rope_type") or self.get("type") or "default"
        return str(kind)

    def _present(self, key: str, default: object) -> object:
        for value in (self._values.get(key), self._defaults.get(key), default):
            if value is not None:
                return value
        raise CheckpointError(f"{self._file} has no {key}; it is needed to build the model")

    def _error(self, key: str, value: object, need: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {key} is {value!r}; {need}")
