"""The thread that loads the model and then owns the engine. Imports no jax.

Commands come in through one queue, and the thread sleeps in it while there is nothing to do. What it has to say goes
out as one call into the event loop per step, and one more where cached blocks have changed. A command never waits for
more than the step that is running.

When nobody has come for a while the engine's books are checked, once. That looks at every cached page, 37 us each, so
the while is as long as twenty checks: who comes during one waits a twentieth of the time that nobody came.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from jetserve.engine.engine import Engine, EngineStatus, LoadedModel
from jetserve.engine.kv_events import AllBlocksCleared, KvEvent
from jetserve.engine.scheduler import Update
from jetserve.errors import Unavailable
from jetserve.request import Request

_IDLE_SECONDS = 1.0  # at least, before the books are checked
_IDLE_CHECKS = 20.0

ReportProgress = Callable[[str, float], None]
Load = Callable[[ReportProgress], LoadedModel]


class Submit(NamedTuple):
    """Queue a request."""

    request: Request


class Abort(NamedTuple):
    """End a request, or one sample of it."""

    request_id: str
    sample: int | None = None


class Flush(NamedTuple):
    """Forget cached prefixes. `reply`, of the event loop, gets the number of pages that this freed."""

    reply: asyncio.Future[int]


class Stop(NamedTuple):
    """Leave everything as it is and end the thread."""


Command = Submit | Abort | Flush | Stop


class Listener(NamedTuple):
    """Who hears from the thread. All are called in the event loop.

    Attributes:
      progress: what loading is at, and how far, from 0 to 1.
      loaded: the model can serve.
      cached: what happened to cached blocks, when something did; the first of all is that there are none.
      stepped: a round of commands and, if there was work, a step of the engine are over.
      failed: the thread died of this.
      stopped: always the last call.
    """

    progress: Callable[[str, float], None]
    loaded: Callable[[LoadedModel], None]
    cached: Callable[[list[KvEvent]], None]
    stepped: Callable[[list[Update], EngineStatus], None]
    failed: Callable[[BaseException], None]
    stopped: Callable[[], None]


class EngineThread:
    """Runs the engine.

    Args:
      load: makes the model; called in the thread.
      clock: of `Request.arrival_seconds`.
      idle_seconds: that nobody has come, before the books are checked.
    """

    def __init__(
        self, load: Load, listener: Listener, clock: Callable[[], float], *, idle_seconds: float = _IDLE_SECONDS
    ) -> None:
        self._load = load
        self._listener = listener
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._step_started_seconds: float | None = None
        self._idle_seconds = idle_seconds
        self._check_seconds = 0.0  # that the last one took
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="jetserve-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to load. The listener is called in `loop`."""
        self._loop = loop
        self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._loop is not None

    def put(self, command: Command) -> None:
        """Hands over a command. May be called from any thread."""
        if isinstance(command, Stop):
            self._is_stopping = True  # loading looks at it
        self._commands.put(command)

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the thread's end. False when it is still running."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def step_age_seconds(self) -> float:
        """How long the step that is running has been; 0 between steps."""
        started = self._step_started_seconds
        return 0.0 if started is None else self._clock() - started

    def _run(self) -> None:
        listener = self._listener
        try:
            model = self._load(self._report_progress)
            self._post(listener.loaded, model)
            self._serve(model.engine)
        except BaseException as error:  # the thread's boundary: whatever it was, streams and health must hear of it
            if not self._is_stopping:
                self._post(listener.failed, error)
        finally:
            self._post(listener.stopped)

    def _serve(self, engine: Engine) -> None:
        # Who followed the process before this one still believes in its blocks.
        self._post(self._listener.cached, [AllBlocksCleared()])
        self._post(self._listener.stepped, [], engine.status())
        while self._obey(engine):
            updates: list[Update] = []
            if engine.has_work:
                now = self._clock()
                self._step_started_seconds = now
                updates = engine.step(now)
                self._step_started_seconds = None
            if events := engine.take_kv_events():
                self._post(self._listener.cached, events)
            self._post(self._listener.stepped, updates, engine.status())

    def _obey(self, engine: Engine) -> bool:
        """Carries out all commands that are there; waits for one while the engine is idle. False to stop."""
        command = self._next_command(0.0) if engine.has_work else self._await_command(engine)
        while command is not None:
            if isinstance(command, Submit):
                engine.add(command.request)
            elif isinstance(command, Abort):
                engine.abort(command.request_id, command.sample)
            elif isinstance(command, Flush):
                pages = engine.flush()
                self._post(self._listener.stepped, [], engine.status())  # who is answered finds it in the status
                self._post(_answer, command.reply, pages)
            else:
                return False
            command = self._next_command(0.0)
        return True

    def _await_command(self, engine: Engine) -> Command:
        """Sleeps until there is one, with a look at the books when that takes long."""
        command = self._next_command(max(self._idle_seconds, _IDLE_CHECKS * self._check_seconds))
        if command is not None:
            return command
        started = self._clock()
        engine.check()  # nothing runs: a good time to find that something was lost
        self._check_seconds = self._clock() - started
        return self._commands.get()

    def _next_command(self, seconds: float) -> Command | None:
        """The next one if it comes within so many seconds."""
        try:
            return self._commands.get(timeout=seconds)
        except queue.Empty:
            return None

    def _report_progress(self, text: str, fraction: float) -> None:
        if self._is_stopping:
            raise Unavailable("stopped while loading")
        self._post(self._listener.progress, text, fraction)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "the thread runs, so it was started"
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: nobody is left to hear
            self.put(Stop())


def _answer(reply: asyncio.Future[int], pages: int) -> None:
    if not reply.done():  # whoever asked may have gone
        reply.set_result(pages)
