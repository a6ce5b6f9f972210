"""What each id adds to a text, as bytes: the only definition of decoding. Imports nothing of the project.

A text is the concatenated bytes of its ids, read as UTF-8, with one U+FFFD for each maximal invalid part (Unicode 15
section 3.9, as Python and Rust do). Byte-level vocabularies decode so in the tokenizers library. For byte pieces such
as <0x0A> the libraries agree as long as the bytes are valid UTF-8; where they are not, tokenizers replaces every byte
of the whole run of byte pieces, which cannot be known before the run ends, and SentencePiece every bad byte.
Ids that are left out do not come between bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class StartEnds(enum.Enum):
    """When the start of a text is over; until then ids have the form they have in `Pieces.first`."""

    AT_ONCE = enum.auto()  # no id has a special form
    AFTER_TOKEN = enum.auto()  # after one id, whatever it adds: tokenizers' Metaspace
    AFTER_SPACE = enum.auto()  # after one byte, kept or taken off: tokenizers' Strip, SentencePiece
    AFTER_TEXT = enum.auto()  # after one byte of text: SentencePiece with remove_extra_whitespaces


class Opening(NamedTuple):
    """What ids at the start of a text add, and whether the start is over after them."""

    data: bytes
    is_over: bool


class _Table(dict[int, bytes]):
    """Bytes by id. An id that is not there adds nothing."""

    def __missing__(self, token_id: int) -> bytes:
        return b""


@dataclass(frozen=True)
class Pieces:
    """The decoding half of a vocabulary.

    Attributes:
      texts: bytes of every id, special ones by their name; None where ids have a gap.
      special: ids that skip_special_tokens leaves out.
      first: ids that lose a leading space at the start of a text, with their form there.
      start_ends: how long `first` holds.
    """

    texts: Sequence[bytes | None]
    special: frozenset[int] = frozenset()
    first: Mapping[int, bytes] = field(default_factory=dict)
    start_ends: StartEnds = StartEnds.AT_ONCE

    def table(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Bytes by id past the start of a text; the mapping answers b"" for any other id."""
        return self._visible if skip_special_tokens else self._all

    def opening(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Opening:
        """What `token_ids` add when the start of the text is not over yet."""
        table = self.table(skip_special_tokens=skip_special_tokens)
        parts: list[bytes] = []
        is_over = self.start_ends is StartEnds.AT_ONCE
        for token_id in token_ids:
            if is_over or token_id not in table:
                parts.append(table[token_id])
                continue
            data = table[token_id]
            shown = self.first.get(token_id, data)
            parts.append(shown)
            if self.start_ends is StartEnds.AFTER_TOKEN:
                is_over = True
            elif self.start_ends is StartEnds.AFTER_SPACE:
                is_over = bool(data)
            else:
                is_over = bool(shown)
        return Opening(b"".join(parts), is_over)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The whole text of `token_ids`."""
        data = self.opening(token_ids, skip_special_tokens=skip_special_tokens).data
        return data.decode("utf-8", "replace")

    @cached_property
    def longest_bytes(self) -> int:
        """Length of the longest piece."""
        return max((len(text) for text in self.texts if text is not None), default=0)

    @cached_property
    def _all(self) -> Mapping[int, bytes]:
        return _Table((i, text) for i, text in enumerate(self.texts) if text is not None)

    @cached_property
    def _visible(self) -> Mapping[int, bytes]:
        return _Table((i, text) for i, text in self._all.items() if i not in self.special)
