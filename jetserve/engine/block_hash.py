"""Names of full pages: a hash of their tokens and of everything before them. Host side; imports no jax.

Routers follow cached pages by these names, and the scheduler guesses by them how much of a prompt is cached. They are
the same in every process. They never decide what is shared: `PrefixTree.match` compares tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_HASH_BYTES = 8
_TOKEN_BYTES = 4


class Namespace(NamedTuple):
    """Who shares prefixes with whom. An adapter is never mistaken for a salt of the same text."""

    adapter: str | None = None
    salt: str | None = None


def root_hash(namespace: Namespace) -> int:
    """Stands for the parent of a namespace's first pages. Fields are tagged: None is not "", an adapter no salt."""
    return _name(b"".join(map(_tagged, namespace)))


def block_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Names a page by the name of the one before it, or `root_hash`, and its tokens. 64-bit, never 0."""
    return _name(parent.to_bytes(_HASH_BYTES, "little") + _token_bytes(token_ids))


def block_hashes(namespace: Namespace, token_ids: Sequence[int], page_size: int) -> list[int]:
    """Names the full pages of a prompt, in their order."""
    data, stride = _token_bytes(token_ids), page_size * _TOKEN_BYTES
    name = root_hash(namespace)
    names = []
    for end in range(stride, len(data) + 1, stride):
        name = _name(name.to_bytes(_HASH_BYTES, "little") + data[end - stride : end])
        names.append(name)
    return names


def _name(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=_HASH_BYTES).digest(), "little") or 1  # routers read 0 as none


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian u32 each. `array` is twice as fast as NumPy, for 16 tokens and for 100,000."""
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _tagged(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    data = text.encode("utf-8", "surrogatepass")
    return b"\1" + len(data).to_bytes(8, "little") + data
