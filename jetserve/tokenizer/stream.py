"""Turns one sequence's ids into text as they arrive, exactly. One stream per sequence; not thread-safe.

The pieces of text a stream returns concatenate to `tokenizer.decode` of all ids (without the end id, and cut at the
first stop string), however the ids were split over pushes. What is held back is an open UTF-8 character, the beginning
of a stop string, and an end id that may turn out to be the last.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jetserve.request import SamplingParams
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.pieces import StartEnds
from jetserve.tokenizer.stops import StopMatcher


class Piece(NamedTuple):
    """What one push added.

    Attributes:
      text: may be empty while something is held back.
      tokens: how many of all pushed ids belong to the answer so far: all of them, or those up to and including the one
        that completed a stop string.
      stop: the stop string that ended the text. Later pushes add nothing and repeat `tokens` and `stop`.
    """

    text: str
    tokens: int
    stop: str | None = None


class TextStream:
    """The text of one sequence.

    Args:
      params: `stop`, `include_stop` and `skip_special_tokens` are read.
      stop_token_ids: ids that end the sequence. As the last id of all, such an id adds no text, even when special
        tokens are shown; with `include_stop` it is an id like any other.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stop_token_ids: Collection[int]) -> None:
        self._pieces = tokenizer.pieces
        self._skip_special_tokens = params.skip_special_tokens
        self._table = self._pieces.table(skip_special_tokens=params.skip_special_tokens)
        self._end_ids = frozenset() if params.include_stop else frozenset(stop_token_ids)
        self._include_stop = params.include_stop
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._is_started = self._pieces.start_ends is StartEnds.AT_ONCE
        self._end_id: int | None = None  # the last id pushed, when it may end the sequence
        self._bytes = b""  # beginning of a UTF-8 character
        self._held = ""  # beginning of a stop string
        self._tokens = 0
        self._stop: str | None = None

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> Piece:
        """Takes the next ids. `final` says that none will follow, and gives out everything held back."""
        if self._stop is not None:
            return Piece("", self._tokens, self._stop)
        self._tokens += len(token_ids)
        if self._end_id is not None and (token_ids or final):
            token_ids = (self._end_id, *token_ids)
            self._end_id = None
        if token_ids and token_ids[-1] in self._end_ids:
            self._end_id = token_ids[-1]
            token_ids = token_ids[:-1]
        if self._matcher is None:
            return Piece(self._decode(token_ids, final), self._tokens)
        return self._push_until_stop(self._matcher, token_ids, final)

    def _decode(self, token_ids: Sequence[int], final: bool) -> str:
        if self._is_started:
            data = b"".join(map(self._table.__getitem__, token_ids))
        else:
            data, self._is_started = self._pieces.opening(token_ids, skip_special_tokens=self._skip_special_tokens)
        if self._bytes:
            data = self._bytes + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._bytes = data[used:]
        return text

    def _push_until_stop(self, matcher: StopMatcher, token_ids: Sequence[int], final: bool) -> Piece:
        before = self._bytes, self._is_started
        text = self._decode(token_ids, final)
        match = matcher.feed(text)
        if match is None:
            if self._include_stop:
                return Piece(text, self._tokens)
            text = self._held + text
            shown = len(text) if final else len(text) - matcher.held
            self._held = text[shown:]
            return Piece(text[:shown], self._tokens)
        self._stop = match.stop
        not_needed = self._drop_after(match.end, token_ids, *before)
        self._tokens -= not_needed
        if self._include_stop:
            return Piece(text[: match.end], self._tokens, match.stop)
        text = self._held + text[: match.end]
        return Piece(text[: len(text) - len(match.stop)], self._tokens, match.stop)

    def _drop_after(self, length: int, token_ids: Sequence[int], data: bytes, is_started: bool) -> int:
        """How many pushed ids there are after the one that completed the first `length` characters of a push."""
        after = 0 if self._end_id is None else 1
        self._bytes, self._is_started = data, is_started
        for index, token_id in enumerate(token_ids):
            length -= len(self._decode((token_id,), final=False))
            if length <= 0:
                return len(token_ids) - index - 1 + after
        return 0
