"""Who gets which pages: exact tables for prefixes around page borders."""

from __future__ import annotations

from typing import Any

import pytest

from jetserve.engine.kv_events import BlockRemoved, BlockStored, Medium
from jetserve.engine.memory import Found, KvMemory
from jetserve.engine.plan import HostMove, PageCopy
from jetserve.engine.sequence import Sequence
from jetserve.engine.sizing import Sizing
from jetserve.request import ModelLimits, Request, SamplingParams

LIMITS = ModelLimits(vocab_size=1000, max_length=64, eos_token_ids=(), max_prompt_tokens=63)
LONG = tuple(range(100, 112))  # three pages of four


def memory(pages: int = 33, *, is_observed: bool = False, **changes: Any) -> KvMemory:
    shapes: dict[str, Any] = {
        "slots": 4,
        "max_length": 64,
        "page_size": 4,
        "pages": pages,
        "prefill_sizes": (8,),
        "prefill_rows": 3,
        "prefill_tokens": 8,
        "generate_rows": (4,),
        "generate_steps": (1,),
    }
    return KvMemory(Sizing(**{**shapes, **changes}), is_observed=is_observed)


def sequence(prompt: tuple[int, ...], salt: str | None = None, order: int = 0, **params: Any) -> Sequence:
    made = SamplingParams(**{"max_tokens": 8, **params})
    return Sequence(Request.create(prompt, made, LIMITS, cache_salt=salt, now=0.0), 0, order)


def written(to: KvMemory, prompt: tuple[int, ...], answer: list[int] | None = None, salt: str | None = None) -> None:
    """A sequence comes, is prefilled, answers and leaves."""
    one = sequence(prompt, salt)
    one.generated = answer or []
    to.seat(one, len(prompt) + len(one.generated))
    one.prefilled = len(prompt)
    to.keep(one, len(prompt))
    to.leave(one)
    assert (to.take_saves(), to.used_pages) == ((), 0)
    to.check(())


@pytest.mark.parametrize(
    ("shared", "whole", "copied"),
    [(0, 0, 0), (1, 0, 1), (3, 0, 3), (4, 1, 0), (5, 1, 1), (7, 1, 3), (8, 2, 0), (11, 2, 3), (12, 3, 0)],
)
def test_prefix_is_found_to_the_token(shared: int, whole: int, copied: int) -> None:
    mine = memory()
    written(mine, LONG)
    one = sequence((*LONG[:shared], 1, 2, 3))
    found = mine.seat(one, len(one.prefix) + 1)
    assert (one.held.kept, one.held.written, one.cached) == (whole, shared, shared)
    assert one.held.pages[:whole] == [1, 2, 3][:whole]
    assert found.copies == ((PageCopy(whole + 1, one.held.pages[whole]),) if copied else ())
    assert (found.loads, found.is_ready) == ((), True)
    mine.check([one])


def test_prompt_that_is_cached_whole_recomputes_its_last_token() -> None:
    mine = memory()
    written(mine, LONG)
    one = sequence(LONG)
    found = mine.seat(one, len(LONG) + 1)
    assert (one.held.kept, one.held.written) == (2, 11)
    assert found.copies == (PageCopy(3, one.held.pages[2]),)
    assert 3 not in one.held.pages
    mine.check([one])


def test_answer_is_found_by_the_next_turn_but_for_its_last_token() -> None:
    """The last token was sampled and never written."""
    mine = memory()
    written(mine, (1, 2, 3), [4, 5, 6])
    one = sequence((1, 2, 3, 4, 5, 6, 7))
    mine.seat(one, 8)
    assert one.cached == 5


def test_page_that_a_running_sequence_has_filled_is_found_at_once() -> None:
    mine = memory()
    writer, reader = sequence(LONG), sequence(LONG)
    mine.seat(writer, 13)
    writer.prefilled = 8
    assert mine.is_being_written(reader)
    mine.keep(writer, 8)
    assert mine.is_being_written(reader) is False  # of the third page it would find no whole one
    mine.seat(reader, 13)
    assert (reader.held.written, reader.held.pages[:2]) == (8, writer.held.pages[:2])
    mine.check([writer, reader])
    mine.leave(writer)
    mine.leave(reader)
    assert mine.used_pages == 0
    mine.check(())


def test_unfinished_chunk_leaves_nothing_behind() -> None:
    """R56: pages enter the cache only after the write is known to be over."""
    mine = memory()
    one = sequence(LONG)
    mine.seat(one, 13)
    one.prefilled = 8  # dispatched, never committed
    mine.leave(one)
    assert (mine.tree.nodes, mine.pool.free_pages) == (0, 32)
    assert mine.is_being_written(sequence(LONG)) is False


def test_equal_pages_computed_twice_are_kept_once() -> None:
    mine = memory()
    first, second = sequence(LONG), sequence(LONG)
    for one in (first, second):
        mine.seat(one, 13)
        one.prefilled = 12
    for one in (first, second):
        mine.keep(one, 12)
    assert (mine.tree.nodes, first.held.kept, second.held.kept) == (3, 3, 0)
    mine.check([first, second])
    mine.leave(second)
    mine.leave(first)
    assert mine.tree.nodes == 3
    mine.check(())


def test_nobody_waits_for_pages_that_will_not_come() -> None:
    """Of two that compute the same pages one keeps its own ones till its end, and with it what comes behind them."""
    mine = memory()
    first, second = sequence(LONG[:8]), sequence(LONG)
    for one in (first, second):
        mine.seat(one, 13)
        one.prefilled = 8
    reader = sequence((*LONG, 1))
    mine.keep(first, 8)
    assert mine.is_being_written(reader)
    mine.keep(second, 8)
    assert mine.is_being_written(reader) is False
    mine.check([first, second])


def test_flush_lets_go_whoever_waits_for_a_prefix_from_before_it() -> None:
    mine = memory()
    before, after, reader = sequence(LONG), sequence(LONG), sequence(LONG)
    mine.seat(before, 13)
    mine.flush()
    before.prefilled = 4
    mine.keep(before, 4)
    assert mine.is_being_written(reader) is False
    mine.seat(after, 13)
    mine.leave(before)
    assert mine.is_being_written(reader), "of those who came after the flush"
    mine.check([after])


def test_salt_keeps_prefixes_apart() -> None:
    mine = memory()
    written(mine, LONG, salt="a")
    for salt, cached in (("a", 11), ("b", 0), (None, 0)):
        one = sequence(LONG, salt)
        mine.seat(one, 13)
        assert one.cached == cached
        mine.leave(one)


def test_nothing_is_shared_when_the_cache_is_off() -> None:
    mine = memory(prefix_cache=False)
    written(mine, LONG)
    one = sequence(LONG)
    mine.seat(one, 13)
    assert (one.cached, mine.tree.nodes, mine.is_being_written(sequence(LONG))) == (0, 0, False)


def test_least_recently_used_prefix_makes_room() -> None:
    mine = memory(pages=7)  # six usable
    written(mine, (1,) * 4)
    written(mine, (2,) * 4)
    written(mine, (1,) * 4)  # used again: its first three tokens were copied
    assert (mine.pool.free_pages, mine.available_pages) == (4, 6)
    mine.seat(one := sequence((3,) * 16), 20)  # five pages
    assert mine.cached_tokens(sequence((2,) * 5)) == 0
    assert mine.cached_tokens(sequence((1,) * 5)) == 4
    assert mine.totals.evicted_pages == 1
    mine.check([one])


def test_room_does_not_count_pages_that_would_be_shared() -> None:
    mine = memory(pages=4)  # three usable
    written(mine, (1,) * 8)  # two of them cached
    same, other = sequence((1,) * 8 + (5, 6)), sequence((2,) * 10)
    assert mine.has_room(same, 12, 0)
    assert mine.has_room(other, 12, 0)
    assert mine.has_room(same, 12, 1) is False
    assert mine.has_room(sequence((1,) * 8 + (5,) * 5), 16, 0) is False
    mine.check(())


def test_evicted_pages_go_to_host_memory_and_come_back() -> None:
    mine = memory(pages=4, host_blocks=2)
    written(mine, LONG)
    mine.seat(other := sequence((1,) * 8), 8)
    assert mine.take_saves() == (HostMove(3, 0), HostMove(2, 1))
    assert (mine.tree.nodes, mine.tree.hosted) == (1, 2)
    mine.leave(other)
    mine.begin_plan()
    one = sequence(LONG)
    found = mine.seat(one, 12)
    # the second page comes back whole, and the third to where its first three tokens are copied
    assert (one.held.pages[0], one.held.kept, one.cached) == (1, 2, 11)
    assert found == Found((), (HostMove(one.held.pages[1], 1), HostMove(one.held.pages[2], 0)), is_ready=False)
    mine.check([one])


def test_page_saved_by_a_plan_is_not_loaded_by_the_same_plan() -> None:
    mine = memory(pages=6, host_blocks=8)
    written(mine, LONG)
    first, second = sequence((1,) * 12), sequence(LONG)
    mine.seat(first, 16)  # two pages were free
    found = mine.seat(second, 4)
    assert (second.cached, found.is_ready) == (4, True)
    assert len(mine.take_saves()) == 2
    mine.check([first, second])


def test_page_saved_by_a_plan_is_not_read_in_part_by_the_same_plan() -> None:
    mine = memory(pages=9, host_blocks=8)
    written(mine, LONG)
    written(mine, (2, 2, 2, 2))
    first, second = sequence((1,) * 17), sequence(LONG)
    mine.seat(first, 20)  # four pages were free
    found = mine.seat(second, 12)
    assert (second.cached, found) == (8, Found())
    assert [move.page for move in mine.take_saves()] == [3, 4]
    mine.check([first, second])


def test_whoever_hits_a_page_that_is_being_loaded_waits_for_the_next_plan() -> None:
    mine = memory(pages=8, host_blocks=8)
    written(mine, LONG)
    big = sequence((9,) * 24)
    mine.seat(big, 28)
    assert len(mine.take_saves()) == 3
    mine.leave(big)
    mine.begin_plan()
    first, second = sequence((*LONG, 5)), sequence((*LONG, 6))
    assert mine.seat(first, 13).is_ready is False
    again = mine.seat(second, 13)
    assert (again.is_ready, again.loads, second.cached) == (False, (), 12)
    mine.take_saves()
    mine.begin_plan()
    third = sequence((*LONG, 7))
    assert mine.seat(third, 13).is_ready
    mine.check([first, second, third])


def test_flush_forgets_everything_but_what_is_in_use() -> None:
    mine = memory()
    written(mine, LONG)
    one = sequence((*LONG[:4], 1, 2))
    mine.seat(one, 7)
    assert mine.flush() == 2
    assert mine.cached_tokens(sequence(LONG)) == 0
    mine.check([one])
    one.prefilled = 6
    mine.keep(one, 6)
    mine.leave(one)
    assert mine.pool.free_pages == 32
    mine.check(())


def test_events_follow_the_tree() -> None:
    mine = memory(pages=4, is_observed=True)
    written(mine, LONG)
    mine.take_saves()
    [stored] = mine.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.parent, stored.token_ids, stored.medium) == (None, LONG, Medium.DEVICE)
    mine.seat(sequence((1,) * 8), 8)
    removed = [event for event in mine.take_events() if isinstance(event, BlockRemoved)]
    assert [value for event in removed for value in event.hashes] == [stored.hashes[2], stored.hashes[1]]
    mine.take_saves()


def test_tokens_that_sampling_counts_are_told_again() -> None:
    mine = memory()
    written(mine, LONG)
    for params, seen in (({}, ()), ({"repetition_penalty": 1.2}, LONG[:11])):
        one = sequence(LONG, **params)
        mine.seat(one, 13)
        one.slot = 0
        assert (one.admission().cached, one.admission().seen) == (11, seen)
        one.slot = None
        mine.leave(one)
