"""What chips are said to do, against jax's own table."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.experimental.pallas import tpu as pltpu

from jetserve.sharding import chips


@pytest.mark.parametrize(
    ("kind", "version", "cores"),
    [
        ("TPU v4", pltpu.ChipVersion.TPU_V4, 2),
        ("TPU v5 lite", pltpu.ChipVersion.TPU_V5E, 1),
        ("TPU v5e", pltpu.ChipVersion.TPU_V5E, 1),
        ("TPU v5", pltpu.ChipVersion.TPU_V5P, 2),
        ("TPU v5p", pltpu.ChipVersion.TPU_V5P, 2),
        ("TPU v6 lite", pltpu.ChipVersion.TPU_V6E, 1),
        ("TPU v6e", pltpu.ChipVersion.TPU_V6E, 1),
        ("TPU7x", pltpu.ChipVersion.TPU_7X, 1),
    ],
)
def test_speed_of_a_device_is_that_of_its_cores(kind: str, version: pltpu.ChipVersion, cores: int) -> None:
    info = pltpu.get_tpu_info_for_chip(version, 1)

    speed = chips.speed(kind, "tpu")

    assert speed.flops_per_second == pytest.approx(cores * info.bf16_ops_per_second, rel=0.01)
    assert speed.bytes_per_second == pytest.approx(cores * info.mem_bw_bytes_per_second, rel=0.01)


def test_an_unknown_chip_is_guessed_by_its_platform() -> None:
    assert chips.speed("TPU v99", "tpu") == chips.speed("TPU v5e", "tpu")
    assert chips.speed("cpu", "cpu").flops_per_second < chips.speed("NVIDIA", "gpu").flops_per_second


def test_memory_of_this_machine_is_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:        3 kB\nMemFree:         1 kB\n")
    monkeypatch.setattr(chips, "_MEMORY_INFO", told)
    assert chips.host_memory_bytes() == 3072
    told.unlink()
    assert chips.host_memory_bytes() is None
