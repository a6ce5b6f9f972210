"""The infinite cache, against a slow one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jetserve.simulation.ideal import InfiniteCache, power_of_two_bucket

rows = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@given(cached=st.lists(rows, max_size=12), prompt=rows)
def test_a_match_is_the_longest_with_any_row_but_for_the_last_token(cached, prompt):
    cache = InfiniteCache()
    for row in cached:
        cache.add(row)
    longest = max((common(prompt, row) for row in cached), default=0)
    assert cache.match(prompt) == min(longest, len(prompt) - 1)


def test_token_ids_sort_as_numbers():
    cache = InfiniteCache()
    cache.add([256, 1, 5])
    cache.add([2, 1, 5])
    assert cache.match([256, 1, 7, 7]) == 2
    assert cache.match([2, 1, 5, 9]) == 3


def test_buckets_are_powers_of_two_from_sixteen():
    assert [power_of_two_bucket(tokens) for tokens in (1, 16, 17, 64, 65, 1000)] == [16, 16, 32, 64, 128, 1024]
