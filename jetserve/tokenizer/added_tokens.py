"""Finds added tokens in a text: leftmost first, the longest of those that begin at one place (as Hugging Face does)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from jetserve.tokenizer.settings import AddedToken


class AddedTokens:
    """The added tokens of a vocabulary. Finding looks at candidate lengths only, so thousands of tokens cost little."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        self._by_text = {token.text: (token_id, token) for token_id, token in tokens.items() if token.text}
        lengths: dict[str, set[int]] = {}
        for text in self._by_text:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {initial: sorted(found, reverse=True) for initial, found in lengths.items()}
        self._initial = re.compile(f"[{''.join(map(re.escape, lengths))}]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """Cuts `text` into ids of added tokens and the non-empty stretches between them."""
        start = at = 0
        while self._initial is not None and (match := self._initial.search(text, at)):
            at = match.start()
            found = self._at(text, at)
            if found is None:
                at += 1
                continue
            token_id, token = found
            before = text[start:at]
            at += len(token.text)
            if token.strips_left:
                before = before.rstrip()
            if token.strips_right:
                at += len(text) - at - len(text[at:].lstrip())
            if before:
                yield before
            yield token_id
            start = at
        if start < len(text):
            yield text[start:]

    def _at(self, text: str, at: int) -> tuple[int, AddedToken] | None:
        for length in self._lengths[text[at]]:
            found = self._by_text.get(text[at : at + length])
            if found is not None:
                return found
        return None
