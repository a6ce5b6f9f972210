"""Finds stop strings in a text that arrives in parts, without keeping the text. Imports nothing of the project."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StopMatch(NamedTuple):
    """The stop string that is complete first.

    Attributes:
      end: how many characters of the part fed last there are up to its end.
    """

    stop: str
    end: int


class StopMatcher:
    """Follows one text. The first stop string to be complete wins, the longest of those that end together.

    So the outcome depends on the text alone, not on how it is cut into parts.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(sorted(dict.fromkeys(stops), key=len, reverse=True))
        self._initials = frozenset(stop[0] for stop in self._stops)
        # For each stop string, how many of its first characters end the text so far: all that needs remembering.
        self._matched = [0] * len(self._stops)
        self.held = 0

    def feed(self, text: str) -> StopMatch | None:
        """Takes the next part of the text. After a match the matcher must not be fed again.

        Afterwards `held` is the length of the longest end of the whole text that a stop string may begin with.
        """
        if not self.held and self._initials.isdisjoint(text):
            return None
        best: StopMatch | None = None
        for index, stop in enumerate(self._stops):
            before = self._matched[index]
            tail = stop[:before] + text
            at = tail.find(stop)
            if at >= 0:
                end = at + len(stop) - before
                if best is None or end < best.end:
                    best = StopMatch(stop, end)
            else:
                self._matched[index] = _open_length(tail, stop)
        if best is None:
            self.held = max(self._matched)
        return best


def _open_length(tail: str, stop: str) -> int:
    """Length of the longest end of `tail` that is a beginning of `stop`, but not all of it."""
    at = tail.find(stop[0], max(0, len(tail) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(stop[0], at + 1)
    return 0
