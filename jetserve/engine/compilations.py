"""Counts compilations and persistent-cache hits of this process. Any compilation after warm-up is a fault (R01)."""

from __future__ import annotations

import logging
import threading

import jax

log = logging.getLogger(__name__)

# Names of jax.monitoring events, jax 0.10.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_CACHE_MISS = "/jax/compilation_cache/cache_misses"


class CompilationCounter:
    """Totals since `COUNTER` was made.

    Attributes:
      compiled: programs handed to the compiler or read from the persistent cache.
      cache_hits, cache_misses: of the persistent cache.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def compiled_by_this_thread(self) -> int:
        """Those of `compiled` that the calling thread waited for."""
        found: int = getattr(self._of_thread, "compiled", 0)
        return found

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG002 jax names it
        if event == _COMPILED:
            self._of_thread.compiled = self.compiled_by_this_thread + 1
            with self._lock:
                self.compiled += 1

    def _on_event(self, event: str, **_: str | int) -> None:
        with self._lock:
            self.cache_hits += event == _CACHE_HIT
            self.cache_misses += event == _CACHE_MISS


COUNTER = CompilationCounter()
