"""Page programs, exactly as NumPy does it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from jetserve.engine import moves
from jetserve.kernels import TRASH_PAGE

PAGES, ROWS = 9, 4
SHAPE = (3, PAGES, 2, 2, 4, 8)  # kv[L, P, K, 2, Z, H]
_copy = jax.jit(functools.partial(moves.copy, rows=ROWS), donate_argnums=0)
_save = jax.jit(moves.save)
_load = jax.jit(moves.load, donate_argnums=0)


def cache(seed: int, dtype: type = np.float32) -> NDArray[np.float32]:
    """Any bits but NaN, which equals nothing."""
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(dtype)


def copied(kv: NDArray[np.float32], pairs: list[tuple[int, int]]) -> NDArray[np.float32]:
    layout = moves.copy_layout(ROWS)
    vector = layout.blank()
    fields = layout.views(vector)
    fields["count"][...] = len(pairs)
    fields["pages"][: len(pairs)] = np.array(pairs).reshape(-1, 2)
    return np.asarray(_copy(jnp.array(kv), vector))


def which(pages: list[int]) -> NDArray[np.int32]:
    layout = moves.move_layout()
    vector = layout.blank()
    layout.views(vector)["pages"][: len(pages)] = pages
    return vector


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(3, 5)],
        [(3, 5), (5, 7), (7, 8)],  # each target is the next one's source
        [(7, 8), (5, 7), (3, 5)],
        [(3, 5), (5, 3)],  # they change places
        [(3, 5), (3, 6), (3, 7), (3, 8)],
    ],
)
def test_copies_read_before_any_writes(pairs: list[tuple[int, int]]) -> None:
    kv = cache(1)
    right = kv.copy()
    right[:, [target for _, target in pairs]] = kv[:, [source for source, _ in pairs]]
    np.testing.assert_array_equal(copied(kv, pairs), right)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=ROWS, unique_by=lambda pair: pair[1]))
def test_any_copies_are_as_if_all_at_once(pairs: list[tuple[int, int]]) -> None:
    kv = cache(2)
    right = kv.copy()
    for source, target in pairs:
        right[:, target] = kv[:, source]
    np.testing.assert_array_equal(copied(kv, pairs), right)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pages_come_back_bit_for_bit_and_elsewhere(dtype: type) -> None:
    kv = cache(3, dtype)
    saved = _save(jnp.array(kv), which([4, 1, 8]))
    assert [page.shape for page in saved] == [(3, 2, 2, 4, 8)] * moves.PAGES_PER_CALL
    for page, values in zip((4, 1, 8), saved, strict=False):
        np.testing.assert_array_equal(np.asarray(values), kv[:, page])
    now = np.asarray(_load(jnp.array(kv), which([2, 3, 5]), saved))
    right = kv.copy()
    right[:, [2, 3, 5]] = kv[:, [4, 1, 8]]
    np.testing.assert_array_equal(np.delete(now, TRASH_PAGE, axis=1), np.delete(right, TRASH_PAGE, axis=1))


def test_blank_vectors_change_nothing() -> None:
    kv = cache(4)
    np.testing.assert_array_equal(copied(kv, []), kv)
    saved = _save(jnp.array(kv), which([]))
    np.testing.assert_array_equal(np.asarray(_load(jnp.array(kv), which([]), saved)), kv)
