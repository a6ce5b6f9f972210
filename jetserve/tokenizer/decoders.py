"""Reads the decoder of a tokenizer.json as a rule per piece, so that a text can be decoded piece by piece.

Known are the decoders of generative models: ByteLevel, and sequences of Replace, ByteFallback, Fuse, Strip and
Metaspace. Others change a piece by its neighbours (WordPiece, CTC) and are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jetserve.errors import TokenizerError
from jetserve.tokenizer import byte_level
from jetserve.tokenizer.pieces import Pieces, StartEnds
from jetserve.tokenizer.settings import Json

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Entry(NamedTuple):
    """One entry of a vocabulary. An added one was found in the text as it is, so it decodes to itself."""

    text: str
    is_added: bool = False


def byte_of(piece: str) -> bytes | None:
    """The byte that a piece like <0x0A> stands for, None for any other piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


@dataclass(frozen=True)
class DecoderRule:
    """What a decoder does to a piece. Made by `read_decoder`.

    Attributes:
      replaced: (from, to) pairs, in order.
      space: Metaspace's stand-in for a space.
      strips_space: one space is taken off the start of the text.
      drops_spaces: the first piece loses all its stand-ins (Metaspace).
    """

    is_byte_level: bool = False
    has_bytes: bool = False
    is_fused: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    space: str | None = None
    strips_space: bool = False
    drops_spaces: bool = False

    def pieces(self, vocabulary: Sequence[Entry | None], special: frozenset[int]) -> Pieces:
        """The table of a vocabulary; None marks a gap in its ids."""
        texts = [None if piece is None else self._bytes(piece) for piece in vocabulary]
        if self.strips_space:
            first = {i: text[1:] for i, text in enumerate(texts) if text is not None and text.startswith(b" ")}
            return Pieces(texts, special, first, StartEnds.AFTER_SPACE)
        if self.drops_spaces and self.space is not None:
            first = {
                i: piece.text.replace(self.space, "").encode()
                for i, piece in enumerate(vocabulary)
                if piece is not None and self.space in piece.text
            }
            return Pieces(texts, special, first, StartEnds.AFTER_TOKEN)
        return Pieces(texts, special)

    def _bytes(self, piece: Entry) -> bytes:
        text = piece.text
        if self.is_byte_level:
            return text.encode() if piece.is_added else byte_level.bytes_of(text)
        if self.has_bytes and (byte := byte_of(text)) is not None:
            return byte
        for old, new in self.replaced:
            text = text.replace(old, new)
        if self.space is not None:
            text = text.replace(self.space, " ")
        return text.encode()


def read_decoder(decoder: Json) -> DecoderRule:
    """Reads the "decoder" of a tokenizer.json. Raises: TokenizerError naming a decoder that is not known."""
    rule = DecoderRule()
    for step in _steps(decoder):
        kind = step.get("type")
        read = _STEPS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise TokenizerError(
                f"decoder {kind!r} is not supported; known are {', '.join(sorted(_STEPS))} and Sequence"
            )
        rule = read(rule, step)
    return rule


def _steps(decoder: Json) -> list[dict[str, Json]]:
    if not isinstance(decoder, dict):
        raise TokenizerError(f"the decoder is {decoder!r:.60}: without one, pieces cannot become text")
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder.get("decoders")
    return [step for part in inner for step in _steps(part)] if isinstance(inner, list) else []


def _read_metaspace(rule: DecoderRule, step: dict[str, Json]) -> DecoderRule:
    replacement, scheme = step.get("replacement"), step.get("prepend_scheme")
    prepends = step.get("add_prefix_space", True) if scheme is None else scheme != "never"
    space = replacement if isinstance(replacement, str) else "▁"
    return replace(rule, space=space, drops_spaces=bool(prepends))


def _read_replace(rule: DecoderRule, step: dict[str, Json]) -> DecoderRule:
    pattern, content = step.get("pattern"), step.get("content")
    old = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(old, str) or not isinstance(content, str) or (rule.is_fused and len(old) != 1):
        raise TokenizerError(
            f"decoder Replace with pattern {pattern!r:.60} is not supported, only plain text before Fuse"
        )
    return replace(rule, replaced=(*rule.replaced, (old, content)))


def _read_strip(rule: DecoderRule, step: dict[str, Json]) -> DecoderRule:
    content, start, stop = step.get("content"), step.get("start"), step.get("stop")
    if not rule.is_fused or content != " " or stop != 0 or start not in (0, 1):
        raise TokenizerError(
            f"decoder Strip with {content=} {start=} {stop=} is not supported, only ' ' 1 0 after Fuse"
        )
    return replace(rule, strips_space=start == 1)


_STEPS: dict[str, Callable[[DecoderRule, dict[str, Json]], DecoderRule]] = {
    "ByteLevel": lambda rule, _: replace(rule, is_byte_level=True, is_fused=True),
    "ByteFallback": lambda rule, _: replace(rule, has_bytes=True),
    "Fuse": lambda rule, _: replace(rule, is_fused=True),
    "Metaspace": _read_metaspace,
    "Replace": _read_replace,
    "Strip": _read_strip,
}
