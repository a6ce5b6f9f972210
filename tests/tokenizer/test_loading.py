"""Which file is taken, and what is said when there is none."""

from __future__ import annotations

import shutil

import pytest

from jetserve.errors import TokenizerError
from jetserve.tokenizer.hugging_face import HuggingFaceEncoder
from jetserve.tokenizer.loading import load_tokenizer
from jetserve.tokenizer.sentence_piece import SentencePieceEncoder


def test_a_folder_with_both_files_is_read_by_tokenizer_json(byte_level, sentence_piece_models, tmp_path):
    shutil.copy(sentence_piece_models["bpe"], tmp_path)
    assert isinstance(load_tokenizer(tmp_path).encoder, SentencePieceEncoder)
    shutil.copy(byte_level / "tokenizer.json", tmp_path)
    assert isinstance(load_tokenizer(tmp_path).encoder, HuggingFaceEncoder)


def test_a_version_after_the_suffix_is_no_hindrance(sentence_piece_models, tmp_path):
    file = shutil.copy(sentence_piece_models["bpe"], tmp_path / "tokenizer.model.v3")
    assert load_tokenizer(file).bos_token_id == 1


def test_a_converted_checkpoint_has_its_vocabulary_in_tokenizer_gguf(gguf_file, tmp_path):
    file = gguf_file.write("gpt2", ["a", "b", "ab"], token_types=[1, 1, 1], token_merges=["a b"])
    (tmp_path / "folder").mkdir()
    shutil.copy(file, tmp_path / "folder" / "tokenizer.gguf")
    assert load_tokenizer(tmp_path / "folder").encode("abb") == [2, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "missing does not exist; give a model folder"),
        ("empty", "has none of tokenizer.json, tokenizer.model, tokenizer.gguf; put the model's vocabulary there"),
        ("weights.safetensors", "is not a vocabulary; give one that ends in .json, .model, .gguf"),
        ("broken.gguf", "broken.gguf is not a GGUF file"),
    ],
)
def test_a_source_without_a_vocabulary_is_named(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.safetensors").touch()
    (tmp_path / "broken.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path / name)
