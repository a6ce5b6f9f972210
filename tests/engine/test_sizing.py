"""The derived numbers of the engine."""

from __future__ import annotations

import pytest

from jetserve import config
from jetserve.engine import sizing
from jetserve.engine.sizing import Sizing
from jetserve.errors import ConfigError

TOKEN_BYTES = 1 << 10


def resolve(*settings: str, platform: str = "cpu", cache_bytes: int | None = None, max_position: int = 4096) -> Sizing:
    tree = config.load(settings=settings)
    return sizing.resolve(
        tree.engine,
        tree.scheduler,
        platform=platform,
        max_position=max_position,
        page_bytes_per_token=TOKEN_BYTES,
        cache_bytes=cache_bytes,
    )


@pytest.mark.parametrize(
    ("slots", "platform", "rows"),
    [
        (1, "cpu", (1,)),
        (2, "cpu", (2,)),
        (3, "cpu", (2, 3)),
        (8, "cpu", (2, 8)),
        (32, "cpu", (2, 8, 32)),
        (1, "tpu", (1,)),
        (96, "tpu", (96,)),
    ],
)
def test_generate_is_compiled_for_all_slots_and_below_by_powers(
    slots: int, platform: str, rows: tuple[int, ...]
) -> None:
    assert resolve(f"engine.slots={slots}", platform=platform).generate_rows == rows


def test_given_rows_are_kept_and_the_slots_added() -> None:
    assert resolve("engine.slots=16", "engine.generate_rows=[4, 12]").generate_rows == (4, 12, 16)


def test_the_pool_holds_every_slot_at_full_length_and_the_trash_page() -> None:
    sizes = resolve("engine.slots=4", "engine.max_length=100", "engine.page_size=16")

    assert (sizes.pages_per_slot, sizes.usable_pages, sizes.pages) == (7, 28, 29)
    assert sizes.max_pool_tokens == 28 * 16


def test_the_pool_is_no_larger_than_its_bytes() -> None:
    sizes = resolve(
        "engine.slots=4", "engine.max_length=100", "engine.page_size=16", f"engine.kv_bytes={TOKEN_BYTES * 100}"
    )

    assert sizes.usable_pages == 6


@pytest.mark.parametrize(
    ("platform", "max_position", "length", "page"),
    [("cpu", 4096, 2048, 16), ("cpu", 512, 512, 16), ("tpu", 131072, 8192, 128), ("cpu", 8, 8, 8)],
)
def test_lengths_follow_model_and_platform(platform: str, max_position: int, length: int, page: int) -> None:
    sizes = resolve(platform=platform, max_position=max_position)

    assert (sizes.max_length, sizes.page_size) == (length, page)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["engine.max_length=5000"], "engine.max_length=5000 exceeds the model's 4096 positions"),
        (["engine.generate_rows=[64]"], "engine.generate_rows=64 exceeds engine.slots=32"),
        (["engine.generate_steps=[32]"], "engine.generate_steps=32 exceeds engine.page_size=16"),
        (["engine.kv_bytes=1"], "the KV pool has no page: 1 bytes, 16384 a page"),
        (
            ["engine.kv_pages=1"],
            "engine.kv_pages=1 is the page for padding alone",
        ),
        (["engine.host_kv_bytes=16383"], "engine.host_kv_bytes=16383 holds no page, one is 16384 bytes; raise it or"),
        (
            ["engine.host_kv_bytes=16384", "engine.prefix_cache=false"],
            "engine.host_kv_bytes=16384 keeps pages of the prefix cache, and engine.prefix_cache is off",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(*settings)

    assert said in str(caught.value)
