"""Pages of the KV pool and who counts on them. Host side, engine thread only; imports no jax.

The pool hands out page numbers; what is in a page is the device's business. A page may have several holders (a shared
prefix), and is free again when the last one lets go.
"""

from __future__ import annotations

from collections.abc import Iterable

from jetserve.kernels import TRASH_PAGE


class PagePool:
    """Reference-counted pages. Page `TRASH_PAGE` is never handed out.

    Example: `PagePool(4).alloc(2) == [1, 2]`; one page is left.
    """

    def __init__(self, pages: int) -> None:
        """Args:
        pages: in the device's pool, the trash page included.
        """
        assert pages >= 1, pages
        self._holders = [0] * pages
        self._free = [page for page in range(pages - 1, -1, -1) if page != TRASH_PAGE]  # the last one goes first

    @property
    def total_pages(self) -> int:
        """Pages that can be handed out."""
        return len(self._holders) - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.total_pages - self.free_pages

    def alloc(self, count: int) -> list[int]:
        """Takes `count` pages, each with one holder. The caller has seen that `free_pages` is enough."""
        assert 0 <= count <= len(self._free), f"{count=} pages asked for, {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that have one."""
        for page in pages:
            assert self._holders[page] > 0, f"{page=} is free and cannot be shared"
            self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Takes a holder away; pages without one can be handed out again."""
        for page in pages:
            assert self._holders[page] > 0, f"{page=} is freed more often than it was held"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Compares the books with the pages that are held, one entry per holder.

        Raises: AssertionError when a page is lost, held twice over or both free and held.
        """
        expected = [0] * len(self._holders)
        for page in held:
            expected[page] += 1
        assert expected[TRASH_PAGE] == 0, "the trash page is held"
        assert expected == self._holders, f"holders are {self._holders}, books say {expected}"
        assert sorted(self._free) == [page for page, count in enumerate(expected) if not count and page != TRASH_PAGE]
