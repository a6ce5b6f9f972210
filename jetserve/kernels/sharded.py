"""Attention split over heads: each chip attends with the heads it holds, and nothing is exchanged."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jetserve.kernels.attention import Attention, DecodeRows, PackedRows, ScoreRule
from jetserve.sharding.rules import TENSOR

Rows = DecodeRows | PackedRows
_HEADS = PartitionSpec(None, TENSOR)
_CACHE = PartitionSpec(None, None, TENSOR)
_WHOLE = PartitionSpec()


def over_heads(attention: Attention, mesh: Mesh) -> Attention:
    """The same attention on a mesh whose "tensor" axis splits query heads, kv heads and the cache."""
    if mesh.shape[TENSOR] == 1:
        return attention
    return Attention(_split(attention.decode, mesh), _split(attention.prefill, mesh))


def _split(attend: Callable[..., tuple[Array, Array]], mesh: Mesh) -> Callable[..., tuple[Array, Array]]:
    def split(
        q: Array,
        k: Array,
        v: Array,
        kv: Array,
        layer: int | Array,
        window: int | Array,
        rows: Rows,
        rule: ScoreRule,
    ) -> tuple[Array, Array]:
        def local(
            q: Array, k: Array, v: Array, kv: Array, layer: Array, window: Array, rows: Rows
        ) -> tuple[Array, Array]:
            return attend(q, k, v, kv, layer, window, rows, rule)

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(_HEADS, _HEADS, _HEADS, _CACHE, _WHOLE, _WHOLE, _WHOLE),
            out_specs=(_HEADS, _CACHE),
            check_vma=False,
        )
        out, cache = mapped(q, k, v, kv, jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32), rows)
        return out, cache

    return split
