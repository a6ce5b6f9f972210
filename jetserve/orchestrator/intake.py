"""The bound on what may wait. Event loop only; imports no jax."""

from __future__ import annotations

from jetserve.config import SchedulerSettings
from jetserve.engine.sequence import Sequence
from jetserve.errors import Overloaded
from jetserve.request import Request

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
_RECENT = 0.1  # weight of the newest interval in the mean


class Intake:
    """Counts the samples that have not been given a slot yet, and refuses more when they are too many.

    What fits the free slots does not count as waiting, so a burst on an idle engine is taken whole. An empty queue
    takes any one request, however many samples or tokens it has.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self.unstarted = 0
        self.unstarted_tokens = 0
        self._start_interval_seconds = 0.0  # mean time between two starts
        self._last_start_seconds: float | None = None

    def require_room(
        self, free_slots: int, samples: int, prompt_tokens: int, predicted_seconds: float | None = None
    ) -> None:
        """Raises: Overloaded when a request of so many samples with so many tokens each would wait in a full queue.

        Args:
          free_slots: as the engine last told.
          predicted_seconds: as `retry_after` takes it.
        """
        top_requests, top_tokens = self._settings.max_waiting_requests, self._settings.max_waiting_tokens
        waiting = self.unstarted - free_slots
        if waiting > 0 and waiting + samples > top_requests:
            raise Overloaded(
                f"{waiting} requests are waiting, at most {top_requests} may; try again later or raise "
                f"scheduler.max_waiting_requests",
                self.retry_after(waiting, predicted_seconds),
            )
        tokens = self.unstarted_tokens + samples * prompt_tokens
        if self.unstarted and tokens > top_tokens:
            raise Overloaded(
                f"{self.unstarted_tokens} prompt tokens are waiting, at most {top_tokens} may, and those of this "
                f"request do not fit; try again later or raise scheduler.max_waiting_tokens",
                self.retry_after(self.unstarted, predicted_seconds),
            )

    def enter(self, request: Request) -> None:
        """A request was accepted."""
        self._count(request, request.params.n)

    def start(self, request: Request, now: float) -> None:
        """One of its samples got a slot."""
        self._count(request, -1)
        if self._last_start_seconds is not None:
            self._start_interval_seconds += _RECENT * (now - self._last_start_seconds - self._start_interval_seconds)
        self._last_start_seconds = now

    def leave(self, request: Request, samples: int) -> None:
        """So many of its samples ended before they got a slot."""
        self._count(request, -samples)

    def retry_after(self, waiting: int, predicted_seconds: float | None) -> float:
        """When half of so many that wait will have started: others come back too.

        Args:
          predicted_seconds: that the engine needs to prefill them, were there slots; None when it cannot tell. The pace
            of late says how long slots take.
        """
        seconds = max(waiting / 2 * self._start_interval_seconds, predicted_seconds or 0.0)
        return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _count(self, request: Request, samples: int) -> None:
        self.unstarted += samples
        self.unstarted_tokens += samples * len(request.prompt_token_ids)


def hopeless(sequence: Sequence, retry_after_seconds: float) -> Overloaded:
    """What the reader of a shed request is told."""
    arrival, late = sequence.request.arrival_seconds, sequence.lateness
    assert late is not None, f"{sequence} was shed for nothing"
    return Overloaded(
        f"request {sequence.request.request_id} was given up: its first token is predicted "
        f"{late.predicted_seconds - arrival:.3f} s after its arrival, at most {late.due_seconds - arrival:.3f} s are "
        f"allowed (scheduler.ttft_target_ms, or its own timeout_seconds); try again later or allow more time",
        retry_after_seconds,
    )
