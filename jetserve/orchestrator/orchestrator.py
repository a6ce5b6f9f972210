"""The async face of the engine. Lives in one event loop; the engine lives in its own thread. Imports no jax."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jetserve.config import SchedulerSettings
from jetserve.engine.engine import EngineStatus, LoadedModel
from jetserve.engine.kv_events import KvEvent
from jetserve.engine.scheduler import Update
from jetserve.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    JetserveError,
    Overloaded,
    RequestAborted,
    RequestError,
    Unavailable,
)
from jetserve.metrics import FinishedReason, Metrics
from jetserve.orchestrator.engine_thread import Abort, EngineThread, Flush, Listener, Load, Stop, Submit
from jetserve.orchestrator.intake import Intake, hopeless
from jetserve.orchestrator.observer import Observer
from jetserve.orchestrator.status import State, Status
from jetserve.orchestrator.stream import Channel, RequestStream
from jetserve.request import FinishReason, Request, SamplingParams

log = logging.getLogger(__name__)

# A step that hangs for so many times the step timeout will not come back: the process should be started anew.
HANG_FACTOR = 5
_LONG_PROMPT_CHARS = 1 << 14  # longer ones are tokenised beside the event loop
# A longer text is refused uncounted when it cannot fit: tokenising takes a second for each megabyte (of demo, CPU).
_COUNTED_CHARS = 1 << 18
_FOLDED_CHARS = 4  # what a normaliser or an unknown token may make one of
_STOPPED = "the server stopped before the request was finished; send it again to another replica"
_NO_STATUS = EngineStatus(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class _Signals:
    """What coroutines wait for.

    Attributes:
      settled: loading is over, one way or the other.
      quiet: no request is live.
      stopped: the engine thread is at its end.
    """

    settled: asyncio.Event = field(default_factory=asyncio.Event)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class Orchestrator:
    """Takes requests in and hands their streams out.

    Args:
      load: makes the model, in the engine thread; reports its progress as (what, fraction from 0 to 1).
      step_timeout_seconds: a step that takes longer is not ready; one that takes `HANG_FACTOR` times as long, not live.
      on_failure: called in the event loop when loading or the engine failed.
      on_cached: called in the event loop with what happened to cached blocks in a step, first that there are none; the
        model must have been loaded with an eye on them.
      clock: of deadlines and durations.
    """

    def __init__(
        self,
        load: Load,
        settings: SchedulerSettings | None = None,
        metrics: Metrics | None = None,
        *,
        step_timeout_seconds: float = 60.0,
        on_failure: Callable[[BaseException], None] | None = None,
        on_cached: Callable[[list[KvEvent]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or SchedulerSettings()
        self._step_timeout_seconds = step_timeout_seconds
        self._on_failure = on_failure
        self._clock = clock
        self._observer = Observer(metrics)
        self._intake = Intake(self._settings)
        self._channels: dict[str, Channel] = {}  # by request id; those that are not over
        self._state = State.LOADING
        self._progress = "starting"
        self._model: LoadedModel | None = None
        self._failure: BaseException | None = None
        self._engine_status = _NO_STATUS
        self._signals = _Signals()
        listener = Listener(
            progress=self._loading,
            loaded=self._loaded,
            cached=on_cached or _ignore,
            stepped=self._stepped,
            failed=self._failed,
            stopped=self._signals.stopped.set,
        )
        self._thread = EngineThread(load, listener, clock)

    @property
    def state(self) -> State:
        return self._state

    @property
    def progress(self) -> str:
        """What loading is at, in words."""
        return self._progress

    @property
    def model(self) -> LoadedModel:
        """Raises: Unavailable while there is none."""
        if self._model is None:
            raise Unavailable(self._explanation())
        return self._model

    @property
    def is_live(self) -> bool:
        """Whether the process is worth keeping."""
        if self._state in (State.FAILED, State.STOPPED):
            return False
        return self._thread.step_age_seconds() <= HANG_FACTOR * self._step_timeout_seconds

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be answered."""
        return self._state is State.READY and self._thread.step_age_seconds() <= self._step_timeout_seconds

    def status(self) -> Status:
        """How things stand after the engine's last step."""
        engine = self._engine_status
        live = sum(channel.unfinished for channel in self._channels.values())
        return Status(
            state=self._state,
            slots_used=engine.running,
            slots_total=engine.slots_total,
            pages_used=engine.pages_used,
            pages_total=engine.pages_total,
            running=engine.running,
            waiting_requests=max(0, live - engine.running),  # the engine may not have seen the last ends
            waiting_tokens=self._intake.unstarted_tokens,
            generated_tokens=engine.generated_tokens,
            preemptions=engine.preemptions,
            compilations_after_warmup=engine.compilations_after_warmup,
            cached_pages=engine.cached_pages,
            evicted_pages=engine.evicted_pages,
            host_pages_used=engine.host_pages_used,
            host_pages_total=engine.host_pages_total,
            queried_tokens=engine.queried_tokens,
            cached_tokens=engine.cached_tokens,
            shed_requests=self._observer.shed_requests,
        )

    async def start(self) -> None:
        """Begins to load the model, and returns."""
        self._signals.quiet.set()
        self._thread.start(asyncio.get_running_loop())

    async def wait_until_ready(self) -> None:
        """Waits until the model is loaded.

        Raises: what loading raised; Unavailable when it was stopped.
        """
        await self._signals.settled.wait()
        if self._failure is not None:
            raise self._failure
        if self._model is None:
            raise Unavailable(self._explanation())

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> RequestStream:
        """Queues a request.

        Args:
          prompt: text, or token ids as they are.
          timeout_seconds: until the request is given up; the configured default when None.
          priority: lower runs first.
          cache_salt: cached prefixes are shared only among requests with an equal one.
          add_special_tokens: of text: whether the tokenizer puts its BOS in front.
        Raises:
          InvalidRequest: it cannot be served, or a live request has its id.
          Overloaded: the queue is full.
          Unavailable: loading, draining, stopped or failed.
        """
        model = self._serving_model()
        self._require_room(params.n, 1 if isinstance(prompt, str) else len(prompt))  # before any work is done for it
        if isinstance(prompt, str):
            prompt = await _encode(model, prompt, add_special_tokens=add_special_tokens)
            model = self._serving_model()
        request = Request.create(
            prompt,
            params,
            model.limits,
            request_id=request_id,
            timeout_seconds=self._settings.default_timeout_seconds if timeout_seconds is None else timeout_seconds,
            priority=priority,
            cache_salt=cache_salt,
            now=self._clock(),
        )
        model.engine.require_fit(request)
        if request.request_id in self._channels:
            raise InvalidRequest(f"request_id {request.request_id!r} is running; choose another or wait for its end")
        self._require_room(params.n, len(request.prompt_token_ids))
        channel = Channel(request, model.tokenizer)
        if request.deadline_seconds is not None:
            left = request.deadline_seconds - self._clock()
            channel.deadline = asyncio.get_running_loop().call_later(left, self._expire, channel)
        self._intake.enter(request)
        self._channels[request.request_id] = channel
        self._signals.quiet.clear()
        self._thread.put(Submit(request))
        return RequestStream(channel, self._abandon)

    def abort(self, request_id: str) -> bool:
        """Ends a live request; its stream raises RequestAborted. False when there is none of that id."""
        channel = self._channels.get(request_id)
        if channel is None:
            return False
        self._end(channel, RequestAborted(f"request {request_id} was aborted"), "abort")
        return True

    async def flush_cache(self) -> int:
        """Forgets all cached prefixes, on the device and in host memory; requests may run meanwhile.

        Returns: pages that this freed; what running requests use of the cache is free when they end.
        Raises: Unavailable unless requests are served.
        """
        self._serving_model()
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def give_up(_: asyncio.Task[bool]) -> None:
            if not reply.done():
                reply.set_exception(Unavailable(self._explanation()))

        stopped = asyncio.create_task(self._signals.stopped.wait())  # the thread's last word, after all its replies
        stopped.add_done_callback(give_up)
        self._thread.put(Flush(reply))
        try:
            pages = await reply
        finally:
            stopped.cancel()
        log.info("flushed the prefix cache pages_freed=%d", pages)
        return pages

    async def drain(self, timeout_seconds: float) -> bool:
        """Takes no more requests, and lets those that are here finish for so long. The rest ends with Unavailable.

        Returns: whether all finished.
        """
        if self._state in (State.LOADING, State.READY):
            self._state = State.DRAINING
        try:
            await asyncio.wait_for(self._signals.quiet.wait(), timeout_seconds)
        except TimeoutError:
            log.warning("drain timed out seconds=%.1f requests_left=%d", timeout_seconds, len(self._channels))
        is_finished = not self._channels
        self._end_all()
        return is_finished

    async def stop(self) -> None:
        """Ends all requests and the engine thread. A thread that hangs is left behind, and dies with the process."""
        self._end_all()
        if self._state is not State.FAILED:
            self._state = State.STOPPED
        self._signals.settled.set()
        self._thread.put(Stop())
        if not self._thread.is_started:
            return
        try:
            await asyncio.wait_for(self._signals.stopped.wait(), self._step_timeout_seconds)
        except TimeoutError:
            log.warning("engine thread did not stop seconds=%.1f", self._step_timeout_seconds)
        else:
            self._thread.join(timeout_seconds=1.0)  # it has said that it is at its end

    def _serving_model(self) -> LoadedModel:
        if self._state is not State.READY:
            raise Unavailable(self._explanation())
        return self.model

    def _explanation(self) -> str:
        """Why there is no service, for whoever asked for it."""
        match self._state:
            case State.LOADING:
                return f"the model is loading ({self._progress}); try again when the server is ready"
            case State.FAILED:
                return f"the engine has failed ({_in_words(self._failure)}); the server must be restarted"
            case _:
                return f"the server is {self._state} and takes no more requests; send it to another replica"

    def _require_room(self, samples: int, prompt_tokens: int) -> None:
        engine = self._engine_status
        try:
            self._intake.require_room(
                engine.slots_total - engine.running, samples, prompt_tokens, engine.retry_after_seconds
            )
        except Overloaded:
            self._observer.rejected()
            raise

    def _expire(self, channel: Channel) -> None:
        request = channel.request
        waited = self._clock() - request.arrival_seconds
        message = f"request {request.request_id} ran out of time after {waited:.3f} s; allow more or ask for less"
        self._end(channel, DeadlineExceeded(message), "timeout")

    def _abandon(self, channel: Channel, error: RequestError) -> None:
        self._end(channel, error, "abort")

    def _end_all(self) -> None:
        for channel in list(self._channels.values()):
            self._end(channel, Unavailable(_STOPPED), "abort")

    def _end(self, channel: Channel, error: RequestError, reason: FinishedReason) -> None:
        """Ends a live request from this side: the reader gets the error, the engine frees what it holds."""
        if channel.is_done:
            return
        log.info("ended request_id=%s reason=%s: %s", channel.request.request_id, reason, error)
        channel.fail(error)
        self._thread.put(Abort(channel.request.request_id))
        self._forget(channel, reason)

    def _forget(self, channel: Channel, reason: FinishedReason) -> None:
        del self._channels[channel.request.request_id]
        self._intake.leave(channel.request, channel.unstarted)
        if channel.deadline is not None:
            channel.deadline.cancel()
        if not self._channels:
            self._signals.quiet.set()
        self._observer.finished(channel, reason, self._clock())

    def _loading(self, text: str, fraction: float) -> None:
        self._progress = f"{text} {fraction:.0%}"

    def _loaded(self, model: LoadedModel) -> None:
        self._model = model
        self._progress = "loaded"
        if self._state is State.LOADING:
            self._state = State.READY
        self._signals.settled.set()

    def _stepped(self, updates: list[Update], status: EngineStatus) -> None:
        """Hands a step's tokens to their channels."""
        self._engine_status = status
        now = self._clock()
        observer = self._observer
        for update in updates:
            sequence = update.sequence
            channel = self._channels.get(sequence.request.request_id)
            if channel is None or channel.request is not sequence.request:
                continue  # ended from this side; the id may be another request's by now
            if not update.token_ids:
                if update.finish_reason is FinishReason.ABORT:
                    self._shed(channel, update)
                else:
                    self._start(channel, update, now)
                continue
            sample = channel.samples[sequence.index]
            if sample.finish_reason is not None:
                continue  # ended by a stop string
            observer.tokens(channel, sample, len(update.token_ids), now)
            if channel.arrive(update):
                self._thread.put(Abort(channel.request.request_id, sequence.index))
            if not channel.unfinished:
                assert sample.finish_reason is not None
                self._forget(channel, sample.finish_reason.value)
        observer.step(status)

    def _start(self, channel: Channel, update: Update, now: float) -> None:
        channel.unstarted -= 1
        self._intake.start(channel.request, now)
        if channel.scheduled_seconds is None:
            channel.scheduled_seconds = update.sequence.scheduled_seconds
            channel.cached_tokens = update.sequence.cached

    def _shed(self, channel: Channel, update: Update) -> None:
        """The first sample would be late, so the request as a whole is."""
        waited = self._intake.retry_after(self._intake.unstarted, self._engine_status.retry_after_seconds)
        self._observer.shed()
        self._end(channel, hopeless(update.sequence, waited), "abort")

    def _failed(self, error: BaseException) -> None:
        known = isinstance(error, JetserveError)  # raised on purpose: its message says all there is to say
        if self._state is not State.LOADING:  # `wait_until_ready` raises what loading raised
            log.error("engine failed: %s", _in_words(error), exc_info=None if known else error)
        self._state = State.FAILED
        self._failure = error
        for channel in list(self._channels.values()):
            channel.fail(EngineFailed(f"the engine failed while it ran the request: {_in_words(error)}"))
            self._forget(channel, "error")
        self._signals.settled.set()
        if self._on_failure is not None:
            self._on_failure(error)


def _ignore(_events: list[KvEvent]) -> None:
    """For where nobody wants to know."""


def _in_words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


async def _encode(model: LoadedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the prompt holds half of a surrogate pair at character {error.start}; send valid Unicode"
        ) from None
    if len(text) < _LONG_PROMPT_CHARS:
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(_encode_long, model, text, add_special_tokens=add_special_tokens)


def _encode_long(model: LoadedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    limits = model.limits
    longest = _FOLDED_CHARS * model.tokenizer.pieces.longest_bytes * limits.max_prompt_tokens
    if len(text) > max(longest, _COUNTED_CHARS):
        raise InvalidRequest(
            f"the prompt has {len(text)} characters, at most {limits.max_prompt_tokens} tokens fit "
            f"(context {limits.max_length}); shorten it or raise engine.max_length"
        )
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
