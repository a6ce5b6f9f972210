"""How GGUF's `tokenizer.ggml.pre` cuts a text into words before BPE.

The patterns are those of the models' own tokenizer.json and of llama.cpp's src/llama-vocab.cpp. A name is listed here
only if its whole behaviour is known: a wrong pre-tokenizer gives a model slightly wrong ids without any error.
"""

from __future__ import annotations

from typing import NamedTuple

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """How one family of vocabularies treats a text.

    Attributes:
      patterns: applied in order, each cutting every stretch that the ones before left.
      is_composed: the text is put in Unicode's NFC first.
      ignores_merges: a word that is a piece is taken whole.
      adds_bos: unless `tokenizer.ggml.add_bos_token` says otherwise.
    """

    patterns: tuple[str, ...]
    is_composed: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2_WORDS = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)

PRE_TOKENIZERS = {
    "default": PreTokenizer(_DEFAULT),
    "gpt-2": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "qwen2": PreTokenizer((_QWEN2,), is_composed=True),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
}
