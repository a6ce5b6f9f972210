"""One sample of one request, as the host knows it. Host side, engine thread only; imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jetserve.engine.plan import Admission
from jetserve.engine.prefix_node import Node
from jetserve.request import FinishReason, Request


class Lateness(NamedTuple):
    """When the first token of a sequence is predicted, and when it should be there; on the clock of its arrival."""

    predicted_seconds: float
    due_seconds: float


@dataclass(slots=True)
class Held:
    """What a sequence has of the KV memory. `KvMemory` alone changes it, but for `granted`.

    Attributes:
      pages: entry i holds positions [i * page_size, (i + 1) * page_size).
      granted: entries of `pages` that the device knows; counted by the plan that grants them.
      node, kept: the deepest node of the prefix tree it has locked, and how many pages are in the tree by it.
      announced: pages from here on are waited for by others with the same prefix.
      written: tokens of its prefix known to be in the pages: cached ones, and chunks whose results were read.
      hashes: of the whole pages of its prefix; None until somebody asks.
    """

    pages: list[int] = field(default_factory=list)
    granted: int = 0
    node: Node | None = None
    kept: int = 0
    announced: int = 0
    written: int = 0
    hashes: list[int] | None = None


class Sequence:
    """Tokens, slot and pages of one sample. The scheduler alone changes it, with its parts: rows, memory, queue, draft.

    Positions, for a prompt of P tokens and at most M generated ones:
        [0, P)            prompt; written by prefill
        [P, P + M - 1)    generated tokens; each is written by the decode step that reads it
        P + M - 1         the last token; sampled but never written

    Attributes:
      order: running number of arrival; ties of priority go to the lower one.
      slot: row of the decode batch from admission to end, None before and after.
      is_aged: waited longest when it was the turn of that one; runs before all others from then on.
      held: its part of the KV memory.
      cached: prompt tokens found in the cache when it first got a slot.
      generated: tokens the host has read back.
      prefix: what prefill writes: the prompt, and after a preemption the tokens generated before it.
      prefilled: tokens of `prefix` that were cached or went to the device.
      incarnation: grows whenever the slot is left, so that results dispatched before are known to be stale.
      scheduled_seconds: when it first got a slot.
      lateness: why it was shed.
    """

    __slots__ = (
        "cached",
        "finish_reason",
        "generated",
        "held",
        "incarnation",
        "index",
        "is_aged",
        "lateness",
        "order",
        "preemptions",
        "prefilled",
        "prefix",
        "request",
        "scheduled_seconds",
        "slot",
    )

    def __init__(self, request: Request, index: int, order: int) -> None:
        self.request = request
        self.index = index
        self.order = order
        self.slot: int | None = None
        self.is_aged = False
        self.held = Held()
        self.cached = 0
        self.generated: list[int] = []
        self.prefix = request.prompt_token_ids
        self.prefilled = 0
        self.incarnation = 0
        self.preemptions = 0
        self.scheduled_seconds: float | None = None
        self.finish_reason: FinishReason | None = None
        self.lateness: Lateness | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id}/{self.index} slot={self.slot} generated={len(self.generated)})"

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Lower runs first and is preempted last."""
        return (not self.is_aged, self.request.priority, self.order)

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == len(self.prefix)

    @property
    def lacking(self) -> int:
        """Tokens of `prefix` to be prefilled."""
        return len(self.prefix) - self.prefilled

    @property
    def positions_written(self) -> int:
        """Positions known to be in its pages. A generated token is written by the step that samples the next one."""
        if self.held.written < len(self.prefix):
            return self.held.written
        return max(self.held.written, len(self.request.prompt_token_ids) + len(self.generated) - 1)

    @property
    def max_positions(self) -> int:
        """Positions ever written."""
        return max_positions(self.request)

    def admission(self) -> Admission:
        """What the device must know to take the sequence up where the host's knowledge ends."""
        assert self.slot is not None
        return Admission(
            slot=self.slot,
            params=self.request.params,
            stop_token_ids=self.request.stop_token_ids,
            seed=self.request.sample_seed(self.index),
            prompt_tokens=len(self.request.prompt_token_ids),
            generated=len(self.generated),
            cached=self.held.written,
            seen=self.prefix[: self.held.written] if self.request.params.has_penalties else (),
        )

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Of prompt and answer, at positions [start, end)."""
        prompt = self.request.prompt_token_ids
        past = len(prompt)
        return prompt[start:end] + tuple(self.generated[max(start - past, 0) : max(end - past, 0)])

    def append(self, token_ids: list[int]) -> FinishReason | None:
        """Takes tokens in and says whether the last one ends the sequence. Mirrors the test on the device."""
        generated, request = self.generated, self.request
        generated += token_ids
        if token_ids[-1] in request.stop_token_ids and len(generated) >= request.params.min_tokens:
            self.finish_reason = FinishReason.STOP
        elif len(generated) == request.params.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason

    def leave(self) -> None:
        """Gives up the slot, and makes results in flight stale."""
        self.slot = None
        self.incarnation += 1

    def rewind(self) -> None:
        """After it left: to be prefilled again, with the tokens generated so far."""
        self.prefix = self.request.prompt_token_ids + tuple(self.generated)
        self.prefilled = 0
        self.preemptions += 1


def max_positions(request: Request) -> int:
    """Positions of the cache one sample of the request can fill: all tokens but the last."""
    return len(request.prompt_token_ids) + request.max_tokens - 1
