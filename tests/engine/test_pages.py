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


def test_more_pages_than_are_free_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="count=3 pages asked for, 2 are free"):
        PagePool(3).alloc(3)


def test_freeing_twice_is_a_bug() -> None:
    pool = PagePool(3)
    pages = pool.alloc(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="page=1 is freed twice"):
        pool.free(pages)


def test_trash_page_is_never_freed() -> None:
    with pytest.raises(AssertionError, match="trash"):
        PagePool(3).free([0])


@pytest.mark.parametrize(
    ("owned", "message"), [([1], "pages taken"), ([1, 2, 3], "pages taken"), ([1, 2, 2], "owned twice: .2.")]
)
def test_check_finds_lost_free_and_twice_owned_pages(owned: list[int], message: str) -> None:
    pool = PagePool(4)
    pool.check(())
    pool.check(reversed(pool.alloc(2)))
    with pytest.raises(AssertionError, match=message):
        pool.check(owned)


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free"]), st.integers(0, 5)), max_size=60))
def test_books_agree_with_a_list_of_owned_pages(verbs: list[tuple[str, int]]) -> None:
    pool = PagePool(8)
    owned: list[int] = []
    for verb, number in verbs:
        if verb == "alloc" and number <= pool.free_pages:
            pages = pool.alloc(number)
            assert not set(pages) & set(owned)
            owned += pages
        elif verb == "free" and owned:
            pool.free([owned.pop(number % len(owned))])
        pool.check(owned)
        assert pool.free_pages == 7 - len(owned)
