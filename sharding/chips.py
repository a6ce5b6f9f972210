"""What the chips at hand are and can do."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax

_MEMORY_INFO = Path("/proc/meminfo")
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86 and Arm


class ChipSpeed(NamedTuple):
    """Peaks of what jax calls a device: multiplying in bfloat16, and reading its memory."""

    flops_per_second: float
    bytes_per_second: float


# By `device_kind`. Figures per core from `tpu_info` of jax 0.10.2 (jax/_src/pallas/mosaic), which names the kinds; a v4
# or v5p device is the two cores of a chip, a 7x device one of two.
_SPEEDS = {
    "TPU v4": ChipSpeed(275e12, 1.23e12),
    "TPU v5 lite": ChipSpeed(197e12, 0.82e12),
    "TPU v5e": ChipSpeed(197e12, 0.82e12),
    "TPU v5": ChipSpeed(459e12, 2.46e12),
    "TPU v5p": ChipSpeed(459e12, 2.46e12),
    "TPU v6 lite": ChipSpeed(920e12, 1.64e12),
    "TPU v6e": ChipSpeed(920e12, 1.64e12),
    "TPU7": ChipSpeed(1155e12, 3.7e12),
    "TPU7x": ChipSpeed(1155e12, 3.7e12),
}
_UNKNOWN_TPU = _SPEEDS["TPU v5e"]  # the slowest of them
_UNKNOWN_GPU = ChipSpeed(50e12, 0.5e12)
# Two Zen4 cores reach 188 to 220 GFLOP/s in float32, 370 to 437 in bfloat16, and 31 to 45 GB/s; other machines less.
_CPU = ChipSpeed(100e9, 20e9)


def speed(device_kind: str, platform: str) -> ChipSpeed:
    """What a chip can do at most; on CPU the whole machine, and for kinds not known a cautious guess."""
    known = _SPEEDS.get(device_kind)
    if known is not None:
        return known
    return {"tpu": _UNKNOWN_TPU, "cpu": _CPU}.get(platform, _UNKNOWN_GPU)


def host_memory_bytes() -> int | None:
    """Of this machine, all of it; None where it does not say."""
    try:
        first, _, _ = _MEMORY_INFO.read_text(encoding="utf-8").partition("\n")
    except OSError:
        return None
    name, _, amount = first.partition(":")
    return int(amount.split()[0]) << 10 if name == "MemTotal" else None


def multiplies_bfloat16(platform: str) -> bool:
    """Whether matmuls in bfloat16 are native; without, they are slower than in float32."""
    if platform != "cpu":
        return True
    try:
        text = _CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return False
    return any(
        _CPU_BFLOAT16_FLAGS & set(line.partition(":")[2].split())
        for line in text.splitlines()
        if line.startswith(("flags", "Features"))
    )


def memory_limit_bytes(device: jax.Device) -> int | None:
    """Memory of one chip that is ours to fill; None where we share it (CPU) or cannot know."""
    if device.platform == "cpu":
        return None
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def describe(devices: list[jax.Device]) -> str:
    """As in "TPU v5e x8"."""
    return f"{devices[0].device_kind} x{len(devices)}"
