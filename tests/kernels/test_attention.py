"""Every attention implementation against a float64 recompute in NumPy, on the same cases (R26 to R28)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.kernels.attention import Attention, DecodeRows, PackedRows, ScoreRule
from jetserve.kernels.attention_xla import XLA

IMPLEMENTATIONS = {"xla": XLA}
LAYERS, LAYER = 2, 1


class Cache:
    """Pages scattered over a pool, with the dense history of each row beside them."""

    def __init__(
        self, lengths: list[int], *, kv_heads: int, head_dim: int, page_size: int, table: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = lengths
        self.page_size = page_size
        self.history = [rng.normal(size=(2, n, kv_heads, head_dim)).astype(np.float32) for n in lengths]
        need = [table for _ in lengths]
        order = rng.permutation(np.arange(1, 1 + sum(need)))
        self.page_table = order.reshape(len(lengths), table).astype(np.int32)
        pool = np.full((LAYERS, 1 + sum(need), kv_heads, 2, page_size, head_dim), np.nan, np.float32)
        for row, history in enumerate(self.history):
            for at in range(history.shape[1]):
                pool[LAYER, self.page_table[row, at // page_size], :, :, at % page_size] = history[:, at].swapaxes(0, 1)
        self.pool = pool

    def dense(self, row: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """History with new keys and values behind it, [S, K, H] in float64."""
        old = self.history[row].astype(np.float64)
        return np.concatenate([old[0], k]), np.concatenate([old[1], v])


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, window: int, rule: ScoreRule) -> np.ndarray:
    """One query [N, H] over keys [S, K, H], position by position in float64."""
    heads, kv_heads = q.shape[0], k.shape[1]
    out = np.zeros(q.shape)
    low = max(0, position - window + 1) if window else 0
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = k[low : position + 1, group] @ q[head].astype(np.float64) * rule.scale
        if rule.softcap:
            scores = rule.softcap * np.tanh(scores / rule.softcap)
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ v[low : position + 1, group]
    return out


@pytest.fixture(params=IMPLEMENTATIONS)
def attention(request: pytest.FixtureRequest) -> Attention:
    return IMPLEMENTATIONS[request.param]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "window", "softcap"),
    [
        (4, 4, 8, 4, 0, None),
        (4, 2, 16, 16, 0, 5.0),
        (6, 1, 8, 128, 3, None),
        (4, 2, 8, 8, 150, None),
        (3, 3, 64, 16, 1, None),
    ],
)
def test_decode_equals_float64(
    attention: Attention, heads: int, kv_heads: int, head_dim: int, page_size: int, window: int, softcap: float | None
) -> None:
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 127, 128, 129, 300]
    table = -(-301 // page_size)
    cache = Cache(lengths, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, table=table, seed=1)
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(len(lengths), n, head_dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    active = np.array([True] * len(lengths))
    active[4] = False
    rule = ScoreRule(scale=0.3, softcap=softcap)
    rows = DecodeRows.create(
        jnp.asarray(cache.page_table), jnp.asarray(lengths, jnp.int32), jnp.asarray(active), page_size
    )

    out, pool = jax.jit(attention.decode, static_argnums=(7,))(q, k, v, cache.pool, LAYER, window, rows, rule)

    for row, position in enumerate(lengths):
        if not active[row]:
            np.testing.assert_array_equal(out[row], 0)
            continue
        keys, values = cache.dense(row, k[row : row + 1], v[row : row + 1])
        expected = reference(q[row], keys, values, position, window, rule)
        np.testing.assert_allclose(out[row], expected, atol=1e-5)
        page = cache.page_table[row, position // page_size]
        np.testing.assert_array_equal(pool[LAYER, page, :, 0, position % page_size], k[row])
        np.testing.assert_array_equal(pool[LAYER, page, :, 1, position % page_size], v[row])
    changed = ~np.isclose(np.asarray(pool), cache.pool, rtol=0, atol=0, equal_nan=True)
    assert {int(page) for page in np.argwhere(changed)[:, 1]} <= {0} | {
        int(cache.page_table[row, n // page_size]) for row, n in enumerate(lengths) if active[row]
    }
    assert not changed[1 - LAYER].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size", "window", "chunks", "tokens"),
    [
        (4, 2, 4, 0, [(0, 7), (5, 1), (3, 4)], 16),
        (2, 1, 16, 3, [(0, 30), (16, 1), (31, 33)], 96),
        (4, 4, 128, 0, [(0, 200), (250, 100)], 320),
        (4, 2, 8, 100, [(257, 64), (0, 0), (0, 65)], 129),
        (2, 2, 16, 0, [(0, 1)], 2),
    ],
)
def test_prefill_equals_float64(
    attention: Attention,
    heads: int,
    kv_heads: int,
    page_size: int,
    window: int,
    chunks: list[tuple[int, int]],
    tokens: int,
) -> None:
    head_dim, table = 16, -(-400 // page_size)
    cache = Cache(
        [start for start, _ in chunks], kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, table=table, seed=3
    )
    rng = np.random.default_rng(4)
    q, k, v = (rng.normal(size=(tokens, n, head_dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    offsets = np.cumsum([0, *[length for _, length in chunks]])
    token_rows = np.full(tokens, len(chunks), np.int32)
    for row, (_, length) in enumerate(chunks):
        token_rows[offsets[row] : offsets[row] + length] = row
    rows = PackedRows.create(
        *(
            jnp.asarray(part, jnp.int32)
            for part in (
                cache.page_table,
                [start for start, _ in chunks],
                [length for _, length in chunks],
                offsets[:-1],
                token_rows,
            )
        ),
        page_size,
    )
    rule = ScoreRule(scale=0.25)

    out, _ = jax.jit(attention.prefill, static_argnums=(7,))(q, k, v, cache.pool, LAYER, window, rows, rule)

    for row, (start, length) in enumerate(chunks):
        own = slice(offsets[row], offsets[row] + length)
        keys, values = cache.dense(row, k[own], v[own])
        for index in range(length):
            expected = reference(q[own][index], keys, values, start + index, window, rule)
            np.testing.assert_allclose(out[own][index], expected, atol=1e-5)
    np.testing.assert_array_equal(out[offsets[-1] :], 0)


def test_window_of_three_sees_exactly_three_positions(attention: Attention) -> None:
    """R26, R27: values are one-hot by position, so the result shows which positions contributed."""
    length, window = 8, 3
    cache = Cache([0], kv_heads=1, head_dim=length, page_size=4, table=2, seed=0)
    one_hot = np.eye(length, dtype=np.float32)[:, None]
    zeros = np.zeros((length, 1, length), np.float32)
    rows = PackedRows.create(
        jnp.asarray(cache.page_table),
        *(jnp.asarray(part, jnp.int32) for part in ([0], [length], [0], [0] * length)),
        page_size=4,
    )
    out, pool = attention.prefill(zeros, zeros, one_hot, jnp.asarray(cache.pool), LAYER, window, rows, ScoreRule(1.0))
    for query in range(length):
        seen = set(np.flatnonzero(np.asarray(out[query, 0])))
        assert seen == set(range(max(0, query - 2), query + 1))
    step = DecodeRows.create(
        jnp.asarray(cache.page_table), jnp.asarray([length - 1], jnp.int32), jnp.asarray([True]), 4
    )
    last, _ = attention.decode(zeros[:1], zeros[:1], one_hot[-1:], pool, LAYER, window, step, ScoreRule(1.0))
    np.testing.assert_allclose(last[0], out[-1], atol=1e-6)
