"""tokenizer.model files with what may lie beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece

from jetserve.errors import TokenizerError
from jetserve.tokenizer.loading import load_tokenizer
from jetserve.tokenizer.sentence_piece import (
    PieceKind,
    ScoredPiece,
    SpaceRule,
    build_model,
    make_processor,
    read_space_rule,
)


@pytest.fixture
def folder(sentence_piece_models: dict[str, Path], tmp_path: Path) -> Path:
    """A Llama-like folder that a test may change."""
    return Path(shutil.copytree(sentence_piece_models["bpe"].parent, tmp_path / "copy"))


def test_a_lone_model_frames_with_its_own_bos(folder):
    ours = load_tokenizer(folder)
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))
    assert ours.encode("fox")[0] == 1


def test_names_of_control_pieces_in_a_text_are_recognised(folder):
    ours = load_tokenizer(folder)
    ids = ours.encode("<s>the fox</s>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert ours.decode(ids) == " the fox"[1:]
    assert ours.decode(ids, skip_special_tokens=False) == "<s> the fox</s>"


def test_added_tokens_above_the_models_size_encode_and_decode(folder):
    """R39: special and other added ids above the base size, with a gap."""
    size = load_tokenizer(folder).vocab_size
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": size, "<|tool|>": size + 2}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    ours = load_tokenizer(folder)
    ids = ours.encode("the<|tool|>fox<pad>", add_special_tokens=False)
    assert ids[-1] == size
    assert size + 2 in ids
    assert ours.vocab_size == size + 3
    assert ours.decode(ids) == "the<|tool|> fox"
    assert ours.decode([size + 1]) == ""


def test_white_space_beside_a_token_that_strips_belongs_to_it(folder):
    size = load_tokenizer(folder).vocab_size
    config = {"added_tokens_decoder": {str(size): {"content": "<|end|>", "special": True, "rstrip": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(folder)
    assert ours.encode("fox<|end|> \n the") == ours.encode("fox<|end|>the")


def test_the_config_names_the_frame(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "eos_token": "<c>"}))
    ours = load_tokenizer(folder)
    assert ours.encode("fox") == ours.encode("fox", add_special_tokens=False)
    assert ours.eos_token_ids == (3,)


def test_a_table_of_pieces_gives_the_ids_of_the_model_it_is_from(sentence_piece_models, sentences):
    """Rebuilding is how GGUF's vocabularies are read."""
    model = sentence_piece_models["bpe"].read_bytes()
    trained = sentencepiece.SentencePieceProcessor(model_proto=model)
    kinds = [
        PieceKind.UNKNOWN
        if trained.is_unknown(i)
        else PieceKind.CONTROL
        if trained.is_control(i)
        else PieceKind.BYTE
        if trained.is_byte(i)
        else PieceKind.NORMAL
        for i in range(trained.get_piece_size())
    ]
    pieces = [ScoredPiece(trained.id_to_piece(i), trained.get_score(i), kind) for i, kind in enumerate(kinds)]
    rebuilt = make_processor(build_model(pieces, read_space_rule(model)))
    for text in [*sentences, "  two  spaces ", "unseen Ω 漢", "<s>", ""]:
        assert rebuilt.encode(text) == trained.encode(text)


@pytest.mark.parametrize("rule", [SpaceRule(a, b) for a in (True, False) for b in (True, False)])
def test_the_space_rule_is_read_as_written(rule):
    assert read_space_rule(build_model([], rule)) == rule


def test_the_space_rule_of_a_trained_model_is_the_trainers(sentence_piece_models):
    rules = {kind: read_space_rule(file.read_bytes()) for kind, file in sentence_piece_models.items()}
    assert rules == {
        "bpe": SpaceRule(True, False),
        "unigram": SpaceRule(True, True),
        "plain": SpaceRule(False, False),
        "squeezed": SpaceRule(False, True),
    }


@pytest.mark.parametrize("damage", [b"", b"not a model", None])
def test_a_damaged_model_is_named_in_one_line(folder, damage):
    file = folder / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:-200] if damage is None else damage)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model") as raised:
        load_tokenizer(folder)
    assert "\n" not in str(raised.value)


def test_an_added_token_far_above_the_model_is_an_error(folder):
    (folder / "added_tokens.json").write_text(json.dumps({"<x>": 10**9}))
    with pytest.raises(TokenizerError, match=r"'<x>' has id 1000000000, too far above the \d+ ids"):
        load_tokenizer(folder)


def test_a_bos_name_that_the_model_does_not_have_is_none(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<nowhere>"}))
    ours = load_tokenizer(folder)
    assert ours.bos_token_id is None
    assert ours.encode("fox") == ours.encode("fox", add_special_tokens=False)
