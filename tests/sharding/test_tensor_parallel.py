"""A model on 1, 2, 4 and 8 emulated devices: same tokens, few exchanges, memory shared (eight_devices.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.links import ROOT

SIZES = (1, 2, 4, 8)
ILLEGAL = (3, 6, 16)
LAYERS = 2


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[int, dict[str, Any]]:
    """By number of devices; compiled programs outlive the run in pytest's cache."""
    folder = request.config.cache.mkdir("jetserve-programs")
    command = [sys.executable, "-m", "tests.sharding.eight_devices", str(folder), *map(str, (*SIZES, *ILLEGAL))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["tensor"]: line for line in map(json.loads, done.stdout.splitlines())}


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tensor", SIZES[1:])
def test_tokens_are_those_of_one_device(measured: dict[int, dict[str, Any]], tensor: int) -> None:
    """R22: also with more devices than kv heads; greedy, penalised and seeded."""
    assert measured[tensor]["answers"] == measured[1]["answers"]
    assert all(len(set(tokens)) > 6 for tokens in measured[1]["answers"])


def test_one_device_exchanges_nothing(measured: dict[int, dict[str, Any]]) -> None:
    assert measured[1]["collectives"] == {}


@pytest.mark.parametrize("tensor", SIZES[1:])
def test_exchanges_of_a_decode_step(measured: dict[int, dict[str, Any]], tensor: int) -> None:
    """R23: two sums a layer, one of the embedding, two of the greedy token; a gather each for draws and logprobs.

    Nothing else: no all-to-all and no permute, so nothing of keys and values ever moves.
    """
    assert measured[tensor]["collectives"] == {"all-reduce": 2 * LAYERS + 3, "all-gather": 2}


@pytest.mark.parametrize(("tensor", "kv_heads"), [(1, 2), (2, 2), (4, 4), (8, 8)])
def test_cache_is_split_by_heads(measured: dict[int, dict[str, Any]], tensor: int, kv_heads: int) -> None:
    """Each device holds whole heads; heads are repeated only so far that every device has one."""
    found = measured[tensor]
    assert found["cache_shape"] == [LAYERS, 257, kv_heads, 2, 4, 8]
    own = kv_heads // tensor
    assert found["cache_heads"] == [[device, device * own, (device + 1) * own] for device in range(tensor)]
    assert found["cache_bytes_per_device"] == [LAYERS * 257 * own * 2 * 4 * 8 * 4]
    assert found["temporary_bytes"] < found["cache_bytes_per_device"][0] / 2


@pytest.mark.parametrize("tensor", SIZES)
def test_pages_move_without_an_exchange(measured: dict[int, dict[str, Any]], tensor: int) -> None:
    """Copied, saved to host memory and loaded again: each device moves its own heads."""
    assert measured[tensor]["moves"] == {"page_is_written": True, "is_exact": True, "collectives": [{}, {}, {}]}


@pytest.mark.parametrize("tensor", SIZES)
def test_vocabulary_is_padded_to_equal_parts(measured: dict[int, dict[str, Any]], tensor: int) -> None:
    assert measured[tensor]["embedding_rows"] == -(-97 // tensor) * tensor
    assert max(token for tokens in measured[tensor]["answers"] for token in tokens) < 97


@pytest.mark.parametrize("tensor", [3, 6])
def test_uneven_heads_are_refused_with_the_sizes_that_work(measured: dict[int, dict[str, Any]], tensor: int) -> None:
    assert measured[tensor]["error"] == (
        f"mesh.tensor={tensor} cannot split 8 query and 2 kv heads evenly; use one of 1, 2, 4, 8"
    )


def test_more_devices_than_there_are_is_refused(measured: dict[int, dict[str, Any]]) -> None:
    assert measured[16]["error"] == (
        "mesh.tensor=16, but this machine has 8 cpu device(s); set mesh.tensor to at most 8"
    )
