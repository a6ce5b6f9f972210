"""Executors without a device, for tests and for measuring the host. Imports no jax.

`FakeExecutor` keeps its own pages and checks every plan against the contract in plan.py. `FreeExecutor` checks nothing
and costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jetserve.engine.fake_pages import UNWRITTEN, ContractViolation, FakePages, FakeRow, require
from jetserve.engine.plan import (
    Admission,
    Chunk,
    Generate,
    HostMove,
    LogprobArrays,
    PageCopy,
    PageGrant,
    StepPlan,
    StepResult,
)
from jetserve.engine.sizing import Sizing
from jetserve.kernels import TRASH_PAGE
from jetserve.request import MAX_LOGPROBS

NextToken = Callable[[Sequence[int], Admission], int]


class FakeExecutor:
    """Runs plans on lists, and refuses those that break the contract.

    Tokens are written into pages and read back through the page table, cached ones too, so wrong sharing shows in the
    tokens as well. Who was aborted or preempted is not known here, so a page taken from a row that runs is found when
    the row uses it next. Of the sampling parameters only min_tokens and max_tokens count: a stop id that comes too
    early is replaced by the next id that is none. Logprobs are those of `fake_logprobs`.

    Args:
      next_token: of all tokens of a sequence, and its admission; None is the last token + 1, modulo the vocabulary.
      step_seconds: that the device is busy with each plan; results wait for it.
      fail_at: index of the plan whose result raises.
      clock, sleep: for `step_seconds`.
    """

    compilations_after_warmup = 0

    def __init__(
        self,
        sizing: Sizing,
        vocab_size: int,
        *,
        next_token: NextToken | None = None,
        step_seconds: float = 0.0,
        fail_at: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sizing = sizing
        self._vocab_size = vocab_size
        self._next_token = next_token or (lambda tokens, _: (tokens[-1] + 1) % vocab_size)
        self._fail_at = fail_at
        self._device = _Device(step_seconds, clock, sleep)
        self._rows: list[FakeRow | None] = [None] * sizing.slots
        self._pages = FakePages(sizing)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> FakeStep:
        """Runs the plan at once; its result comes when the device would be done.

        Raises: ContractViolation.
        """
        failure = RuntimeError(f"the fake device failed at plan {len(self.plans)}")
        is_failing = len(self.plans) == self._fail_at
        self.plans.append(plan)
        if plan.is_empty:
            raise ContractViolation("the plan is empty")
        for admission in plan.admissions:
            self._admit(plan, admission)
        for grant in plan.grants:
            self._grant(grant)
        loaded = [self._pages.block(self._checked(move).block) for move in plan.loads]
        self._save(plan.saves)
        self._copy(plan.copies, plan.grants)
        wants_logprobs = any(row.admission.params.logprobs is not None for row in self._planned(plan))
        first_tokens = self._prefill(plan.chunks)
        tokens, counts = self._generate(plan.generate)
        self._load(plan.loads, loaded)
        result = StepResult(
            first_tokens=first_tokens,
            tokens=tokens,
            counts=counts,
            first_logprobs=fake_logprobs(first_tokens, self._vocab_size) if wants_logprobs else None,
            logprobs=fake_logprobs(tokens, self._vocab_size) if wants_logprobs else None,
        )
        return FakeStep(result, self._device, self._device.dispatch(), failure if is_failing else None)

    def _planned(self, plan: StepPlan) -> list[FakeRow]:
        slots = {chunk.slot for chunk in plan.chunks} | set(plan.generate.active if plan.generate else ())
        return [row for slot in slots if (row := self._row(slot)) is not None]

    def _row(self, slot: int) -> FakeRow:
        require(0 <= slot < self._sizing.slots, f"{slot=} is out of range")
        row = self._rows[slot]
        if row is None:
            raise ContractViolation(f"{slot=} was never admitted")
        return row

    def _admit(self, plan: StepPlan, admission: Admission) -> None:
        slot = admission.slot
        require(0 <= slot < self._sizing.slots, f"admission to {slot=}, which is out of range")
        require([a.slot for a in plan.admissions].count(slot) == 1, f"{slot=} is admitted twice in a plan")
        require(0 <= admission.generated < (admission.params.max_tokens or 0), f"nothing is left of {admission}")
        whole = admission.prompt_tokens + admission.generated
        require(0 <= admission.cached < whole, f"nothing is left to prefill of {admission}")
        counted = admission.cached if admission.params.has_penalties else 0
        require(len(admission.seen) == counted, f"{len(admission.seen)} tokens seen, not {counted}: {admission}")
        self._rows[slot] = FakeRow(admission, admission.generated, admission.cached)

    def _grant(self, grant: PageGrant) -> None:
        row = self._row(grant.slot)
        self._require_page(grant.page, grant)
        require(grant.index == len(row.pages), f"{grant} leaves a gap or replaces a page, {len(row.pages)} are granted")
        require(grant.index < self._sizing.pages_per_slot, f"{grant} is beyond the page table")
        row.pages.append(grant.page)
        row.lives.append(self._pages.lives[grant.page])
        if (grant.index + 1) * self._sizing.page_size > row.admission.cached:
            self._pages.owners[grant.page] = row

    def _require_page(self, page: int, reason: PageGrant | PageCopy | HostMove) -> None:
        require(page != TRASH_PAGE, f"{reason} is about the trash page")
        require(0 < page < self._sizing.pages, f"{reason}: no such page")

    def _checked(self, move: HostMove) -> HostMove:
        self._require_page(move.page, move)
        require(0 <= move.block < self._sizing.host_blocks, f"{move}: no such block")
        return move

    def _save(self, saves: tuple[HostMove, ...]) -> None:
        require(len({move.block for move in saves}) == len(saves), "two pages are saved to one block in a plan")
        for move in saves:
            self._pages.save(move.block, self._pages.page(self._checked(move).page))

    def _copy(self, copies: tuple[PageCopy, ...], grants: tuple[PageGrant, ...]) -> None:
        """Reads all sources, clears the pages that are granted as new ones, and writes all targets."""
        limit = self._sizing.prefill_rows
        require(len(copies) <= limit, f"{len(copies)} copies, at most {limit} are allowed")
        require(len({copy.target for copy in copies}) == len(copies), "two pages are copied to one in a plan")
        for copy in copies:
            self._require_page(copy.source, copy)
            self._require_page(copy.target, copy)
        sources = [self._pages.page(copy.source) for copy in copies]
        for slot, index, page in grants:
            row = self._row(slot)
            if index * self._sizing.page_size >= row.admission.cached:
                self._pages.renew(page)
                row.lives[index] = self._pages.lives[page]
        for copy, cells in zip(copies, sources, strict=True):
            self._pages.renew(copy.target, cells)

    def _load(self, loads: tuple[HostMove, ...], loaded: list[NDArray[np.int64]]) -> None:
        require(len({move.page for move in loads}) == len(loads), "two blocks are loaded to one page in a plan")
        for move, cells in zip(loads, loaded, strict=True):
            self._pages.renew(move.page, cells)

    def _prefill(self, chunks: tuple[Chunk, ...]) -> NDArray[np.int32]:
        sizing = self._sizing
        total = sum(len(chunk.token_ids) for chunk in chunks)
        require(len(chunks) <= sizing.prefill_rows, f"{len(chunks)} chunks, at most {sizing.prefill_rows} are allowed")
        require(
            total <= min(sizing.prefill_tokens, sizing.prefill_sizes[-1]), f"{total} prefill tokens do not fit a plan"
        )
        require(len({chunk.slot for chunk in chunks}) == len(chunks), "a slot has two chunks in a plan")
        first_tokens = np.full(len(chunks), UNWRITTEN, np.int32)
        for chunk in chunks:  # all of them before any writes: a page cannot be shared in the plan that writes it
            if not (row := self._row(chunk.slot)).has_begun:
                self._pages.begin(row)
        for at, chunk in enumerate(chunks):
            row = self._row(chunk.slot)
            require(not row.is_prefilled, f"{chunk} comes after the last one of its slot")
            require(chunk.start == row.length, f"{chunk} starts at {chunk.start}, {row.length} tokens are written")
            require(bool(chunk.token_ids), f"{chunk} is empty")
            require(
                0 <= min(chunk.token_ids) <= max(chunk.token_ids) < self._vocab_size, f"{chunk} leaves the vocabulary"
            )
            for token in chunk.token_ids:
                self._write(row, token)
            if chunk.is_last:
                whole = row.admission.prompt_tokens + row.admission.generated
                require(row.length == whole, f"{chunk} is the last, {row.length} of {whole} tokens are written")
                row.is_prefilled = row.is_active = True
                first_tokens[at] = self._sample(row, self._pages.read(row))
        return first_tokens

    def _generate(self, generate: Generate | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        if generate is None:
            return np.zeros((0, 0), np.int32), np.zeros(0, np.int32)
        rows, steps, active = generate
        require(rows in self._sizing.generate_rows, f"{rows=} is not compiled")
        require(steps in self._sizing.generate_steps, f"{steps=} is not compiled")
        require(bool(active), "generate has no rows")
        require(list(active) == sorted(set(active)), f"{active=} is not ascending")
        require(active[-1] < rows, f"slot {active[-1]} is active, {rows=} take part")
        tokens = np.full((steps, rows), UNWRITTEN, np.int32)
        counts = np.zeros(rows, np.int32)
        for slot in active:
            row = self._row(slot)
            require(row.is_prefilled, f"{slot=} decodes before its last chunk")
            for step in range(steps):
                if row.is_active:
                    self._write(row, row.last_token)
                    tokens[step, slot] = self._sample(row, self._pages.read(row))
                    counts[slot] += 1
        return tokens, counts

    def _write(self, row: FakeRow, token: int) -> None:
        if row.length >= min(self._sizing.max_length, len(row.pages) * self._sizing.page_size):
            raise ContractViolation(f"position {row.length} of {row.admission} has no page")
        self._pages.write(row, token)

    def _sample(self, row: FakeRow, tokens: list[int]) -> int:
        params, stops = row.admission.params, row.admission.stop_token_ids
        token = self._next_token(tokens, row.admission)
        while row.generated < params.min_tokens and token in stops:
            token = (token + 1) % self._vocab_size
        row.generated += 1
        row.last_token = token
        row.is_active = token not in stops and row.generated != params.max_tokens
        return token


class FreeExecutor:
    """Samples last token + 1 for every row that is listed, with array operations only. Checks nothing.

    Rows stop at max_tokens; stop ids, min_tokens and logprobs are ignored, so give it requests without.
    """

    compilations_after_warmup = 0

    def __init__(
        self,
        sizing: Sizing,
        vocab_size: int,
        *,
        step_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = _Device(step_seconds, clock, sleep)
        self._last_tokens = np.zeros(sizing.slots, np.int32)
        self._left = np.zeros(sizing.slots, np.int32)
        self._active: tuple[int, ...] = ()
        self._active_array = np.zeros(0, np.int64)

    def execute(self, plan: StepPlan) -> FakeStep:
        for admission in plan.admissions:
            self._left[admission.slot] = (admission.params.max_tokens or 0) - admission.generated
        first_tokens = np.zeros(len(plan.chunks), np.int32)
        for at, chunk in enumerate(plan.chunks):
            if chunk.is_last:
                first_tokens[at] = (chunk.token_ids[-1] + 1) % self._vocab_size
                self._last_tokens[chunk.slot] = first_tokens[at]
                self._left[chunk.slot] -= 1
        tokens, counts = np.zeros((0, 0), np.int32), np.zeros(0, np.int32)
        if plan.generate is not None:
            rows, steps, active = plan.generate
            if active is not self._active:
                self._active, self._active_array = active, np.array(active)
            counts = np.zeros(rows, np.int32)
            counts[self._active_array] = np.clip(self._left[self._active_array], 0, steps)
            tokens = (self._last_tokens[:rows] + np.arange(1, steps + 1, dtype=np.int32)[:, None]) % self._vocab_size
            self._last_tokens[:rows] = (self._last_tokens[:rows] + counts) % self._vocab_size
            self._left[:rows] -= counts
        return FakeStep(StepResult(first_tokens, tokens, counts), self._device, self._device.dispatch(), None)


class _Device:
    """One plan at a time, each for so long."""

    def __init__(self, step_seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._step_seconds = step_seconds
        self._clock = clock
        self._sleep = sleep
        self._busy_until = 0.0

    def dispatch(self) -> float:
        """Takes the next plan on. Returns when it will be done."""
        if self._step_seconds:
            self._busy_until = max(self._clock(), self._busy_until) + self._step_seconds
        return self._busy_until

    def wait_until(self, done: float) -> None:
        if self._step_seconds and (left := done - self._clock()) > 0:
            self._sleep(left)


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A plan in flight."""

    _result: StepResult
    _device: _Device
    _done_seconds: float
    _failure: RuntimeError | None

    def result(self) -> StepResult:
        self._device.wait_until(self._done_seconds)
        if self._failure is not None:
            raise self._failure
        return self._result


def fake_logprobs(tokens: NDArray[np.int32], vocab_size: int) -> LogprobArrays:
    """Logprob -1 for a token t; the most likely are t, t+1, .. modulo the vocabulary with -1, -2, .."""
    ranks = np.arange(MAX_LOGPROBS, dtype=np.int32)
    return LogprobArrays(
        chosen=np.full(tokens.shape, -1.0, np.float32),
        top_ids=(tokens[..., None] + ranks) % vocab_size,
        top=np.broadcast_to(-1.0 - ranks, (*tokens.shape, MAX_LOGPROBS)).astype(np.float32),
    )
