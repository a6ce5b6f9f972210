"""Cutting a text at added tokens equals a search that tries every token everywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jetserve.tokenizer.added_tokens import AddedTokens
from jetserve.tokenizer.settings import AddedToken


def cut_slowly(text: str, tokens: dict[str, int]) -> list[str | int]:
    parts: list[str | int] = []
    plain = ""
    while text:
        found = max((t for t in tokens if text.startswith(t)), key=len, default=None)
        if found is None:
            plain, text = plain + text[0], text[1:]
            continue
        parts += [plain, tokens[found]] if plain else [tokens[found]]
        plain, text = "", text[len(found) :]
    return [*parts, plain] if plain else parts


@given(
    text=st.text(alphabet="ab<]", max_size=30),
    names=st.lists(st.text(alphabet="ab<]", min_size=1, max_size=4), max_size=5, unique=True),
)
def test_the_leftmost_and_longest_token_is_cut_out(text, names):
    ids = {name: index for index, name in enumerate(names)}
    added = AddedTokens({index: AddedToken(name, True) for name, index in ids.items()})
    assert list(added.split(text)) == cut_slowly(text, ids)


def test_white_space_goes_to_the_side_that_strips():
    left = AddedTokens({0: AddedToken("<m>", True, strips_left=True)})
    right = AddedTokens({0: AddedToken("<m>", True, strips_right=True)})
    assert list(left.split("a  <m>  b")) == ["a", 0, "  b"]
    assert list(right.split("a  <m>  b")) == ["a  ", 0, "b"]
    assert list(left.split("  <m>")) == [0]
