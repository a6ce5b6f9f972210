"""The GGUF header against the `gguf` package's own writer and reader."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from jetserve.errors import CheckpointError
from jetserve.gguf_header import copy_metadata, read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "all-types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "größe ▁ 🦙")
    writer.add_array("a.texts", ["", "▁the", "<0x0A>"])
    writer.add_array("a.floats", [0.25, -1.5])
    writer.add_array("a.ints", [-1, 3, 2])
    writer.add_custom_alignment(64)
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_value_equals_what_the_gguf_package_reads(file: Path) -> None:
    reader = gguf.GGUFReader(file)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert read_header(file).metadata == expected
    assert expected["a.text"] == "größe ▁ 🦙"
    assert expected["a.u64"] == 2**64 - 1


def test_tensors_lie_where_the_gguf_package_says(file: Path) -> None:
    tensors = read_header(file).tensors
    reader = gguf.GGUFReader(file)
    assert list(tensors) == ["matrix", "half"]
    assert tensors["matrix"].shape == (2, 3)
    assert {name: info.offset for name, info in tensors.items()} == {t.name: t.data_offset for t in reader.tensors}
    data = np.fromfile(file, np.float32, count=6, offset=tensors["matrix"].offset)
    assert data.tolist() == [0, 1, 2, 3, 4, 5]


def test_every_truncation_is_a_checkpoint_error_that_names_the_file(file: Path) -> None:
    whole = file.read_bytes()
    end = read_header(file).tensors["matrix"].offset
    header_bytes = max(size for size in range(end - 64, end) if whole[size - 1])
    for size in range(header_bytes):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"all-types\.gguf"):
            read_header(file)


def test_another_file_type_is_refused_with_what_it_starts_with(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(CheckpointError, match=r"not a GGUF file: it starts with b'PK"):
        read_header(path)


def test_an_unknown_version_is_refused_by_number(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4:8] = (7).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="GGUF version 7"):
        read_header(file)


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "absent.gguf")


def test_counts_beyond_the_file_end_in_an_error_at_once(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[16:24] = (2**62).to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        read_header(file)


def test_a_copy_of_the_metadata_is_the_same_without_tensors(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "vocabulary.gguf"
    copy_metadata(file, copy)
    assert read_header(copy).metadata == read_header(file).metadata
    assert read_header(copy).tensors == {}
    assert list(gguf.GGUFReader(copy).tensors) == []
