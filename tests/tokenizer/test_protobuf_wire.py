"""The wire format as its specification has it (https://protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

import pytest

from jetserve.tokenizer import protobuf_wire
from jetserve.tokenizer.protobuf_wire import Field


@pytest.mark.parametrize(
    ("written", "wire"),
    [
        (protobuf_wire.number_field(1, 150), "08 96 01"),
        (protobuf_wire.bytes_field(2, b"testing"), "12 07 74 65 73 74 69 6e 67"),
        (protobuf_wire.number_field(1, -2), "08 fe ff ff ff ff ff ff ff ff 01"),
        (protobuf_wire.float_field(2, 25.4), "15 33 33 cb 41"),
        (protobuf_wire.number_field(35, 1), "98 02 01"),
    ],
)
def test_a_field_is_written_as_specified(written, wire):
    assert written == bytes.fromhex(wire)


def test_fields_are_read_as_written():
    data = protobuf_wire.message(
        (protobuf_wire.number_field(3, 2**63), protobuf_wire.bytes_field(40, b""), protobuf_wire.float_field(2, 1.0))
    )
    assert list(protobuf_wire.read_fields(data + bytes.fromhex("09 0102030405060708"))) == [
        Field(3, 2**63),
        Field(40, b""),
        Field(2, bytes.fromhex("0000803f")),
        Field(1, bytes.fromhex("0102030405060708")),
    ]


@pytest.mark.parametrize("damaged", ["08", "08 80", "12 07 74", "0b", "15 00", "80 " * 12])
def test_a_damaged_message_is_an_error(damaged):
    with pytest.raises(ValueError, match=r"field|wire|number"):
        list(protobuf_wire.read_fields(bytes.fromhex(damaged)))
