"""Requests before they meet an engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetserve.errors import ConfigError
from jetserve.simulation.trace import (
    FIRST_ID,
    VOCABULARY,
    Clipped,
    Span,
    Trace,
    TraceRequest,
    draw_token_ids,
    span_token_ids,
    token_ids,
)
from tests.simulation.conftest import trace_of


def request(tokens, output=4, at=0.0, **more):
    return TraceRequest(at, (Span(f"p{tokens}", tokens),), output, **more)


def test_drawn_ids_are_splitmix64():
    # splitmix64 from state 1234567: the first three outputs of the reference implementation.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [FIRST_ID + output % (VOCABULARY - FIRST_ID) for output in outputs]
    assert draw_token_ids(np.uint64(1234567), np.arange(3)).tolist() == expected


@given(key=st.text(min_size=1), short=st.integers(0, 50), long=st.integers(50, 200))
def test_spans_of_one_key_are_equal_as_far_as_both_reach(key, short, long):
    assert span_token_ids(Span(key, short)).tolist() == span_token_ids(Span(key, long)).tolist()[:short]


def test_spans_of_different_keys_differ():
    assert span_token_ids(Span("a", 20)).tolist() != span_token_ids(Span("b", 20)).tolist()


def test_a_prompt_is_its_pieces_in_a_row():
    span = Span("a", 3)
    assert token_ids(((7, 8), span, (9,))) == (7, 8, *span_token_ids(span).tolist(), 9)


def test_later_turns_are_no_openings():
    one, two, three = request(1, session="a"), request(2, session="a"), request(3)
    assert trace_of(one, two, three).openings == [one, three]


def test_the_rate_counts_later_turns_with_the_first_ones():
    trace = trace_of(request(1, session="a"), request(2, session="a"), request(3, at=2.0), request(4, at=4.0))
    # Three openings in two gaps of 2 s, four requests for three openings.
    assert trace.rate_requests_per_second == pytest.approx(0.5 * 4 / 3)


def test_at_rate_moves_arrivals_and_nothing_else():
    trace = trace_of(request(1), request(2, at=1.0, session="a", think_seconds=3.0), request(3, at=4.0))
    moved = trace.at_rate(3.0)
    assert [one.arrival_seconds for one in moved.requests] == pytest.approx([0.0, 1 / 6, 2 / 3])  # from 0.5 requests/s
    assert moved.requests[1].think_seconds == 3.0
    assert moved.rate_requests_per_second == pytest.approx(3.0)


def test_requests_that_come_at_once_have_no_rate():
    trace = trace_of(request(1), request(2))
    assert trace.rate_requests_per_second is None
    with pytest.raises(ConfigError, match="all requests of test arrive at the same time"):
        trace.at_rate(1.0)


def test_one_request_has_any_rate():
    trace = trace_of(request(1))
    assert trace.at_rate(5.0) is trace
    assert Trace("empty", ()).rate_requests_per_second is None


def test_clip_cuts_the_end_of_the_prompt_and_leaves_half_to_the_answer():
    long = TraceRequest(0.0, (Span("a", 6), (1, 2, 3), Span("b", 5)), 30)
    clipped, count = trace_of(long).clip(20)
    assert clipped.requests[0].output_tokens == 10
    assert clipped.requests[0].prompt == (Span("a", 6), (1, 2, 3), Span("b", 1))
    assert count == Clipped(prompts=1, prompt_tokens=4, outputs=1, output_tokens=20)


def test_clip_leaves_alone_what_fits():
    trace = trace_of(request(10, output=10))
    assert trace.clip(20) == (trace, Clipped())


def test_clip_cuts_no_prompt_of_a_later_turn():
    trace = trace_of(request(4, session="a"), request(90, output=30, session="a"))
    clipped, count = trace.clip(20)
    assert clipped.requests[1].prompt_tokens == 90
    assert count == Clipped(outputs=1, output_tokens=20)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=8),
    max_length=st.integers(2, 60),
)
def test_what_was_clipped_fits_and_is_counted(sizes, max_length):
    trace = trace_of(*(request(tokens, output) for tokens, output in sizes))
    clipped, count = trace.clip(max_length)
    before = [(one.prompt_tokens, one.output_tokens) for one in trace.requests]
    after = [(one.prompt_tokens, one.output_tokens) for one in clipped.requests]
    assert all(prompt >= 1 and output >= 1 and prompt + output <= max_length for prompt, output in after)
    assert count.prompt_tokens == sum(old[0] - new[0] for old, new in zip(before, after, strict=True))
    assert count.output_tokens == sum(old[1] - new[1] for old, new in zip(before, after, strict=True))
    assert count.prompts == sum(old[0] != new[0] for old, new in zip(before, after, strict=True))
    assert count.outputs == sum(old[1] != new[1] for old, new in zip(before, after, strict=True))
