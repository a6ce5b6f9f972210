"""Decoding equals the library's own, for any ids."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jetserve.tokenizer.pieces import Pieces, StartEnds

ANY_IDS = st.lists(st.integers(0, 2**16), max_size=12)
REPLACEMENT = "\ufffd"
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)


def into_vocabulary(ids: list[int], size: int) -> list[int]:
    """Ids of the vocabulary and of a little above it, those at its start and end more often."""
    return [token_id % (size + 3) for token_id in ids]


@relaxed
@given(ids=ANY_IDS, skip=st.booleans())
def test_decode_equals_the_librarys_where_all_bytes_are_valid(case, ids, skip):
    ids = into_vocabulary(ids, case.ours.vocab_size)
    ours = case.ours.decode(ids, skip_special_tokens=skip)
    if not skip and not case.shows_special:
        return
    if REPLACEMENT not in ours:
        theirs = case.decode(ids, skip)
        # SentencePiece lets a control piece come between two bytes of a character, tokenizers does not.
        assert theirs == ours or (not case.shows_special and REPLACEMENT in theirs)
    if case.name == "byte_level":
        assert ours == case.decode(ids, skip)


@relaxed
@given(text=st.text(alphabet="the quick_ \n\té日😀"))
def test_decode_of_encode_equals_the_librarys(case, text):
    ids = case.ours.encode(text, add_special_tokens=False)
    assert ids == case.encode(text)
    assert case.ours.decode(ids) == case.decode(ids, True)


def test_byte_pieces_are_bytes_and_underscores_stay(cases):
    """R38."""
    ours = cases["byte_fallback"].ours
    text = "the `__a`\r\n\tsnake_case   x_"
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    newline = 3 + 0x0A
    assert newline in ids
    assert ours.token_bytes(newline) == b"\n"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff", "\ufffd"),
        (b"\x80\x80", "\ufffd\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd"),  # one maximal part, not three bytes
        (b"\xf0\x9fA", "\ufffdA"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate: no byte of it begins a character
        (b"\xc3\xa9\xff", "é\ufffd"),  # the tokenizers library would replace the é too
    ],
)
def test_every_maximal_invalid_part_is_one_replacement_character(data, text):
    """R37: the table of Unicode 15 section 3.9 in small."""
    pieces = Pieces([bytes([value]) for value in range(256)])
    assert pieces.decode(list(data), skip_special_tokens=True) == text


def test_special_tokens_are_shown_or_hidden(cases):
    """R76."""
    ours = cases["byte_level"].ours
    ids = ours.encode("<|im_start|>the fox<|im_end|>", add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=True) == "the fox"
    assert ours.decode(ids, skip_special_tokens=False) == "<|im_start|>the fox<|im_end|>"


def test_added_tokens_above_the_base_size_decode(cases):
    """R39."""
    ours = cases["byte_level"].ours
    ids = ours.encode("a<tool>b", add_special_tokens=False)
    assert ours.decode(ids) == "a<tool>b"


def test_unknown_ids_add_nothing():
    pieces = Pieces([b"a", None, b"b"])
    assert pieces.decode([0, 1, 7, -1, 10**9, 2], skip_special_tokens=True) == "ab"


SPACED = {0: b"x"}  # id 0 is " x"


@pytest.mark.parametrize(
    ("ends", "ids", "text"),
    [
        (StartEnds.AT_ONCE, [0, 0], " x x"),
        (StartEnds.AFTER_TOKEN, [0, 0], "x x"),
        (StartEnds.AFTER_TOKEN, [1, 0], " x"),  # id 1 is a piece without text: it ends the start
        (StartEnds.AFTER_SPACE, [1, 0, 0], "x x"),
        (StartEnds.AFTER_SPACE, [2, 2, 0], "  x"),  # id 2 is one space, first taken off and then kept
        (StartEnds.AFTER_TEXT, [2, 2, 0, 0], "x x"),
        (StartEnds.AFTER_TOKEN, [9, 3, 0, 0], "x x"),  # unknown and hidden ids do not count
    ],
)
def test_the_start_of_a_text_ends_as_its_rule_says(ends, ids, text):
    first = {} if ends is StartEnds.AT_ONCE else SPACED | {2: b""}
    pieces = Pieces([b" x", b"", b" ", b"<s>"], frozenset({3}), first, ends)
    assert pieces.decode(ids, skip_special_tokens=True) == text
