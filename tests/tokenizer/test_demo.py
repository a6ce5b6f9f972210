"""The demo models' vocabularies, from their GGUF files, against goldens of other tokenizers (make_goldens.py)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from jetserve.models.demo import DEMO_MODELS, default_cache_folder
from jetserve.request import SamplingParams
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.loading import load_tokenizer
from jetserve.tokenizer.stream import TextStream

pytestmark = pytest.mark.demo
GOLDENS = Path(__file__).parent / "goldens" / "demo_ids.json"


@pytest.fixture(scope="module", params=["demo", "demo-gemma"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Tokenizer:
    file = default_cache_folder() / DEMO_MODELS[name].file_name
    if not file.is_file():
        pytest.skip(f"{file} is not there; run jetserve fetch {name}")
    return load_tokenizer(file)


def test_ids_of_500_texts_equal_the_goldens(name, tokenizer):
    """R97: unicode, spaces, tabs, emoji, code, special tokens."""
    rows = json.loads(GOLDENS.read_text(encoding="utf-8"))
    assert len(rows) == 500
    different = [row["text"] for row in rows if tokenizer.encode(row["text"], add_special_tokens=False) != row[name]]
    assert different == []


def test_the_frame_is_the_files(name, tokenizer):
    frame = (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids)
    assert frame == {"demo": (49152, 1, (2, 0)), "demo-gemma": (262144, 2, (1, 106))}[name]
    first = tokenizer.encode("Hello")[0]
    assert (first == tokenizer.bos_token_id) is (name == "demo-gemma")
    assert (tokenizer.chat_template is not None) is (name == "demo")


def test_decode_gives_the_text_back(tokenizer):
    for row in json.loads(GOLDENS.read_text(encoding="utf-8")):
        ids = tokenizer.encode(row["text"], add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == row["text"]


def test_random_ids_stream_to_their_decode(tokenizer):
    """R36, R37: any ids, a few of them unknown, byte pieces as often as others."""
    draw = random.Random(0)
    in_bytes = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    for _ in range(500):
        ids = [
            draw.choice(in_bytes) if draw.random() < 0.5 else draw.randrange(tokenizer.vocab_size + 100)
            for _ in range(draw.randint(1, 40))
        ]
        skip = draw.random() < 0.5
        stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip), ())
        text = "".join(stream.push([token_id]).text for token_id in ids) + stream.push([], final=True).text
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
