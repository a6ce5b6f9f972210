"""Names of full pages."""

from __future__ import annotations

import hashlib
import itertools
import struct
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from jetserve.engine.block_hash import Namespace, block_hash, block_hashes, root_hash

GOLDEN = [
    13882046351556634375,
    7666651311172922136,
]  # of Namespace("a", "b"), tokens 1 2 3 4, two in a page; the same forever
TEXTS = (None, "", "X", "Y", "XY", "\0", "\1", "\ud800")


def test_hash_is_blake2b_of_parent_and_tokens() -> None:
    data = struct.pack("<QIII", 2**64 - 1, 0, 7, 2**32 - 1)
    expected = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    assert block_hash(2**64 - 1, (0, 7, 2**32 - 1)) == expected


def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "from jetserve.engine.block_hash import Namespace, block_hashes\n"
        "print(*block_hashes(Namespace('a', 'b'), [1, 2, 3, 4], 2))"
    )

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert [int(word) for word in ran.stdout.split()] == block_hashes(Namespace("a", "b"), [1, 2, 3, 4], 2)
    assert block_hashes(Namespace("a", "b"), [1, 2, 3, 4], 2) == GOLDEN


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 6))
def test_hashes_of_a_prompt_are_a_chain_over_its_full_pages(token_ids: list[int], page_size: int) -> None:
    namespace = Namespace(salt="s")
    pages = [token_ids[at : at + page_size] for at in range(0, len(token_ids) - page_size + 1, page_size)]

    chain = list(itertools.accumulate(pages, block_hash, initial=root_hash(namespace)))

    assert block_hashes(namespace, token_ids, page_size) == chain[1:]
    assert all(0 < name < 2**64 for name in chain)


def test_adapter_and_salt_never_stand_for_each_other() -> None:
    namespaces = [Namespace(adapter, salt) for adapter in TEXTS for salt in TEXTS]

    assert len({root_hash(namespace) for namespace in namespaces}) == len(TEXTS) ** 2


def test_same_tokens_behind_other_tokens_have_another_hash() -> None:
    [_, one], [_, two] = (block_hashes(Namespace(), (first, 5), 1) for first in (1, 2))

    assert one != two
