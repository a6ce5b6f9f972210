"""The contract of attention over the paged KV cache. All implementations mean the same; `attention_xla` defines it.

One call appends the new tokens' keys and values to the cache and attends over it, so that a kernel can do both on one
visit of the pages. The cache is passed whole with a layer index, and returned: donated, it is updated in place.

Cache: kv[L, P, K, 2, Z, H], keys at [..., 0, :, :] and values at [..., 1, :, :]. Page 0 is the trash page: what padding
and inactive rows write goes there. Of a sequence's positions

    [0, position]            read: causal, at most `window` of them when the layer has one (itself included)
    (position, end of page]  never read: may hold anything, NaN included
    beyond its pages         page table entries may be stale: never read, never written

Scores are f32; the result is f32 within 1e-5 of a float64 recompute for an f32 cache.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import flax.struct
import jax.numpy as jnp
from jax import Array, lax

from jetserve.kernels import TRASH_PAGE


class ScoreRule(NamedTuple):
    """What turns dot products into scores; the same in all layers of a model. Static.

    Attributes:
      scale: multiplied with q.k.
      softcap: cap * tanh(score / cap) before masking; None for none.
    """

    scale: float
    softcap: float | None = None


@flax.struct.dataclass
class DecodeRows:
    """One new token for each row of the batch. Made by `create`, once a step: all layers share it.

    Attributes:
      page_table: i32[B, M].
      positions: i32[B], where the new token is.
      active: bool[B]; an inactive row writes to the trash page and its result is zero.
      pages, offsets: i32[B], the page of the new token and where in it.
    """

    page_table: Array
    positions: Array
    active: Array
    pages: Array
    offsets: Array

    @staticmethod
    def create(page_table: Array, positions: Array, active: Array, page_size: int) -> DecodeRows:
        pages, offsets = _locate(page_table, positions, active, page_size)
        return DecodeRows(page_table, positions, active, pages, offsets)


@flax.struct.dataclass
class PackedRows:
    """Chunks of up to R prompts, one behind the other in T tokens. Made by `create`, once a step.

    Attributes:
      page_table: i32[R, M].
      starts: i32[R], position of the chunk's first token in its sequence.
      lengths: i32[R], tokens in the chunk; 0 for an unused row.
      offsets: i32[R], where the chunk begins in [0, T).
      positions: i32[T], of each token in its sequence; 0 for padding.
      pages, page_offsets: i32[T], the page of each token and where in it.
    """

    page_table: Array
    starts: Array
    lengths: Array
    offsets: Array
    positions: Array
    pages: Array
    page_offsets: Array

    @staticmethod
    def create(
        page_table: Array, starts: Array, lengths: Array, offsets: Array, token_rows: Array, page_size: int
    ) -> PackedRows:
        """token_rows: i32[T], the row of each token; R for padding."""
        is_real = token_rows < lengths.shape[0]
        row = jnp.minimum(token_rows, lengths.shape[0] - 1)
        positions = jnp.where(is_real, starts[row] + jnp.arange(token_rows.shape[0]) - offsets[row], 0)
        pages, page_offsets = _locate(page_table[row], positions, is_real, page_size)
        return PackedRows(page_table, starts, lengths, offsets, positions, pages, page_offsets)


class DecodeAttention(Protocol):
    """One new token per row: q[B, N, H], k and v[B, K, H] -> (out[B, N, H], kv)."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: Array,
        layer: int | Array,
        window: int | Array,
        rows: DecodeRows,
        rule: ScoreRule,
    ) -> tuple[Array, Array]: ...


class PrefillAttention(Protocol):
    """Packed chunks: q[T, N, H], k and v[T, K, H] -> (out[T, N, H], kv). Padding tokens' results are zero."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: Array,
        layer: int | Array,
        window: int | Array,
        rows: PackedRows,
        rule: ScoreRule,
    ) -> tuple[Array, Array]: ...


class Attention(NamedTuple):
    """One implementation of both."""

    decode: DecodeAttention
    prefill: PrefillAttention


def _locate(page_table: Array, positions: Array, is_real: Array, page_size: int) -> tuple[Array, Array]:
    """Page and offset of one position per row of the table; the trash page where it is not real."""
    index = jnp.minimum(lax.div(positions, page_size), page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table, index[:, None], axis=1)[:, 0]
    return jnp.where(is_real, pages, TRASH_PAGE), lax.rem(positions, page_size)
