"""Pages of the KV pool: which are free. Host side, engine thread only; imports no jax.

The pool hands out page numbers; what is in a page is the device's business, and who owns it is memory.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from jetserve.kernels import TRASH_PAGE


class PagePool:
    """Free pages. Page `TRASH_PAGE` is never handed out.

    Example: `PagePool(4).alloc(2) == [1, 2]`; one page is left.
    """

    def __init__(self, pages: int) -> None:
        """Args:
        pages: in the device's pool, the trash page included.
        """
        assert pages >= 1, pages
        self.total_pages = pages - 1
        self._is_free = [page != TRASH_PAGE for page in range(pages)]
        self._free = [page for page in range(pages - 1, -1, -1) if page != TRASH_PAGE]  # the last one goes first

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.total_pages - self.free_pages

    def alloc(self, count: int) -> list[int]:
        """Takes `count` pages. The caller has seen that `free_pages` is enough."""
        assert 0 <= count <= len(self._free), f"{count=} pages asked for, {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back."""
        for page in pages:
            assert page != TRASH_PAGE, "the trash page is freed"
            assert not self._is_free[page], f"{page=} is freed twice"
            self._is_free[page] = True
            self._free.append(page)

    def check(self, owned: Iterable[int]) -> None:
        """Compares the books with the pages that are owned.

        Raises: AssertionError when a page is lost, owned twice, or both free and owned.
        """
        pages = sorted(owned)
        assert len(set(pages)) == len(pages), f"owned twice: {[a for a, b in pairwise(pages) if a == b]}"
        assert TRASH_PAGE not in pages, "the trash page is owned"
        free = [page for page, is_free in enumerate(self._is_free) if is_free]
        assert sorted(self._free) == free, f"free pages are {free}, the list says {sorted(self._free)}"
        expected = [page for page in range(1, self.total_pages + 1) if not self._is_free[page]]
        assert pages == expected, f"pages taken are {expected}, owned ones {pages}"
