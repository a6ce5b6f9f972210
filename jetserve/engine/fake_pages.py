"""Pages and rows of `FakeExecutor`: what they hold, and whose they are. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jetserve.engine.plan import Admission
from jetserve.engine.sizing import Sizing

UNWRITTEN = -1


class ContractViolation(AssertionError):
    """A plan that no executor may be given."""


@dataclass(slots=True)
class FakeRow:
    """A slot as the device has it.

    Attributes:
      pages: of the page table, and with each the life of the page that the row counts on.
      length: positions written.
      chain: of the last of them; see `FakePages`.
      has_begun: its first chunk has run, so that what it found in its cached pages is checked.
    """

    admission: Admission
    generated: int
    length: int
    pages: list[int] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    chain: int = 0
    last_token: int = UNWRITTEN
    has_begun: bool = False
    is_prefilled: bool = False
    is_active: bool = False


class FakePages:
    """What every page and every block of host memory holds.

    A position holds its token and a number for all tokens up to it, as keys and values depend on all of them: a page
    shared behind another prefix is found although its own tokens are right.

    A life of a page begins when it is granted as a new one, copied to or loaded to. Whoever had the page before and
    still uses it afterwards is found by that.
    """

    def __init__(self, sizing: Sizing) -> None:
        self._page_size = sizing.page_size
        self._cells = np.full((sizing.pages, sizing.page_size, 2), UNWRITTEN, np.int64)
        self._blocks: dict[int, NDArray[np.int64]] = {}
        self.lives = [0] * sizing.pages
        self.owners: list[FakeRow | None] = [None] * sizing.pages  # who may write
        self.made: set[int] = set()  # by a copy or a load, and nobody began to use them

    def renew(self, page: int, cells: NDArray[np.int64] | None = None) -> None:
        """Begins a life, with these cells or with nothing."""
        self._cells[page] = UNWRITTEN if cells is None else cells
        self.lives[page] += 1
        (self.made.discard if cells is None else self.made.add)(page)

    def truncate(self, page: int, length: int) -> None:
        """Forgets what a copy brought along behind the prefix it was made for."""
        self._cells[page, length:] = UNWRITTEN
        self.lives[page] += 1

    def page(self, page: int) -> NDArray[np.int64]:
        require(self._cells[page, 0, 0] != UNWRITTEN, f"{page=} is saved or copied, and holds nothing")
        cells: NDArray[np.int64] = self._cells[page].copy()
        return cells

    def save(self, block: int, cells: NDArray[np.int64]) -> None:
        self._blocks[block] = cells

    def block(self, block: int) -> NDArray[np.int64]:
        require(block in self._blocks, f"{block=} is loaded, and nothing was saved there")
        return self._blocks[block]

    def write(self, row: FakeRow, token: int) -> None:
        at, offset = divmod(row.length, self._page_size)
        page = self._page_of(row, at)
        if self.owners[page] is not row:
            raise _taken(row, page)
        row.chain = hash((row.chain, token))
        self._cells[page, offset] = token, row.chain
        row.length += 1

    def read(self, row: FakeRow) -> list[int]:
        """The tokens of a row that has begun."""
        pages = [self._page_of(row, at) for at in range(-(-row.length // self._page_size))]
        tokens: list[int] = self._cells[pages, :, 0].reshape(-1)[: row.length].tolist()
        if UNWRITTEN in tokens:
            raise ContractViolation(f"{row.admission} reads what it never wrote")
        return tokens

    def begin(self, row: FakeRow) -> None:
        """Takes up what the row's pages hold by now: exactly the first `cached` tokens of some sequence."""
        cached = row.admission.cached
        whole, rest = divmod(cached, self._page_size)
        count = whole + bool(rest)
        require(len(row.pages) >= count, f"{row.admission} begins with {len(row.pages)} pages granted")
        cells = self._cells[row.pages[:count]].reshape(-1, 2)[:cached]
        for position, (token, chain) in enumerate(cells.tolist()):
            row.chain = hash((row.chain, token))
            if token == UNWRITTEN:
                raise ContractViolation(f"nothing was written at cached position {position} of {row.admission}")
            if chain != row.chain:
                raise ContractViolation(f"cached position {position} of {row.admission} is behind another prefix")
        if rest:
            page = row.pages[whole]
            require(page in self.made, f"{page=} holds the end of a cached prefix, and is no copy: {row.admission}")
            self.truncate(page, rest)
        self.made.difference_update(row.pages[:count])
        row.lives[:count] = [self.lives[page] for page in row.pages[:count]]
        row.has_begun = True
        seen = row.admission.seen
        require(not seen or seen == tuple(cells[:, 0].tolist()), f"its pages hold other tokens: {row.admission}")

    def _page_of(self, row: FakeRow, at: int) -> int:
        page = row.pages[at]
        if self.lives[page] != row.lives[at]:
            raise _taken(row, page)
        return page


def require(is_kept: bool, message: str) -> None:
    if not is_kept:
        raise ContractViolation(message)


def _taken(row: FakeRow, page: int) -> ContractViolation:
    return ContractViolation(f"{page=} of {row.admission} belongs to somebody else by now")
