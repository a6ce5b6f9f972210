"""The books of the page pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetserve.engine.pages import PagePool


def test_pages_are_handed_out_from_the_lowest_without_the_trash_page() -> None:
    pool = PagePool(4)
    assert (pool.total_pages, pool.free_pages) == (3, 3)
    assert pool.alloc(2) == [1, 2]
    assert pool.alloc(1) == [3]
    assert (pool.free_pages, pool.used_pages) == (0, 3)


def test_freed_page_is_handed_out_again() -> None:
    pool = PagePool(4)
    pool.alloc(3)
    pool.free([2])
    assert pool.alloc(1) == [2]


def test_shared_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(3)
    [page] = pool.alloc(1)
    pool.share([page])
    pool.free([page])
    assert pool.free_pages == 1
    pool.free([page])
    assert pool.free_pages == 2


def test_more_pages_than_are_free_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="count=3 pages asked for, 2 are free"):
        PagePool(3).alloc(3)


def test_freeing_twice_is_a_bug() -> None:
    pool = PagePool(3)
    pages = pool.alloc(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="more often"):
        pool.free(pages)


def test_free_page_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="free and cannot"):
        PagePool(3).share([1])


def test_check_finds_a_lost_page() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.check(pages)
    with pytest.raises(AssertionError):
        pool.check(pages[:1])


@given(st.lists(st.tuples(st.sampled_from(["alloc", "share", "free"]), st.integers(0, 5)), max_size=60))
def test_books_agree_with_a_list_of_holders(verbs: list[tuple[str, int]]) -> None:
    pool = PagePool(8)
    held: list[int] = []
    for verb, number in verbs:
        if verb == "alloc" and number <= pool.free_pages:
            pages = pool.alloc(number)
            assert not set(pages) & set(held)
            held += pages
        elif verb == "share" and held:
            page = held[number % len(held)]
            pool.share([page])
            held.append(page)
        elif verb == "free" and held:
            pool.free([held.pop(number % len(held))])
        pool.check(held)
        assert pool.free_pages == 7 - len(set(held))
