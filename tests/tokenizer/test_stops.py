"""Stop strings found in parts equal stop strings found in the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jetserve.tokenizer.stops import StopMatch, StopMatcher

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """By looking at every beginning of the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


def open_length(text: str, stops: list[str]) -> int:
    """Longest end of the text that a stop string begins with."""
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_a_match_does_not_depend_on_the_parts(text, stops, cuts):
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    expected = first_stop(text, stops)
    for start, end in itertools.pairwise(bounds):
        match = matcher.feed(text[start:end])
        if match is not None:
            assert (match.stop, start + match.end) == expected
            return
        assert matcher.held == open_length(text[:end], stops)
    assert expected is None


def test_what_is_held_is_shorter_than_the_longest_stop():
    matcher = StopMatcher(["aaaa"])
    assert [(matcher.feed("a"), matcher.held) for _ in range(3)] == [(None, 1), (None, 2), (None, 3)]
    assert matcher.feed("a") == StopMatch("aaaa", 1)


def test_a_part_without_text_changes_nothing():
    matcher = StopMatcher(["ab"])
    assert matcher.feed("a") is None
    assert matcher.feed("") is None
    assert matcher.held == 1
    assert matcher.feed("b") == StopMatch("ab", 1)


def test_a_thousand_repeats_cost_one_comparison_a_character():
    """A stop string that nearly matches all the time must not cost its length for each character."""
    matcher = StopMatcher(["a" * 500 + "b" * 500])
    for _ in range(20_000):
        matcher.feed("a")
    assert matcher.held == 500
