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
    base_size = processor.get_piece_size()
    added = {
        token_id: AddedToken(processor.id_to_piece(token_id), True)
        for token_id in range(base_size)
        if processor.is_control(token_id) or processor.is_unknown(token_id)
    } | dict(settings.added)
    pieces = _with_added(read_pieces(processor, spaces), settings.added, base_size, file)
    ids = {token.text: token_id for token_id, token in added.items()}
    bos = processor.bos_id() if settings.bos is None else ids.get(settings.bos, processor.piece_to_id(settings.bos))
    eos = processor.eos_id() if settings.eos is None else ids.get(settings.eos, processor.piece_to_id(settings.eos))
    return Vocabulary(
        encoder=SentencePieceEncoder(processor, added),
        pieces=pieces,
        bos_token_id=bos if bos >= 0 else None,
        eos_token_ids=(eos,) if eos >= 0 else (),
        adds_bos=bos >= 0 if settings.adds_bos is None else settings.adds_bos,
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
    for piece in pieces:
        has_bytes = has_bytes or piece.kind is PieceKind.BYTE
        fields.append(
            wire.bytes_field(
                _PIECE,
                wire.bytes_field(_PIECE_TEXT, piece.text.encode())
                + wire.float_field(_PIECE_SCORE, piece.score)
                + wire.number_field(_PIECE_KIND, piece.kind),
            )
        )
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


def read_pieces(processor: sentencepiece.SentencePieceProcessor, spaces: SpaceRule) -> Pieces:
    """The decoding table of a model: what `processor.decode` does, and control pieces by their name."""
    texts: list[bytes | None] = []
    special: set[int] = set()
    first: dict[int, bytes] = {}
    takes_off = spaces.adds_prefix or spaces.removes_extra
    for token_id in range(processor.get_piece_size()):
        piece = processor.id_to_piece(token_id)
        byte = byte_of(piece) if processor.is_byte(token_id) else None
        if byte is not None:
            texts.append(byte)
        elif processor.is_unknown(token_id):
            texts.append(processor.decode([token_id]).encode())
        elif processor.is_control(token_id):
            texts.append(piece.encode())
            special.add(token_id)
        else:
            texts.append(piece.replace(SPACE, " ").encode())
            if takes_off and piece.startswith(SPACE):
                first[token_id] = piece[1:].replace(SPACE, " ").encode()
    if not takes_off:
        return Pieces(texts, frozenset(special))
    ends = StartEnds.AFTER_TEXT if spaces.removes_extra else StartEnds.AFTER_SPACE
    return Pieces(texts, frozenset(special), first, ends)


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
