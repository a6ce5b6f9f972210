"""From plans to programs and back."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.engine.executor import DeviceExecutor
from jetserve.engine.plan import Admission, Chunk, Generate, PageGrant, StepPlan
from jetserve.request import MAX_LOGPROBS, SamplingParams
from tests.engine.conftest import Served


def start(slot: int, prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> StepPlan:
    made = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **params})  # type: ignore[arg-type]
    return StepPlan(
        (Admission(slot, made, (), 0, len(prompt)),),
        (PageGrant(slot, 0, slot + 1),),
        chunks=(Chunk(slot, 0, prompt, True),),
    )


def test_more_admissions_than_one_insert_takes(llama: Served) -> None:
    """Four with three rows: a second call."""
    assert llama.sizing.prefill_rows == 3
    plans = [start(slot, (slot, slot + 1)) for slot in range(4)]
    admissions = tuple(plan.admissions[0] for plan in plans)
    chunks = tuple(plan.chunks[0] for plan in plans)
    grants = tuple(plan.grants[0] for plan in plans)
    llama.executor.execute(StepPlan(admissions, grants, chunks=chunks[:3])).result()
    llama.executor.execute(StepPlan(chunks=chunks[3:])).result()
    result = llama.executor.execute(StepPlan(generate=Generate(4, 1, (0, 1, 2, 3)))).result()
    assert result.counts.tolist() == [1, 1, 1, 1]


def test_logprobs_come_for_plans_with_a_row_that_wants_them(llama: Served) -> None:
    quiet = llama.executor.execute(start(0)).result()
    assert quiet.first_logprobs is None
    plan = start(1, logprobs=2)
    loud = llama.executor.execute(replace(plan, generate=Generate(2, 1, (0,)))).result()
    assert loud.first_logprobs is not None
    assert loud.first_logprobs.top_ids.shape == (3, MAX_LOGPROBS)
    assert loud.logprobs is None
    both = llama.executor.execute(StepPlan(generate=Generate(2, 1, (0, 1)))).result()
    assert both.logprobs is not None
    assert both.logprobs.top.shape == (1, 2, MAX_LOGPROBS)
    assert np.isfinite(both.logprobs.top[0, 1]).all()
    # The slot is somebody else's now.
    llama.executor.execute(start(1)).result()
    assert llama.executor.execute(StepPlan(generate=Generate(2, 1, (0, 1)))).result().logprobs is None


def test_smallest_program_that_holds_the_chunks_is_called(serve: object, llama: Served) -> None:
    called = []
    executor = llama.executor
    whole = executor._programs
    counted = {
        size: lambda *arguments, size=size, program=program: called.append(size) or program(*arguments)
        for size, program in whole.prefill.items()
    }
    executor._programs = whole._replace(prefill=counted)
    try:
        for length in (1, 7, 8, 9, 31, 32):
            prompt = tuple(range(length))
            grants = tuple(PageGrant(0, at, at + 1) for at in range(-(-length // 4)))
            plan = start(0, prompt)
            executor.execute(replace(plan, grants=grants)).result()
    finally:
        executor._programs = whole
    sizes = llama.sizing.prefill_sizes
    assert called == [next(size for size in sizes if size >= length) for length in (1, 7, 8, 9, 31, 32)]


class Recompiling:
    """Stands for a program that was not in the table: every call compiles."""

    def __init__(self, program: object) -> None:
        self._program = program

    def __call__(self, *arguments: object) -> object:
        jax.jit(lambda x: x + 1).lower(jnp.int32(1)).compile()
        return self._program(*arguments)  # type: ignore[operator]


def test_compiling_in_a_step_is_counted_and_an_error_when_strict(
    llama: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """R01: whatever compiles while a step is dispatched; compilations elsewhere in the process are not its fault."""
    executor: DeviceExecutor = llama.executor
    jnp.int32(1)  # made before, so that only the step compiles
    programs, strict = executor._programs, executor._strict
    plan = StepPlan(generate=Generate(4, 1, (0,)))
    before = executor.compilations_after_warmup
    jax.jit(lambda x: x - 3)(1)
    llama.executor.execute(start(0)).result()
    assert executor.compilations_after_warmup == before == 0
    executor._programs = programs._replace(generate={(1, 4): Recompiling(programs.generate[1, 4])})
    try:
        with pytest.raises(RuntimeError, match=r"^1 compilation\(s\) after warm-up"):
            executor.execute(plan)
        executor._strict = False
        with caplog.at_level(logging.WARNING):
            executor.execute(plan).result()
        assert "2 compilation(s) after warm-up" in caplog.text
        assert executor.compilations_after_warmup == 2
    finally:
        executor._programs, executor._strict, executor._compilations = programs, strict, 0
