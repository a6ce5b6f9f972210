"""Pages go to host memory and come back, in the order that plans promise."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from jetserve.engine import programs
from jetserve.engine.compilations import COUNTER
from jetserve.engine.host_blocks import HostBlocks
from jetserve.engine.moves import PAGES_PER_CALL
from jetserve.engine.plan import HostMove, PageCopy, StepPlan
from jetserve.sharding.mesh import make_mesh
from tests.engine.conftest import Serve, Served

BLOCKS = 20
PAGE_BYTES = 4 * 2 * 2 * 2 * 8 * 4  # tokens, layers, heads, keys and values, numbers of a head, bytes of a number


@pytest.fixture
def hosted(serve: Serve) -> Served:
    """A tiny model with a host tier; its cache holds random numbers."""
    served = serve(
        "llama", "engine.prefill_sizes=[16]", "engine.generate_rows=[4]", f"engine.host_kv_bytes={BLOCKS * PAGE_BYTES}"
    )
    chance = np.random.default_rng(8)
    served.poison(
        lambda x: chance.standard_normal(x.shape).astype(x.dtype) if x.dtype.kind == "f" else np.zeros_like(x)
    )
    return served


def pages(served: Served) -> NDArray[np.float32]:
    """[P, L, K, 2, Z, H]"""
    return np.moveaxis(np.array(served.executor._kv), 1, 0)


def moves(page_ids: range, block_ids: range) -> tuple[HostMove, ...]:
    return tuple(HostMove(page, block) for page, block in zip(page_ids, block_ids, strict=True))


def test_size_of_host_memory_decides_the_blocks(hosted: Served, llama: Served) -> None:
    assert hosted.sizing.host_blocks == BLOCKS
    assert llama.sizing.host_blocks == 0
    assert llama.executor._programs.host is None


@pytest.mark.parametrize("count", [1, PAGES_PER_CALL, PAGES_PER_CALL + 1, BLOCKS])
def test_pages_come_back_bit_for_bit(hosted: Served, count: int) -> None:
    before = pages(hosted)
    there, back = moves(range(1, count + 1), range(count)), moves(range(101, count + 101), range(count))
    hosted.executor.execute(StepPlan(saves=there)).result()
    np.testing.assert_array_equal(pages(hosted), before)
    hosted.executor.execute(StepPlan(copies=tuple(PageCopy(200, page) for page in range(1, min(count, 3) + 1))))
    hosted.executor.execute(StepPlan(loads=back)).result()
    now = pages(hosted)
    np.testing.assert_array_equal(now[101 : count + 101], before[1 : count + 1])
    untouched = [page for page in range(4, len(now)) if not 101 <= page < count + 101]
    np.testing.assert_array_equal(now[untouched], before[untouched])


def test_load_reads_its_block_before_the_save_of_the_same_plan(hosted: Served) -> None:
    before = pages(hosted)
    hosted.executor.execute(StepPlan(saves=(HostMove(1, 0),)))
    hosted.executor.execute(StepPlan(saves=(HostMove(2, 0),), loads=(HostMove(3, 0),)))
    hosted.executor.execute(StepPlan(loads=(HostMove(4, 0),))).result()
    np.testing.assert_array_equal(pages(hosted)[[3, 4]], before[[1, 2]])


def test_save_and_copy_read_a_page_before_the_load_of_the_same_plan_writes_it(hosted: Served) -> None:
    before = pages(hosted)
    hosted.executor.execute(StepPlan(saves=(HostMove(1, 0),)))
    hosted.executor.execute(StepPlan(saves=(HostMove(2, 1),), copies=(PageCopy(2, 5),), loads=(HostMove(2, 0),)))
    hosted.executor.execute(StepPlan(loads=(HostMove(6, 1),))).result()
    np.testing.assert_array_equal(pages(hosted)[[2, 5, 6]], before[[1, 2, 2]])


def test_save_reads_a_page_before_the_copy_of_the_same_plan_writes_it(hosted: Served) -> None:
    before = pages(hosted)
    hosted.executor.execute(StepPlan(saves=(HostMove(7, 3),), copies=(PageCopy(1, 7),)))
    hosted.executor.execute(StepPlan(loads=(HostMove(8, 3),))).result()
    np.testing.assert_array_equal(pages(hosted)[[7, 8]], before[[1, 7]])


def test_nothing_compiles_for_any_number_of_moves(hosted: Served) -> None:
    """R01."""
    compiled = COUNTER.compiled
    for count in (1, 2, PAGES_PER_CALL, BLOCKS):
        hosted.executor.execute(StepPlan(saves=moves(range(1, count + 1), range(count))))
        hosted.executor.execute(StepPlan(loads=moves(range(1, count + 1), range(count)))).result()
    assert COUNTER.compiled == compiled
    assert hosted.executor.compilations_after_warmup == 0


def test_block_that_holds_nothing_cannot_be_loaded(hosted: Served) -> None:
    fresh = HostBlocks(_host(hosted), 2, None)
    with pytest.raises(AssertionError, match="hold nothing"):
        fresh.at([HostMove(1, 1)])


def test_pinned_memory_keeps_pages_bit_for_bit_and_compiles_nothing(hosted: Served) -> None:
    """The way of an accelerator, which XLA:CPU knows too."""
    pinned = programs.page_sharding(make_mesh(1)).with_memory_kind("pinned_host")
    blocks = HostBlocks(_host(hosted), BLOCKS, pinned)
    before = pages(hosted)
    kv = blocks.warm_up(jax.numpy.array(hosted.executor._kv))
    compiled = COUNTER.compiled
    blocks.save(kv, moves(range(1, 12), range(11)))
    loads = moves(range(51, 62), range(11))
    held = blocks.at(loads)
    assert {page.sharding.memory_kind for page in held} == {"pinned_host"}
    kv = blocks.load(kv, loads, held)
    assert COUNTER.compiled == compiled
    np.testing.assert_array_equal(np.array(kv)[:, 51:62], np.moveaxis(before, 0, 1)[:, 1:12])


def test_save_reads_and_load_writes_in_place(hosted: Served) -> None:
    kv, host = hosted.executor._kv, _host(hosted)
    save, load = host.save.memory_analysis(), host.load.memory_analysis()  # type: ignore[attr-defined]
    assert load.alias_size_in_bytes == kv.nbytes
    assert max(save.temp_size_in_bytes, load.temp_size_in_bytes) < kv.nbytes / 100
    assert save.output_size_in_bytes < kv.nbytes / 50


def _host(served: Served) -> programs.HostPrograms:
    found = served.executor._programs.host
    assert found is not None
    return found
