"""Finds a vocabulary and loads it, whatever file it is in."""

from __future__ import annotations

from pathlib import Path

from jetserve.errors import TokenizerError
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.gguf_vocabulary import load_gguf
from jetserve.tokenizer.hugging_face import load_hugging_face
from jetserve.tokenizer.sentence_piece import load_sentence_piece

_LOADERS = {".json": load_hugging_face, ".model": load_sentence_piece, ".gguf": load_gguf}
_FOLDER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer.gguf")


def load_tokenizer(source: Path) -> Tokenizer:
    """Loads the vocabulary of a model.

    Args:
      source: a folder with tokenizer.json, tokenizer.model or tokenizer.gguf, taken in this order; or one such file,
        or any GGUF file. The small files beside it (tokenizer_config.json and the like) are read too.
    Raises: TokenizerError naming the file, what is wrong with it and what to do.
    """
    if source.is_dir():
        for name in _FOLDER_FILES:
            if (source / name).is_file():
                return _ready(_LOADERS[Path(name).suffix](source / name))
        raise TokenizerError(f"{source} has none of {', '.join(_FOLDER_FILES)}; put the model's vocabulary there")
    if not source.is_file():
        raise TokenizerError(
            f"{source} does not exist; give a model folder, tokenizer.json, tokenizer.model or .gguf file"
        )
    # Mistral's files have a version after the suffix: tokenizer.model.v3.
    loader = next((_LOADERS[suffix] for suffix in reversed(source.suffixes) if suffix in _LOADERS), None)
    if loader is None:
        raise TokenizerError(f"{source} is not a vocabulary; give one that ends in {', '.join(_LOADERS)}")
    return _ready(loader(source))


def _ready(vocabulary: Tokenizer) -> Tokenizer:
    """Makes both decoding tables now (0.1 s for 262144 pieces), so that the first request does not wait for them."""
    for skip_special_tokens in (True, False):
        vocabulary.pieces.table(skip_special_tokens=skip_special_tokens)
    return vocabulary
