"""Runs plans on the device. The only host code that touches device arrays while serving; engine thread only."""

from __future__ import annotations

import logging

import numpy as np
from jax import Array
from jax.sharding import Sharding
from numpy.typing import NDArray

from jetserve.engine import moves, steps
from jetserve.engine import state as states
from jetserve.engine.compilations import COUNTER
from jetserve.engine.control import Layout
from jetserve.engine.host_blocks import HostBlocks
from jetserve.engine.plan import Admission, LogprobArrays, PageCopy, StepPlan, StepResult
from jetserve.engine.programs import CompiledTable, Step
from jetserve.engine.sizing import Sizing
from jetserve.kernels import TRASH_PAGE
from jetserve.models.transformer import Weights

log = logging.getLogger(__name__)

_NO_TOKENS = np.zeros((0, 0), np.int32)


class DeviceExecutor:
    """Owns weights, state and cache; calls compiled programs only.

    Args:
      blocks: sharding of a page in host memory; None leaves saved pages where the device put them.
      strict: raise when something compiled after warm-up, instead of warning.
    """

    def __init__(
        self,
        programs: CompiledTable,
        sizing: Sizing,
        weights: Weights[Array],
        state: states.DecodeState,
        kv: Array,
        *,
        blocks: Sharding | None = None,
        strict: bool,
    ) -> None:
        self._programs = programs
        self._sizing = sizing
        self._weights = weights
        self._state = state
        self._kv = kv
        self._strict = strict
        self._page_table = np.full((sizing.slots, sizing.pages_per_slot), TRASH_PAGE, np.int32)
        self._prompt_tokens = np.zeros(sizing.slots, np.int32)
        self._wants_logprobs = np.zeros(sizing.slots, bool)
        self._layouts = _Layouts(sizing)
        self._compilations = 0
        self._host = HostBlocks(programs.host, sizing.host_blocks, blocks) if programs.host else None

    @property
    def compilations_after_warmup(self) -> int:
        """Should stay 0: a compilation while serving stalls every stream."""
        return self._compilations

    def execute(self, plan: StepPlan) -> DeviceStep:
        """Dispatches a plan; the device runs it behind all earlier ones."""
        compiled_before = COUNTER.compiled_by_this_thread
        for slot, index, page in plan.grants:
            self._page_table[slot, index] = page
        for first in range(0, len(plan.admissions), self._sizing.prefill_rows):
            self._insert(plan, first)
        for admission in plan.admissions:
            if admission.seen:
                self._count_seen(admission)
        loaded = self._host.at(plan.loads) if self._host else []
        if plan.saves:
            self._hosted.save(self._kv, plan.saves)
        if plan.copies:
            self._copy(plan.copies)
        sampled_first = self._prefill(plan) if plan.chunks else None
        sampled = self._generate(plan) if plan.generate else None
        if plan.loads:
            self._kv = self._hosted.load(self._kv, plan.loads, loaded)
        self._count_compilations(COUNTER.compiled_by_this_thread - compiled_before)
        return DeviceStep(sampled_first, sampled, self._logprobs_wanted(plan))

    def warm_up(self) -> None:
        """Runs the smallest program of each kind with nothing to do: proof that the device can step.

        All programs are compiled and loaded by now; running the large ones as well would only cost time.
        """
        self._state = self._programs.insert(self._state, self._layouts.insert.blank())
        self._state = self._programs.seen(self._state, self._layouts.seen.blank())
        self._kv = self._programs.copy(self._kv, self._layouts.copy.blank())
        if self._host:
            self._kv = self._host.warm_up(self._kv)
        size, prefill = min(self._programs.prefill.items())
        self._step(prefill, self._layouts.prefill[size].blank())
        (_, rows), generate = min(self._programs.generate.items(), key=lambda item: item[0])
        sampled = self._step(generate, self._layouts.generate[rows].blank())
        np.asarray(sampled.tokens)

    def _step(self, program: Step, control: NDArray[np.int32]) -> steps.Sampled:
        """Dispatches a program on state and cache, which its results replace."""
        self._state, self._kv, sampled = program(self._weights, self._state, self._kv, control)
        return sampled

    def _insert(self, plan: StepPlan, first: int) -> None:
        vector = self._layouts.insert.blank()
        fields = self._layouts.insert.views(vector)
        for row, admission in enumerate(plan.admissions[first : first + self._sizing.prefill_rows]):
            states.write_admission(fields, row, admission)
            self._prompt_tokens[admission.slot] = admission.prompt_tokens
            self._wants_logprobs[admission.slot] = admission.params.logprobs is not None
        self._state = self._programs.insert(self._state, vector)

    def _count_seen(self, admission: Admission) -> None:
        layout = self._layouts.seen
        most = layout.fields["tokens"].size
        for start in range(0, len(admission.seen), most):
            tokens = admission.seen[start : start + most]
            vector = layout.blank()
            fields = layout.views(vector)
            fields["tokens"][: len(tokens)] = tokens
            fields["slot"][...] = admission.slot
            fields["start"][...] = start
            fields["length"][...] = len(tokens)
            fields["prompt_tokens"][...] = admission.prompt_tokens
            self._state = self._programs.seen(self._state, vector)

    def _copy(self, copies: tuple[PageCopy, ...]) -> None:
        vector = self._layouts.copy.blank()
        fields = self._layouts.copy.views(vector)
        fields["count"][...] = len(copies)
        fields["pages"][: len(copies)] = copies
        self._kv = self._programs.copy(self._kv, vector)

    @property
    def _hosted(self) -> HostBlocks:
        assert self._host is not None, "pages move to host memory only where it has blocks"
        return self._host

    def _prefill(self, plan: StepPlan) -> steps.Sampled:
        total = plan.prefill_tokens
        size = next(size for size in self._sizing.prefill_sizes if size >= total)
        layout = self._layouts.prefill[size]
        vector = layout.blank()
        fields = layout.views(vector)
        offset = 0
        for row, chunk in enumerate(plan.chunks):
            length = len(chunk.token_ids)
            fields["tokens"][offset : offset + length] = chunk.token_ids
            fields["token_rows"][offset : offset + length] = row
            fields["slot"][row] = chunk.slot
            fields["starts"][row] = chunk.start
            fields["lengths"][row] = length
            fields["offsets"][row] = offset
            fields["prompt_tokens"][row] = self._prompt_tokens[chunk.slot]
            fields["is_last"][row] = chunk.is_last
            fields["page_table"][row] = self._page_table[chunk.slot]
            offset += length
        return self._step(self._programs.prefill[size], vector)

    def _generate(self, plan: StepPlan) -> steps.Sampled:
        assert plan.generate is not None
        rows = plan.generate.rows
        layout = self._layouts.generate[rows]
        vector = layout.blank()
        fields = layout.views(vector)
        fields["active"][list(plan.generate.active)] = 1
        if plan.grants:
            # A chunk's slot gets its whole row of the page table from the prefill, and so will one that has none yet.
            told = set(plan.generate.active).difference(chunk.slot for chunk in plan.chunks)
            grants = [grant for grant in plan.grants if grant.slot in told]
            fields["grants"][: len(grants)] = np.array(grants, np.int32).reshape(-1, 3)
        return self._step(self._programs.generate[plan.generate.steps, rows], vector)

    def _logprobs_wanted(self, plan: StepPlan) -> tuple[bool, bool]:
        chunks = any(chunk.is_last and self._wants_logprobs[chunk.slot] for chunk in plan.chunks)
        active = plan.generate.active if plan.generate else ()
        return chunks, bool(active) and bool(self._wants_logprobs[list(active)].any())

    def _count_compilations(self, compiled: int) -> None:
        if not compiled:
            return
        self._compilations += compiled
        message = f"{self._compilations} compilation(s) after warm-up; every stream waited for them"
        if self._strict:
            raise RuntimeError(message)
        log.warning(message)


class DeviceStep:
    """A plan in flight; its copies to the host have begun.

    Args:
      wanted: whether logprobs of the first tokens, and of the others, are read.
    """

    def __init__(self, first: steps.Sampled | None, others: steps.Sampled | None, wanted: tuple[bool, bool]) -> None:
        self._first = _begin_copy(first, wanted[0])
        self._others = _begin_copy(others, wanted[1])

    def result(self) -> StepResult:
        first, first_logprobs = _read(self._first)
        tokens, logprobs = _read(self._others)
        if tokens.ndim != 2:
            tokens = _NO_TOKENS
        return StepResult(
            first_tokens=first.reshape(-1),
            tokens=tokens,
            counts=np.count_nonzero(tokens >= 0, axis=0).astype(np.int32),
            first_logprobs=first_logprobs,
            logprobs=logprobs,
        )


class _Layouts:
    """The control layouts of all programs, made once."""

    def __init__(self, sizing: Sizing) -> None:
        rows, pages = sizing.prefill_rows, sizing.pages_per_slot
        self.insert: Layout = states.insert_layout(rows)
        self.seen: Layout = steps.seen_layout(sizing.prefill_sizes[-1])
        self.copy: Layout = moves.copy_layout(rows)
        self.prefill = {size: steps.prefill_layout(size, rows, pages) for size in sizing.prefill_sizes}
        self.generate = {size: steps.generate_layout(size) for size in sizing.generate_rows}


def _begin_copy(sampled: steps.Sampled | None, with_logprobs: bool) -> tuple[Array, ...]:
    if sampled is None:
        return ()
    arrays = (sampled.tokens, *(sampled.logprobs if with_logprobs else ()))
    for array in arrays:
        array.copy_to_host_async()
    return arrays


def _read(arrays: tuple[Array, ...]) -> tuple[NDArray[np.int32], LogprobArrays | None]:
    if not arrays:
        return np.zeros(0, np.int32), None
    tokens, *logprobs = (np.asarray(array) for array in arrays)
    return tokens, LogprobArrays(*logprobs) if logprobs else None
