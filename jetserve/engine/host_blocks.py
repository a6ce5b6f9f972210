"""Pages that wait in host memory. Device side, engine thread only; calls compiled programs only.

A block is an array of its own. On an accelerator it lies in pinned memory, and the transfer both ways runs beside the
programs; on CPU what `save` read stays as it is. Where a plan moves more pages than one call holds, each call waits for
the one before: the memory budget counts the pages of one on their way, not of hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding
from numpy.typing import NDArray

from jetserve.engine import moves
from jetserve.engine.plan import HostMove
from jetserve.engine.programs import HostPrograms

Item = TypeVar("Item")


class HostBlocks:
    """Owns the blocks; which page is where is the scheduler's knowledge.

    Args:
      blocks: how many there are.
      kept: where blocks lie, as the sharding of a page in host memory; None leaves them where `save` wrote them.
    """

    def __init__(self, programs: HostPrograms, blocks: int, kept: Sharding | None) -> None:
        self._programs = programs
        self._kept = kept
        self._layout = moves.move_layout()
        self._blocks: list[Array | None] = [None] * blocks
        self._unused: Array | None = None  # fills up the last call of a load

    def warm_up(self, kv: Array) -> Array:
        """Sends the trash page to host memory and back. Returns: the cache."""
        saved = self._programs.save(kv, self._layout.blank())
        self._unused = saved[0]
        back = tuple(self._fetch(self._keep(page)) for page in saved)
        return self._programs.load(kv, self._layout.blank(), back)

    def at(self, loads: Sequence[HostMove]) -> list[Array]:
        """What the blocks hold now, whatever is saved there afterwards."""
        found = [self._blocks[move.block] for move in loads]
        assert None not in found, f"{loads} load blocks that hold nothing"
        return [block for block in found if block is not None]

    def save(self, kv: Array, saves: Sequence[HostMove]) -> None:
        """Reads pages into blocks; the transfers have begun when this returns."""
        kept: list[Array] = []
        for group in _groups(saves):
            jax.block_until_ready(kept)
            pages = self._programs.save(kv, self._control(group))
            kept = [self._keep(page) for page in pages[: len(group)]]
            for move, page in zip(group, kept, strict=True):
                self._blocks[move.block] = page

    def load(self, kv: Array, loads: Sequence[HostMove], held: Sequence[Array]) -> Array:
        """Writes what `at` found into the pages.

        Returns: the cache.
        """
        assert self._unused is not None, "loads come after warm-up"
        for index, (group, blocks) in enumerate(zip(_groups(loads), _groups(held), strict=True)):
            if index:
                kv.block_until_ready()
            pages = [self._fetch(block) for block in blocks]
            pages += [self._unused] * (moves.PAGES_PER_CALL - len(pages))
            kv = self._programs.load(kv, self._control(group), tuple(pages))
        return kv

    def _keep(self, page: Array) -> Array:
        return page if self._kept is None else jax.device_put(page, self._kept)

    def _fetch(self, block: Array) -> Array:
        return block if self._kept is None else jax.device_put(block, self._kept.with_memory_kind("device"))

    def _control(self, group: Sequence[HostMove]) -> NDArray[np.int32]:
        vector = self._layout.blank()
        self._layout.views(vector)["pages"][: len(group)] = [move.page for move in group]
        return vector


def _groups(items: Sequence[Item]) -> list[Sequence[Item]]:
    """As many as a call takes, and as many again."""
    size = moves.PAGES_PER_CALL
    return [items[first : first + size] for first in range(0, len(items), size)]
