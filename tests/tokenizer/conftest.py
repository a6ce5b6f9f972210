"""Tiny vocabularies of every kind, trained or written here, with the library that decides what is right."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.loading import load_tokenizer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "def snake_case(self):\n\treturn self.x  # twice  two spaces",
    "naïve façade über Größe, 日本語のテキスト and 😀 emoji 👍🏽",
    "one two three four five six seven eight nine ten",
] * 8
ADDED_TEXT = "<tool>"


@dataclass(frozen=True)
class Case:
    """A loaded vocabulary and its library's own encode and decode.

    Attributes:
      shows_special: the library can show special tokens too (SentencePiece cannot).
    """

    name: str
    ours: Tokenizer
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int], bool], str]
    shows_special: bool


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """What the vocabularies were trained on, each once."""
    return SENTENCES[:4]


def _save(tokenizer: tokenizers.Tokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 style: BPE on bytes, with special and added tokens, BOS by the post-processor."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special)
    )
    tokenizer.add_tokens([tokenizers.AddedToken(ADDED_TEXT, normalized=False), tokenizers.AddedToken("   ")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    # Training leaves such settings behind; a prompt must not be cut or padded by them.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    return _save(
        tokenizer,
        tmp_path_factory.mktemp("byte_level") / "model",
        bos_token="<|bos|>",
        eos_token={"content": "<|im_end|>"},
        chat_template="{{ bos_token }}{{ messages[0]['content'] }}",
    )


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 2 style: BPE on characters with byte pieces, a space in front that decoding takes off."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz_", "th", "the", "▁the", "▁▁", "▁_", "▁__", "▁a", "qu", "é"]
    vocabulary = {text: index for index, text in enumerate([*names, *words])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("▁", "_"), ("▁_", "_"), ("▁", "a"), ("q", "u")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in names[:3]])
    tokenizer.add_tokens([tokenizers.AddedToken(ADDED_TEXT, normalized=False)])
    return _save(
        tokenizer,
        tmp_path_factory.mktemp("byte_fallback") / "model",
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
    )


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T5 style: Unigram whose decoder takes the stand-ins for spaces off the first piece."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("▁", -2.0), ("▁▁", -3.0), ("▁the", -3.0), ("▁▁x", -4.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram([*pieces, *((c, -5.0) for c in "abcdehtx_")], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<s>", normalized=False)])
    return _save(tokenizer, tmp_path_factory.mktemp("metaspace") / "model")


SENTENCE_PIECE_KINDS: dict[str, dict[str, object]] = {
    "bpe": {"model_type": "bpe", "remove_extra_whitespaces": False},
    "unigram": {"model_type": "unigram"},
    "plain": {"model_type": "bpe", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "squeezed": {"model_type": "unigram", "add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "<u>"]},
}


@pytest.fixture(scope="session")
def sentence_piece_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tokenizer.model files by kind, all with byte pieces and a control piece <c>."""
    folder = tmp_path_factory.mktemp("sentence_piece")
    files = {}
    for kind, options in SENTENCE_PIECE_KINDS.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES),
            model_writer=model,
            vocab_size=380,
            byte_fallback=True,
            control_symbols=["<c>"],
            normalization_rule_name="identity",
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        (folder / kind).mkdir()
        files[kind] = folder / kind / "tokenizer.model"
        files[kind].write_bytes(model.getvalue())
    return files


def library_case(name: str, folder: Path) -> Case:
    """A tokenizer.json with the tokenizers library as the judge."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    return Case(
        name,
        load_tokenizer(folder),
        lambda text: library.encode(text, add_special_tokens=False).ids,
        lambda ids, skip: library.decode(ids, skip_special_tokens=skip),
        shows_special=True,
    )


def sentence_piece_case(kind: str, file: Path) -> Case:
    """A tokenizer.model with the sentencepiece library as the judge."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(file))
    size = library.get_piece_size()
    return Case(
        kind,
        load_tokenizer(file),
        library.encode,
        lambda ids, _: library.decode([token_id for token_id in ids if token_id < size]),
        shows_special=False,
    )


@pytest.fixture(scope="session")
def cases(
    byte_level: Path, byte_fallback: Path, metaspace: Path, sentence_piece_models: dict[str, Path]
) -> dict[str, Case]:
    """Every kind of vocabulary by name."""
    found = {
        "byte_level": library_case("byte_level", byte_level),
        "byte_fallback": library_case("byte_fallback", byte_fallback),
        "metaspace": library_case("metaspace", metaspace),
    }
    return found | {kind: sentence_piece_case(kind, file) for kind, file in sentence_piece_models.items()}


@pytest.fixture(params=["byte_level", "byte_fallback", "metaspace", *SENTENCE_PIECE_KINDS])
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    """One kind of vocabulary at a time."""
    return cases[request.param]


class GgufFile:
    """Writes the metadata of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = gguf.GGUFWriter(path, "llama")

    def write(self, model: str | None, tokens: list[str], **values: object) -> Path:
        """`values` are arguments of gguf's add_<name> methods."""
        if model is not None:
            self._writer.add_tokenizer_model(model)
        self._writer.add_token_list(tokens)
        for name, value in values.items():
            getattr(self._writer, f"add_{name}")(value)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.close()
        return self.path


@pytest.fixture
def gguf_file(tmp_path: Path) -> Iterator[GgufFile]:
    """A GGUF file to be written."""
    return GgufFile(tmp_path / "model.gguf")
