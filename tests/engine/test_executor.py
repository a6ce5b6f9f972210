"""From plans to programs and back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.engine.executor import DeviceExecutor
from jetserve.engine.plan import Admission, Chunk, Generate, HostMove, PageCopy, PageGrant, StepPlan
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


def test_row_may_be_granted_all_its_pages_before_its_first_chunk(llama: Served) -> None:
    """More pages than a generate could be told of: the row's prefill brings them."""
    executor = llama.executor
    executor.execute(start(0)).result()
    prompt = tuple(range(50))
    [admitted] = start(1, prompt).admissions
    grants = tuple(PageGrant(1, at, 20 + at) for at in range(13))
    executor.execute(StepPlan((admitted,), grants, generate=Generate(2, 1, (0,)))).result()
    executor.execute(StepPlan(chunks=(Chunk(1, 0, prompt[:32], False),), generate=Generate(2, 1, (0,)))).result()
    result = executor.execute(StepPlan(chunks=(Chunk(1, 32, prompt[32:], True),))).result()
    assert result.first_tokens[0] == np.argmax(llama.truth.logits(prompt)[-1])


def test_copies_read_their_sources_before_chunks_write_them(llama: Served) -> None:
    """The source of a copy is granted to somebody else in the same plan."""
    executor = llama.executor
    prompt, other = (5, 6, 7, 8, 9), (60, 61, 62, 63)
    executor.execute(start(0, prompt[:4])).result()
    warm = start(1, prompt).admissions[0]._replace(cached=3)
    [thief] = start(2, other).admissions
    plan = StepPlan(
        (warm, thief),
        (PageGrant(1, 0, 9), PageGrant(1, 1, 10), PageGrant(2, 0, 1)),
        copies=(PageCopy(1, 9),),
        chunks=(Chunk(2, 0, other, True), Chunk(1, 3, prompt[3:], True)),
    )
    first_tokens = executor.execute(plan).result().first_tokens
    right = [int(np.argmax(llama.truth.logits(tokens)[-1])) for tokens in (other, prompt)]
    assert first_tokens[:2].tolist() == right


def test_plans_without_moves_and_seen_tokens_call_no_program_for_them(llama: Served) -> None:
    executor, called = llama.executor, []
    whole = executor._programs

    def counted(name: str) -> Callable[..., object]:
        return lambda *arguments: called.append(name) or getattr(whole, name)(*arguments)  # type: ignore[func-returns-value]

    executor._programs = whole._replace(copy=counted("copy"), seen=counted("seen"))  # type: ignore[arg-type]
    try:
        executor.execute(start(0)).result()
        assert called == []
        warm = start(1, tuple(range(50)), presence_penalty=0.5).admissions[0]._replace(cached=40, seen=(1,) * 40)
        executor.execute(StepPlan((warm,), copies=(PageCopy(1, 9), PageCopy(1, 8)))).result()
        assert called == ["seen", "seen", "copy"]
    finally:
        executor._programs = whole


def test_pages_cannot_move_where_host_memory_has_no_blocks(llama: Served) -> None:
    with pytest.raises(AssertionError, match="only where it has blocks"):
        llama.executor.execute(StepPlan(saves=(HostMove(1, 0),)))


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
