"""What the chips at hand are and can do."""

from __future__ import annotations

from pathlib import Path

import jax

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86 and Arm


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
