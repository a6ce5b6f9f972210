"""The one implementation of `Tokenizer`: an encoder, a table of pieces and the ids that frame a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jetserve.errors import InvalidRequest
from jetserve.tokenizer.pieces import Pieces


class Encoder(Protocol):
    """The encoding half of a vocabulary: what differs between libraries."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, names of special tokens in it recognised.

        With `add_special_tokens` framed as the vocabulary's file says, which may be not at all.
        """
        ...


@dataclass(frozen=True)
class Vocabulary:
    """A `Tokenizer`.

    Attributes:
      adds_bos: whether a text gets a BOS in front; None leaves it to what the encoder itself adds.
    """

    encoder: Encoder
    pieces: Pieces
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    adds_bos: bool | None = None
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.pieces.texts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. With `add_special_tokens` a BOS is put in front once, if the vocabulary wants one.

        Raises: InvalidRequest when the text is not valid Unicode.
        """
        _check_unicode(text)
        ids = self.encoder.encode(text, add_special_tokens=add_special_tokens and self.adds_bos is not False)
        bos = self.bos_token_id
        if not add_special_tokens or bos is None:
            return ids
        if ids[:2] == [bos, bos]:  # one is the text's own, as in a prompt made by a chat template
            return ids[1:]
        if self.adds_bos and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids at once: what a stream of them concatenates to. Unknown ids add nothing."""
        return self.pieces.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for, special tokens by their name; none for an unknown id."""
        return self.pieces.table(skip_special_tokens=False)[token_id]


def _check_unicode(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; send valid Unicode"
        ) from error
