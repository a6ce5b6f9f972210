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
    fields = [b"\0" if text is None else _tagged(text.encode("utf-8", "surrogatepass")) for text in namespace]
    return int.from_bytes(_digest(b"".join(fields)), "little")


def block_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Names a page by the name of the one before it, or `root_hash`, and its tokens. 64-bit, never 0, lasting."""
    return int.from_bytes(_digest(parent.to_bytes(_HASH_BYTES, "little") + _token_bytes(token_ids)), "little")


def block_hashes(namespace: Namespace, token_ids: Sequence[int], page_size: int) -> list[int]:
    """Names the full pages of a prompt, in their order."""
    stride = page_size * _TOKEN_BYTES
    data = _token_bytes(token_ids)
    digest = root_hash(namespace).to_bytes(_HASH_BYTES, "little")
    hashes = []
    for end in range(stride, len(data) + 1, stride):
        digest = _digest(digest + data[end - stride : end])
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


def _digest(data: bytes) -> bytes:
    digest = blake2b(data, digest_size=_HASH_BYTES).digest()
    return digest if digest != bytes(_HASH_BYTES) else (1).to_bytes(_HASH_BYTES, "little")  # 0 is "none" to routers


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian u32 each. `array` is 2.5 times as fast as NumPy, for 16 tokens and for 100,000."""
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _tagged(text: bytes) -> bytes:
    return b"\1" + len(text).to_bytes(8, "little") + text
