"""The prefix tree: every verb by hand; all of them at random against a list of pages in test_prefix_tree_model.py."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from jetserve.engine.block_hash import Namespace, block_hashes
from jetserve.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from jetserve.engine.plan import HostMove
from jetserve.engine.prefix_node import Node
from jetserve.engine.prefix_tree import Evicted, Inserted, PrefixTree

NAMESPACE = Namespace()


def hang(tree: PrefixTree, token_ids: Sequence[int], pages: Sequence[int], namespace: Namespace = NAMESPACE) -> Node:
    """Inserts tokens from the first one on. Returns the deepest full page."""
    return tree.insert(tree.match(namespace, (), 0).node, token_ids, pages).node


def found(tree: PrefixTree, token_ids: Sequence[int], limit: int = 1000, namespace: Namespace = NAMESPACE) -> list[int]:
    """Tokens that match in each page, from the first one on."""
    match = tree.match(namespace, token_ids, limit)
    assert match.tokens == tree.page_size * len(match.nodes)
    assert match.node is (match.nodes[-1] if match.nodes else match.node.root)
    assert (match.partial is None) == (match.partial_tokens == 0)
    return [tree.page_size] * len(match.nodes) + ([match.partial_tokens] if match.partial else [])


def names(token_ids: Sequence[int], page_size: int = 2, namespace: Namespace = NAMESPACE) -> tuple[int, ...]:
    return tuple(block_hashes(namespace, token_ids, page_size))


# match


def test_empty_tree_has_nothing() -> None:
    tree = PrefixTree(4)

    match = tree.match(NAMESPACE, (1, 2, 3), 3)

    assert (match.nodes, match.tokens, match.partial, match.partial_tokens) == ([], 0, None, 0)
    assert (tree.nodes, tree.evictable, tree.hosted, list(tree.pages())) == (0, 0, 0, [])
    tree.check()


def test_match_goes_to_the_token() -> None:
    tree = PrefixTree(4)
    hang(tree, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (11, 12, 13))

    assert found(tree, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)) == [4, 4, 2]
    assert found(tree, (1, 2, 3, 4, 5, 6, 7, 8, 9)) == [4, 4, 1]
    assert found(tree, (1, 2, 3, 4, 5, 6, 7, 8)) == [4, 4]
    assert found(tree, (1, 2, 3, 4, 5, 6, 7, 0)) == [4, 3]
    assert found(tree, (1, 2, 3, 4, 9)) == [4]
    assert found(tree, (1, 2, 9, 4)) == [2]
    assert found(tree, (2,)) == []
    assert found(tree, ()) == []


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, []), (1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])]
)
def test_match_stops_at_the_limit(limit: int, expected: list[int]) -> None:
    tree = PrefixTree(4)
    token_ids = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    hang(tree, token_ids, (11, 12, 13))

    assert found(tree, token_ids, limit) == expected


def test_partial_match_is_the_best_of_many_children() -> None:
    tree = PrefixTree(4)
    pages = itertools.count(1)
    children = list(itertools.product((0, 2, 4), repeat=4))
    for child in reversed(children):
        hang(tree, child, [next(pages)])
    tree.check()

    for query in itertools.product(range(5), repeat=4):
        best = max(next((at for at in range(4) if child[at] != query[at]), 4) for child in children)
        assert sum(found(tree, query)) == best, query


def test_of_equally_long_partial_matches_the_one_on_the_device_is_taken() -> None:
    for stays, goes in (((1, 5), (1, 9)), ((1, 9), (1, 5))):
        tree = PrefixTree(2, host_blocks=1)
        tree.lock(hang(tree, stays, [1]))
        hang(tree, goes, [2])
        tree.evict(1)

        match = tree.match(NAMESPACE, (1, 7), 2)

        assert match.partial is not None
        assert (match.partial.page, match.partial_tokens) == (1, 1)


def test_partial_match_may_be_on_the_host() -> None:
    tree = PrefixTree(2, host_blocks=1)
    hang(tree, (1, 5), [1])
    tree.evict(1)

    match = tree.match(NAMESPACE, (1, 7), 2)

    assert match.partial is not None
    assert (match.partial.page, match.partial.block, match.partial_tokens) == (None, 0, 1)


def test_namespaces_share_nothing() -> None:
    """R57, R58: each adapter and each salt has prefixes of its own, also where their texts are equal."""
    tree = PrefixTree(1)
    namespaces = [Namespace(), Namespace(adapter="X"), Namespace(salt="X"), Namespace("X", "X"), Namespace(salt="")]
    for page, namespace in enumerate(namespaces):
        assert found(tree, (1,), namespace=namespace) == []
        hang(tree, (1,), [page], namespace)

    assert [tree.match(namespace, (1,), 1).node.page for namespace in namespaces] == [0, 1, 2, 3, 4]
    tree.check()


def test_match_changes_nothing() -> None:
    tree = PrefixTree(1)
    hang(tree, (1, 2), (1, 2))
    hang(tree, (3,), [3])

    for salt in "abc":
        found(tree, (1, 2), namespace=Namespace(salt=salt))
        found(tree, (1, 2))

    assert tree.evict(3).pages == [2, 1, 3]
    tree.check()


def test_hint_counts_full_pages_wherever_they_are() -> None:
    tree = PrefixTree(2, host_blocks=1)
    hang(tree, range(1, 8), (1, 2, 3, 4))
    tree.evict(2)

    assert [found(tree, range(1, 10)), tree.hosted] == [[2, 2, 2], 1]
    assert tree.matched_tokens(names(range(1, 10))) == 6
    assert tree.matched_tokens(names((1, 2, 3, 5))) == 2
    assert tree.matched_tokens(names((2, 1))) == 0
    assert tree.matched_tokens([]) == 0
    assert tree.matched_tokens(names(range(1, 10)), 2) == 4


# insert


def test_insert_takes_full_pages_and_a_partial_one() -> None:
    tree = PrefixTree(2)

    inserted = tree.insert(tree.match(NAMESPACE, (), 0).node, (1, 2, 3, 4, 5), (7, 8, 9))

    assert (inserted.node.tokens, inserted.node.page, inserted.spare, inserted.freed) == ((3, 4), 8, [], [])
    assert (tree.nodes, tree.evictable, sorted(tree.pages())) == (3, 3, [7, 8, 9])
    tree.check()


def test_insert_goes_on_behind_a_node() -> None:
    tree = PrefixTree(2)
    first = hang(tree, (1, 2), [1])

    second = tree.insert(first, (3, 4), [2]).node

    assert second.parent is first
    assert found(tree, (1, 2, 3, 4)) == [2, 2]


def test_insert_of_nothing_changes_nothing() -> None:
    tree = PrefixTree(2)
    node = hang(tree, (1, 2), [1])

    assert tree.insert(node, (), ()) == Inserted(node, [], [])
    tree.check()


def test_of_equal_pages_the_older_one_stays() -> None:
    tree = PrefixTree(2)
    hang(tree, (1, 2, 3, 4, 5), (1, 2, 3))

    inserted = tree.insert(tree.match(NAMESPACE, (), 0).node, (1, 2, 3, 4, 5), (4, 5, 6))

    assert (inserted.node.page, inserted.spare, inserted.freed) == (2, [4, 5, 6], [])
    assert sorted(tree.pages()) == [1, 2, 3]
    tree.check()


def test_insert_branches_where_tokens_differ() -> None:
    tree = PrefixTree(2)
    hang(tree, (1, 2, 3, 4), (1, 2))

    inserted = tree.insert(tree.match(NAMESPACE, (), 0).node, (1, 2, 3, 5, 6), (3, 4, 5))

    assert (inserted.node.page, inserted.spare) == (4, [3])
    assert found(tree, (1, 2, 3, 4)) == [2, 2]
    assert found(tree, (1, 2, 3, 5, 6)) == [2, 2, 1]
    tree.check()


@pytest.mark.parametrize("longer", [(1, 2), (1, 2, 3), (1, 2, 3, 4)])
def test_partial_page_gives_way_to_one_it_begins(longer: tuple[int, ...]) -> None:
    tree = PrefixTree(4)
    hang(tree, (1,), [1])
    hang(tree, (0, 9), [2])
    hang(tree, (2,), [3])

    inserted = tree.insert(tree.match(NAMESPACE, (), 0).node, longer, [4])

    assert (inserted.spare, inserted.freed, sorted(tree.pages())) == ([], [1], [2, 3, 4])
    assert found(tree, (1, 2, 3, 4)) == [len(longer)]
    tree.check()


@pytest.mark.parametrize("longer", [(1, 2), (1, 2, 3), (1, 2, 3, 4)])
def test_partial_page_that_begins_another_is_spare(longer: tuple[int, ...]) -> None:
    tree = PrefixTree(4)
    hang(tree, longer, [1])
    hang(tree, (1, 3), [2])

    inserted = tree.insert(tree.match(NAMESPACE, (), 0).node, (1, 2), [3])

    assert (inserted.node.parent, inserted.spare, inserted.freed) == (None, [3], [])
    tree.check()


def test_locked_partial_page_that_gives_way_is_free_at_its_unlock() -> None:
    tree = PrefixTree(4)
    hang(tree, (1, 2), [1])
    partial = tree.match(NAMESPACE, (1, 2), 2).partial
    assert partial is not None
    tree.lock(partial)

    inserted = tree.insert(partial.root, (1, 2, 3), [2])

    assert (inserted.freed, tree.nodes, tree.evictable, sorted(tree.pages())) == ([], 2, 1, [1, 2])
    tree.check()
    assert tree.unlock(partial) == [1]
    assert (tree.nodes, tree.evictable) == (1, 1)
    tree.check()


def test_root_kept_from_before_its_namespace_was_known_leads_into_the_tree() -> None:
    tree = PrefixTree(1)
    early, late = (tree.match(NAMESPACE, (1,), 1).node for _ in range(2))
    hang(tree, (1,), [1])

    tree.lock(early)
    tree.lock(node := tree.insert(early, (1, 2), (2, 3)).node, above=early)
    spare = tree.insert(late, (1, 2), (4, 5)).spare

    assert ([node.page, *spare], found(tree, (1, 2)), tree.evictable) == ([3, 4, 5], [1, 1], 0)
    assert tree.unlock(node) == []
    tree.check()


def test_nothing_is_taken_behind_a_node_that_left_the_tree() -> None:
    tree = PrefixTree(1)
    root = tree.match(NAMESPACE, (1,), 1).node
    node = hang(tree, (1,), [1])
    evicted = hang(tree, (2,), [2])
    tree.lock(node)
    tree.evict(1)
    assert tree.insert(evicted, (3,), [3]) == Inserted(evicted, [3], [])

    tree.clear()

    for left in (node, root):
        assert tree.insert(left, (5, 6), (5, 6)) == Inserted(left, [5, 6], [])
    assert tree.unlock(node) == [1]
    tree.check()


def test_pages_must_be_as_many_as_their_tokens_fill() -> None:
    tree = PrefixTree(2)

    with pytest.raises(AssertionError, match="1 pages for 3 tokens, 2 in each"):
        hang(tree, (1, 2, 3), [1])


def test_nothing_hangs_behind_a_partial_page() -> None:
    tree = PrefixTree(2)
    hang(tree, (1,), [1])
    partial = tree.match(NAMESPACE, (1,), 1).partial
    assert partial is not None

    with pytest.raises(AssertionError, match="is not full"):
        tree.insert(partial, (2,), [2])


# lock, unlock


def test_lock_holds_the_whole_path() -> None:
    tree = PrefixTree(1)
    node = hang(tree, (1, 2), (1, 2))
    hang(tree, (1, 3), (9, 3))

    tree.lock(node)
    assert (tree.nodes, tree.evictable) == (3, 1)
    assert tree.evict(1).pages == [3]
    with pytest.raises(AssertionError, match="1 pages to evict, 0 are not locked"):
        tree.evict(1)
    assert tree.unlock(node) == []
    assert tree.evict(2).pages == [2, 1]
    tree.check()


def test_page_is_evictable_when_its_last_lock_is_gone() -> None:
    tree = PrefixTree(1)
    node = hang(tree, (1,), [1])
    tree.lock(node)
    tree.lock(node)

    tree.unlock(node)
    assert tree.evictable == 0
    tree.unlock(node)
    assert tree.evictable == 1
    with pytest.raises(AssertionError, match="unlocked more often"):
        tree.unlock(node)


def test_lock_moves_down() -> None:
    tree = PrefixTree(1)
    first = hang(tree, (1,), [1])
    tree.lock(first)
    last = tree.insert(first, (2, 3), (2, 3)).node

    tree.lock(last, above=first)

    assert (first.locks, last.locks, tree.evictable) == (1, 1, 0)
    tree.lock(last, above=last)
    tree.unlock(last)
    assert (first.locks, last.locks, tree.evictable) == (0, 0, 3)
    tree.check()


def test_lock_moves_down_only() -> None:
    tree = PrefixTree(1)
    one, two = hang(tree, (1,), [1]), hang(tree, (2,), [2])
    tree.lock(one)

    with pytest.raises(AssertionError, match="is not above"):
        tree.lock(two, above=one)


def test_locking_a_root_locks_nothing() -> None:
    tree = PrefixTree(1)
    root = hang(tree, (1,), [1]).root

    tree.lock(root)

    assert tree.evictable == 1
    assert tree.unlock(root) == []
    tree.check()


# evict


def test_least_recently_used_leaves_go_first() -> None:
    tree = PrefixTree(1)
    first = hang(tree, (1, 2), (1, 2))
    hang(tree, (3,), [3])
    hang(tree, (1, 4), (9, 4))
    tree.lock(first)
    tree.unlock(first)  # used last of all

    assert tree.evict(1).pages == [3]
    assert tree.evict(3).pages == [4, 2, 1]
    assert (tree.nodes, tree.evictable, found(tree, (1, 2))) == (0, 0, [])
    tree.check()


def test_inserting_what_is_there_already_uses_it() -> None:
    tree = PrefixTree(2)
    hang(tree, (1, 2), [1])
    hang(tree, (3, 4), [2])
    hang(tree, (5, 6), [3])
    hang(tree, (1, 2), [9])
    hang(tree, (3,), [9])  # part of a page

    assert tree.evict(3).pages == [3, 1, 2]


def test_partial_pages_are_dropped_before_those_above() -> None:
    tree = PrefixTree(2, host_blocks=4)
    hang(tree, (1, 2, 3), (1, 2))

    assert tree.evict(1) == Evicted([2], [])
    assert (found(tree, (1, 2, 3)), tree.hosted) == ([2], 0)
    tree.check()


def test_queue_of_leaves_stays_small() -> None:
    tree = PrefixTree(1)
    node = hang(tree, (1, 2), (1, 2))
    for _ in range(1000):
        tree.lock(node)
        tree.unlock(node)

    assert len(tree._device_leaves._heap) <= 66
    assert tree.evict(2).pages == [2, 1]


def test_order_of_leaves_outlives_the_tidying_of_their_queue() -> None:
    tree = PrefixTree(1)
    nodes = [hang(tree, (page,), [page]) for page in range(500)]
    assert tree.evict(100).pages == list(range(100))
    used = random.Random(5).sample(range(100, 500), 200)
    for page in used * 5:
        tree.lock(nodes[page])
        tree.unlock(nodes[page])

    assert tree.evict(400).pages == sorted(set(range(100, 500)) - set(used)) + used


# host


def test_evicted_pages_move_to_the_host_and_come_back() -> None:
    tree = PrefixTree(2, host_blocks=2)
    hang(tree, (1, 2, 3, 4, 5), (1, 2, 3))

    assert tree.evict(3) == Evicted([3, 2, 1], [HostMove(2, 0), HostMove(1, 1)])
    assert (tree.nodes, tree.hosted, list(tree.pages())) == (0, 2, [])
    tree.check()

    match = tree.match(NAMESPACE, (1, 2, 3, 4, 5), 5)
    assert [(node.page, node.block) for node in match.nodes] == [(None, 1), (None, 0)]
    tree.lock(match.node)
    assert tree.restore(match.nodes, (7, 8)) == [HostMove(7, 1), HostMove(8, 0)]
    assert (tree.nodes, tree.evictable, tree.hosted, sorted(tree.pages())) == (2, 0, 0, [7, 8])
    tree.check()
    tree.unlock(match.node)
    assert tree.evictable == 2
    tree.check()


def test_least_recently_used_leaf_on_the_host_makes_room() -> None:
    tree = PrefixTree(1, host_blocks=2)
    for page in (1, 2, 3):
        hang(tree, (page,), [page])

    assert tree.evict(2).saves == [HostMove(1, 0), HostMove(2, 1)]
    assert tree.evict(1).saves == [HostMove(3, 0)]
    assert [found(tree, (token,)) for token in (1, 2, 3)] == [[], [1], [1]]
    tree.check()


def test_no_two_pages_are_saved_to_one_block_at_once() -> None:
    tree = PrefixTree(1, host_blocks=1)
    hang(tree, (1, 2, 3), (1, 2, 3))

    assert tree.evict(3) == Evicted([3, 2, 1], [HostMove(1, 0)])
    assert found(tree, (1, 2, 3)) == [1]
    tree.check()


def test_locked_page_on_the_host_makes_no_room() -> None:
    tree = PrefixTree(1, host_blocks=1)
    node = hang(tree, (1,), [1])
    tree.evict(1)
    tree.lock(node)
    hang(tree, (2,), [2])

    assert tree.evict(1) == Evicted([2], [])
    assert (found(tree, (1,)), found(tree, (2,))) == ([1], [])
    tree.check()
    tree.unlock(node)
    hang(tree, (2,), [2])
    assert tree.evict(1).saves == [HostMove(2, 0)]
    tree.check()


def test_inserted_page_takes_the_place_of_an_equal_one_on_the_host() -> None:
    tree = PrefixTree(2, host_blocks=4)
    hang(tree, (1, 2, 3, 4, 5, 6), (1, 2, 3))
    tree.evict(2)

    inserted = tree.insert(tree.match(NAMESPACE, (), 0).node, (1, 2, 3, 4), (4, 5))

    assert (inserted.node.page, inserted.spare, inserted.freed) == (5, [4], [])
    assert (tree.hosted, tree.evictable, sorted(tree.pages())) == (1, 2, [1, 5])
    assert found(tree, (1, 2, 3, 4, 5, 6)) == [2, 2, 2]
    tree.check()


def test_page_is_queued_when_what_follows_it_is_spare_on_the_host() -> None:
    tree = PrefixTree(2, host_blocks=4)
    hang(tree, (1, 2, 3, 4), (1, 2))
    tree.evict(2)

    inserted = tree.insert(tree.match(NAMESPACE, (), 0).node, (1, 2, 3), (3, 4))

    assert (inserted.node.page, inserted.spare) == (3, [4])
    tree.check()
    assert tree.evict(1).pages == [3]


def test_page_is_used_when_it_comes_back() -> None:
    tree = PrefixTree(1, host_blocks=1)
    node = hang(tree, (1,), [1])
    tree.evict(1)
    hang(tree, (2,), [2])

    tree.restore([node], [3])

    assert tree.evict(2).pages == [2, 3]


def test_only_pages_behind_the_device_come_back() -> None:
    tree = PrefixTree(1, host_blocks=2)
    hang(tree, (1, 2), (1, 2))
    tree.evict(2)
    [first, second] = tree.match(NAMESPACE, (1, 2), 2).nodes

    with pytest.raises(AssertionError, match="is not on the device"):
        tree.restore([second], [3])
    tree.restore([first], [3])
    with pytest.raises(AssertionError, match="is not on the host"):
        tree.restore([first], [4])


# clear


def test_clear_frees_what_nobody_has_locked_and_the_rest_later() -> None:
    tree = PrefixTree(1, host_blocks=2)
    hang(tree, (1, 2, 3), (1, 2, 3))
    tree.evict(1)
    node = tree.match(NAMESPACE, (1,), 1).node
    tree.lock(node)
    tree.lock(node)

    assert tree.clear() == [2]
    assert (tree.nodes, tree.evictable, tree.hosted, list(tree.pages())) == (1, 0, 0, [1])
    assert found(tree, (1,)) == []
    tree.check()

    hang(tree, (1,), [4])
    assert tree.unlock(node) == []
    assert tree.unlock(node) == [1]
    assert list(tree.pages()) == [4]
    tree.check()


def test_locked_page_on_the_host_is_gone_after_clear() -> None:
    tree = PrefixTree(1, host_blocks=1)
    node = hang(tree, (1,), [1])
    tree.evict(1)
    tree.lock(node)

    assert tree.clear() == []
    assert (tree.hosted, tree.unlock(node)) == (0, [])
    tree.check()


def test_tree_without_prefixes_keeps_no_namespace() -> None:
    tree = PrefixTree(1)
    for salt in map(str, range(10)):
        hang(tree, (1,), [1], Namespace(salt=salt))
        tree.evict(1)

    assert tree._roots == {}


# events


def test_events_of_one_insert_are_one() -> None:
    tree = PrefixTree(2, is_observed=True)
    namespace = Namespace("A", "S")
    first, second, third = names((1, 2, 3, 4, 5, 6), namespace=namespace)

    node = hang(tree, (1, 2, 3, 4, 5), (1, 2, 3), namespace)
    tree.insert(node, (5, 6), [4])

    assert tree.take_events() == [
        BlockStored((first, second), None, (1, 2, 3, 4), Medium.DEVICE, "A", "S"),
        BlockStored((third,), second, (5, 6), Medium.DEVICE, "A", "S"),
    ]
    assert tree.take_events() == []


def test_pages_that_are_there_or_partial_are_no_event() -> None:
    tree = PrefixTree(2, is_observed=True)
    hang(tree, (1, 2, 3), (1, 2))
    tree.take_events()

    hang(tree, (1, 2, 3), (3, 4))
    tree.evict(1)

    assert tree.take_events() == []


def test_evictions_are_one_event() -> None:
    tree = PrefixTree(2, is_observed=True)
    hang(tree, (1, 2, 3, 4), (1, 2))
    first, second = names((1, 2, 3, 4))
    tree.take_events()

    tree.evict(1)
    tree.evict(1)

    assert tree.take_events() == [BlockRemoved((second, first))]


def test_moves_to_and_from_the_host_are_events() -> None:
    tree = PrefixTree(2, host_blocks=1, is_observed=True)
    hang(tree, (1, 2, 3, 4), (1, 2))
    first, second = names((1, 2, 3, 4))
    tree.take_events()

    tree.evict(1)
    assert tree.take_events() == [
        BlockRemoved((second,)),
        BlockStored((second,), first, (3, 4), Medium.HOST),
    ]
    tree.evict(1)
    assert tree.take_events() == [
        BlockRemoved((second,), Medium.HOST),
        BlockRemoved((first,)),
        BlockStored((first,), None, (1, 2), Medium.HOST),
    ]
    tree.restore(tree.match(NAMESPACE, (1, 2), 2).nodes, [3])
    assert tree.take_events() == [
        BlockRemoved((first,), Medium.HOST),
        BlockStored((first,), None, (1, 2)),
    ]


def test_page_that_replaces_one_on_the_host_is_stored_with_those_behind_it() -> None:
    tree = PrefixTree(2, host_blocks=2, is_observed=True)
    hang(tree, (1, 2, 3, 4), (1, 2))
    tree.evict(1)
    first, second, third = names((1, 2, 3, 4, 5, 6))
    tree.take_events()

    hang(tree, (1, 2, 3, 4, 5, 6, 7), (3, 4, 5, 6))

    assert tree.take_events() == [
        BlockRemoved((second,), Medium.HOST),
        BlockStored((second, third), first, (3, 4, 5, 6)),
    ]


def test_clear_is_one_event_and_later_unlocks_are_none() -> None:
    tree = PrefixTree(1, is_observed=True)
    node = hang(tree, (1, 2), (1, 2))
    tree.lock(node)
    tree.take_events()

    tree.clear()
    tree.unlock(node)

    assert tree.take_events() == [AllBlocksCleared()]


def test_nobody_listening_means_no_events() -> None:
    tree = PrefixTree(1, host_blocks=1)
    hang(tree, (1, 2), (1, 2))
    tree.evict(2)
    tree.clear()

    assert tree.take_events() == []


# check


def test_check_finds_a_wrong_lock() -> None:
    tree = PrefixTree(1)
    hang(tree, (1, 2), (1, 2)).locks += 1

    with pytest.raises(AssertionError):
        tree.check()


def test_check_finds_a_page_that_is_held_twice() -> None:
    tree = PrefixTree(1)
    hang(tree, (1, 2), (1, 1))

    with pytest.raises(AssertionError, match=r"pages are \[1, 1\]"):
        tree.check()


def test_check_finds_a_leaf_that_would_never_be_evicted() -> None:
    tree = PrefixTree(1)
    hang(tree, (1,), [1])
    tree._device_leaves.clear()

    with pytest.raises(AssertionError, match="queue"):
        tree.check()
