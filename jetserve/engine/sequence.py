"""One sample of one request, as the host knows it. Host side, engine thread only; imports no jax."""

from __future__ import annotations

from jetserve.engine.plan import Admission
from jetserve.request import FinishReason, Request


class Sequence:
    """Tokens, slot and pages of one sample. The scheduler alone changes it.

    Positions, for a prompt of P tokens and at most M generated ones:
        [0, P)            prompt; written by prefill
        [P, P + M - 1)    generated tokens; each is written by the decode step that reads it
        P + M - 1         the last token; sampled but never written

    Attributes:
      order: running number of arrival; ties of priority go to the lower one.
      slot: row of the decode batch from admission to end, None before and after.
      pages: entry i holds positions [i * page_size, (i + 1) * page_size).
      generated: tokens the host has read back.
      prefix: what prefill writes: the prompt, and after a preemption the tokens generated before it.
      prefilled: tokens of `prefix` that went to the device.
      incarnation: grows whenever the slot is left, so that results dispatched before are known to be stale.
      scheduled_seconds: when it first got a slot.
    """

    __slots__ = (
        "finish_reason",
        "generated",
        "incarnation",
        "index",
        "order",
        "pages",
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
        self.pages: list[int] = []
        self.generated: list[int] = []
        self.prefix = request.prompt_token_ids
        self.prefilled = 0
        self.incarnation = 0
        self.preemptions = 0
        self.scheduled_seconds: float | None = None
        self.finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id}/{self.index} slot={self.slot} generated={len(self.generated)})"

    @property
    def rank(self) -> tuple[int, int]:
        """Lower runs first and is preempted last."""
        return (self.request.priority, self.order)

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == len(self.prefix)

    @property
    def max_positions(self) -> int:
        """Positions ever written."""
        return positions_written(self.request)

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
        )

    def append(self, token_ids: list[int]) -> FinishReason | None:
        """Takes tokens in and says whether the last one ends the sequence. Mirrors the test on the device."""
        generated, request = self.generated, self.request
        generated += token_ids
        if token_ids[-1] in request.stop_token_ids and len(generated) >= request.params.min_tokens:
            self.finish_reason = FinishReason.STOP
        elif len(generated) == request.params.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason

    def leave(self) -> list[int]:
        """Gives up slot and pages, and makes results in flight stale. Returns the pages."""
        pages, self.pages = self.pages, []
        self.slot = None
        self.incarnation += 1
        return pages

    def rewind(self) -> None:
        """After `leave`: to be prefilled again, with the tokens generated so far."""
        self.prefix = self.request.prompt_token_ids + tuple(self.generated)
        self.prefilled = 0
        self.preemptions += 1


def positions_written(request: Request) -> int:
    """Positions of the cache one sample of the request can fill: all tokens but the last."""
    return len(request.prompt_token_ids) + request.max_tokens - 1
