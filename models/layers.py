"""The pieces every decoder layer is made of, and the one home of the layer loop. Pure functions on arrays.

Numbers: activations between the pieces are float32 whatever the weights are. A matrix product runs in the weight's
dtype with a float32 result: on XLA:CPU bfloat16 is fast only so, and on TPU the accumulator is float32 anyway. Float32
weights multiply at the highest precision, so that a float32 model is one on TPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Params = Mapping[str, Array]
Carry = TypeVar("Carry")
Data = TypeVar("Data")


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Multiplies rows with a weight stored [out, in].

    Args:
      x: [T, in], cast to the weight's dtype.
      bias: [out].
    Returns: f32[T, out].
    """
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    out = lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out if bias is None else out + bias.astype(jnp.float32)[None]


def embed(tokens: Array, embedding: Array, scale: float) -> Array:
    """Looks tokens up: f32[T, D].

    Args:
      scale: rounded to the embedding's dtype before it multiplies, as Gemma was trained.
    """
    rows = jnp.take(embedding, tokens, axis=0, mode="clip").astype(jnp.float32)
    return rows if scale == 1.0 else rows * np.asarray(scale, embedding.dtype).astype(np.float32)


def norm(x: Array, weight: Array, *, eps: float, offset: float) -> Array:
    """Scales the last axis to unit mean square, times `weight + offset`. Float32 in and out."""
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    scale = weight.astype(jnp.float32) + offset
    return x * lax.rsqrt(mean_square + eps) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def mlp(x: Array, params: Params, activation: Literal["silu", "gelu_tanh"]) -> Array:
    """Gated feed-forward: down(act(gate(x)) * up(x)); f32[T, D] in and out."""
    gate = linear(x, params["gate_proj"], params.get("gate_bias"))
    up = linear(x, params["up_proj"], params.get("up_bias"))
    gate = jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return linear(gate * up, params["down_proj"], params.get("down_bias"))


def softcap(x: Array, cap: float | None) -> Array:
    """Squashes x into (-cap, cap); None leaves it alone."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def layer_loop(
    layers: Sequence[Params] | Params,
    data: Sequence[Data],
    body: Callable[[Params, Data, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Runs `body` once per layer, first to last, on the whole carry.

    A sequence of per-layer parameters is unrolled: on XLA:CPU bfloat16 weights sliced out of a stacked array lose the
    fast matmul (4-5x). A mapping of stacked parameters [L, ...] runs as one loop: on TPU unrolling costs 20x the code.
    The carry is never a scan's xs/ys, which would copy a KV cache in it.

    Args:
      data: one pytree of ints per layer. Unrolled they stay Python ints. In a loop an int that differs between layers
        becomes a traced i32 scalar; one that is the same in all layers stays a Python int.
    """
    if not isinstance(layers, Mapping):
        for params, numbers in zip(layers, data, strict=True):
            carry = body(params, numbers, carry)
        return carry
    leaves = [jax.tree.leaves(numbers) for numbers in data]
    structure = jax.tree.structure(data[0])
    columns = [np.array(column, np.int32) for column in zip(*leaves, strict=True)]

    def at(layer: Array) -> tuple[Params, Data]:
        params = {name: lax.dynamic_index_in_dim(stacked, layer, keepdims=False) for name, stacked in layers.items()}
        numbers = [
            int(column[0]) if (column == column[0]).all() else lax.dynamic_index_in_dim(column, layer, keepdims=False)
            for column in columns
        ]
        return params, jax.tree.unflatten(structure, numbers)

    final: Carry = lax.fori_loop(0, len(data), lambda layer, carry: body(*at(layer), carry), carry)
    return final
