"""A stream's text is the full decode, however the ids arrive."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jetserve.request import SamplingParams
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.byte_vocabulary import EOS_TOKEN_ID, byte_vocabulary
from jetserve.tokenizer.stream import Piece, TextStream

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
BYTES = byte_vocabulary()
IDS = st.lists(st.integers(0, 2**16), max_size=16)
CUTS = st.lists(st.integers(1, 15), max_size=5)


def pushes(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` in parts; a part may be empty."""
    bounds = sorted([0, *(cut for cut in cuts if cut < len(ids)), len(ids)])
    return [ids[start:end] for start, end in itertools.pairwise(bounds)]


def run(stream: TextStream, parts: list[list[int]], final_alone: bool = False) -> list[Piece]:
    """Pushes all parts, the last with `final` or followed by an empty final push."""
    pieces = [stream.push(part, final=not final_alone and part is parts[-1]) for part in parts]
    return [*pieces, stream.push([], final=True)] if final_alone or not parts else pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def stream_bytes(parts: list[bytes], **params: object) -> list[Piece]:
    """Byte vocabulary; each part is one push, the last is final."""
    stream = TextStream(BYTES, SamplingParams(**params), BYTES.eos_token_ids)
    return run(stream, [list(part) for part in parts])


@relaxed
@given(ids=IDS, cuts=CUTS, skip=st.booleans(), final_alone=st.booleans())
def test_pieces_concatenate_to_the_full_decode(case, ids, cuts, skip, final_alone):
    """R36, R37, R38, R39: byte pieces, added, special and unknown ids, any split."""
    ids = [token_id % (case.ours.vocab_size + 3) for token_id in ids]
    stream = TextStream(case.ours, SamplingParams(skip_special_tokens=skip), ())
    pieces = run(stream, pushes(ids, cuts), final_alone)
    full = case.ours.decode(ids, skip_special_tokens=skip)
    assert text_of(pieces) == full
    assert pieces[-1] == (pieces[-1].text, len(ids), None)
    assert sum(piece.text.count("\ufffd") for piece in pieces) == full.count("\ufffd")


def reference_stop(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, int, str | None]:
    """Text before the stop, ids up to it and the stop, by decoding every beginning of the ids.

    No stop string here holds U+FFFD, so an open character at the end of a beginning completes none.
    """
    whole = tokenizer.decode(ids)
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    if not ends:
        return whole, len(ids), None
    end, _, stop = min(ends)
    needed = next(
        count for count in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:count])[end - len(stop) : end]
    )
    return whole[: end - len(stop)], needed, stop


@relaxed
@given(
    ids=st.lists(st.sampled_from([97, 98, 99, 0xC3, 0xA9, 300]), max_size=14),
    cuts=CUTS,
    stops=st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings_cut_the_text_at_the_same_place_for_any_split(ids, cuts, stops, include):
    stream = TextStream(BYTES, SamplingParams(stop=tuple(stops), include_stop=include), ())
    pieces = run(stream, pushes(ids, cuts))
    text, needed, stop = reference_stop(BYTES, ids, stops)
    assert text_of(pieces) == text + (stop if include and stop else "")
    assert pieces[-1].stop == stop
    assert pieces[-1].tokens == needed


@relaxed
@given(
    text=st.text(alphabet="abcd", max_size=20),
    stops=st.lists(st.text(alphabet="abcd", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_hold_back_is_shorter_than_the_longest_stop(text, stops):
    """R41."""
    stream = TextStream(BYTES, SamplingParams(stop=tuple(stops)), ())
    given_out = ""
    for count, token_id in enumerate(text.encode(), start=1):
        piece = stream.push([token_id])
        given_out += piece.text
        if piece.stop is not None:
            return
        held = text[len(given_out) : count]
        assert len(held) < len(max(stops, key=len))
        assert held == "" or any(stop.startswith(held) for stop in stops)
    assert given_out + stream.push([], final=True).text == text


@pytest.mark.parametrize("emoji", ["😀", "👨‍👩‍👧‍👦", "🇺🇸", "👍🏽"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_split_emoji_never_show_a_replacement_character(emoji, size):
    """R36: a 4-byte character over 4, 2 and 2 pushes; families, flags and skin tones."""
    data = f"a{emoji}b".encode()
    pieces = stream_bytes([data[at : at + size] for at in range(0, len(data), size)])
    assert text_of(pieces) == f"a{emoji}b"
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_a_character_cut_off_by_the_end_is_one_replacement_character():
    """R37: a truncated character as the last token before max_tokens."""
    assert [piece.text for piece in stream_bytes([b"a", b"\xf0", b"\x9f", b"\x98"])] == ["a", "", "", "\ufffd"]


def test_invalid_bytes_are_replaced_as_soon_as_they_are_known_invalid():
    """R37."""
    pieces = stream_bytes([b"\xff", b"\x80", b"\xe2\x82", b"A", b""])
    assert [piece.text for piece in pieces] == ["\ufffd", "\ufffd", "", "\ufffdA", ""]


def test_nothing_of_a_stop_string_is_sent():
    """R40."""
    pieces = stream_bytes([b"abcDEF", b"G", b"HI", b"Jxyz", b"more"], stop=("DEFGHIJ",))
    assert pieces == [
        Piece("abc", 6),
        Piece("", 7),
        Piece("", 9),
        Piece("", 10, "DEFGHIJ"),
        Piece("", 10, "DEFGHIJ"),
    ]


def test_a_near_miss_is_sent_in_full_once_it_is_clear():
    """R40."""
    pieces = stream_bytes([b"DEF", b"G", b"X", b""], stop=("DEFGHIJ",))
    assert [piece.text for piece in pieces] == ["", "", "DEFGX", ""]


def test_text_held_for_a_stop_string_comes_at_the_end():
    """R41."""
    assert [piece.text for piece in stream_bytes([b"a,", b"b,", b"d"], stop=("b,c",))] == ["a,", "", "b,d"]
    assert [piece.text for piece in stream_bytes([b"a,", b"b,"], stop=("b,c",))] == ["a,", "b,"]


def test_a_stop_string_at_once_leaves_no_text():
    """R45."""
    assert stream_bytes([b"\n\nHello"], stop=("\n",)) == [Piece("", 1, "\n")]


def test_the_stop_string_is_in_the_text_when_asked():
    pieces = stream_bytes([b"aS", b"TOP", b"b"], stop=("STOP",), include_stop=True)
    assert [piece.text for piece in pieces] == ["aS", "TOP", ""]
    assert pieces[-1].tokens == 5


def test_the_stop_string_complete_first_wins_and_the_longest_of_those():
    assert stream_bytes([b"xabcd"], stop=("abcd", "bc"))[0] == Piece("xa", 4, "bc")
    assert stream_bytes([b"xabcd"], stop=("bc", "abc"))[0] == Piece("x", 4, "abc")


def test_a_stop_string_over_an_open_character_counts_its_last_token():
    pieces = stream_bytes(["aé".encode()[:2], "é".encode()[1:] + b"z"], stop=("é",))
    assert pieces[-1] == Piece("", 3, "é")


def test_a_stop_string_of_replaced_bytes_is_found_in_the_flush():
    assert stream_bytes([b"a\xf0\x9f"], stop=("\ufffd",)) == [Piece("a", 3, "\ufffd")]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("final_alone", [True, False])
def test_the_end_id_adds_no_text_even_when_special_tokens_are_shown(skip, final_alone):
    """R76."""
    stream = TextStream(BYTES, SamplingParams(skip_special_tokens=skip), BYTES.eos_token_ids)
    pieces = run(stream, [[97], [98, EOS_TOKEN_ID]], final_alone)
    assert text_of(pieces) == "ab"
    assert pieces[-1].tokens == 3


def test_an_ordinary_stop_token_adds_no_text_unless_the_stop_is_included():
    for include, text in ((False, "ab"), (True, "abZ")):
        stream = TextStream(BYTES, SamplingParams(include_stop=include), (ord("Z"),))
        assert text_of(run(stream, [[97, 98], [ord("Z")]])) == text


def test_an_end_id_that_was_not_the_last_is_text_like_any_other():
    """With ignore_eos the model's end id is no stop id; a stop id in the middle is shown when others follow."""
    params = SamplingParams(skip_special_tokens=False)
    for parts in ([[97, EOS_TOKEN_ID, 98]], [[97, EOS_TOKEN_ID], [98]], [[97], [EOS_TOKEN_ID], [], [98]]):
        assert text_of(run(TextStream(BYTES, params, BYTES.eos_token_ids), parts)) == "a<eos>b"


def test_special_ids_in_the_middle_are_shown_or_hidden_as_in_the_full_decode(cases):
    """R76."""
    ours = cases["byte_level"].ours
    ids = ours.encode("the<|im_start|>fox<|im_end|>", add_special_tokens=False)
    for skip, text in ((True, "thefox"), (False, "the<|im_start|>fox")):
        stream = TextStream(ours, SamplingParams(skip_special_tokens=skip), ours.eos_token_ids)
        assert text_of(run(stream, [[token_id] for token_id in ids])) == text
