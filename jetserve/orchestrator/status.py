"""How an orchestrator is doing, as data. Imports no jax."""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.StrEnum):
    """Where an orchestrator is in its life.

    LOADING -> READY -> DRAINING -> STOPPED, and from anywhere to FAILED, which is final.
    """

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class Status(NamedTuple):
    """A snapshot. A request with n samples counts n times among running and waiting ones.

    Attributes:
      running: in a slot.
      waiting_requests: accepted and without a slot, preempted ones too.
      waiting_tokens: prompt tokens of those that never had a slot.
      pages_used: that running requests have or share; the others are free to take.
      cached_pages: that the prefix cache holds, those in use too.
      queried_tokens, cached_tokens: of prompts that were looked up in the prefix cache, and found there.
    """

    state: State
    slots_used: int
    slots_total: int
    pages_used: int
    pages_total: int
    running: int
    waiting_requests: int
    waiting_tokens: int
    generated_tokens: int
    preemptions: int
    compilations_after_warmup: int
    cached_pages: int
    evicted_pages: int
    host_pages_used: int
    host_pages_total: int
    queried_tokens: int
    cached_tokens: int
    shed_requests: int
