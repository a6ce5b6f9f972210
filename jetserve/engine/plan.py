"""The seam between policy and device: `schedule` makes a `StepPlan`, an `Executor` runs it. Plain data; imports no jax.

One plan is, in this order on the device: admit rows, save pages to host memory, copy pages, prefill chunks, generate,
load pages from host memory. A sequence keeps its slot from admission to its end. The device knows a row's stop ids and
token limit, so it stops a row by itself; the host learns of it from the result of the step, one step late.

Plans run one after the other, so a page may be saved or copied from and granted to somebody else in the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jetserve.request import SamplingParams


class Admission(NamedTuple):
    """Initialises one slot. The row stays inactive until the chunk with `is_last` was prefilled.

    Attributes:
      seed: 64-bit, of this sample.
      generated: tokens already generated before a preemption; they count against min_tokens and max_tokens.
      prompt_tokens: length of the prompt proper; later tokens of the chunks are `generated` ones.
      cached: tokens whose keys and values the row's pages hold already; its first chunk starts there.
      seen: the `cached` tokens themselves, of rows whose sampling counts tokens; empty for others.
    """

    slot: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    seed: int
    prompt_tokens: int
    generated: int = 0
    cached: int = 0
    seen: tuple[int, ...] = ()


class PageCopy(NamedTuple):
    """Page `target` becomes what page `source` was before the plan: a prefix that ends inside a page is copied.

    Where the source was evicted for this very sequence, it may be copied to itself.
    """

    source: int
    target: int


class HostMove(NamedTuple):
    """A page goes to (`saves`) or comes from (`loads`) a block of host memory of the same size.

    Saves read pages before anything of the plan writes them. Loads read blocks before the plan's saves write them, and
    write their pages behind everything else of the plan: chunks of later plans may use them.
    """

    page: int
    block: int


class Chunk(NamedTuple):
    """Prefills `token_ids` at positions [start, start + len(token_ids)) of a slot.

    Attributes:
      is_last: sample the next token from the last position and activate the row.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    is_last: bool


class PageGrant(NamedTuple):
    """Entry `index` of the slot's page table becomes `page`; takes effect before anything of the plan runs."""

    slot: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    page: int


class Generate(NamedTuple):
    """Decodes `steps` tokens for each active row below `rows`.

    Attributes:
      rows: how many slots take part, from slot 0; one of the compiled sizes.
      steps: one of the compiled sizes.
      active: slots the host wants to go on; the device drops those that it knows have ended.
    """

    rows: int
    steps: int
    active: tuple[int, ...]


class StepShape(NamedTuple):
    """What a step's time depends on.

    Attributes:
      prefill_size: of the compiled program; 0 without chunks.
      prefill_context: positions attended to, summed over the chunks' tokens.
      generate_rows, generate_steps: of the compiled program; 0 without generate.
      generate_context: positions attended to, summed over the active rows and the steps.
      generate_longest: those of the active row with the most, summed over the steps; where rows are computed together,
        all of them take as long as it does.
    """

    prefill_size: int = 0
    prefill_context: int = 0
    generate_rows: int = 0
    generate_steps: int = 0
    generate_context: int = 0
    generate_longest: int = 0


_NO_SHAPE = StepShape()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the device does in one step.

    The chunks' tokens together are at most the largest prefill size, and their number at most `prefill_rows`; so are
    the copies'.

    Attributes:
      shape: for who predicts the step's time; executors need not read it.
    """

    admissions: tuple[Admission, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    saves: tuple[HostMove, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    generate: Generate | None = None
    loads: tuple[HostMove, ...] = ()
    shape: StepShape = _NO_SHAPE

    @property
    def is_empty(self) -> bool:
        return not (self.admissions or self.chunks or self.generate)

    @property
    def prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class LogprobArrays(NamedTuple):
    """Aligned with the tokens they describe; `top_*` have MAX_LOGPROBS on the last axis, most likely first."""

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one plan sampled, on the host.

    Attributes:
      first_tokens: i32[chunks], the token sampled after each chunk with `is_last`; others undefined.
      tokens: i32[steps, rows]; row r has `counts[r]` valid ones, the first ones.
      counts: i32[rows], 0 for a row that had ended before.
      first_logprobs, logprobs: present when a row of the plan asked for them; leading axes as the tokens'.
    """

    first_tokens: NDArray[np.int32]
    tokens: NDArray[np.int32]
    counts: NDArray[np.int32]
    first_logprobs: LogprobArrays | None = None
    logprobs: LogprobArrays | None = None


class PendingStep(Protocol):
    """A step in flight."""

    def result(self) -> StepResult:
        """Waits for the device and returns what was sampled. Called once."""
        ...


class Executor(Protocol):
    """Runs plans, in order. Called from the engine thread only."""

    @property
    def compilations_after_warmup(self) -> int:
        """Programs compiled since warm-up ended; 0 unless something is wrong."""
        ...

    def execute(self, plan: StepPlan) -> PendingStep:
        """Dispatches a plan and returns without waiting for the device."""
        ...
