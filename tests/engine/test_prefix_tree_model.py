"""The prefix tree at random against a plain list of pages, searched from end to end."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jetserve.engine.block_hash import Namespace, block_hashes
from jetserve.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from jetserve.engine.plan import HostMove
from jetserve.engine.prefix_node import Node
from jetserve.engine.prefix_tree import PrefixTree

# Most have much in common, so that pages meet.
NAMESPACES = (*[Namespace()] * 6, Namespace(adapter="X"), Namespace(salt="X"))
TOKENS = st.builds(
    lambda zeros, rest: (0,) * zeros + tuple(rest), st.integers(0, 6), st.lists(st.integers(0, 1), max_size=3)
)

CHOICES = st.integers(0, 99)


class Page:
    """One cached page, named by all tokens up to its end."""

    def __init__(self, namespace: Namespace, path: tuple[int, ...], page: int) -> None:
        self.namespace = namespace
        self.path = path
        self.page: int | None = page
        self.block: int | None = None
        self.locks = 0
        self.used = 0


class Lock(NamedTuple):
    """A node of the tree that is locked, the tokens that lead to it, and what the model has of them."""

    node: Node
    namespace: Namespace
    path: tuple[int, ...]
    pages: list[Page]
    clears: int


class Model:
    """What the tree should do, by lists and brute force."""

    def __init__(self, size: int, host_blocks: int) -> None:
        self.size = size
        self.pages: list[Page] = []  # found by `match`
        self.gone: list[Page] = []  # locked, no longer found
        self.free_blocks = set(range(host_blocks))
        self.clock = 0
        self.clears = 0

    def get(self, namespace: Namespace, path: tuple[int, ...]) -> Page | None:
        return next((page for page in self.pages if (page.namespace, page.path) == (namespace, path)), None)

    def along(self, namespace: Namespace, path: tuple[int, ...]) -> list[Page]:
        """The cached full pages that a path consists of, from the first one."""
        ends = range(self.size, len(path) + 1, self.size)
        return [page for end in ends if (page := self.get(namespace, path[:end])) is not None]

    def behind(self, page: Page) -> list[Page]:
        """All pages further down."""
        return [
            other
            for other in self.pages
            if other.namespace == page.namespace
            and len(other.path) > len(page.path)
            and other.path[: len(page.path)] == page.path
        ]

    def insert(
        self, namespace: Namespace, start: int, path: tuple[int, ...], pages: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns spare and freed pages."""
        self.clock += 1
        spare, freed = [], []
        for at, page in zip(range(start, len(path), self.size), pages, strict=True):
            piece = path[: at + self.size]
            equals = [
                other
                for other in self.pages
                if other.namespace == namespace
                and other.path[: len(piece)] == piece
                and len(other.path) <= at + self.size
            ]
            if equals:
                [equal] = sorted(equals, key=lambda other: other.path)[:1]
                equal.used = self.clock
                if equal.page is None and equal.path == piece:
                    assert equal.block is not None
                    self.free_blocks.add(equal.block)
                    equal.page, equal.block = page, None
                else:
                    spare.append(page)
                continue
            for other in list(self.pages):
                if other.namespace == namespace and len(other.path) > at and other.path == piece[: len(other.path)]:
                    self.pages.remove(other)
                    if other.locks:
                        self.gone.append(other)
                    else:
                        assert other.page is not None
                        freed.append(other.page)
            new = Page(namespace, piece, page)
            new.used = self.clock
            self.pages.append(new)
        return spare, freed

    def evict(self, count: int) -> tuple[list[int], list[HostMove]]:
        pages, saves = [], []
        for _ in range(count):
            leaves = [
                page
                for page in self.pages
                if page.page is not None and not page.locks and all(other.page is None for other in self.behind(page))
            ]
            leaf = min(leaves, key=lambda page: page.used)
            assert leaf.page is not None
            if len(leaf.path) % self.size == 0:
                if not self.free_blocks:
                    hosted = [
                        page
                        for page in self.pages
                        if page.block is not None and not page.locks and not self.behind(page)
                    ]
                    if hosted:
                        last = min(hosted, key=lambda page: page.used)
                        assert last.block is not None
                        self.free_blocks.add(last.block)
                        self.pages.remove(last)
                        saves = [save for save in saves if save.block != last.block]
                if self.free_blocks:
                    leaf.block = self.free_blocks.pop()  # the tree may choose another
                    saves.append(HostMove(leaf.page, leaf.block))
            pages.append(leaf.page)
            leaf.page = None
            if leaf.block is None:
                self.pages.remove(leaf)
        return pages, saves

    def clear(self) -> list[int]:
        freed = [page.page for page in self.pages if page.page is not None and not page.locks]
        self.gone += [page for page in self.pages if page.page is not None and page.locks]
        self.free_blocks |= {page.block for page in self.pages if page.block is not None}
        self.pages = []
        self.clears += 1
        return freed

    def unlock(self, pages: list[Page]) -> list[int]:
        self.clock += 1
        freed = []
        for page in pages:
            page.locks -= 1
            page.used = self.clock
            if not page.locks and page in self.gone:
                self.gone.remove(page)
                assert page.page is not None
                freed.append(page.page)
        return freed


class TreeMachine(RuleBasedStateMachine):
    """Sequences come, find, write, lock and leave. `memory` and `host` are what pages and blocks hold."""

    @initialize(size=st.integers(1, 4), host_blocks=st.sampled_from((4, 8, 2, 1, 0)))
    def start(self, size: int, host_blocks: int) -> None:
        self.size = size
        self.tree = PrefixTree(size, host_blocks=host_blocks, is_observed=True)
        self.model = Model(size, host_blocks)
        self.locks: list[Lock] = []
        self.free = list(range(400, 0, -1))
        self.memory: dict[int, tuple[Namespace, tuple[int, ...]]] = {}
        self.host: dict[int, tuple[Namespace, tuple[int, ...]]] = {}
        self.events: dict[Medium, set[int]] = {medium: set() for medium in Medium}

    def release(self, pages: list[int]) -> None:
        for page in pages:
            del self.memory[page]
        self.free += pages

    def write(self, namespace: Namespace, start: int, path: tuple[int, ...]) -> list[int]:
        pages = []
        for at in range(start, len(path), self.size):
            page = self.free.pop()
            self.memory[page] = (namespace, path[: at + self.size])
            pages.append(page)
        return pages

    def insert(self, node: Node, namespace: Namespace, start: int, path: tuple[int, ...], *, is_gone: bool) -> Node:
        pages = self.write(namespace, start, path)
        spare, freed = (pages, []) if is_gone else self.model.insert(namespace, start, path, pages)
        inserted = self.tree.insert(node, path[start:], pages)
        assert (inserted.spare, inserted.freed) == (spare, freed)
        self.release(spare + freed)
        return inserted.node

    def lock(self, node: Node, namespace: Namespace, path: tuple[int, ...]) -> None:
        pages = self.model.along(namespace, path)
        for page in pages:
            page.locks += 1
        self.locks.append(Lock(node, namespace, path, pages, self.model.clears))

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS, limit=st.integers(0, 9))
    def find(self, namespace: Namespace, tokens: tuple[int, ...], limit: int) -> None:
        match = self.tree.match(namespace, tokens, limit)
        asked = tokens[:limit]
        shared = [
            next((at for at in range(min(len(asked), len(page.path))) if asked[at] != page.path[at]), len(page.path))
            for page in self.model.pages
            if page.namespace == namespace
        ]
        assert match.tokens + match.partial_tokens == min(len(asked), max(shared, default=0))
        assert match.tokens == self.size * len(self.model.along(namespace, asked))
        for at, node in enumerate(match.nodes):
            holds = self.memory[node.page] if node.page is not None else self.host[node.block or 0]
            assert holds == (namespace, tokens[: (at + 1) * self.size])
        if match.partial is not None:
            node = match.partial
            _, path = self.memory[node.page] if node.page is not None else self.host[node.block or 0]
            assert path[: match.tokens + match.partial_tokens] == asked[: match.tokens + match.partial_tokens]
        assert self.tree.matched_tokens(block_hashes(namespace, asked, self.size)) == match.tokens

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def write_all(self, namespace: Namespace, tokens: tuple[int, ...]) -> None:
        """A sequence adds its tokens without having looked."""
        self.insert(self.tree.match(namespace, tokens, 0).node, namespace, 0, tokens, is_gone=False)

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS, is_kept=st.booleans())
    def run(self, namespace: Namespace, tokens: tuple[int, ...], is_kept: bool) -> None:
        """A sequence uses what is cached, from the host too, and adds the rest."""
        match = self.tree.match(namespace, tokens, len(tokens))
        self.tree.lock(match.node)
        self.lock(match.node, namespace, tokens[: match.tokens])
        at_host = [node for node in match.nodes if node.page is None]
        pages = [self.free.pop() for _ in at_host]
        if at_host:
            self.model.clock += 1
        for node, load in zip(at_host, self.tree.restore(at_host, pages), strict=True):
            page = next(page for page in self.model.pages if page.block == load.block)
            assert (node.page, page.path) == (load.page, self.host[load.block][1])
            self.memory[load.page] = self.host.pop(load.block)
            self.model.free_blocks.add(load.block)
            page.page, page.block, page.used = load.page, None, self.model.clock
        if not is_kept:
            self.insert(match.node, namespace, match.tokens, tokens, is_gone=False)
            self.unlock(len(self.locks) - 1)
            return
        node = self.insert(match.node, namespace, match.tokens, tokens, is_gone=False)
        self.move_down(len(self.locks) - 1, node, tokens[: len(tokens) // self.size * self.size])

    @precondition(lambda self: self.locks)
    @rule(choice=CHOICES, tokens=TOKENS, is_fresh=st.booleans())
    def go_on(self, choice: int, tokens: tuple[int, ...], is_fresh: bool) -> None:
        """A sequence writes more, perhaps after the tree was cleared."""
        at = choice % len(self.locks)
        lock = self.locks[at]
        is_gone = lock.clears != self.model.clears
        if not lock.path and not is_gone and is_fresh:
            lock = lock._replace(node=self.tree.match(lock.namespace, (), 0).node)
        if any(page.page is None for page in lock.pages) or (lock.pages and len(lock.path) % self.size):
            return  # on the host, or in part of a page
        path = lock.path + tokens
        node = self.insert(lock.node, lock.namespace, len(lock.path), path, is_gone=is_gone)
        if is_gone:
            assert node is lock.node
        else:
            self.move_down(at, node, path[: len(path) // self.size * self.size])

    def move_down(self, at: int, node: Node, path: tuple[int, ...]) -> None:
        lock = self.locks[at]
        self.tree.lock(node, above=lock.node)
        pages = self.model.along(lock.namespace, path)
        for page in pages[len(lock.pages) :]:
            page.locks += 1
        self.locks[at] = lock._replace(node=node, path=path, pages=pages)

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def lock_what_matches(self, namespace: Namespace, tokens: tuple[int, ...]) -> None:
        """Also on the host, and also part of a page."""
        match = self.tree.match(namespace, tokens, len(tokens))
        self.tree.lock(match.node)
        self.lock(match.node, namespace, tokens[: match.tokens])
        if match.partial is not None and match.partial.page is not None:
            self.tree.lock(match.partial)
            _, path = self.memory[match.partial.page]
            pages = self.model.along(namespace, path[: match.tokens])
            partial = self.model.get(namespace, path)
            assert partial is not None
            for page in (*pages, partial):
                page.locks += 1
            self.locks.append(Lock(match.partial, namespace, path, [*pages, partial], self.model.clears))

    @precondition(lambda self: self.locks)
    @rule(choice=CHOICES)
    def unlock_one(self, choice: int) -> None:
        self.unlock(choice % len(self.locks))

    def unlock(self, at: int) -> None:
        lock = self.locks.pop(at)
        freed = self.model.unlock(lock.pages)
        assert sorted(self.tree.unlock(lock.node)) == sorted(freed)
        self.release(freed)

    @precondition(lambda self: self.tree.evictable)
    @rule(choice=CHOICES)
    def evict(self, choice: int) -> None:
        count = 1 + choice % self.tree.evictable
        pages, saves = self.model.evict(count)
        evicted = self.tree.evict(count)
        assert evicted.pages == pages
        assert sorted(save.page for save in evicted.saves) == sorted(save.page for save in saves)
        assert len({save.block for save in evicted.saves}) == len(evicted.saves)
        for save in evicted.saves:
            self.host[save.block] = self.memory[save.page]
        self.release(pages)
        taken = set()
        for page in self.model.pages:  # which block is the tree's choice
            if page.block is not None:
                [page.block] = [
                    block for block in self.tree_blocks() if self.host[block] == (page.namespace, page.path)
                ]
                taken.add(page.block)
        self.model.free_blocks = set(range(self.tree.host_blocks)) - taken

    def tree_blocks(self) -> list[int]:
        return [node.block for node in self.tree._walk() if node.block is not None]

    @precondition(lambda self: len(self.model.pages) > 6)  # little can happen in a tree that is empty time and again
    @rule()
    def clear(self) -> None:
        freed = self.model.clear()
        assert sorted(self.tree.clear()) == sorted(freed)
        self.release(freed)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        held = [page.page for page in (*self.model.pages, *self.model.gone) if page.page is not None]
        assert sorted(self.tree.pages()) == sorted(held) == sorted(self.memory)
        assert self.tree.nodes == len(held)
        assert self.tree.evictable == sum(page.page is not None and not page.locks for page in self.model.pages)
        assert self.tree.hosted == sum(page.block is not None for page in self.model.pages)
        for page in (*self.model.pages, *self.model.gone):
            if page.page is not None:
                assert self.memory[page.page] == (page.namespace, page.path)

    @invariant()
    def events_tell_which_blocks_are_where(self) -> None:
        if not hasattr(self, "tree"):
            return
        for event in self.tree.take_events():
            self.replay(event)
        for medium, is_there in ((Medium.DEVICE, "page"), (Medium.HOST, "block")):
            expected = {
                block_hashes(page.namespace, page.path, self.size)[-1]
                for page in self.model.pages
                if getattr(page, is_there) is not None and len(page.path) % self.size == 0
            }
            assert self.events[medium] == expected

    def replay(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case BlockStored():
                known = set().union(*self.events.values())
                assert event.parent is None or event.parent in known
                assert not self.events[event.medium] & set(event.hashes)
                assert len(event.token_ids) == self.size * len(event.hashes)
                self.events[event.medium] |= set(event.hashes)
                if event.parent is None:
                    namespace = Namespace(event.adapter, event.cache_salt)
                    assert tuple(block_hashes(namespace, event.token_ids, self.size)) == event.hashes
            case BlockRemoved():
                assert set(event.hashes) <= self.events[event.medium]
                assert len(set(event.hashes)) == len(event.hashes)
                self.events[event.medium] -= set(event.hashes)
            case AllBlocksCleared():
                self.events = {medium: set() for medium in Medium}


TestPrefixTree = TreeMachine.TestCase
TestPrefixTree.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("size", "host_blocks"), [(1, 0), (1, 3), (2, 0), (2, 2), (2, 9), (3, 4), (4, 1), (4, 9)])
def test_tree_and_list_agree_for_long(size: int, host_blocks: int) -> None:
    """Goes where short runs seldom get: full hosts, pages that come back, sequences that outlive a clear."""
    choices = random.Random(size * 100 + host_blocks)
    machine = TreeMachine()
    machine.start(size, host_blocks)
    for _ in range(600):
        namespace = choices.choice(NAMESPACES)
        tokens = (0,) * choices.randrange(7) + tuple(choices.choices((0, 1), k=choices.randrange(4)))
        choice = choices.randrange(100)
        steps: list[Callable[[], None]] = [
            partial(machine.find, namespace, tokens, choice % 10),
            partial(machine.write_all, namespace, tokens),
            partial(machine.run, namespace, tokens, choice < 20),
        ]
        if len(machine.locks) < 5:
            steps.append(partial(machine.lock_what_matches, namespace, tokens))
        if machine.locks:
            steps += [partial(machine.go_on, choice, tokens, choice < 50), partial(machine.unlock_one, choice)]
        if machine.tree.evictable:
            steps += [partial(machine.evict, choice)] * 2
        if choice == 0:
            steps = [machine.clear]
        choices.choice(steps)()
        machine.books_agree()
        machine.events_tell_which_blocks_are_where()
