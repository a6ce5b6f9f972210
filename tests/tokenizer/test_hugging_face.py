"""Folders as transformers writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jetserve.errors import TokenizerError
from jetserve.tokenizer.loading import load_tokenizer


@pytest.fixture
def folder(byte_level: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(byte_level, tmp_path / "copy"))


def configure(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_framing_tokens_and_template_come_from_the_config(byte_level):
    ours = load_tokenizer(byte_level)
    assert ours.bos_token_id == 0
    assert ours.eos_token_ids == (2,)
    assert ours.chat_template == "{{ bos_token }}{{ messages[0]['content'] }}"


def test_cutting_and_padding_left_from_training_are_off(byte_level):
    assert len(load_tokenizer(byte_level).encode("one two three four five six seven " * 8)) > 16


def test_a_lone_file_finds_its_bos_in_the_post_processor(folder):
    (folder / "tokenizer_config.json").unlink()
    ours = load_tokenizer(folder / "tokenizer.json")
    assert ours.bos_token_id == 0
    assert ours.eos_token_ids == ()
    assert ours.chat_template is None


def test_framing_tokens_may_come_from_the_special_tokens_map(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}))
    ours = load_tokenizer(folder)
    assert (ours.bos_token_id, ours.eos_token_ids) == (0, (2,))


def test_the_template_file_wins_over_the_setting(folder):
    (folder / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "from the file é"


def test_of_several_named_templates_the_default_is_taken(folder):
    configure(
        folder, chat_template=[{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    )
    assert load_tokenizer(folder).chat_template == "plain"


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_overrides_the_post_processor(folder, adds):
    configure(folder, add_bos_token=adds)
    assert (load_tokenizer(folder).encode("fox")[0] == 0) is adds


def test_tokens_named_only_by_the_config_are_added(folder):
    size = load_tokenizer(folder).vocab_size
    configure(folder, added_tokens_decoder={str(size): {"content": "<|extra|>", "special": True}})
    ours = load_tokenizer(folder)
    ids = ours.encode("a<|extra|>b", add_special_tokens=False)
    assert ids[1] == size
    assert ours.decode(ids) == "ab"
    assert ours.decode(ids, skip_special_tokens=False) == "a<|extra|>b"


def test_an_added_token_without_its_place_is_an_error(folder):
    configure(folder, added_tokens_decoder={"9999": {"content": "<|extra|>"}})
    with pytest.raises(TokenizerError, match=r"added token '<\|extra\|>' has id 9999.*different models"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "cannot read .*tokenizer.json as a tokenizer.json"),
        ("tokenizer.json", "", "cannot read .*tokenizer.json as a tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds a list, must hold a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": 3}', "added_tokens_decoder is 3, must be an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder has 'x': {}"),
        ("added_tokens.json", '{"<a>": "1"}', "added_tokens.json: the id of '<a>' is '1', must be a whole number"),
        ("special_tokens_map.json", "x", "special_tokens_map.json is not JSON"),
    ],
)
def test_a_broken_file_is_named_in_one_line(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as raised:
        load_tokenizer(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "decoder 'WordPiece' is not supported"),
        (None, "without one, pieces cannot become text"),
        ({"type": "Strip", "content": " ", "start": 1, "stop": 0}, "only ' ' 1 0 after Fuse"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}, "decoder Replace with pattern"),
    ],
)
def test_a_decoder_that_cannot_stream_is_refused_by_name(folder, decoder, message):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": decoder}))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)
