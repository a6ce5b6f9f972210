"""A vocabulary without a file: every byte is a token. For models with random weights and for tests."""

from __future__ import annotations

from jetserve.tokenizer.pieces import Pieces
from jetserve.tokenizer.vocabulary import Vocabulary

_BYTES = 256
BOS_TOKEN_ID = _BYTES
EOS_TOKEN_ID = _BYTES + 1
_SPECIAL_TEXTS = (b"<bos>", b"<eos>")


class _ByteEncoder:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002 the protocol's
        return list(text.encode())


def byte_vocabulary() -> Vocabulary:
    """Ids 0 to 255 are bytes, 256 is BOS, 257 is EOS. Names of special tokens in a text are plain text."""
    texts = tuple(bytes([value]) for value in range(_BYTES)) + _SPECIAL_TEXTS
    return Vocabulary(
        encoder=_ByteEncoder(),
        pieces=Pieces(texts, special=frozenset((BOS_TOKEN_ID, EOS_TOKEN_ID))),
        bos_token_id=BOS_TOKEN_ID,
        eos_token_ids=(EOS_TOKEN_ID,),
        adds_bos=True,
    )
