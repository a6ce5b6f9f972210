"""A vocabulary in a GGUF file gives the ids of the one it was converted from (R97)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from jetserve.errors import TokenizerError
from jetserve.tokenizer.loading import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _UNUSED, BYTE = range(1, 7)
SCRIPTS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFG",
    "0123456789²½٣",
    "   \t\n\r\u00a0\u3000",
    ".,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+`~",
    "éèüñçåßœ\u0301",
    "абвгд漢字日本語한국어مرحबा",
    "😀👍🏽👨‍👩‍👧🇺🇸",
)


def varied_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = ["it's", "WE'LL", "x = 1;", "<|end|>", "<tool>", "1234567", " \n\n ", "e\u0301", "a__b", "  "]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 8)):
            script = draw.choice(SCRIPTS)
            parts.append(draw.choice(words) if draw.random() < 0.3 else "".join(draw.choices(script, k=4)))
        texts.append("".join(parts))
    return texts


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


# As the models' own tokenizer.json files have it, with the library's ready-made parts where they use them.
REFERENCES = {
    "gpt-2": (None, [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "smollm": (
        None,
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    ),
    "llama-bpe": (None, [split(LLAMA3), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "qwen2": (
        normalizers.NFC(),
        [split(LLAMA3.replace("{1,3}", "")), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
    ),
}


@pytest.mark.parametrize("pre", REFERENCES)
def test_byte_level_ids_equal_those_of_the_tokenizer_json(pre, gguf_file):
    """R97: 500 strings of unicode, spaces, digits, code and special tokens."""
    normalizer, steps = REFERENCES[pre]
    reference = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if normalizer is not None:
        reference.normalizer = normalizer
    reference.pre_tokenizer = pre_tokenizers.Sequence(steps)
    reference.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=["<s>", "<|end|>"])
    reference.train_from_iterator(varied_texts(400, seed=1), trainer)
    reference.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    model = json.loads(reference.to_str())["model"]
    tokens = [reference.id_to_token(i) for i in range(reference.get_vocab_size())]
    kinds = [CONTROL if i < 2 else USER_DEFINED if text == "<tool>" else NORMAL for i, text in enumerate(tokens)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ours = load_tokenizer(
        gguf_file.write("gpt2", tokens, tokenizer_pre=pre, token_types=kinds, token_merges=merges, add_bos_token=False)
    )
    for text in varied_texts(500, seed=2):
        ids = ours.encode(text)
        assert ids == reference.encode(text).ids
        assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("kind", ["bpe", "plain"])
def test_scored_ids_equal_those_of_the_tokenizer_model(kind, sentence_piece_models, gguf_file, sentences):
    """R97: 500 strings, with and without the space in front."""
    trained = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece_models[kind]))
    size = range(trained.get_piece_size())
    kinds = [
        UNKNOWN
        if trained.is_unknown(i)
        else CONTROL
        if trained.is_control(i)
        else BYTE
        if trained.is_byte(i)
        else NORMAL
        for i in size
    ]
    file = gguf_file.write(
        "llama",
        [trained.id_to_piece(i) for i in size],
        token_scores=[trained.get_score(i) for i in size],
        token_types=kinds,
        add_space_prefix=kind == "bpe",
    )
    ours = load_tokenizer(file)
    original = load_tokenizer(sentence_piece_models[kind])
    assert ours.bos_token_id == 1
    for text in [*sentences, *varied_texts(500, seed=3), "<s>fox", "<c>"]:
        ids = ours.encode(text)
        assert ids == original.encode(text)
        assert ours.decode(ids) == original.decode(ids)


def byte_pieces() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def test_runs_of_spaces_that_were_user_defined_are_pieces_of_their_own(gguf_file):
    """Converters write Gemma's user-defined runs of U+2581 with spaces."""
    tokens = ["<unk>", "<s>", "</s>", *byte_pieces(), "  ", "   ", "▁", "a", "▁a"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, USER_DEFINED, NORMAL, NORMAL, NORMAL]
    scores = [0.0] * len(tokens)
    ours = load_tokenizer(
        gguf_file.write("llama", tokens, token_scores=scores, token_types=kinds, add_space_prefix=False)
    )
    two, three, a = 259, 260, 262
    assert ours.encode("a  a   a", add_special_tokens=False) == [a, two, a, three, a]
    assert ours.encode("▁▁a", add_special_tokens=False) == [two, a]
    assert ours.decode([a, two, three, a]) == "a     a"


def tiny(gguf_file, model: str | None = "gpt2", tokens: list[str] | None = None, **values: object) -> Path:
    tokens = tokens or ["a", "b", "ab", "<|im_end|>", "<|end|>", "<eos>"]
    default: dict[str, object] = {"token_types": [1, 1, 1, 3, 3, 3], "token_merges": ["a b"]}
    return gguf_file.write(model, tokens, **{k: v for k, v in (default | values).items() if v is not None})


def test_ends_are_those_of_the_file_and_the_known_names(gguf_file):
    """R42: files name one end token, chat models have more."""
    assert load_tokenizer(tiny(gguf_file, eos_token_id=5)).eos_token_ids == (5, 3, 4)


def test_an_end_name_ends_no_answer_that_has_channels(gguf_file):
    tokens = ["a", "b", "ab", "<|end|>", "<|return|>", "<|call|>"]
    assert load_tokenizer(tiny(gguf_file, tokens=tokens, eos_token_id=4)).eos_token_ids == (4,)


def test_bos_is_added_as_the_file_or_the_pre_tokenizer_says(gguf_file):
    file = tiny(gguf_file, bos_token_id=5, tokenizer_pre="llama-bpe")
    assert load_tokenizer(file).encode("ab") == [5, 2]


def test_the_files_word_on_bos_wins(gguf_file):
    file = tiny(gguf_file, bos_token_id=5, tokenizer_pre="llama-bpe", add_bos_token=False)
    assert load_tokenizer(file).encode("ab") == [2]


def test_the_chat_template_is_the_files(gguf_file):
    assert load_tokenizer(tiny(gguf_file, chat_template="{{ x }}")).chat_template == "{{ x }}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', supported are 'gpt2' and 'llama'"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer_pre": "tomorrow"}, "tokenizer.ggml.pre is 'tomorrow', supported are default, gpt-2, llama-bpe"),
        ({"token_merges": None}, "tokenizer.ggml.merges is missing"),
        ({"token_merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', must be two pieces"),
        ({"token_merges": ["a z"]}, "tokenizer.ggml.merges cannot be used"),
        ({"token_types": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for 6 tokens"),
        ({"tokens": ["a", "b", "ab", "a", "c", "d"]}, "tokenizer.ggml.tokens has 'a' twice, at 0 and 3"),
        ({"model": "llama"}, "tokenizer.ggml.scores has no numbers for 6 tokens"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(gguf_file, changes, message):
    file = tiny(gguf_file, **changes)
    with pytest.raises(TokenizerError, match=message) as raised:
        load_tokenizer(file)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)
