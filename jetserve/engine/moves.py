"""The page programs: `copy`, `save` and `load`. Pure functions of cache and control.

The cache is kv[L, P, K, 2, Z, H]. One page of it, on its way to or from host memory, is [L, K, 2, Z, H].
"""

from __future__ import annotations

from jax import Array, lax

from jetserve.engine.control import Field, Layout
from jetserve.kernels import TRASH_PAGE

# On two Xeon cores and pages of 0.7 MB, one call saves 8 in 1.1 ms, and 4 in 1.0 ms.
PAGES_PER_CALL = 8
_PAGE_AXIS = 1


def copy_layout(rows: int) -> Layout:
    """Control vector of `copy`: (source, target) of the first `count` rows."""
    return Layout({"count": Field(()), "pages": Field((rows, 2), fill=TRASH_PAGE)})


def move_layout() -> Layout:
    """Control vector of `save` and `load`; what is unused moves the trash page."""
    return Layout({"pages": Field((PAGES_PER_CALL,), fill=TRASH_PAGE)})


def copy(kv: Array, control: Array, *, rows: int) -> Array:
    """Copies pages as if all at once: a target may be the source of another row. Unused rows cost nothing."""
    told = copy_layout(rows).unpack(control)
    sources, targets = told["pages"].T

    def read(row: Array, held: Array) -> Array:
        now: Array = lax.dynamic_update_index_in_dim(held, _page(kv, sources[row]), row, 0)
        return now

    def write(row: Array, kv: Array) -> Array:
        return _with_page(kv, targets[row], lax.dynamic_index_in_dim(held, row, 0, keepdims=False))

    nothing = lax.empty((rows, *_page_shape(kv)), kv.dtype)  # only what was read is written
    held = lax.fori_loop(0, told["count"], read, nothing)
    copied: Array = lax.fori_loop(0, told["count"], write, kv)
    return copied


def save(kv: Array, control: Array) -> tuple[Array, ...]:
    """Reads `PAGES_PER_CALL` pages, each into an array of its own, so that nobody has to slice."""
    pages = move_layout().unpack(control)["pages"]
    return tuple(_page(kv, pages[at]) for at in range(PAGES_PER_CALL))


def load(kv: Array, control: Array, saved: tuple[Array, ...]) -> Array:
    """Writes what `save` read into pages; the later one wins where two are the same."""
    pages = move_layout().unpack(control)["pages"]
    for at, values in enumerate(saved):
        kv = _with_page(kv, pages[at], values)
    return kv


def _page_shape(kv: Array) -> tuple[int, ...]:
    layers, _, *rest = kv.shape
    return layers, *rest


def _page(kv: Array, page: Array) -> Array:
    found: Array = lax.dynamic_index_in_dim(kv, page, _PAGE_AXIS, keepdims=False)
    return found


def _with_page(kv: Array, page: Array, values: Array) -> Array:
    now: Array = lax.dynamic_update_index_in_dim(kv, values, page, _PAGE_AXIS)
    return now
