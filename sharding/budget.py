"""How much of a chip's memory is left for keys and values."""

from __future__ import annotations

from typing import NamedTuple

from jetserve.errors import ConfigError

# Bisected with a 3B model on one v5e: the compiler accepts 2 % fewer pages than the plain sum; one more to be safe.
_MARGIN = 0.03


class ProgramMemory(NamedTuple):
    """Of one chip, from the compiler's `memory_analysis`: largest temporaries of a program, and code of all of them."""

    temporary_bytes: int
    code_bytes: int


def cache_bytes(limit_bytes: int, weight_bytes: int, programs: ProgramMemory) -> int:
    """Bytes of one chip for the KV cache.

    Args:
      limit_bytes: what the runtime lets us use of the chip.
      weight_bytes: of one chip's shards.
    Raises: ConfigError with the sum when nothing is left.
    """
    left = int(limit_bytes * (1 - _MARGIN)) - weight_bytes - programs.temporary_bytes - programs.code_bytes
    if left <= 0:
        raise ConfigError(
            f"the model does not fit: weights {weight_bytes}, temporaries {programs.temporary_bytes} and code "
            f"{programs.code_bytes} bytes of a chip's {limit_bytes}; raise mesh.tensor, or lower engine.prefill_sizes"
        )
    return left
