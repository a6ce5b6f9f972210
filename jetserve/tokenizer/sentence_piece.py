"""Vocabularies that the sentencepiece library runs: tokenizer.model files, and tables with scores."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from jetserve.errors import TokenizerError
from jetserve.tokenizer import protobuf_wire
from jetserve.tokenizer.added_tokens import AddedTokens
from jetserve.tokenizer.decoders import byte_of
from jetserve.tokenizer.pieces import Pieces, StartEnds
from jetserve.tokenizer.settings import AddedToken, read_settings
from jetserve.tokenizer.vocabulary import Vocabulary

SPACE = "▁"
_MAX_ADDED_GAP = 65536

# Field numbers of sentencepiece_model.proto.
_PIECE, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_MODEL_TYPE, _VOCAB_SIZE, _SPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 4, 24, 35
_CHARS_MAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_SPACES = 2, 3, 4
_NAME = 1
_BPE = 2


class PieceKind(enum.IntEnum):
    """SentencePiece's piece types; GGUF's token types have the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ScoredPiece(NamedTuple):
    """One piece of a model; BPE merges to the piece with the highest score first."""

    text: str
    score: float
    kind: PieceKind


class SpaceRule(NamedTuple):
    """What a model does to spaces at the start of a text. Both default to true in the model file."""

    adds_prefix: bool = True
    removes_extra: bool = True


class SentencePieceEncoder:
    """Encodes with the sentencepiece library, added tokens cut out first.

    Each stretch between added tokens gets the model's own space in front, as in Hugging Face's and llama.cpp's.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, added: Mapping[int, AddedToken]) -> None:
        self._processor = processor
        self._added = AddedTokens(added)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002 the protocol's
        """Token ids of `text`; the model file frames nothing."""
        ids: list[int] = []
        for part in self._added.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._processor.encode(part))
        return ids


def load_sentence_piece(file: Path) -> Vocabulary:
    """Loads a tokenizer.model and what the files beside it say.

    Raises: TokenizerError.
    """
    settings = read_settings(file.parent)
    try:
        model = file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read {file}: {error.strerror}") from error
    try:
        processor = make_processor(model)
        spaces = read_space_rule(model)
    except (ValueError, TokenizerError) as error:
        raise TokenizerError(f"cannot read {file} as a SentencePiece model: {error}; get it again") from error
    size = processor.get_piece_size()
    texts = [processor.id_to_piece(token_id) for token_id in range(size)]
    kinds = [_kind(processor, token_id) for token_id in range(size)]
    named = (PieceKind.CONTROL, PieceKind.UNKNOWN)
    added = {i: AddedToken(texts[i], True) for i, kind in enumerate(kinds) if kind in named} | dict(settings.added)
    pieces = read_pieces(texts, kinds, spaces, processor.decode([processor.unk_id()]))
    ids = {text: i for i, text in enumerate(texts)} | {token.text: i for i, token in added.items()}
    bos = _named(settings.bos, processor.bos_id(), ids)
    eos = _named(settings.eos, processor.eos_id(), ids)
    return Vocabulary(
        encoder=SentencePieceEncoder(processor, added),
        pieces=_with_added(pieces, settings.added, size, file),
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        adds_bos=bos is not None and settings.adds_bos is not False,
        chat_template=settings.chat_template,
    )


def make_processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Makes a processor of a model file's bytes. Raises: TokenizerError."""
    if not model:
        raise TokenizerError("it is empty")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except (RuntimeError, ValueError, OSError) as error:
        raise TokenizerError(" ".join(str(error).split()) or "it is damaged") from error
    return processor


def build_model(pieces: Iterable[ScoredPiece], spaces: SpaceRule) -> bytes:
    """Writes a BPE model file that takes text as it is, but for spaces."""
    wire = protobuf_wire
    fields = []
    has_bytes = False
    kind_fields = {kind: wire.number_field(_PIECE_KIND, kind) for kind in PieceKind}
    for piece in pieces:
        has_bytes = has_bytes or piece.kind is PieceKind.BYTE
        text = wire.bytes_field(_PIECE_TEXT, piece.text.encode())
        score = wire.float_field(_PIECE_SCORE, piece.score)
        fields.append(wire.bytes_field(_PIECE, text + score + kind_fields[piece.kind]))
    trainer = wire.message(
        (
            wire.number_field(_MODEL_TYPE, _BPE),
            wire.number_field(_VOCAB_SIZE, len(fields)),
            wire.number_field(_BYTE_FALLBACK, has_bytes),
        )
    )
    normalizer = wire.message(
        (
            wire.bytes_field(_NAME, b"identity"),
            wire.number_field(_ADD_DUMMY_PREFIX, spaces.adds_prefix),
            wire.number_field(_REMOVE_EXTRA_SPACES, spaces.removes_extra),
        )
    )
    return wire.message((*fields, wire.bytes_field(_TRAINER, trainer), wire.bytes_field(_NORMALIZER, normalizer)))


def read_space_rule(model: bytes) -> SpaceRule:
    """Reads what a model file says about spaces.

    Raises: ValueError when the file is damaged, TokenizerError when it asks for a way of decoding that we do not have.
    """
    rule = SpaceRule()
    for field in protobuf_wire.read_fields(model):
        if field.number not in (_TRAINER, _NORMALIZER, _DENORMALIZER) or isinstance(field.value, int):
            continue
        inner = {part.number: part.value for part in protobuf_wire.read_fields(field.value)}
        if field.number == _NORMALIZER:
            rule = SpaceRule(bool(inner.get(_ADD_DUMMY_PREFIX, 1)), bool(inner.get(_REMOVE_EXTRA_SPACES, 1)))
        elif field.number == _TRAINER and inner.get(_SPACE_AS_SUFFIX):
            raise TokenizerError("treat_whitespace_as_suffix is not supported")
        elif field.number == _DENORMALIZER and inner.get(_CHARS_MAP):
            raise TokenizerError("a denormalizer is not supported")
    return rule


def read_pieces(texts: Iterable[str], kinds: Iterable[PieceKind], spaces: SpaceRule, unknown_text: str = "") -> Pieces:
    """The decoding table of a model: what sentencepiece's decode does, and control pieces by their name.

    Args:
      unknown_text: what the unknown piece decodes to.
    """
    table: list[bytes | None] = []
    special: set[int] = set()
    first: dict[int, bytes] = {}
    takes_off = spaces.adds_prefix or spaces.removes_extra
    for token_id, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind is PieceKind.BYTE:
            table.append(byte_of(text))
        elif kind is PieceKind.UNKNOWN:
            table.append(unknown_text.encode())
        elif kind is PieceKind.CONTROL:
            table.append(text.encode())
            special.add(token_id)
        else:
            table.append(text.replace(SPACE, " ").encode())
            if takes_off and text.startswith(SPACE):
                first[token_id] = text[1:].replace(SPACE, " ").encode()
    if not takes_off:
        return Pieces(table, frozenset(special))
    ends = StartEnds.AFTER_TEXT if spaces.removes_extra else StartEnds.AFTER_SPACE
    return Pieces(table, frozenset(special), first, ends)


def _kind(processor: sentencepiece.SentencePieceProcessor, token_id: int) -> PieceKind:
    """The kind of a piece as far as decoding goes."""
    if processor.is_byte(token_id):
        return PieceKind.BYTE
    if processor.is_unknown(token_id):
        return PieceKind.UNKNOWN
    return PieceKind.CONTROL if processor.is_control(token_id) else PieceKind.NORMAL


def _named(name: str | None, default: int, ids: Mapping[str, int]) -> int | None:
    """The id of a framing token: as the files beside the model name it, else the model's own (-1 for none)."""
    if name is not None:
        return ids.get(name)
    return default if default >= 0 else None


def _with_added(pieces: Pieces, added: Mapping[int, AddedToken], base_size: int, file: Path) -> Pieces:
    """Appends added tokens that lie above the model's own ids, and takes their word on what is special."""
    texts = list(pieces.texts)
    special = set(pieces.special)
    for token_id, token in sorted(added.items()):
        if token_id > len(texts) + _MAX_ADDED_GAP:
            raise TokenizerError(
                f"{file.parent}: added token {token.text!r} has id {token_id}, too far above the {base_size} ids of "
                f"{file.name}; the files are of different models"
            )
        if token_id >= base_size:
            texts.extend([None] * (token_id + 1 - len(texts)))
            texts[token_id] = token.text.encode()
        if token.is_special:
            special.add(token_id)
    return Pieces(texts, frozenset(special), pieces.first, pieces.start_ends)
