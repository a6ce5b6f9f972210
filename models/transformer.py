"""The decoder stack of every family. What differs between families is data in `ModelConfig` and in the weights' names.

The stack never sees a cache, a slot or a bucket: it hands queries, keys and values of its tokens to an `attend`
callback, which owns masks, scale, soft cap and wherever keys and values live. Activations are
float32 (layers.py says why).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jetserve.models import layers, rope
from jetserve.models.spec import ModelConfig, ParamSpec, parameter_table

Leaf = TypeVar("Leaf")
Carry = TypeVar("Carry")


@flax.struct.dataclass
class Weights(Generic[Leaf]):
    """All parameters, by the names of `spec.parameter_table`.

    Attributes:
      model: those outside the layers.
      layers: a tuple of per-layer mappings (unrolled), or one mapping of arrays [L, ...] (stacked). Chosen at load;
        only `layers.layer_loop` tells them apart.
    """

    model: dict[str, Leaf]
    layers: tuple[dict[str, Leaf], ...] | dict[str, Leaf]


@flax.struct.dataclass
class LayerInfo:
    """What attention may know about a layer. A Python int where all layers are equal, else a traced i32.

    Attributes:
      index: 0-based.
      window: how many positions a query sees, itself included; 0 for all.
    """

    index: int | Array
    window: int | Array


# attend(layer, q[T, N, H], k[T, K, H], v[T, K, H], carry) -> (out[T, N, H], carry). f32, q and k rotated, q not scaled.
Attend = Callable[[LayerInfo, Array, Array, Array, Carry], tuple[Array, Carry]]


class _LayerData(NamedTuple):
    info: LayerInfo
    rope: int | Array  # index into the rotations of this call


def forward(
    config: ModelConfig,
    weights: Weights[Array],
    tokens: Array,
    positions: Array,
    attend: Attend[Carry],
    carry: Carry,
) -> tuple[Array, Carry]:
    """Runs tokens through all layers.

    Args:
      tokens, positions: i32[T], of one or several sequences; only `attend` knows whose they are.
      carry: handed from layer to layer through `attend`, usually the KV cache.
    Returns: f32[T, D] after the final norm, and the carry. The weights may hold more kv heads than the config says
      (heads repeated at load for wide meshes): K follows the weights.
    """
    with jax.named_scope("embed"):
        x = layers.embed(tokens, weights.model["embedding"], config.embed_scale)
    with jax.named_scope("rope"):
        rotations = [rope.rotation(config, positions, local=False)]
        if config.local_rope_theta is not None:
            rotations.append(rope.rotation(config, positions, local=True))

    def body(params: layers.Params, data: _LayerData, state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        x, carry = state
        with jax.named_scope("attention"):
            h = _norm(config, x, params["attention_norm"])
            h, carry = _attention(config, params, h, data.info, _pick(rotations, data.rope), attend, carry)
            x = x + (_norm(config, h, params["post_attention_norm"]) if config.post_norms else h)
        with jax.named_scope("mlp"):
            h = layers.mlp(_norm(config, x, params["mlp_norm"]), params, config.activation)
            x = x + (_norm(config, h, params["post_mlp_norm"]) if config.post_norms else h)
        return x, carry

    x, carry = layers.layer_loop(weights.layers, _layer_data(config), body, (x, carry))
    with jax.named_scope("final_norm"):
        return _norm(config, x, weights.model["final_norm"]), carry


def logits(config: ModelConfig, weights: Weights[Array], hidden: Array) -> Array:
    """Scores of every vocabulary entry.

    Args:
      hidden: f32[R, D], rows of what `forward` returned.
    Returns: f32[R, V].
    """
    with jax.named_scope("logits"):
        head = weights.model["embedding" if config.tied_head else "head"]
        return layers.softcap(layers.linear(hidden, head), config.logits_softcap)


def param_specs(config: ModelConfig, *, stacked: bool) -> Weights[ParamSpec]:
    """The parameter table in the shape of `Weights`: a stacked layer parameter has L in front, on no mesh axis."""
    table = parameter_table(config)
    if not stacked:
        return Weights(model=table.model, layers=tuple(dict(table.layer) for _ in range(config.num_layers)))
    layer = {
        name: ParamSpec((config.num_layers, *spec.shape), (None, *spec.axes), spec.init)
        for name, spec in table.layer.items()
    }
    return Weights(model=table.model, layers=layer)


def _attention(
    config: ModelConfig,
    params: layers.Params,
    x: Array,
    info: LayerInfo,
    rotation: rope.Rotation,
    attend: Attend[Carry],
    carry: Carry,
) -> tuple[Array, Carry]:
    def heads(name: str) -> Array:
        flat = layers.linear(x, params[f"{name}_proj"], params.get(f"{name}_bias"))
        return flat.reshape(flat.shape[0], -1, config.head_dim)

    q, k, v = heads("q"), heads("k"), heads("v")
    if config.qk_norm:
        q, k = _norm(config, q, params["q_norm"]), _norm(config, k, params["k_norm"])
    q, k = rope.rotate(q, rotation), rope.rotate(k, rotation)
    out, carry = attend(info, q, k, v, carry)
    return layers.linear(out.reshape(out.shape[0], -1), params["o_proj"], params.get("o_bias")), carry


def _norm(config: ModelConfig, x: Array, weight: Array) -> Array:
    return layers.norm(x, weight, eps=config.rms_norm_eps, offset=config.norm_offset)


def _layer_data(config: ModelConfig) -> list[_LayerData]:
    return [
        _LayerData(LayerInfo(index, window), int(window > 0 and config.local_rope_theta is not None))
        for index, window in enumerate(config.windows)
    ]


def _pick(rotations: list[rope.Rotation], index: int | Array) -> rope.Rotation:
    if isinstance(index, int):
        return rotations[index]

    def at(tables: list[Array]) -> Array:
        return jnp.stack(tables)[index]

    return rope.Rotation(at([table.cos for table in rotations]), at([table.sin for table in rotations]))
