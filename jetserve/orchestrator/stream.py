"""From the tokens of a live request to the deltas its reader takes. Event loop only; imports no jax.

Tokens wait as ids until the reader asks, so a slow reader costs the engine nothing and gets all that came meanwhile in
one delta. Only requests with stop strings are made into text as tokens arrive: the engine cannot see such an end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from jetserve.engine.scheduler import Update
from jetserve.errors import RequestAborted, RequestError
from jetserve.request import Delta, FinishReason, Request, TokenLogprobs, Usage
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.stream import TextStream


class Sample:
    """One sample: what arrived and was not taken yet."""

    __slots__ = (
        "_is_eager",
        "_logprobs",
        "_request",
        "_stop_reason",
        "_stream",
        "_text",
        "_token_ids",
        "cached_tokens",
        "completion_tokens",
        "finish_reason",
        "index",
        "is_ready",
        "last_token_seconds",
        "preemptions",
    )

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.last_token_seconds: float | None = None
        self.preemptions = 0
        self.is_ready = False  # something can be taken
        self._request = request
        self._stream = TextStream(tokenizer, request.params, request.stop_token_ids)
        self._is_eager = bool(request.params.stop)
        self._text = ""  # of `_token_ids`, when eager
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._stop_reason: str | int | None = None

    def arrive(self, update: Update) -> bool:
        """Takes in what the engine generated. True when a stop string ended the sample, which the engine cannot know.

        Tokens after the one that completed the stop string are dropped.
        """
        sequence, token_ids, logprobs, reason = update
        is_stopped = False
        self.preemptions = sequence.preemptions
        self.cached_tokens = sequence.cached
        self.finish_reason = reason
        if reason is FinishReason.STOP and token_ids[-1] in self._request.params.stop_token_ids:
            self._stop_reason = token_ids[-1]
        if self._is_eager:
            piece = self._stream.push(token_ids, final=reason is not None)
            self._text += piece.text
            if piece.stop is not None:
                kept = piece.tokens - self.completion_tokens
                token_ids, logprobs = token_ids[:kept], logprobs[:kept]
                self._stop_reason = piece.stop
                self.finish_reason = FinishReason.STOP
                is_stopped = reason is None
        self._token_ids += token_ids
        self._logprobs += logprobs
        self.completion_tokens += len(token_ids)
        return is_stopped

    def take(self) -> Delta:
        """Everything that arrived since the last call."""
        reason = self.finish_reason
        if self._is_eager:
            text, self._text = self._text, ""
        else:
            text = self._stream.push(self._token_ids, final=reason is not None).text
        delta = Delta(
            index=self.index,
            text=text,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=reason,
            stop_reason=self._stop_reason if reason is not None else None,
            usage=Usage(len(self._request.prompt_token_ids), self.completion_tokens, self.cached_tokens),
        )
        self._token_ids = []
        self._logprobs = []
        self.is_ready = False
        return delta


class Channel:
    """A request between the engine and its reader.

    Attributes:
      unfinished: samples that may still get tokens.
      unstarted: samples that have not had a slot.
      scheduled_seconds, first_token_seconds: of the first sample that got so far.
      cached_tokens: of the prompt, that the first sample in a slot found cached.
      deadline: fires when the request's time is up.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.samples = [Sample(request, index, tokenizer) for index in range(request.params.n)]
        self.unfinished = self.unstarted = len(self.samples)
        self.scheduled_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.cached_tokens = 0
        self.deadline: asyncio.TimerHandle | None = None
        self._ready: deque[Sample] = deque()
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing more will arrive. The reader may still have deltas to take."""
        return not self.unfinished or self._error is not None

    @property
    def generated_tokens(self) -> int:
        return sum(sample.completion_tokens for sample in self.samples)

    @property
    def preemptions(self) -> int:
        return sum(sample.preemptions for sample in self.samples)

    def arrive(self, update: Update) -> bool:
        """Takes in an update with tokens. True when a stop string ended the sample."""
        sample = self.samples[update.sequence.index]
        is_stopped = sample.arrive(update)
        if sample.finish_reason is not None:
            self.unfinished -= 1
        if not sample.is_ready:
            sample.is_ready = True
            self._ready.append(sample)
        self._wake()
        return is_stopped

    def fail(self, error: RequestError) -> None:
        """Ends the request; the reader gets what arrived before, then the error."""
        if not self.is_done:
            self._error = error
            self._wake()

    async def next(self) -> Delta:
        """Waits for the next delta.

        Raises: StopAsyncIteration at the end; the RequestError that ended the request.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise RuntimeError(f"{self.request.request_id} is read by two readers at once; give it one")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._ready.popleft().take()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStream(AsyncIterator[Delta]):
    """What the reader of one request holds. Letting go of it, by `aclose` or for good, aborts the request.

    Deltas of the samples are interleaved; each sample's last one has a finish reason. A delta holds every token that
    arrived since the sample's last one.

    Raises (from iteration): DeadlineExceeded, RequestAborted, Unavailable or EngineFailed, after the deltas before it.
    """

    def __init__(self, channel: Channel, leave: Callable[[Channel, RequestError], None]) -> None:
        """Args:
        leave: ends the request when its reader is gone. Called in the event loop.
        """
        self._channel = channel
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    @property
    def request(self) -> Request:
        return self._channel.request

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_closed:
            raise StopAsyncIteration
        return await self._channel.next()

    async def aclose(self) -> None:
        """Aborts the request if it is not over. Iterating ends."""
        self._is_closed = True
        if not self._channel.is_done:
            self._leave(self._channel, RequestAborted("the stream was closed by its reader"))

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._channel.is_done and not self._loop.is_closed():
            error = RequestAborted("nobody holds the stream any more")
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, and the engine stopped with it
                self._loop.call_soon_threadsafe(self._leave, self._channel, error)
