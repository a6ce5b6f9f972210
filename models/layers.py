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
    fast matmul (4-5x). The body is traced once and called for each layer (30 layers: tracing and lowering a step took
    8.1 s without, 1.0 s so); the compiler inlines the calls. A mapping of stacked parameters [L, ...] runs as one loop:
    on TPU unrolling costs 20x the code. The carry is never a scan's xs/ys, which would copy a KV cache in it.

    Args:
      data: one pytree of ints per layer. An int that differs between layers becomes a traced i32 scalar; one that is
        the same in all layers stays a Python int.
    """
    leaves = [jax.tree.leaves(numbers) for numbers in data]
    structure = jax.tree.structure(data[0])
    columns = [np.array(column, np.int32) for column in zip(*leaves, strict=True)]
    varying = [column for column in columns if (column != column[0]).any()]

    def numbers(own: Sequence[Array]) -> Data:
        """The data of one layer from its varying ints."""
        rest = iter(own)
        each = [next(rest) if (column != column[0]).any() else int(column[0]) for column in columns]
        layer_data: Data = jax.tree.unflatten(structure, each)
        return layer_data

    if not isinstance(layers, Mapping):
        once = jax.jit(lambda params, own, carry: body(params, numbers(own), carry))
        for index, params in enumerate(layers):
            carry = once(params, [column[index] for column in varying], carry)
        return carry

    def at(layer: Array, carry: Carry) -> Carry:
        params = {name: lax.dynamic_index_in_dim(stacked, layer, keepdims=False) for name, stacked in layers.items()}
        own = [lax.dynamic_index_in_dim(column, layer, keepdims=False) for column in varying]
        return body(params, numbers(own), carry)

    final: Carry = lax.fori_loop(0, len(data), at, carry)
    return final
