"""Vocabularies in a GGUF file's metadata: byte-level BPE ("gpt2") and SentencePiece with scores ("llama").

Keys and defaults are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
src/llama-vocab.cpp. Other vocabulary models are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jetserve.errors import CheckpointError, TokenizerError
from jetserve.gguf_header import GgufValue, read_header
from jetserve.tokenizer import byte_level, sentence_piece
from jetserve.tokenizer.hugging_face import HuggingFaceEncoder
from jetserve.tokenizer.pieces import Pieces
from jetserve.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from jetserve.tokenizer.sentence_piece import PieceKind, ScoredPiece, SentencePieceEncoder, SpaceRule
from jetserve.tokenizer.settings import AddedToken
from jetserve.tokenizer.vocabulary import Encoder, Vocabulary

_PREFIX = "tokenizer.ggml."
_NAMED_KINDS = (PieceKind.UNKNOWN, PieceKind.CONTROL)
_FOUND_IN_TEXT = (*_NAMED_KINDS, PieceKind.USER_DEFINED)
_SENTENCE_PIECE_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # of Llama 2, for files that do not say

# Control tokens that end an answer in the families that have them; files name only one of theirs as eos.
_END_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
_CHANNEL_NAMES = ("<|return|>", "<|call|>")  # with these, "<|end|>" ends a channel of an answer only


def load_gguf(file: Path) -> Vocabulary:
    """Loads the vocabulary of a GGUF file.

    Raises: TokenizerError.
    """
    try:
        metadata = read_header(file).metadata
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    return read_vocabulary(metadata, file)


def read_vocabulary(metadata: Mapping[str, GgufValue], file: Path) -> Vocabulary:
    """Builds the vocabulary that a GGUF file's metadata describes. `file` is for messages only.

    Raises: TokenizerError.
    """
    table = _Table(metadata, file)
    model = table.text("model")
    if model == "gpt2":
        return _byte_level_bpe(table)
    if model == "llama":
        return _sentence_piece(table)
    raise TokenizerError(
        f"{file}: {_PREFIX}model is {model!r}, supported are 'gpt2' and 'llama'; use the model's Hugging Face folder"
    )


class _Table:
    """The vocabulary's keys with their types checked."""

    def __init__(self, metadata: Mapping[str, GgufValue], file: Path) -> None:
        self._metadata = metadata
        self.file = file
        # llama.cpp gives a piece without text this name, so that ids stay where they are.
        self.texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(self._texts("tokens"))]
        self.kinds = self._kinds()
        ids: dict[str, int] = {}
        for index, text in enumerate(self.texts):
            if ids.setdefault(text, index) != index:
                raise self.error("tokens", f"has {text!r} twice, at {ids[text]} and {index}")
        self.ids = ids

    def error(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(
            f"{self.file}: {_PREFIX}{key} {problem}; convert the model again with a current llama.cpp"
        )

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, str):
            raise self.error(key, "is missing" if value is None else f"is {value!r:.60}, must be a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r:.60}, must be true or false")
        return value

    def token_id(self, key: str, default: int | None = None) -> int | None:
        value = self._metadata.get(f"{_PREFIX}{key}_token_id", default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key}_token_id", f"is {value!r:.60}, must be a whole number")
        # Files with an id past the vocabulary exist; llama.cpp takes them as not said.
        return value if 0 <= value < len(self.texts) else None

    def scores(self) -> Sequence[float]:
        values = self._metadata.get(_PREFIX + "scores")
        numbers = [value for value in values if isinstance(value, int | float)] if isinstance(values, list) else []
        if len(numbers) != len(self.texts):
            raise self.error("scores", f"has {len(numbers) or 'no'} numbers for {len(self.texts)} tokens")
        return numbers

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._texts("merges"):
            at = merge.find(" ", 1)
            if at < 0:
                raise self.error("merges", f"has {merge!r}, must be two pieces with a space between")
            pairs.append((merge[:at], merge[at + 1 :]))
        return pairs

    @property
    def chat_template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    @property
    def added(self) -> dict[int, AddedToken]:
        """Tokens that are recognised in a text as they are."""
        return {
            index: AddedToken(self.texts[index], kind in _NAMED_KINDS)
            for index, kind in enumerate(self.kinds)
            if kind in _FOUND_IN_TEXT
        }

    def end_ids(self, default: int | None = None) -> tuple[int, ...]:
        """The end token, and the others that are known to end an answer."""
        found = [self.token_id("eos", default), self.token_id("eot"), self.token_id("eom")]
        names = [name for name in _END_NAMES if name != "<|end|>" or not all(c in self.ids for c in _CHANNEL_NAMES)]
        found.extend(self.ids[name] for name in names if name in self.ids and self._is_control(self.ids[name]))
        return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))

    def vocabulary(
        self, encoder: Encoder, pieces: Pieces, *, adds_bos: bool, defaults: Mapping[str, int]
    ) -> Vocabulary:
        bos = self.token_id("bos", defaults.get("bos"))
        return Vocabulary(
            encoder=encoder,
            pieces=pieces,
            bos_token_id=bos,
            eos_token_ids=self.end_ids(defaults.get("eos")),
            adds_bos=bos is not None and self.flag("add_bos_token", adds_bos),
            chat_template=self.chat_template,
        )

    def _is_control(self, index: int) -> bool:
        return self.kinds[index] is PieceKind.CONTROL

    def _texts(self, key: str) -> list[str]:
        values = self._metadata.get(_PREFIX + key)
        if not isinstance(values, list):
            raise self.error(key, "is missing")
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) != len(values):
            raise self.error(key, "holds other values than texts")
        return texts

    def _kinds(self) -> list[PieceKind]:
        values = self._metadata.get(_PREFIX + "token_type")
        if values is None:
            return [PieceKind.NORMAL] * len(self.texts)
        if not isinstance(values, list) or len(values) != len(self.texts):
            count = len(values) if isinstance(values, list) else "no"
            raise self.error("token_type", f"has {count} entries for {len(self.texts)} tokens")
        known = {int(kind): kind for kind in PieceKind}
        return [known.get(value, PieceKind.NORMAL) if isinstance(value, int) else PieceKind.NORMAL for value in values]


def _byte_level_bpe(table: _Table) -> Vocabulary:
    name = table.text("pre", "default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise TokenizerError(
            f"{table.file}: {_PREFIX}pre is {name!r}, supported are {', '.join(sorted(PRE_TOKENIZERS))}; "
            f"use the model's Hugging Face folder"
        )
    added = table.added
    tokenizer = _make_bpe(table, rule, added)
    texts = [text.encode() if index in added else byte_level.bytes_of(text) for index, text in enumerate(table.texts)]
    special = frozenset(index for index, token in added.items() if token.is_special)
    return table.vocabulary(HuggingFaceEncoder(tokenizer), Pieces(texts, special), adds_bos=rule.adds_bos, defaults={})


def _make_bpe(table: _Table, rule: PreTokenizer, added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    try:
        model = models.BPE(vocab=table.ids, merges=table.merges(), ignore_merges=rule.ignores_merges)
    except Exception as error:  # the library raises nothing narrower
        raise table.error("merges", f"cannot be used: {' '.join(str(error).split())}") from error
    tokenizer = tokenizers.Tokenizer(model)
    if rule.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for is_special in (True, False):
        tokens = [
            tokenizers.AddedToken(token.text, normalized=False, special=is_special)
            for token in added.values()
            if token.is_special is is_special
        ]
        if is_special:
            tokenizer.add_special_tokens(tokens)
        else:
            tokenizer.add_tokens(tokens)
    return tokenizer


def _sentence_piece(table: _Table) -> Vocabulary:
    defaults = _SENTENCE_PIECE_DEFAULT_IDS
    unknown = table.token_id("unknown", defaults["unknown"])
    spaces = SpaceRule(
        adds_prefix=table.flag("add_space_prefix", True), removes_extra=table.flag("remove_extra_whitespaces", False)
    )
    texts = [
        _model_text(table, text) if kind is PieceKind.USER_DEFINED else text
        for text, kind in zip(table.texts, table.kinds, strict=True)
    ]
    # SentencePiece has exactly one unknown piece; converters call it control, or call several unknown. Decoding shows
    # it by its name or hides it, as Hugging Face does, like any control piece.
    shown: list[PieceKind] = [PieceKind.CONTROL if kind is PieceKind.UNKNOWN else kind for kind in table.kinds]
    if unknown is not None:
        shown[unknown] = PieceKind.CONTROL
    kinds = list(shown)
    added = table.added
    if unknown is not None:
        kinds[unknown] = PieceKind.UNKNOWN
        added[unknown] = AddedToken(table.texts[unknown], True)
    model = sentence_piece.build_model(map(ScoredPiece, texts, table.scores(), kinds), spaces)
    try:
        processor = sentence_piece.make_processor(model)
    except TokenizerError as error:
        raise table.error("tokens", f"cannot be used: {error}") from error
    pieces = sentence_piece.read_pieces(texts, shown, spaces)
    return table.vocabulary(SentencePieceEncoder(processor, added), pieces, adds_bos=True, defaults=defaults)


def _model_text(table: _Table, text: str) -> str:
    """A user-defined piece as the model file had it: converters write its spaces out."""
    original = text.replace(" ", sentence_piece.SPACE)
    return text if original in table.ids else original
