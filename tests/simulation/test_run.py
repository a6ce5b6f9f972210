"""Traces through the real engine: times that were added up by hand, and nothing lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetserve.config import SchedulerSettings
from jetserve.errors import ConfigError, Overloaded
from jetserve.orchestrator.intake import Intake
from jetserve.request import Request, SamplingParams
from jetserve.simulation.report import Limits, report
from jetserve.simulation.run import Outcome, QueueBound, run
from jetserve.simulation.trace import Span, TraceRequest, token_ids
from tests.simulation.conftest import make_setup, trace_of

ONE_SLOT = {"slots": 1, "generate_rows": (1,)}  # a decode step of one row is half of one of two: 0.05 s


def request(tokens, output, at=0.0, key=None, **more):
    return TraceRequest(at, (Span(key or f"{at}/{tokens}/{output}", tokens),), output, **more)


def outcomes(ran):
    return [record.outcome.value for record in ran.records]


def test_times_are_those_added_up_by_hand():
    # Prefill takes 1 s, a decode step 0.1 s, and both go into one plan:
    #   plan 1, sent at 0:    8 tokens of A, then one decode    done at 1.1, two tokens
    #   plan 2, sent at 0:    one decode                        done at 1.2, A's third token
    #   plan 3, sent at 1.1:  4 tokens of B, which came at 0.05 done at 2.2, B's only token
    ran = run(trace_of(request(8, 3), request(4, 1, at=0.05)), make_setup())
    first, second = ran.records
    assert first.message_seconds == pytest.approx([1.1, 1.2])
    assert second.message_seconds == pytest.approx([2.2])
    assert (first.scheduled_seconds, second.scheduled_seconds) == pytest.approx((0.0, 1.1))
    assert [len(record.token_ids) for record in ran.records] == [3, 1]
    assert ran.seconds == pytest.approx(2.2)
    found = report(ran, Limits(ttft_ms=1500), config="c", cost="m")
    assert found.ttft_ms.mean == pytest.approx((1100 + 2150) / 2)
    assert found.tpot_ms.mean == pytest.approx((50 + 0) / 2)
    assert found.itl_ms.mean == found.largest_gap_ms == pytest.approx(100)
    assert found.e2e_ms.mean == pytest.approx((1200 + 2150) / 2)
    assert found.queue_ms.mean == pytest.approx((0 + 1050) / 2)
    assert found.goodput == pytest.approx(1 / 2.2)
    assert found.goodput_tokens_per_second == pytest.approx(3 / 2.2)
    assert found.good_share == 0.5
    assert found.output_tokens_per_second == pytest.approx(4 / 2.2)
    assert found.input_tokens_per_second == pytest.approx(12 / 2.2)
    # 12 tokens in two programs of 8; powers of two from 16 would have been two of 16.
    assert (found.padded_share, found.power_of_two_padded_share) == (4 / 16, 20 / 32)
    # One slot from 0 to 2.2: A's until 1.2, B's from 1.1; both of them for 0.1 s.
    assert (found.slots_max, found.slots_mean) == (2, pytest.approx((1.2 + 1.1) / 2.2))
    assert (found.steps, found.device_busy_share) == (3, pytest.approx(1.0))


def test_the_hosts_time_delays_the_first_token():
    ran = run(trace_of(request(8, 1)), make_setup(host_seconds=0.25))
    assert ran.records[0].message_seconds == pytest.approx([1.25])


def test_a_request_that_came_during_a_step_waits_for_its_end():
    ran = run(trace_of(request(8, 9), request(4, 1, at=0.5)), make_setup())
    assert ran.records[1].scheduled_seconds == pytest.approx(1.1)


def test_time_between_requests_passes_at_once():
    ran = run(trace_of(request(8, 1), request(8, 1, at=1000.0)), make_setup())
    assert [record.end_seconds for record in ran.records] == pytest.approx([1.0, 1001.0])


def test_who_finds_the_queue_full_is_refused():
    three = trace_of(request(8, 2), request(7, 2), request(6, 2))
    assert outcomes(run(three, make_setup(ONE_SLOT, max_waiting_requests=1))) == [
        "finished",
        "finished",
        "refused",
    ]


def test_who_finds_too_many_tokens_waiting_is_refused():
    ran = run(trace_of(request(8, 2), request(7, 2), request(6, 2)), make_setup(max_waiting_tokens=15))
    assert outcomes(ran) == ["finished", "finished", "refused"]


def test_an_expired_request_is_no_finished_one_and_frees_its_slot():
    ran = run(
        trace_of(request(8, 30, timeout_seconds=1.52), request(4, 2, at=0.1)),
        make_setup(ONE_SLOT),
    )
    first, second = ran.records
    assert outcomes(ran) == ["expired", "finished"]
    assert first.end_seconds == pytest.approx(1.52)
    assert len(first.token_ids) == 11  # two at 1.05, then one every 0.05 s
    assert second.scheduled_seconds == pytest.approx(1.55)  # when the step that ran is over


def test_the_configured_timeout_is_for_requests_without_one():
    ran = run(
        trace_of(request(8, 30), request(8, 30, at=0.5, timeout_seconds=50.0)), make_setup(default_timeout_seconds=2.0)
    )
    assert outcomes(ran) == ["expired", "finished"]


def test_a_request_that_expires_while_it_waits_never_starts():
    ran = run(
        trace_of(request(8, 30), request(4, 2, at=0.1, timeout_seconds=0.5)),
        make_setup(ONE_SLOT),
    )
    assert outcomes(ran) == ["finished", "expired"]
    assert ran.starts == (0,)


def test_hopeless_requests_are_shed_once_times_are_known():
    calm = [request(8, 2, at=10.0 * at, key=f"calm-{at}") for at in range(20)]
    flood = [request(8, 2, at=300.0, key=f"flood-{at}") for at in range(40)]
    ran = run(trace_of(*calm, *flood), make_setup(shed_hopeless=True, ttft_target_ms=5000.0))
    count = Counter(outcomes(ran))
    assert count["finished"] + count["shed"] == 60
    assert outcomes(ran)[:20] == ["finished"] * 20
    assert count["shed"] > 20  # 5 s are enough for about 8 prompts of those 40


def test_the_next_turn_comes_after_the_answer_and_says_it_again():
    ran = run(
        trace_of(
            request(8, 3, session="a", key="one"),
            request(2, 2, session="a", key="two", think_seconds=5.0),
            request(3, 1, session="a", key="three"),
        ),
        make_setup(),
    )
    first, second, third = ran.records
    said = token_ids((Span("one", 8),)) + tuple(first.token_ids) + token_ids((Span("two", 2),))
    assert second.prompt_token_ids == said
    assert third.prompt_token_ids == said + tuple(second.token_ids) + token_ids((Span("three", 3),))
    assert second.arrival_seconds == pytest.approx(first.end_seconds + 5.0)
    assert third.arrival_seconds == second.end_seconds
    # The last token of an answer is never written.
    assert [record.cached_tokens for record in ran.records] == [0, 10, 14]


def test_a_session_without_an_answer_goes_no_further():
    ran = run(
        trace_of(
            request(8, 30, session="a", timeout_seconds=1.5), request(2, 2, session="a"), request(2, 2, session="a")
        ),
        make_setup(),
    )
    assert outcomes(ran) == ["expired", "unsent", "unsent"]


def test_a_session_that_outgrew_the_context_goes_no_further():
    ran = run(
        trace_of(request(30, 10, session="a"), request(20, 5, session="a"), request(1, 1, session="a")), make_setup()
    )
    assert outcomes(ran) == ["finished", "unsent", "unsent"]  # 30 + 10 + 20 + 5 exceed 64


def test_what_is_longer_than_the_context_is_clipped_and_counted():
    ran = run(trace_of(request(100, 40)), make_setup())
    (record,) = ran.records
    assert (len(record.prompt_token_ids), len(record.token_ids)) == (32, 32)
    assert (ran.clipped.prompt_tokens, ran.clipped.output_tokens) == (68, 8)


def test_what_is_longer_than_the_pool_is_clipped_too():
    ran = run(trace_of(request(100, 40)), make_setup({"pages": 5}))
    (record,) = ran.records
    assert (len(record.prompt_token_ids), len(record.token_ids)) == (9, 8)  # 17: the last one needs no place


def test_a_context_of_one_token_is_refused():
    with pytest.raises(ConfigError, match=r"raise engine\.max_length"):
        run(trace_of(request(5, 5)), make_setup({"max_length": 1}))


def test_priorities_go_first():
    ran = run(
        trace_of(request(8, 2, key="a"), request(8, 2, key="b", priority=1), request(8, 2, key="c", priority=-1)),
        make_setup(ONE_SLOT),
    )
    assert ran.starts[0] == 2


def test_progress_counts_to_the_end():
    seen = []
    turns = [request(8, 30, session="a", timeout_seconds=1.5), request(2, 2, session="a")]
    run(trace_of(*turns, request(4, 2)), make_setup(), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def random_trace(rng, count):
    requests = []
    for at in range(count):
        session = rng.choice([None, None, "a", "b"])
        requests.append(
            TraceRequest(
                rng.uniform(0, 20),
                (Span(rng.choice(["x", "y"]), rng.randrange(1, 20)), Span(f"own/{at}", rng.randrange(1, 20))),
                rng.randrange(1, 20),
                session,
                think_seconds=rng.choice([0.0, 1.0]),
                timeout_seconds=rng.choice([None, None, rng.uniform(0.1, 9)]),
                priority=rng.choice([0, 0, 1]),
            )
        )
    return trace_of(*requests)


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 30),
    pages=st.integers(6, 40),
    waiting=st.sampled_from([1, 3, 100]),
    sheds=st.booleans(),
    prefix_cache=st.booleans(),
    host_blocks=st.sampled_from([0, 6]),
    steps=st.sampled_from([(1,), (1, 4)]),
)
@settings(max_examples=60, deadline=None)
def test_no_request_is_lost_and_equal_runs_are_equal(
    seed, count, pages, waiting, sheds, prefix_cache, host_blocks, steps
):
    trace = random_trace(random.Random(seed), count)
    made = make_setup(
        {
            "pages": pages,
            "prefix_cache": prefix_cache,
            "host_blocks": host_blocks if prefix_cache else 0,
            "generate_steps": steps,
        },
        max_waiting_requests=waiting,
        shed_hopeless=sheds,
        ttft_target_ms=4000.0 if sheds else None,
    )
    ran, again = run(trace, made), run(trace, made)
    assert ran == again
    found = report(ran, Limits(ttft_ms=3000, tpot_ms=300), config="c", cost="m")
    assert found.finished + found.refused + found.shed + found.expired + found.unsent == found.requests == count
    for record in ran.records:
        if record.outcome is Outcome.FINISHED:
            assert len(record.token_ids) == min(record.request.output_tokens, made.max_tokens // 2)
            assert record.message_seconds == sorted(set(record.message_seconds))
            assert record.scheduled_seconds is not None
            assert record.arrival_seconds <= record.scheduled_seconds <= record.message_seconds[0]
            assert record.message_seconds[-1] == record.end_seconds
    assert found.computed_prompt_tokens >= found.ideal_computed_prompt_tokens or found.expired


@given(
    orders=st.lists(st.tuples(st.sampled_from(["ask", "leave"]), st.integers(1, 9)), max_size=40),
    slots=st.integers(0, 3),
    top=st.integers(1, 4),
    tokens=st.integers(1, 20),
)
def test_the_queue_is_bounded_as_the_orchestrators_is(orders, slots, top, tokens):
    bounds = SchedulerSettings(max_waiting_requests=top, max_waiting_tokens=tokens)
    ours, theirs = QueueBound(bounds, slots), Intake(bounds)
    waiting = []
    for order, length in orders:
        if order == "leave":
            if waiting:
                left = waiting.pop(0)
                ours.leave(len(left.prompt_token_ids))
                theirs.leave(left, 1)
            continue
        try:
            theirs.require_room(slots, 1, length)
            is_taken = True
        except Overloaded:
            is_taken = False
        assert ours.has_room(length) is is_taken
        if is_taken:
            waiting.append(Request("r", (1,) * length, SamplingParams(max_tokens=1, seed=0), (), 0.0))
            ours.enter(length)
            theirs.enter(waiting[-1])
