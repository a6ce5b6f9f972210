"""Reads and writes the few protobuf messages of a SentencePiece model file.

By hand because the module that sentencepiece brings for it wants a newer protobuf than gRPC allows. Field numbers are
those of https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_SHORT = tuple(bytes([value]) for value in range(0x80))  # most numbers are such, and vocabularies are large
_FLOAT = struct.Struct("<f")


class Field(NamedTuple):
    """One field of a message: a number, or the bytes of a string, message or fixed-size number."""

    number: int
    value: int | bytes


def read_fields(data: bytes) -> Iterator[Field]:
    """Iterates over the fields of a message. Raises: ValueError when it is damaged."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        elif kind in (_LENGTH, _FIXED64, _FIXED32):
            if kind == _LENGTH:
                size, at = _read_varint(data, at)
            else:
                size = 8 if kind == _FIXED64 else 4
            if at + size > len(data):
                raise ValueError(f"field {key >> 3} ends after the data")
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        yield Field(key >> 3, value)


def number_field(number: int, value: int) -> bytes:
    """A whole number, bool or enum. Negative ones take ten bytes, as protobuf has it."""
    return _varint(number << 3 | _VARINT) + _varint(value % 2**64)


def bytes_field(number: int, value: bytes) -> bytes:
    """A string, bytes or a message."""
    return _varint(number << 3 | _LENGTH) + _varint(len(value)) + value


def float_field(number: int, value: float) -> bytes:
    """A 32-bit float."""
    return _varint(number << 3 | _FIXED32) + _FLOAT.pack(value)


def message(fields: Iterable[bytes]) -> bytes:
    """A message of written fields."""
    return b"".join(fields)


def _varint(value: int) -> bytes:
    if value < len(_SHORT):
        return _SHORT[value]
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"number at byte {at} has no end")
