"""The table of device programs. Warm-up compiles its rows, and the executor can call nothing else.

One row per program and size. `compile_table` is the only place where jetserve compiles for serving, so "nothing
compiles after warm-up" is a fact that `compilations.py` counts, not a hope.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jetserve.engine import moves, steps
from jetserve.engine import state as states
from jetserve.engine.sizing import Sizing
from jetserve.models.transformer import Weights
from jetserve.sharding.budget import ProgramMemory
from jetserve.sharding.rules import TENSOR, replicated

Control = NDArray[np.int32]
# Each takes up to 2 GB of host memory for a large model, and more than there are cores only take memory.
_COMPILING_AT_ONCE = min(4, os.cpu_count() or 1)

Insert = Callable[[states.DecodeState, Control], states.DecodeState]
Step = Callable[[Weights[Array], states.DecodeState, Array, Control], tuple[states.DecodeState, Array, steps.Sampled]]
Copy = Callable[[Array, Control], Array]
Save = Callable[[Array, Control], tuple[Array, ...]]
Load = Callable[[Array, Control, tuple[Array, ...]], Array]


class Program(NamedTuple):
    """One device program.

    Attributes:
      fn: pure; everything static is bound.
      args: shapes and shardings of the arguments.
      donate: indices of arguments that the results overwrite.
      out_shardings: of the results; donated ones come back as they went in.
    """

    name: str
    fn: Callable[..., object]
    args: tuple[object, ...]
    donate: tuple[int, ...]
    out_shardings: object

    def lower(self) -> jax.stages.Lowered:
        jitted = jax.jit(self.fn, donate_argnums=self.donate, out_shardings=self.out_shardings)
        return jitted.lower(*self.args)


class HostPrograms(NamedTuple):
    """What moves pages between the cache and host memory."""

    save: Save
    load: Load


class CompiledTable(NamedTuple):
    """What the executor may call: by tokens, and by (steps, rows).

    Attributes:
      host: only where pages may move to host memory.
    """

    insert: Insert
    seen: Insert
    copy: Copy
    prefill: dict[int, Step]
    generate: dict[tuple[int, int], Step]
    host: HostPrograms | None


def cache_shape(sizing: Sizing, layers: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """kv[L, P, K, 2, Z, H]"""
    return layers, sizing.pages, kv_heads, 2, sizing.page_size, head_dim


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """A head's keys and values stay on one chip."""
    return NamedSharding(mesh, PartitionSpec(None, None, TENSOR))


def page_sharding(mesh: Mesh) -> NamedSharding:
    """Of one page on its own, [L, K, 2, Z, H]; as in the cache."""
    return NamedSharding(mesh, PartitionSpec(None, TENSOR))


def program_table(
    rule: steps.StepRule,
    sizing: Sizing,
    mesh: Mesh,
    weights: Weights[jax.ShapeDtypeStruct],
    kv: jax.ShapeDtypeStruct,
    vocab_size: int,
) -> Iterator[Program]:
    """All rows, smallest first.

    Args:
      weights, kv: shapes with shardings, of arrays or of nothing yet.
      vocab_size: V of the logits, padding included.
    """
    whole = replicated(mesh)
    shapes = jax.eval_shape(lambda: states.initial(sizing, vocab_size))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)

    def control(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)

    rows = sizing.prefill_rows
    yield Program(
        "insert",
        functools.partial(steps.insert, rows=rows),
        (state, control(states.insert_layout(rows).size)),
        donate=(0,),
        out_shardings=whole,
    )
    seen = sizing.prefill_sizes[-1]
    yield Program(
        "seen",
        functools.partial(steps.seen, tokens=seen),
        (state, control(steps.seen_layout(seen).size)),
        donate=(0,),
        out_shardings=whole,
    )
    yield from _page_programs(sizing, mesh, kv)
    for tokens in sizing.prefill_sizes:
        yield Program(
            f"prefill[{tokens}]",
            functools.partial(steps.prefill, rule=rule, tokens=tokens, rows=rows),
            (weights, state, kv, control(steps.prefill_layout(tokens, rows, sizing.pages_per_slot).size)),
            donate=(1, 2),
            out_shardings=(whole, kv.sharding, whole),
        )
    for count in sizing.generate_steps:
        for batch in sizing.generate_rows:
            yield Program(
                f"generate[{count}, {batch}]",
                functools.partial(steps.generate, rule=rule, steps=count, rows=batch),
                (weights, state, kv, control(steps.generate_layout(batch).size)),
                donate=(1, 2),
                out_shardings=(whole, kv.sharding, whole),
            )


def _page_programs(sizing: Sizing, mesh: Mesh, kv: jax.ShapeDtypeStruct) -> Iterator[Program]:
    def control(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=replicated(mesh))

    rows = sizing.prefill_rows
    yield Program(
        "copy",
        functools.partial(moves.copy, rows=rows),
        (kv, control(moves.copy_layout(rows).size)),
        donate=(0,),
        out_shardings=kv.sharding,
    )
    if not sizing.host_blocks:
        return
    layers, _, *rest = kv.shape
    page = jax.ShapeDtypeStruct((layers, *rest), kv.dtype, sharding=page_sharding(mesh))
    pages = (page,) * moves.PAGES_PER_CALL
    which = control(moves.move_layout().size)
    yield Program("save", moves.save, (kv, which), donate=(), out_shardings=page.sharding)
    yield Program("load", moves.load, (kv, which, pages), donate=(0,), out_shardings=kv.sharding)


def measure(table: list[Program]) -> ProgramMemory:
    """What the programs need of one chip besides arguments, by compiling them.

    Results that overwrite no argument count as temporaries: pages on their way to host memory are as large.
    """
    found = [program.lower().compile().memory_analysis() for program in table]
    analyses = [analysis for analysis in found if analysis is not None]
    return ProgramMemory(
        temporary_bytes=max(
            (
                analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
                for analysis in analyses
            ),
            default=0,
        ),
        code_bytes=sum(analysis.generated_code_size_in_bytes for analysis in analyses),
    )


def compile_table(table: list[Program], sizing: Sizing, report: Callable[[str, float], None]) -> CompiledTable:
    """Compiles every row. While the compiler works on one, which needs no Python, the next is traced.

    Args:
      report: called with (what is being done, fraction of the rows compiled) at the start and after each row.
    """
    report(f"compiling {len(table)} programs", 0.0)
    compiled = {}
    with ThreadPoolExecutor(_COMPILING_AT_ONCE, thread_name_prefix="compile") as pool:
        pending = {pool.submit(program.lower().compile): program.name for program in table}
        for done, future in enumerate(as_completed(pending), 1):
            compiled[pending[future]] = future.result()
            report(f"compiled {pending[future]}", done / len(table))
    return CompiledTable(
        insert=compiled["insert"],
        seen=compiled["seen"],
        copy=compiled["copy"],
        prefill={tokens: compiled[f"prefill[{tokens}]"] for tokens in sizing.prefill_sizes},
        generate={
            (count, batch): compiled[f"generate[{count}, {batch}]"]
            for count in sizing.generate_steps
            for batch in sizing.generate_rows
        },
        host=HostPrograms(compiled["save"], compiled["load"]) if sizing.host_blocks else None,
    )
