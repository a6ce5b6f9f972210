"""Which pages of the pool, or blocks of host memory, hold the keys and values of which tokens.

Host side, engine thread only; imports no jax. The tree owns the pages of its nodes: who inserts a page gives it away.
Pages that the tree does not want, or gives up, are returned for the caller to free; it knows nothing of the pool.

One node is one page. A path from a root spells a prefix; only the last node of one may be a page that is not full:

    root -- [7 7 7 7] -- [1 2 3 4] -- [5 6]         page size 4; the last leaf holds two tokens
                      \\- [1 2 9 9] -- [8 8 8 8]     on the host: then so is all behind it

Children are sorted by their tokens and none is a prefix of another, so the child that shares most with a query stands
next to where the query would be inserted. A sequence locks the deepest node it uses, and with it all nodes above.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jetserve.engine.block_hash import Namespace, block_hash
from jetserve.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Medium
from jetserve.engine.plan import HostMove
from jetserve.engine.prefix_node import Leaves, Node, Root, closest, place_of


class Match(NamedTuple):
    """What is cached of some tokens.

    Attributes:
      node: the deepest full page, on the device or the host; the root without any.
      nodes: the full pages, from the first to `node`.
      tokens: covered by `nodes`.
      partial: behind `node`, a page of which the first `partial_tokens` match; on the device or the host, too.
    """

    node: Node
    nodes: list[Node]
    tokens: int
    partial: Node | None
    partial_tokens: int


class Inserted(NamedTuple):
    """Attributes:
    node: the deepest full page.
    spare: pages that were not taken, because the tree has their tokens; they stay the caller's.
    freed: pages the tree has given up.
    """

    node: Node
    spare: list[int]
    freed: list[int]


class Evicted(NamedTuple):
    """Attributes:
    pages: that the tree has given up.
    saves: which of them live on in host memory. No two go to the same block.
    """

    pages: list[int]
    saves: list[HostMove]


class PrefixTree:
    """Finds, keeps and gives up pages by the tokens before and in them.

    Args:
      page_size: tokens in a page.
      host_blocks: pages that fit in host memory. Full pages that are evicted move there, and the least recently used
        ones there make room.
      is_observed: collect events; `take_events` must be called now and then.

    Attributes:
      nodes: pages held.
      evictable: of these, the ones that nobody has locked.
    """

    def __init__(self, page_size: int, *, host_blocks: int = 0, is_observed: bool = False) -> None:
        self.page_size = page_size
        self.host_blocks = host_blocks
        self.nodes = 0
        self.evictable = 0
        self._is_observed = is_observed
        self._roots: dict[Namespace, Root] = {}  # those with children
        self._generation = 0
        self._clock = 0
        self._hashes: set[int] = set()  # of full pages in the tree
        self._detached: set[Node] = set()  # with pages, all locked
        self._free_blocks = list(range(host_blocks - 1, -1, -1))  # the last one goes first
        numbers = itertools.count()
        self._device_leaves = Leaves(operator.attrgetter("is_device_leaf"), numbers)
        self._host_leaves = Leaves(operator.attrgetter("is_host_leaf"), numbers)
        self._events: list[KvEvent] = []

    @property
    def hosted(self) -> int:
        """Host blocks in use."""
        return self.host_blocks - len(self._free_blocks)

    def match(self, namespace: Namespace, token_ids: Sequence[int], limit: int) -> Match:
        """Finds the longest cached prefix, to the token. Changes nothing: lock the node before anything is evicted.

        Args:
          limit: most tokens to find.
        """
        tokens, size = tuple(token_ids), self.page_size
        limit = min(limit, len(tokens))
        node: Node = self._roots.get(namespace) or Root(namespace, self._generation)
        path: list[Node] = []
        covered = 0
        while covered + size <= limit and node.children:
            piece = tokens[covered : covered + size]
            at = place_of(node.children, piece)
            if at == len(node.children) or node.children[at].tokens != piece:
                break
            node = node.children[at]
            path.append(node)
            covered += size
        partial, shared = closest(node.children, tokens[covered : min(limit, covered + size)])
        return Match(node, path, covered, partial, shared)

    def matched_tokens(self, hashes: Sequence[int], most_pages: int | None = None) -> int:
        """How much of a prompt is cached in full pages, by its `block_hashes`. A hint: hashes may collide.

        Looks at few of them: where a page is cached, so are all before it.

        Args:
          most_pages: to find; None for all that have a hash.
        """
        missing = bisect.bisect_left(hashes, True, hi=most_pages, key=lambda name: name not in self._hashes)
        return missing * self.page_size

    def lock(self, node: Node, *, above: Node | None = None) -> None:
        """Keeps a node and all above it from being evicted, or those below one that the caller has locked already.

        Args:
          above: on the path to `node`. Its lock moves to `node`.
        """
        while node is not above and node.parent is not None:
            if not node.locks and node.page is not None:
                self.evictable -= 1
            node.locks += 1
            node = node.parent
        assert node is above or above is None or above.parent is None, f"{above} is not above the node to lock"

    def unlock(self, node: Node) -> list[int]:
        """Takes a lock back. Returns the pages that are free now: of nodes that had left the tree."""
        self._clock += 1
        freed = []
        while node.parent is not None:
            assert node.locks > 0, f"{node} is unlocked more often than it was locked"
            node.locks -= 1
            node.last_used = self._clock
            if not node.locks and node.is_detached:
                freed += self._let_go(node)
            elif not node.locks:
                self.evictable += node.page is not None
                self._offer(node)
            node = node.parent
        return freed

    def insert(self, parent: Node, token_ids: Sequence[int], pages: Sequence[int]) -> Inserted:
        """Hangs the pages of consecutive tokens behind a node on the device, which the caller has locked, or a root.

        The last page may be partial. Of equal pages the tree keeps its own, unless that is on the host. A partial page
        that is the beginning of another gives way to it. Nothing is taken behind a node that has left the tree.
        """
        tokens, size = tuple(token_ids), self.page_size
        assert len(pages) == -(-len(tokens) // size), f"{len(pages)} pages for {len(tokens)} tokens, {size} in each"
        assert parent is parent.root or len(parent.tokens) == size, f"{parent} is not full"
        if parent.is_detached or parent.root.generation != self._generation:
            return Inserted(parent, list(pages), [])
        self._clock += 1
        node = self._roots.get(parent.root.namespace, parent) if parent is parent.root else parent
        assert node is node.root or node.page is not None, f"{node} is not on the device"
        spare: list[int] = []
        freed: list[int] = []
        arrived: list[Node] = []  # on the device: consecutive, because behind the first of them nothing was there
        moved: list[Node] = []  # the ones of them that were on the host
        deepest = last = node
        for at, page in enumerate(pages):
            piece = tokens[at * size : (at + 1) * size]
            place = place_of(deepest.children, piece)
            last = deepest.children[place] if place < len(deepest.children) else deepest
            if last is deepest or last.tokens[: len(piece)] != piece:
                freed += self._replace(deepest, place - 1, piece)
                last = self._hang(deepest, piece, page)
                arrived.append(last)
            elif last.page is None and last.tokens == piece:
                self._bring_back(last, page)
                arrived.append(last)
                moved.append(last)
            else:
                spare.append(page)
            last.last_used = self._clock
            if len(piece) == size:
                deepest = last
        for leaf in {deepest, last}:
            self._offer(leaf)
        self._tell_removed(moved, Medium.HOST)
        self._tell_stored(arrived, Medium.DEVICE)
        return Inserted(deepest, spare, freed)

    def evict(self, count: int) -> Evicted:
        """Gives up so many pages, those of the least recently used leaves. The caller has seen `evictable`."""
        assert count <= self.evictable, f"{count} pages to evict, {self.evictable} are not locked"
        pages: list[int] = []
        saves: dict[int, HostMove] = {}  # by block
        for _ in range(count):
            node = self._device_leaves.pop()
            assert node is not None, f"no leaf is left of {self.evictable} pages that are not locked"
            page, parent = node.page, node.parent
            assert page is not None, node
            assert parent is not None, node
            block = self._take_block() if len(node.tokens) == self.page_size else None
            self._take_page(node)
            self._tell_removed([node], Medium.DEVICE)
            if block is None:
                self._remove(node)
            else:
                node.block = block
                self._tell_stored([node], Medium.HOST)
                self._offer(node)
                saves[block] = HostMove(page, block)  # replaces one whose block was taken again
            self._offer(parent)
            pages.append(page)
        return Evicted(pages, list(saves.values()))

    def restore(self, nodes: Sequence[Node], pages: Sequence[int]) -> list[HostMove]:
        """Brings consecutive nodes from the host to these pages, the upper ones first. Their blocks are free then."""
        self._clock += 1
        loads = []
        for node, page in zip(nodes, pages, strict=True):
            assert node.block is not None, f"{node} is not on the host"
            assert node.is_reachable, f"{node} is behind {node.parent}, which is not on the device"
            loads.append(HostMove(page, node.block))
            self._bring_back(node, page)
            node.last_used = self._clock
        if nodes:
            self._offer(nodes[-1])
        self._tell_removed(nodes, Medium.HOST)
        self._tell_stored(nodes, Medium.DEVICE)
        return loads

    def clear(self) -> list[int]:
        """Forgets everything. Returns the pages that are free now; locked ones are returned by their last unlock."""
        freed = []
        for node in self._walk():
            node.is_detached = True
            node.block = None
            if node.page is not None:
                self._detached.add(node)
                freed += self._let_go(node) if not node.locks else []
            node.children = []  # no cycle is left to collect
        self.evictable = 0
        self._roots.clear()
        self._hashes.clear()
        self._device_leaves.clear()
        self._host_leaves.clear()
        self._free_blocks = list(range(self.host_blocks - 1, -1, -1))
        self._generation += 1
        if self._is_observed:
            self._events.append(AllBlocksCleared())
        return freed

    def take_events(self) -> list[KvEvent]:
        """What became of full pages since the last call."""
        taken: list[KvEvent] = []
        for medium, events in itertools.groupby(self._events, _left_medium):
            if medium is None:
                taken += events
            else:  # those of many evictions are one
                hashes = (name for event in events if isinstance(event, BlockRemoved) for name in event.hashes)
                taken.append(BlockRemoved(tuple(hashes), medium))
        self._events = []
        return taken

    def pages(self) -> Iterator[int]:
        """All pages held, also those of nodes that have left the tree but are locked."""
        return (node.page for node in itertools.chain(self._walk(), self._detached) if node.page is not None)

    def check(self) -> None:
        """Raises: AssertionError when the books disagree, or nodes are where they must not be."""
        nodes = list(self._walk())
        for root in self._roots.values():
            assert root.children, root.namespace
            assert root.generation == self._generation, root.namespace
        for node in (*self._roots.values(), *nodes):
            tokens = [child.tokens for child in node.children]
            assert all(one != two[: len(one)] and one < two for one, two in itertools.pairwise(tokens)), tokens
            assert node.device_children == sum(child.page is not None for child in node.children), node
        for node in nodes:
            self._check_node(node)
        held = list(self.pages())
        assert len(set(held)) == len(held) == self.nodes, f"{self.nodes=}, pages are {held}"
        assert all(node.is_detached and node.locks and node.page is not None for node in self._detached), self._detached
        assert self.evictable == sum(node.page is not None and not node.locks for node in nodes)
        assert self._hashes == {node.hash for node in nodes if node.hash}
        blocks = [node.block for node in nodes if node.block is not None]
        assert sorted(blocks + self._free_blocks) == list(range(self.host_blocks)), (blocks, self._free_blocks)
        self._device_leaves.check({node for node in nodes if node.is_device_leaf})
        self._host_leaves.check({node for node in nodes if node.is_host_leaf})

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, node
        assert node.root is parent.root, node
        assert not node.is_detached, node
        assert (node.page is None) != (node.block is None), node
        assert node.page is None or node.is_reachable, f"{node} is behind {parent}"
        assert node.locks >= sum(child.locks for child in node.children), node
        is_full = len(node.tokens) == self.page_size
        assert node.hash == (block_hash(parent.hash, node.tokens) if is_full else 0), node
        assert is_full or (node.tokens and node.block is None and not node.children), node

    def _walk(self) -> Iterator[Node]:
        """All nodes but the roots, those above first."""
        stack = [node for root in self._roots.values() for node in root.children]
        while stack:
            node = stack.pop()
            stack += node.children
            yield node

    def _hang(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        name = block_hash(parent.hash, tokens) if len(tokens) == self.page_size else 0
        node = Node(tokens, parent, parent.root, name)
        parent.children.insert(place_of(parent.children, tokens), node)
        if name:
            self._hashes.add(name)
        self._roots[parent.root.namespace] = parent.root
        self._give_page(node, page)
        return node

    def _replace(self, parent: Node, place: int, tokens: tuple[int, ...]) -> list[int]:
        """Takes a partial page out of the tree if it is the beginning of these tokens. Returns it if it is free."""
        if place < 0 or (node := parent.children[place]).tokens != tokens[: len(node.tokens)]:
            return []
        del parent.children[place]
        parent.device_children -= 1
        node.is_detached = True
        self._detached.add(node)
        if node.locks:
            return []
        self.evictable -= 1
        return self._let_go(node)

    def _remove(self, node: Node) -> None:
        """Takes a leaf without a page out of the tree."""
        assert node.parent is not None
        assert not node.children, node
        del node.parent.children[place_of(node.parent.children, node.tokens)]
        node.is_detached = True
        self._hashes.discard(node.hash)
        if node.parent is node.root and not node.root.children:
            del self._roots[node.root.namespace]

    def _let_go(self, node: Node) -> list[int]:
        """Gives up the page of a node that has left the tree."""
        if node.page is None:
            return []
        page, node.page = node.page, None
        self._detached.remove(node)
        self.nodes -= 1
        return [page]

    def _give_page(self, node: Node, page: int) -> None:
        assert node.parent is not None
        node.page = page
        node.parent.device_children += 1
        self.nodes += 1
        self.evictable += not node.locks

    def _take_page(self, node: Node) -> None:
        assert node.parent is not None
        node.page = None
        node.parent.device_children -= 1
        self.nodes -= 1
        self.evictable -= 1

    def _bring_back(self, node: Node, page: int) -> None:
        assert node.block is not None
        self._free_blocks.append(node.block)
        node.block = None
        self._give_page(node, page)

    def _take_block(self) -> int | None:
        """A free block of host memory, if need be that of the least recently used leaf there. None without any."""
        if not self._free_blocks:
            node = self._host_leaves.pop()
            if node is None:
                return None
            assert node.block is not None
            assert node.parent is not None
            self._free_blocks.append(node.block)
            node.block = None
            self._tell_removed([node], Medium.HOST)
            self._remove(node)
            self._offer(node.parent)
        return self._free_blocks.pop()

    def _offer(self, node: Node) -> None:
        """Queues a node if it has become a leaf that can be given up, or was used."""
        if node.is_device_leaf:
            self._device_leaves.push(node)
        elif node.is_host_leaf:
            self._host_leaves.push(node)

    def _tell_stored(self, nodes: Sequence[Node], medium: Medium) -> None:
        """Of consecutive nodes, only the last of which may be partial."""
        full = [node for node in nodes if node.hash] if self._is_observed else []
        if full:
            root, parent = full[0].root, full[0].parent
            self._events.append(
                BlockStored(
                    hashes=tuple(node.hash for node in full),
                    parent=None if parent is root or parent is None else parent.hash,
                    token_ids=tuple(token for node in full for token in node.tokens),
                    medium=medium,
                    adapter=root.namespace.adapter,
                    cache_salt=root.namespace.salt,
                )
            )

    def _tell_removed(self, nodes: Sequence[Node], medium: Medium) -> None:
        if self._is_observed and (hashes := tuple(node.hash for node in nodes if node.hash)):
            self._events.append(BlockRemoved(hashes, medium))


def _left_medium(event: KvEvent) -> Medium | None:
    return event.medium if isinstance(event, BlockRemoved) else None
