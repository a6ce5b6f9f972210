"""Who holds which page of the KV pool. Engine thread only; imports no jax.

Every page is free, or owned by one sequence, or by one node of the prefix tree. A sequence reads the pages of the nodes
on its path and keeps them from being evicted by locking the deepest one; it writes only pages of its own:

    entries of a sequence's page table
    [0, kept)     found in the tree, or handed to it since; not written again
    [kept, ...)   own

Pages go to the tree when a committed plan has filled them, and with a partial last one when the sequence leaves its
slot. They stay there until somebody needs room. Where the tree has an equal page already, the sequence goes on with its
own ones until it leaves, so that whatever it has locked it uses. With a host tier evicted pages move to blocks of host
memory first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from jetserve.engine.block_hash import Namespace, block_hashes
from jetserve.engine.kv_events import KvEvent
from jetserve.engine.pages import PagePool
from jetserve.engine.plan import HostMove, PageCopy
from jetserve.engine.prefix_node import Node
from jetserve.engine.prefix_tree import Match, PrefixTree
from jetserve.engine.sequence import Held, Sequence
from jetserve.engine.sizing import Sizing


class Found(NamedTuple):
    """What a sequence found in the cache when it got its pages.

    Attributes:
      copies, loads: what the plan must do for it.
      is_ready: whether its first chunk may be in the same plan.
    """

    copies: tuple[PageCopy, ...] = ()
    loads: tuple[HostMove, ...] = ()
    is_ready: bool = True


@dataclass(slots=True)
class Totals:
    """Counted since the start.

    Attributes:
      queried_tokens, cached_tokens: of prompts that were looked up, and found; resumed sequences do not count again.
      host_cached_tokens: of these, in host memory.
      evicted_pages: that left the pool's part of the tree, to host memory or for good.
      saved_pages, loaded_pages: that went to and came from host memory.
    """

    queried_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    evicted_pages: int = 0
    saved_pages: int = 0
    loaded_pages: int = 0


class KvMemory:
    """The pool, and the prefix tree that lives in it.

    Args:
      is_observed: collect events about cached blocks; `take_events` must be called now and then.
    """

    def __init__(self, sizing: Sizing, *, is_observed: bool = False) -> None:
        self.pool = PagePool(sizing.pages)
        self.tree = PrefixTree(sizing.page_size, host_blocks=sizing.host_blocks, is_observed=is_observed)
        self.totals = Totals()
        self._page_size = sizing.page_size
        self._is_sharing = sizing.prefix_cache
        self._host_blocks = sizing.host_blocks
        self._saves: dict[int, HostMove] = {}  # by block, of the plan in the making
        self._loading: set[Node] = set()  # nodes whose pages the plan in the making loads
        self._writing: Counter[int] = Counter()  # hashes of pages that will come to the tree

    @property
    def available_pages(self) -> int:
        """Pages that are free or can be made so."""
        return self.pool.free_pages + self.tree.evictable

    @property
    def used_pages(self) -> int:
        """Pages that cannot be had: owned by sequences, or locked by them."""
        return self.pool.total_pages - self.available_pages

    def pages(self, positions: int) -> int:
        """How many pages so many positions need."""
        return -(-positions // self._page_size)

    def begin_plan(self) -> None:
        """What the plan before loads is there for the next one."""
        self._loading.clear()

    def take_saves(self) -> tuple[HostMove, ...]:
        """Pages that the plan in the making must save, because it hands them to others."""
        saves, self._saves = tuple(self._saves.values()), {}
        return saves

    def take_events(self) -> list[KvEvent]:
        """What happened to cached blocks since the last call."""
        return self.tree.take_events()

    def cached_tokens(self, sequence: Sequence) -> int:
        """Whole pages' worth of the sequence's prefix that is cached now. Costs no more for long prefixes."""
        if not self._is_sharing:
            return 0
        return self.tree.matched_tokens(self._hashes(sequence), self._most_found(sequence))

    def is_being_written(self, sequence: Sequence) -> bool:
        """Whether somebody is prefilling the very page that the sequence would have to begin with."""
        if not self._writing or not self._is_sharing:
            return False
        hashes = self._hashes(sequence)
        at = self.cached_tokens(sequence) // self._page_size
        return at < self._most_found(sequence) and hashes[at] in self._writing

    def has_room(self, sequence: Sequence, positions: int, others: int) -> bool:
        """Whether a sequence can get pages for so many positions, and so many pages would be left for others."""
        most = self.pages(positions) + others
        if most <= self.available_pages:
            return True
        if most - self.cached_tokens(sequence) // self._page_size > self.available_pages:
            return False
        # What it would share counts as available now, unless others have locked it; when it is shared it will not.
        shared = sum(node.page is not None and node.locks > 0 for node in self._match(sequence).nodes)
        return most - shared <= self.available_pages

    def seat(self, sequence: Sequence, positions: int) -> Found:
        """Gives a sequence its pages: what the cache has of its prefix, and own ones for the rest. There is room."""
        found = self._share(sequence, positions) if self._is_sharing else self._own(sequence, positions)
        if sequence.scheduled_seconds is None:
            sequence.cached = sequence.held.written
            self.totals.queried_tokens += len(sequence.prefix)
            self.totals.cached_tokens += sequence.cached
            self.totals.host_cached_tokens += min(len(found.loads) * self._page_size, sequence.cached)
        sequence.held.announced = sequence.held.kept
        self._writing.update(self._hashes(sequence)[sequence.held.announced :])
        return found

    def extend(self, sequence: Sequence, count: int) -> None:
        """Gives a sequence so many pages more. The caller has seen `available_pages`."""
        sequence.held.pages += self._alloc(count)

    def keep(self, sequence: Sequence, written: int) -> None:
        """A committed plan has written so many positions of the prefix: whole pages can be found by others."""
        sequence.held.written = written
        whole = written // self._page_size
        kept = sequence.held.kept
        if whole == kept or not self._is_sharing:
            return
        assert sequence.held.node is not None, sequence
        hashes = self._hashes(sequence)
        if self.tree.matched_tokens(hashes, kept + 1) > kept * self._page_size:
            self._end_writing(sequence, len(hashes))  # computed by somebody else as well
            return
        tokens = sequence.prefix[kept * self._page_size : whole * self._page_size]
        inserted = self.tree.insert(sequence.held.node, tokens, sequence.held.pages[kept:whole])
        if inserted.spare:
            self._end_writing(sequence, len(hashes))  # the cache was flushed, and takes nothing from before
            return
        self._end_writing(sequence, whole)
        self.tree.lock(inserted.node, above=sequence.held.node)
        sequence.held.node, sequence.held.kept = inserted.node, whole
        self.pool.free(inserted.freed)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence's pages; what it has written stays in the tree."""
        self._end_writing(sequence, len(self._hashes(sequence)))
        own = sequence.held.pages[sequence.held.kept :]
        if sequence.held.node is not None:
            start, end = sequence.held.kept * self._page_size, sequence.positions_written
            tokens = sequence.tokens(start, end)
            filled = self.pages(len(tokens))
            if filled:
                inserted = self.tree.insert(sequence.held.node, tokens, own[:filled])
                own = own[filled:] + inserted.spare + inserted.freed
            own += self.tree.unlock(sequence.held.node)
        self.pool.free(own)
        sequence.held = Held()

    def flush(self) -> int:
        """Forgets all prefixes; what running sequences use leaves with them. Returns the pages that are free now."""
        pages = self.tree.clear()
        self.pool.free(pages)
        return len(pages)

    def check(self, residents: Collection[Sequence]) -> None:
        """Raises: AssertionError unless free + cached + owned pages are all pages, each of them once."""
        self.tree.check()
        owned = [page for sequence in residents for page in sequence.held.pages[sequence.held.kept :]]
        self.pool.check([*owned, *self.tree.pages()])
        writing = Counter(name for sequence in residents for name in self._hashes(sequence)[sequence.held.announced :])
        assert self._writing == writing, f"{self._writing} are waited for, {writing} are being written"
        assert not self._saves, "pages were evicted for no plan"

    def _share(self, sequence: Sequence, positions: int) -> Found:
        match = self._match(sequence)
        self.tree.lock(match.node)
        at_host = [node for node in match.nodes if node.page is None]
        partial = match.partial
        source, block = (partial.page, partial.block) if partial is not None else (None, None)
        own = self._alloc(self.pages(positions) - len(match.nodes) + len(at_host))
        loads = self.tree.restore(at_host, own[: len(at_host)])
        own = own[len(at_host) :]
        self._loading.update(at_host)
        sequence.held.node, sequence.held.kept = match.node, len(match.nodes)
        sequence.held.pages = [page for node in match.nodes if (page := node.page) is not None] + own
        sequence.held.written = match.tokens
        copies: tuple[PageCopy, ...] = ()
        if partial is not None:
            sequence.held.written += match.partial_tokens
            if source is not None:
                copies = (PageCopy(source, own[0]),)
            elif block is not None:
                loads.append(HostMove(own[0], block))
        self.totals.loaded_pages += len(loads)
        is_ready = not loads and self._loading.isdisjoint(match.nodes)
        return Found(copies, tuple(loads), is_ready)

    def _own(self, sequence: Sequence, positions: int) -> Found:
        sequence.held.pages = self._alloc(self.pages(positions))
        return Found()

    def _match(self, sequence: Sequence) -> Match:
        """What of a sequence's prefix can be had in the plan in the making.

        A prompt that is cached whole is still to be read from its last token on: nothing else gives logits. What this
        very plan saves to host memory can only be loaded by a later one.
        """
        match = self.tree.match(self._namespace(sequence), sequence.prefix, len(sequence.prefix) - 1)
        for at, node in enumerate(match.nodes):
            if node.block in self._saves:
                above = node.parent
                assert above is not None, node
                return Match(above, match.nodes[:at], at * self._page_size, None, 0)
        if match.partial is not None and (match.partial in self._loading or match.partial.block in self._saves):
            return match._replace(partial=None, partial_tokens=0)
        return match

    def _alloc(self, count: int) -> list[int]:
        """Takes pages, evicting some if need be."""
        short = count - self.pool.free_pages
        if short > 0:
            evicted = self.tree.evict(short)
            self.pool.free(evicted.pages)
            self._saves |= {move.block: move for move in evicted.saves}
            self.totals.evicted_pages += len(evicted.pages)
            self.totals.saved_pages += len(evicted.saves)
        return self.pool.alloc(count)

    def _hashes(self, sequence: Sequence) -> list[int]:
        """Of the whole pages of the prefix, made once for each prefix."""
        if not self._is_sharing:
            return []
        if sequence.held.hashes is None:
            sequence.held.hashes = block_hashes(self._namespace(sequence), sequence.prefix, self._page_size)
        return sequence.held.hashes

    def _namespace(self, sequence: Sequence) -> Namespace:
        return Namespace(salt=sequence.request.cache_salt)

    def _most_found(self, sequence: Sequence) -> int:
        """Whole pages of its prefix that it can share at most: the last token is computed again."""
        return (len(sequence.prefix) - 1) // self._page_size

    def _end_writing(self, sequence: Sequence, end: int) -> None:
        """Nobody is to wait for the sequence's pages below `end` any more: they are in the tree, or will not be."""
        for value in self._hashes(sequence)[sequence.held.announced : end]:
            self._writing[value] -= 1
            if not self._writing[value]:
                del self._writing[value]
        sequence.held.announced = max(sequence.held.announced, end)
