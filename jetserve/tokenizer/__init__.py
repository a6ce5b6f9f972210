"""Text to token ids and back, whatever file the vocabulary came from. Host side; imports no jax.

A `Tokenizer` is stateless and shared; a `TextStream` (stream.py) turns one sequence's ids into text piece by piece.
Both decode by one table of bytes, `Pieces` (pieces.py), so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jetserve.tokenizer.pieces import Pieces


class Tokenizer(Protocol):
    """One vocabulary.

    Attributes:
      vocab_size: ids below it have a piece; a model's (padded) vocabulary may be larger.
      eos_token_ids: ids that end an answer as far as the vocabulary says.
      chat_template: Jinja source, or None.
      pieces: what each id adds to the text; `decode`, `token_bytes` and streams read it.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def pieces(self) -> Pieces: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. With `add_special_tokens` a BOS is put in front once, if the vocabulary wants one."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids at once: what a stream of them concatenates to. Unknown ids add nothing."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for, special tokens by their name; none for an unknown id."""
        ...
