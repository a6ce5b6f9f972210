"""The compiled table: what it holds, and that no program copies the cache."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jetserve.engine import moves, programs
from jetserve.sharding.budget import ProgramMemory
from tests.engine.conftest import Served


def test_table_has_a_program_for_every_size(llama: Served, gemma: Served) -> None:
    for served in (llama, gemma):
        table, sizing = served.executor._programs, served.sizing
        assert tuple(table.prefill) == sizing.prefill_sizes
        assert set(table.generate) == {(n, rows) for n in sizing.generate_steps for rows in sizing.generate_rows}


def test_cache_and_state_are_overwritten_in_place(served: Served) -> None:
    """All of both is aliased, and the temporaries of the largest program are small beside the cache."""
    executor = served.executor
    cache_bytes = executor._kv.nbytes
    state_bytes = sum(array.nbytes for array in jax.tree.leaves(executor._state))
    table = executor._programs
    for program in (*table.prefill.values(), *table.generate.values()):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= cache_bytes + state_bytes
        assert memory.temp_size_in_bytes < cache_bytes / 4
    for program in (table.insert, table.seen):
        assert program.memory_analysis().alias_size_in_bytes >= state_bytes
    memory = table.copy.memory_analysis()
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < 2 * cache_bytes * served.sizing.prefill_rows / served.sizing.pages


def test_no_program_copies_the_cache(served: Served) -> None:
    shape = ",".join(map(str, served.executor._kv.shape))
    table = served.executor._programs
    for program in (*table.prefill.values(), *table.generate.values(), table.copy):
        text = program.as_text()
        assert f"f32[{shape}]" in text
        assert not re.search(rf"= f32\[{shape}\]\S* (copy|convert|transpose|concatenate|select)\(", text)


def test_donated_buffers_are_gone_after_a_step(served: Served) -> None:
    kv = served.executor._kv
    served.solo(served.request((1, 2, 3), 2))
    with pytest.raises(RuntimeError, match="deleted"):
        kv.block_until_ready()


def test_memory_of_programs_counts_results_that_overwrite_nothing() -> None:
    """Pages on their way to host memory; what a copy returns lies where the cache was."""
    kv = jax.ShapeDtypeStruct((2, 100, 2, 2, 4, 8), jnp.float32)
    page_bytes = 2 * 2 * 2 * 4 * 8 * 4
    which = jax.ShapeDtypeStruct((moves.move_layout().size,), jnp.int32)
    save = programs.Program("save", moves.save, (kv, which), donate=(), out_shardings=None)
    assert programs.measure([save]).temporary_bytes >= moves.PAGES_PER_CALL * page_bytes
    pairs = jax.ShapeDtypeStruct((moves.copy_layout(1).size,), jnp.int32)
    copy = programs.Program("copy", functools.partial(moves.copy, rows=1), (kv, pairs), donate=(0,), out_shardings=None)
    assert programs.measure([copy]).temporary_bytes < 10 * page_bytes
    assert programs.measure([]) == ProgramMemory(0, 0)
