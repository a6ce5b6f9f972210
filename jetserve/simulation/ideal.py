"""What prefill could not have avoided, and what it would have cost elsewhere. Imports no jax."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_SMALLEST_BUCKET = 16  # of JetStream's default prefill buckets 16, 32, 64, ..


class InfiniteCache:
    """A prefix cache that forgets nothing and matches to the token.

    Token rows are kept sorted, as bytes that sort like them: the longest common beginning of a prompt with any of them
    is that with one of its two neighbours.
    """

    def __init__(self) -> None:
        self._rows: list[bytes] = []

    def add(self, token_ids: Iterable[int]) -> None:
        """Keeps the tokens of a sequence."""
        row = _sortable(token_ids)
        at = bisect.bisect_left(self._rows, row)
        if at == len(self._rows) or self._rows[at] != row:
            self._rows.insert(at, row)

    def match(self, token_ids: Iterable[int]) -> int:
        """How many of the first tokens of a prompt are there. The last one never counts: it has to be computed."""
        row = _sortable(token_ids)
        at = bisect.bisect_left(self._rows, row)
        near = self._rows[max(0, at - 1) : at + 1]
        return min(max((_common(row, other) for other in near), default=0), len(row) // 4 - 1)


def power_of_two_bucket(tokens: int) -> int:
    """What JetStream pads a prompt of so many tokens to."""
    return max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def _sortable(token_ids: Iterable[int]) -> bytes:
    return np.fromiter(token_ids, dtype=">u4").tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Tokens that two rows have in common at their beginning."""
    length = min(len(one), len(other)) // 4
    differs: NDArray[np.bool_] = np.frombuffer(one, ">u4", length) != np.frombuffer(other, ">u4", length)
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length
