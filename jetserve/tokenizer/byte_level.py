"""The alphabet that byte-level BPE writes bytes in: one printable character per byte (GPT-2's encoder.py)."""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_FIRST_STAND_IN = 0x100

_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
_BYTES = {chr(value): value for value in _PRINTABLE} | {
    chr(_FIRST_STAND_IN + index): value for index, value in enumerate(_OTHERS)
}


def bytes_of(piece: str) -> bytes:
    """The bytes of a piece; one with other characters than the alphabet's stands for itself, as in tokenizers."""
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:
        return piece.encode()
