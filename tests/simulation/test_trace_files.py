"""Traces on disk."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetserve.errors import ConfigError
from jetserve.simulation.trace import Span, Trace, TraceRequest, token_ids
from jetserve.simulation.trace_files import read_trace, write_trace
from jetserve.simulation.workloads import WORKLOADS

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,0

2023-11-16 18:18:04.0319600,110,27
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 4500, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]}
{"timestamp": 4500, "input_length": 600, "output_length": 7, "hash_ids": [0]}
"""
OURS = """{"arrival_seconds": 5.5, "prompt_tokens": 700, "output_tokens": 80, "priority": -1}

{"arrival_seconds": 2.0, "prompt": [["system", 200], [4, 5]], "output_tokens": 90, "session": "a"}
{"think_seconds": 4.0, "prompt_token_ids": [17, 29], "output_tokens": 60, "session": "a", "timeout_seconds": 9}
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="trace.jsonl"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_azures_columns_are_read(written):
    trace = read_trace(written(AZURE, "conv.csv"))
    assert trace.name == "conv.csv"
    assert [request.arrival_seconds for request in trace.requests] == pytest.approx([0.0, 0.052, 60.052])
    assert [request.prompt_tokens for request in trace.requests] == [4808, 3180, 110]
    assert [request.output_tokens for request in trace.requests] == [10, 1, 27]  # none is made one
    assert token_ids(trace.requests[0].prompt)[:9] != token_ids(trace.requests[1].prompt)[:9]


def test_mooncakes_lines_are_read_and_equal_hashes_are_equal_tokens(written):
    requests = read_trace(written(MOONCAKE)).requests
    first, second, third = (token_ids(request.prompt) for request in requests)
    assert [request.arrival_seconds for request in requests] == [0.0, 1.5, 1.5]
    assert [len(ids) for ids in (first, second, third)] == [1500, 1024, 600]
    assert [request.output_tokens for request in requests] == [500, 1, 7]
    assert second == first[:1024]
    assert third[:512] == first[:512]  # the tokens behind the last hash are the request's own
    assert third[512:] != first[512:600]


def test_our_lines_are_read(written):
    trace = read_trace(written(OURS))
    assert trace.requests == (
        TraceRequest(0.0, (Span("system", 200), (4, 5)), 90, session="a"),
        TraceRequest(0.0, ((17, 29),), 60, session="a", think_seconds=4.0, timeout_seconds=9.0),
        TraceRequest(3.5, (Span("line/1", 700),), 80, priority=-1),
    )


pieces = st.one_of(
    st.builds(Span, st.text(min_size=1, max_size=5), st.integers(1, 9)),
    st.lists(st.integers(0, 99), min_size=1, max_size=5).map(tuple),
)
singles = st.builds(
    TraceRequest,
    arrival_seconds=st.floats(0, 100),
    prompt=st.lists(pieces, min_size=1, max_size=3).map(tuple),
    output_tokens=st.integers(1, 99),
    think_seconds=st.floats(0, 9),
    timeout_seconds=st.one_of(st.none(), st.floats(0.5, 9)),
    priority=st.integers(-3, 3),
)


@given(requests=st.lists(singles, min_size=1, max_size=6))
def test_what_is_written_is_read_again(requests, tmp_path_factory):
    ordered = sorted(requests, key=lambda request: request.arrival_seconds)
    start = ordered[0].arrival_seconds
    shifted = [TraceRequest(one.arrival_seconds - start, *_rest(one)) for one in ordered]
    file = tmp_path_factory.mktemp("traces") / "t.jsonl"
    write_trace(Trace("t", tuple(shifted)), file)
    assert read_trace(file) == Trace("t.jsonl", tuple(shifted))


def _rest(one):
    return one.prompt, one.output_tokens, one.session, one.think_seconds, one.timeout_seconds, one.priority


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_survive_the_file(name, tmp_path):
    trace = WORKLOADS[name].generate(40)
    write_trace(trace, tmp_path / name)
    assert read_trace(tmp_path / name) == trace


GOOD = {"arrival_seconds": 1.0, "prompt_tokens": 5, "output_tokens": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arrival_seconds": None}, "arrival_seconds=None must be a number of at least 0"),
        ({"arrival_seconds": -1}, "arrival_seconds=-1 must be"),
        ({"arrival_seconds": True}, "arrival_seconds=True must be"),
        ({"arrival_seconds": "now"}, "arrival_seconds='now' must be"),
        ({"output_tokens": 0}, "output_tokens=0 must be a whole number from 1 to 16777216"),
        ({"output_tokens": 2.5}, "output_tokens=2.5 must be"),
        ({"prompt_tokens": 0}, "prompt_tokens=0 must be"),
        ({"prompt_tokens": 10**9}, "prompt_tokens=1000000000 must be"),
        ({"prompt_tokens": None}, "give one of prompt_tokens, prompt, prompt_token_ids; there are 0"),
        ({"prompt": [["a", 1]]}, "give one of prompt_tokens, prompt, prompt_token_ids; there are 2"),
        ({"prompt_tokens": None, "prompt": [["a", 0]]}, r"\['a', 0\] is neither"),
        ({"prompt_tokens": None, "prompt": [["a", True]]}, "is neither"),
        ({"prompt_tokens": None, "prompt": [3]}, "3 is neither"),
        ({"prompt_tokens": None, "prompt": []}, r"prompt=\[\] must be a list that is not empty"),
        ({"prompt_tokens": None, "prompt_token_ids": [1, -1]}, "must be token ids from 0 to 2147483647"),
        ({"prompt_tokens": None, "prompt_token_ids": "5 6"}, "prompt_token_ids='5 6' must be a list"),
        ({"session": ""}, "session='' must be a text"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 must be a number of at least 0.001"),
        ({"priority": 1.5}, "priority=1.5 must be"),
        ({"think_seconds": float("inf")}, "think_seconds=inf must be"),
        ({"max_tokens": 5}, "unknown key 'max_tokens'; there are arrival_seconds, output_tokens"),
        ({"hash_ids": [1], "input_length": 3}, "unknown key 'arrival_seconds'; there are hash_ids"),
    ],
)
def test_a_bad_line_of_ours_is_told_by_file_line_and_value(change, words, written):
    line = {key: value for key, value in (GOOD | change).items() if value is not None or key == "arrival_seconds"}
    file = written(json.dumps(GOOD) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=f"^{file}, line 2: .*{words}"):
        read_trace(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no requests|neither a JSON object"),
        ('{"arrival_seconds": 1', "line 1 is not JSON"),
        (json.dumps(GOOD) + "\n[1]\n", r"line 2 must be a JSON object, is \[1\]"),
        ("a,b\n1,2\n", "line 1: 'a,b' is neither a JSON object nor the columns TIMESTAMP,ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,7\n", "line 2: has 2 columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,7,8\n", "line 2: TIMESTAMP='noon' must be a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,8\n", "line 2: ContextTokens='x' must be"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,-8\n", "line 2: GeneratedTokens='-8' must"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": ["a"]}', "hash_ids=.* whole numbers"),
        ('{"timestamp": 1, "input_length": 512, "output_length": 2, "hash_ids": [1, 2]}', "at most 1 ids for 512 tok"),
        ('{"input_length": 512, "output_length": 2, "hash_ids": [1]}', "timestamp is missing; it must be a number"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 2, "hash_ids": [1]}', "input_length=0 must be"),
    ],
)
def test_a_file_that_is_no_trace_is_told_so(text, words, written):
    file = written(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


def test_a_file_that_cannot_be_read_or_written_is_told_so(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the trace .*none.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"cannot write .*: Is a directory"):
        write_trace(Trace("t", ()), tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text: byte [0-9]+; unpack it"):
        read_trace(tmp_path / "bytes")
