"""A closed loop of clients over anything that streams tokens, and what they saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tests.bench.workloads import Workload

# Yields how many tokens each message of the stream brought.
Stream = Callable[[list[int]], AsyncIterator[int]]


@dataclass(slots=True)
class Seen:
    """Times in seconds, over all requests of a workload."""

    wall: float = 0.0
    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)  # each token of a message has an equal part of its gap
    tokens: int = 0
    messages: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.wall


async def drive(stream: Stream, workload: Workload, vocab_size: int) -> Seen:
    """Sends the workload's requests and returns when all ended.

    Raises: ValueError when a request did not bring exactly the tokens it should.
    """
    prompts = workload.prompts(vocab_size)
    seen = Seen()

    async def client(index: int) -> None:
        for turn in range(workload.rounds):
            await _request(stream, prompts[index * workload.rounds + turn], workload.output_tokens, seen)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for index in range(workload.concurrency):
            clients.create_task(client(index))
    seen.wall = time.perf_counter() - start
    return seen


async def _request(stream: Stream, prompt: list[int], expected: int, seen: Seen) -> None:
    last, got = time.perf_counter(), 0
    async for tokens in stream(prompt):
        seen.messages += 1
        if not tokens:
            continue
        now = time.perf_counter()
        if got:
            seen.inter_token.extend([(now - last) / tokens] * tokens)
        else:
            seen.first_token.append(now - last)
            seen.inter_token.extend([0.0] * (tokens - 1))
        last, got = now, got + tokens
    if got != expected:
        raise ValueError(f"a request brought {got} tokens, expected {expected}")
    seen.tokens += got
