"""The host side as a whole: whatever happens around it, a sequence gets the tokens of its solo run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jetserve.config import SchedulerSettings
from jetserve.engine.engine import Engine
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.plan import Admission
from jetserve.engine.scheduler import Scheduler, Update
from jetserve.engine.sequence import Sequence
from jetserve.engine.sizing import Sizing
from jetserve.errors import InvalidRequest
from jetserve.request import FinishReason, ModelLimits, Request, SamplingParams

VOCAB = 50
SYSTEM = tuple((7 * i + 3) % VOCAB for i in range(20))  # what prompts have in common
LIMITS = ModelLimits(vocab_size=VOCAB, max_length=40, eos_token_ids=(0,), max_prompt_tokens=39)
SIZING = Sizing(
    slots=4,
    max_length=40,
    page_size=4,
    pages=41,
    prefill_sizes=(4, 8),
    prefill_rows=3,
    prefill_tokens=8,
    generate_rows=(1, 2, 4),
    generate_steps=(1,),
)


def mixed(tokens: Ids[int], seed: int) -> int:
    """A token that depends on every one before it."""
    value = seed % 1009
    for token in tokens:
        value = (value * 31 + token + 7) % 1000003
    return value % VOCAB


def next_token(tokens: Ids[int], admission: Admission) -> int:
    return mixed(tokens, admission.seed)


def solo(request: Request, index: int) -> list[int]:
    """What the request generates when nothing else exists."""
    answer: list[int] = []
    while len(answer) < request.max_tokens:
        token = mixed([*request.prompt_token_ids, *answer], request.sample_seed(index))
        if len(answer) < request.params.min_tokens:
            while token in request.stop_token_ids:
                token = (token + 1) % VOCAB
        answer.append(token)
        if token in request.stop_token_ids:
            break
    return answer


def engine(sizing: Sizing = SIZING, settings: SchedulerSettings | None = None, **changes: Any) -> Engine:
    return Engine(Scheduler(sizing, settings), FakeExecutor(sizing, VOCAB, next_token=next_token, **changes))


def request(prompt: Ids[int], max_tokens: int, name: str | None = None, **params: Any) -> Request:
    made = SamplingParams(**{"max_tokens": max_tokens, "seed": 3, **params})
    return Request.create(prompt, made, LIMITS, request_id=name, now=0.0)


def run(on: Engine, most_steps: int = 1000) -> list[Update]:
    updates: list[Update] = []
    for _ in range(most_steps):
        if not on.has_work:
            on.check()
            return updates
        updates += on.step(0.0)
    raise AssertionError(f"still running after {most_steps} steps: {on.status()}")


def answers(updates: list[Update]) -> dict[tuple[str, int], tuple[list[int], FinishReason | None]]:
    found: dict[tuple[str, int], tuple[list[int], FinishReason | None]] = {}
    for sequence, tokens, _, reason in updates:
        key = (sequence.request.request_id, sequence.index)
        so_far, ended = found.get(key, ([], None))
        assert ended is None, f"{sequence} got more after its end"
        found[key] = (so_far + tokens, reason)
    return found


def test_first_result_comes_with_the_second_step() -> None:
    on = engine()
    [sequence] = on.add(request((1, 2), 4))
    assert on.step(5.0) == [Update(sequence, [])]
    assert sequence.scheduled_seconds == 5.0
    assert [u.token_ids for u in on.step(6.0)] == [[t] for t in solo(sequence.request, 0)[:2]]


def test_plan_is_dispatched_before_the_one_before_is_read() -> None:
    events: list[str] = []

    class Watched(FakeExecutor):
        def execute(self, plan: Any) -> Any:
            number = len(self.plans)
            events.append(f"dispatch {number}")
            pending = super().execute(plan)

            class Pending:
                def result(self) -> Any:
                    events.append(f"read {number}")
                    return pending.result()

            return Pending()

    on = Engine(Scheduler(SIZING), Watched(SIZING, VOCAB))
    on.add(request((1, 2), 4, ignore_eos=True))
    run(on)
    assert events == ["dispatch 0", "dispatch 1", "read 0", "dispatch 2", "read 1", "read 2"]


def test_samples_of_a_request_have_their_own_seeds() -> None:
    on = engine()
    asked = request((1, 2, 3), 8, n=3)
    on.add(asked)
    found = answers(run(on))
    assert [found[asked.request_id, i][0] for i in range(3)] == [solo(asked, i) for i in range(3)]
    assert len({tuple(solo(asked, i)) for i in range(3)}) == 3


def test_pool_for_one_serves_many_in_turn() -> None:
    """R60: memory runs full, processing goes on."""
    sizing = Sizing(**{**{f: getattr(SIZING, f) for f in SIZING.__slots__}, "pages": 6, "page_size": 4})
    on = engine(sizing)
    asked = [request((i + 1,) * 5, 12, ignore_eos=True) for i in range(6)]
    for one in asked:
        on.add(one)
    found = answers(run(on))
    assert [found[one.request_id, 0] for one in asked] == [(solo(one, 0), FinishReason.LENGTH) for one in asked]
    assert on.status().preemptions > 0


def test_single_sequence_fills_the_pool_to_its_last_page() -> None:
    """R61: a request that needs every page ends with length; one that needs more is refused before it starts."""
    sizing = Sizing(**{**{f: getattr(SIZING, f) for f in SIZING.__slots__}, "pages": 5})
    on = engine(sizing)
    asked = request((1,) * 6, 11, ignore_eos=True)  # 16 positions, 4 pages
    on.add(asked)
    assert answers(run(on))[asked.request_id, 0] == (solo(asked, 0), FinishReason.LENGTH)
    with pytest.raises(InvalidRequest, match="needs 5 KV pages"):
        on.add(request((1,) * 6, 12, ignore_eos=True))
    assert not on.has_work


def test_running_stream_gets_a_token_in_every_step_while_prompts_keep_coming() -> None:
    """R35: the largest gap of a running stream is one step, and no step prefills more than its budget."""
    fake = FakeExecutor(SIZING, VOCAB, next_token=next_token)
    on = Engine(Scheduler(SIZING), fake)
    stream = request((1, 2), 30, "stream", ignore_eos=True)
    on.add(stream)
    on.step(0.0)
    steps_with_tokens = []
    for number in range(28):
        on.add(request((3,) * 20, 2, f"late-{number}", ignore_eos=True))
        updates = on.step(0.0)
        steps_with_tokens.append(any(u.sequence.request is stream and u.token_ids for u in updates))
    assert all(steps_with_tokens)
    assert max(plan.prefill_tokens for plan in fake.plans) == SIZING.prefill_tokens
    run(on)


def test_totals_count_what_was_read() -> None:
    on = engine()
    on.add(request((1, 2, 3), 5, ignore_eos=True))
    run(on)
    status = on.status()
    assert (status.prefill_tokens, status.generated_tokens, status.preemptions) == (3, 5, 0)
    assert (status.running, status.waiting, status.waiting_tokens, status.pages_used) == (0, 0, 0, 0)
    assert (status.slots_total, status.pages_total) == (4, 40)


def test_device_time_is_counted_from_dispatch_or_the_end_of_the_step_before() -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    fake = FakeExecutor(SIZING, VOCAB, step_seconds=2.0, clock=lambda: now, sleep=sleep)
    on = Engine(Scheduler(SIZING), fake, clock=lambda: now)
    on.add(request((1, 2), 4, ignore_eos=True))
    run(on)
    assert (on.status().steps, on.status().device_seconds, on.status().host_seconds) == (3, 6.0, 0.0)


def test_abort_ends_one_sample_or_all() -> None:
    on = engine()
    asked = request((1, 2), 20, "x", n=2, ignore_eos=True)
    on.add(asked)
    on.step(0.0)
    assert on.abort("x", 0) is True
    assert on.abort("x", 0) is False
    on.check()
    assert on.status().running == 1
    assert on.abort("x") is True
    assert (on.abort("x"), on.abort("unknown")) == (False, False)
    assert on.status().running == 0
    assert run(on) == []


def test_name_of_an_aborted_request_can_be_used_again_at_once() -> None:
    on = engine()
    on.add(request((1, 2), 20, "x", ignore_eos=True))
    on.step(0.0)
    on.abort("x")
    again = request((4, 5), 6, "x", ignore_eos=True)
    on.add(again)
    updates = run(on)
    assert all(u.sequence.request is again for u in updates)
    assert answers(updates)["x", 0][0] == solo(again, 0)


@pytest.mark.parametrize("rounds", [40, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [{}, {"host_blocks": 3, "pages": 13}, {"prefix_cache": False}])
def test_slot_belongs_to_a_sequence_until_its_end(rounds: int, sizes: dict[str, Any]) -> None:
    """R33: a long prompt in 8 chunks while short requests come, end and are cancelled in slots that are full."""
    chance = random.Random(5)
    sizing = replace(SIZING, prefill_sizes=(4,), prefill_tokens=4, **sizes)
    for round_ in range(rounds):
        on = engine(sizing)
        long = request((*SYSTEM[: chance.randrange(3)], *(chance.randrange(VOCAB) for _ in range(30))), 8, "long")
        asked = [long]
        for at in range(12):  # half of them begin alike, or as the long one
            shared = chance.choice((SYSTEM, long.prompt_token_ids, ()))[: chance.randrange(20)]
            own = (chance.randrange(VOCAB) for _ in range(chance.randrange(1, 6)))
            asked.append(request((*shared, *own), chance.randrange(1, 5), f"{round_}/{at}"))
        asked[0], asked[2] = asked[2], asked[0]
        pending, updates, owners, given_up = list(asked), [], {}, set()
        while pending or on.has_work:
            while pending and on.status().running + on.status().waiting <= sizing.slots:
                on.add(pending.pop(0))
            updates += on.step(0.0)
            on.check()
            for sequence in on.scheduler.rows.residents:
                assert owners.setdefault((sequence, sequence.incarnation), sequence.slot) == sequence.slot
                if sequence.request is not long and chance.random() < 0.02:
                    given_up.add(sequence.request.request_id)
                    on.abort(sequence.request.request_id)
        found = answers(updates)
        for one in asked:
            assert one.request_id in given_up or found[one.request_id, 0][0] == solo(one, 0)
        assert on.status().pages_used == 0


@dataclass
class Asked:
    request: Request
    tokens: dict[int, list[int]]
    open: set[int]


class Interleavings(RuleBasedStateMachine):
    """Arrivals, aborts, flushes and steps in any order, over pools of any size, with prompts that share beginnings."""

    @initialize(
        pages=st.integers(2, 14),
        cache=st.sampled_from([(True, 0), (True, 1), (True, 3), (True, 6), (False, 0)]),
        policy=st.sampled_from(["fcfs", "longest_prefix"]),
        ageing=st.integers(1, 4),
        tpot_target_ms=st.sampled_from([None, 1e-9, 1500]),
        ttft_target_ms=st.sampled_from([None, 1e-9, 4000]),
        page_size=st.sampled_from([1, 2, 4]),
        slots=st.sampled_from([1, 2, 4]),
        steps=st.sampled_from([(1,), (1, 3), (2, 4)]),
        prefill=st.sampled_from([((4,), 4, 1), ((4, 8), 8, 3), ((8,), 5, 2)]),
    )
    def begin(
        self, pages: int, page_size: int, slots: int, steps: tuple[int, ...], prefill: Any, cache: tuple[bool, int],
        **settings: Any,
    ) -> None:  # fmt: skip
        sizes, tokens, rows = prefill
        batches = tuple(size for size in (1, 2, 4) if size <= slots)
        self.sizing = Sizing(slots, 40, page_size, pages, sizes, rows, tokens, batches, steps, *cache)
        chance = random.Random(1)  # steps that are measured to take this or that, and the same when played again
        clock = itertools.accumulate(chance.random() for _ in itertools.count()).__next__
        scheduler = Scheduler(self.sizing, SchedulerSettings.model_validate(settings))
        self.engine = Engine(scheduler, FakeExecutor(self.sizing, VOCAB, next_token=next_token), clock=clock)
        self.asked: dict[str, Asked] = {}
        self.owners: dict[tuple[Sequence, int], int | None] = {}
        self.names = 0

    @rule(
        own=st.lists(st.integers(0, VOCAB - 1), max_size=9),
        shared=st.integers(0, 20),
        salt=st.sampled_from([None, None, "a"]),
        max_tokens=st.integers(1, 14),
        min_tokens=st.integers(0, 3),
        n=st.integers(1, 2),
        priority=st.integers(-1, 1),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    )
    def arrive(
        self, own: list[int], shared: int, salt: str | None, max_tokens: int, min_tokens: int, n: int, priority: int,
        stops: list[int],
    ) -> None:  # fmt: skip
        self._ask([*SYSTEM[:shared], *(own or [1])], salt, max_tokens, min_tokens, n, priority, stops)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), max_tokens=st.integers(1, 9))
    def next_turn(self, data: st.DataObject, own: list[int], max_tokens: int) -> None:
        """A prompt that goes on from an earlier answer, or from what there is of it."""
        before = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        prompt = [*before.request.prompt_token_ids, *before.tokens[0], *own]
        if len(prompt) < LIMITS.max_length:
            self._ask(prompt, before.request.cache_salt, max_tokens, 0, 1, 0, [])

    @rule()
    def flush(self) -> None:
        self.engine.flush()

    def _ask(
        self, prompt: list[int], salt: str | None, max_tokens: int, min_tokens: int, n: int, priority: int,
        stops: list[int],
    ) -> None:  # fmt: skip
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), n=n, stop_token_ids=tuple(stops), seed=9
        )
        self.names += 1
        name = f"r{self.names}"
        asked = Request.create(prompt, params, LIMITS, request_id=name, priority=priority, cache_salt=salt, now=0.0)
        pages = -(-(len(prompt) + asked.max_tokens - 1) // self.sizing.page_size)
        if pages > self.sizing.usable_pages:
            with pytest.raises(InvalidRequest):
                self.engine.add(asked)
            return
        self.engine.add(asked)
        self.asked[name] = Asked(asked, {i: [] for i in range(n)}, set(range(n)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        asked = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        index = data.draw(st.sampled_from([None, *asked.tokens]))
        expected = bool(asked.open) if index is None else index in asked.open
        assert self.engine.abort(asked.request.request_id, index) is expected
        asked.open -= set(asked.tokens) if index is None else {index}

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            for sequence, tokens, _, reason in self.engine.step(0.0):
                asked = self.asked[sequence.request.request_id]
                assert sequence.index in asked.open, "news of a sample that has ended"
                asked.tokens[sequence.index] += tokens
                expected = solo(sequence.request, sequence.index)
                assert asked.tokens[sequence.index] == expected[: len(asked.tokens[sequence.index])]
                if reason is not None:
                    assert asked.tokens[sequence.index] == expected
                    is_stop = expected[-1] in sequence.request.stop_token_ids
                    assert reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
                    asked.open.remove(sequence.index)
            self.books_agree()

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        for sequence in self.engine.scheduler.rows.residents:
            key = (sequence, sequence.incarnation)
            assert self.owners.setdefault(key, sequence.slot) == sequence.slot
        if not self.sizing.prefix_cache:
            assert self.engine.status().cached_pages == 0
        assert self.engine.status().running + self.engine.status().waiting == sum(
            len(asked.open) for asked in self.asked.values()
        )

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        tokens = sum(len(a.request.prompt_token_ids) + 2 * a.request.max_tokens for a in self.asked.values())
        for _ in range(50 + 20 * tokens):  # progress: every request ends
            if not self.engine.has_work:
                break
            self.step(1)
        assert not any(asked.open for asked in self.asked.values())
        status = self.engine.status()
        assert (status.running, status.waiting, status.waiting_tokens, status.pages_used) == (0, 0, 0, 0)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_ten_thousand_steps_of_interleavings() -> None:
    steps = 0

    class Counted(Interleavings):
        @rule()
        def one_more(self) -> None:
            self.step(1)

        def books_agree(self) -> None:
            nonlocal steps
            super().books_agree()
            steps += 1

    more = settings(max_examples=500, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Counted, settings=more)
    assert steps >= 10_000
