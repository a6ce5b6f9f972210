"""What happens to cached KV blocks, for routers that follow it. Plain data; imports no jax.

A block is a full page in the prefix tree. Its hash names it and all tokens before it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Medium(StrEnum):
    """Where a block is. The words are vLLM's, which routers know: "GPU" is the accelerator's own memory."""

    DEVICE = "GPU"
    HOST = "CPU"


class BlockStored(NamedTuple):
    """Consecutive blocks can be hit from now on.

    Attributes:
      hashes: of the blocks, in the order of their tokens; 64-bit, never 0.
      parent: hash of the block before the first one; None at the beginning of a prompt.
      token_ids: of all these blocks.
      adapter, cache_salt: whose prefixes these are.
    """

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    medium: Medium = Medium.DEVICE
    adapter: str | None = None
    cache_salt: str | None = None


class BlockRemoved(NamedTuple):
    """Blocks are no longer where they were."""

    hashes: tuple[int, ...]
    medium: Medium = Medium.DEVICE


class AllBlocksCleared(NamedTuple):
    """No block is left."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
