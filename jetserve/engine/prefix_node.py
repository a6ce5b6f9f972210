"""Nodes of the prefix tree, how they are found among their like, and which go first. Host side; imports no jax."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Callable, Iterator

from jetserve.engine.block_hash import Namespace, root_hash

_tokens_of = operator.attrgetter("tokens")


class Node:
    """One page of a prefix. The tree alone changes it.

    Attributes:
      tokens: of this page; fewer than its size in a leaf.
      page: on the device; or else `block`, on the host. A root has neither, nor has a node the tree let go of.
      children: ascending by tokens; `device_children` of them have a page.
      locks: held by sequences, at this node or behind it.
      hash: names this page's tokens and all before them; 0 while the page is not full.
      last_used: grows with every use.
      entry: of its entries in the queues of leaves, the one that counts.
      is_detached: no longer found; the page stays until the last lock is gone.
    """

    __slots__ = (
        "block",
        "children",
        "device_children",
        "entry",
        "hash",
        "is_detached",
        "last_used",
        "locks",
        "page",
        "parent",
        "root",
        "tokens",
    )

    def __init__(self, tokens: tuple[int, ...], parent: Node | None, root: Root, name: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.root = root
        self.hash = name
        self.page: int | None = None
        self.block: int | None = None
        self.children: list[Node] = []
        self.device_children = 0
        self.locks = 0
        self.last_used = 0
        self.entry = -1
        self.is_detached = False

    def __repr__(self) -> str:
        return f"Node({self.tokens} page={self.page} block={self.block} locks={self.locks})"

    @property
    def is_reachable(self) -> bool:
        """All before it is on the device."""
        return self.parent is self.root or (self.parent is not None and self.parent.page is not None)

    @property
    def is_device_leaf(self) -> bool:
        """Its page can be evicted."""
        return self.page is not None and not (self.device_children or self.locks)

    @property
    def is_host_leaf(self) -> bool:
        """Its block can be given to another."""
        return self.block is not None and not (self.children or self.locks)


class Root(Node):
    """Where the prefixes of a namespace begin. Locks pass it by; it may be held without being in the tree."""

    __slots__ = ("generation", "namespace")

    def __init__(self, namespace: Namespace, generation: int) -> None:
        super().__init__((), None, self, root_hash(namespace))
        self.namespace = namespace
        self.generation = generation  # how often the tree had been cleared


class Leaves:
    """Nodes that may be given up, the least recently used one first. Entries that no longer hold are dropped late."""

    def __init__(self, is_leaf: Callable[[Node], bool], numbers: Iterator[int]) -> None:
        """Args:
        numbers: for entries; shared, so that a node's latest entry is the same in all queues.
        """
        self._is_leaf = is_leaf
        self._numbers = numbers
        self._heap: list[tuple[int, int, Node]] = []
        self._most = 64

    def push(self, node: Node) -> None:
        if len(self._heap) >= self._most:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)
            self._most = 64 + 2 * len(self._heap)
        node.entry = next(self._numbers)
        heapq.heappush(self._heap, (node.last_used, node.entry, node))

    def pop(self) -> Node | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._holds(entry):
                return entry[2]
        return None

    def clear(self) -> None:
        self._heap.clear()

    def check(self, leaves: set[Node]) -> None:
        """Raises: AssertionError unless these are in the queue, each once, as last used."""
        held = [(used, node) for used, number, node in self._heap if self._holds((used, number, node))]
        assert len(held) == len(leaves), f"queue {held}, leaves {leaves}"
        assert {node for _, node in held} == leaves, f"queue {held}, leaves {leaves}"
        assert all(used == node.last_used for used, node in held), held

    def _holds(self, entry: tuple[int, int, Node]) -> bool:
        _, number, node = entry
        return node.entry == number and self._is_leaf(node)


def place_of(children: list[Node], tokens: tuple[int, ...]) -> int:
    """Of the first child that is not before these tokens."""
    return bisect.bisect_left(children, tokens, key=_tokens_of)


def closest(children: list[Node], tokens: tuple[int, ...]) -> tuple[Node | None, int]:
    """The child that begins with the most of these tokens, and how many; among its like one on the device."""
    place = place_of(children, tokens)
    near = [
        (_shared(child.tokens, tokens), child.page is not None, child)
        for child in children[max(0, place - 1) : place + 1]
    ]
    shared, _, child = max(near, key=operator.itemgetter(0, 1), default=(0, False, None))
    return (child, shared) if shared else (None, 0)


def _shared(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
