"""Vocabularies that the tokenizers library runs: tokenizer.json files, and BPE built from tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from jetserve.errors import TokenizerError
from jetserve.tokenizer.decoders import Entry, read_decoder
from jetserve.tokenizer.pieces import Pieces
from jetserve.tokenizer.settings import AddedToken, read_settings
from jetserve.tokenizer.vocabulary import Vocabulary


class HuggingFaceEncoder:
    """Encodes with the tokenizers library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, framed by the file's post-processor with `add_special_tokens`."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def load_hugging_face(file: Path) -> Vocabulary:
    """Loads a tokenizer.json and what the files beside it say.

    Raises: TokenizerError.
    """
    settings = read_settings(file.parent)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(
            f"cannot read {file} as a tokenizer.json: {' '.join(str(error).split())}; get it again"
        ) from error
    # A file may carry the padding and cutting of its training; a prompt is neither padded nor cut.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _add_missing(tokenizer, settings.added, file)
    try:
        pieces = read_pieces(tokenizer)
    except TokenizerError as error:
        raise TokenizerError(f"{file}: {error}") from error
    bos = None if settings.bos is None else tokenizer.token_to_id(settings.bos)
    eos = None if settings.eos is None else tokenizer.token_to_id(settings.eos)
    if bos is None and settings.bos is None:
        bos = next((i for i in tokenizer.encode("").ids[:1] if i in pieces.special), None)
    return Vocabulary(
        encoder=HuggingFaceEncoder(tokenizer),
        pieces=pieces,
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        adds_bos=settings.adds_bos,
        chat_template=settings.chat_template,
    )


def read_pieces(tokenizer: tokenizers.Tokenizer) -> Pieces:
    """The decoding table of a tokenizer. Raises: TokenizerError when its decoder is not known."""
    decoder = tokenizer.decoder
    rule = read_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
    added = tokenizer.get_added_tokens_decoder()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    entries = [
        None if (text := tokenizer.id_to_token(token_id)) is None else Entry(text, token_id in added)
        for token_id in range(size)
    ]
    return rule.pieces(entries, frozenset(token_id for token_id, token in added.items() if token.special))


def _add_missing(tokenizer: tokenizers.Tokenizer, added: Mapping[int, AddedToken], file: Path) -> None:
    """Adds tokens that only tokenizer_config.json or added_tokens.json name, as transformers does."""
    for token_id, token in sorted(added.items()):
        if tokenizer.token_to_id(token.text) is not None:
            continue
        new = tokenizers.AddedToken(
            token.text, normalized=False, special=token.is_special, lstrip=token.strips_left, rstrip=token.strips_right
        )
        if token.is_special:
            tokenizer.add_special_tokens([new])
        else:
            tokenizer.add_tokens([new])
        if tokenizer.token_to_id(token.text) != token_id:
            raise TokenizerError(
                f"{file.parent}: added token {token.text!r} has id {token_id} in the files beside {file.name}, "
                f"which has place for id {tokenizer.token_to_id(token.text)}; the files are of different models"
            )
