"""BOS at most once, and what may be encoded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jetserve.errors import InvalidRequest
from jetserve.tokenizer.byte_vocabulary import BOS_TOKEN_ID, byte_vocabulary

FRAMED = ["byte_level", "byte_fallback", "bpe", "unigram", "plain"]


@pytest.mark.parametrize("name", FRAMED)
def test_bos_is_put_in_front_once(cases, name):
    """R74."""
    ours = cases[name].ours
    bos = ours.bos_token_id
    ids = ours.encode("the fox")
    assert ids == [bos, *ours.encode("the fox", add_special_tokens=False)]
    assert bos not in ids[1:]


@pytest.mark.parametrize("name", FRAMED)
def test_a_text_that_begins_with_bos_gets_no_second_one(cases, name):
    """R74: a chat template has put its BOS in front already."""
    ours = cases[name].ours
    templated = ours.token_bytes(ours.bos_token_id).decode() + "the fox"
    once = ours.encode(templated, add_special_tokens=False)
    assert once.count(ours.bos_token_id) == 1
    assert ours.encode(templated) == once


@pytest.mark.parametrize("name", FRAMED)
def test_without_special_tokens_no_bos_is_added(cases, name):
    ours = cases[name].ours
    assert ours.bos_token_id not in ours.encode("the fox", add_special_tokens=False)


def test_an_empty_text_is_its_frame(cases):
    assert cases["byte_level"].ours.encode("") == [cases["byte_level"].ours.bos_token_id]
    assert cases["byte_level"].ours.encode("", add_special_tokens=False) == []


def test_a_vocabulary_that_wants_no_bos_adds_none():
    silent = replace(byte_vocabulary(), adds_bos=False)
    assert silent.encode("a") == [97]
    assert byte_vocabulary().encode("a") == [BOS_TOKEN_ID, 97]


def test_a_lone_surrogate_is_a_clear_error(case):
    with pytest.raises(InvalidRequest, match=r"lone surrogate U\+D83D at character 2; send valid Unicode"):
        case.ours.encode("ab\ud83d")


def test_token_bytes_of_special_tokens_are_their_names(cases):
    ours = cases["byte_level"].ours
    assert ours.token_bytes(ours.bos_token_id) == b"<|bos|>"
    assert ours.token_bytes(ours.vocab_size) == b""


def test_token_bytes_of_a_split_character_are_its_bytes(cases):
    ours = cases["byte_level"].ours
    ids = ours.encode("é漢", add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, ids)) == "é漢".encode()
