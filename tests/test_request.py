"""Every rule of a valid request: one row per rule, and properties over the rest."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetserve.errors import InvalidRequest, JetserveError, RequestError
from jetserve.request import (
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    FinishReason,
    ModelLimits,
    Request,
    SamplingParams,
    Usage,
)

LIMITS = ModelLimits(vocab_size=100, max_length=16, eos_token_ids=(2, 3), max_prompt_tokens=12)
INFINITY = math.inf
NAN = math.nan


def create(prompt: object = (5, 6, 7), limits: ModelLimits = LIMITS, **fields: object) -> Request:
    return Request.create(prompt, SamplingParams(**fields), limits, now=100.0)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", 0, "max_tokens=0 is out of range, must be at least 1"),
        ("max_tokens", -1, "max_tokens=-1"),
        ("max_tokens", 1.5, "max_tokens must be a whole number, got 1.5"),
        ("max_tokens", True, "max_tokens must be a whole number, got True"),
        ("max_tokens", "8", "max_tokens must be a whole number, got '8'"),
        ("min_tokens", -1, "min_tokens=-1 is out of range, must be at least 0"),
        ("min_tokens", None, "min_tokens must be a whole number, got None"),
        ("temperature", -0.1, "temperature=-0.1 is out of range, must be at least 0.0 and at most 100.0"),
        ("temperature", 100.1, "temperature=100.1"),
        ("temperature", NAN, "temperature must be finite, got nan"),
        ("temperature", INFINITY, "temperature must be finite, got inf"),
        ("temperature", 10**400, "temperature="),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("temperature", False, "temperature must be a number, got False"),
        ("top_k", -2, "top_k=-2 is out of range, must be at least -1"),
        ("top_k", 1.0, "top_k must be a whole number, got 1.0"),
        ("top_p", 0.0, "top_p=0.0 is out of range, must be above 0.0 and at most 1.0"),
        ("top_p", 1.01, "top_p=1.01"),
        ("top_p", NAN, "top_p must be finite"),
        ("min_p", -0.01, "min_p=-0.01 is out of range, must be at least 0.0 and at most 1.0"),
        ("min_p", 1.01, "min_p=1.01"),
        ("presence_penalty", 2.1, "presence_penalty=2.1 is out of range, must be at least -2.0 and at most 2.0"),
        ("presence_penalty", -2.1, "presence_penalty=-2.1"),
        ("frequency_penalty", 2.1, "frequency_penalty=2.1"),
        ("frequency_penalty", -2.1, "frequency_penalty=-2.1"),
        ("repetition_penalty", 0.0, "repetition_penalty=0.0 is out of range, must be above 0.0 and at most 100.0"),
        ("repetition_penalty", 101, "repetition_penalty=101"),
        ("seed", 2**64, "seed=18446744073709551616 is out of range"),
        ("seed", -(2**63) - 1, "seed=-9223372036854775809 is out of range"),
        ("seed", 0.5, "seed must be a whole number, got 0.5"),
        ("stop", ("a", ""), "stop must hold non-empty strings, got ''"),
        ("stop", "", "stop must hold non-empty strings, got ''"),
        ("stop", (7,), "stop must hold non-empty strings, got 7"),
        ("stop", 7, "stop must be a list, got 7"),
        ("stop", tuple("abcdefghijklmnopq"), f"stop has 17 strings, at most {MAX_STOP_STRINGS} are allowed"),
        ("stop", "x" * 1025, f"a stop string has 1025 characters, at most {MAX_STOP_STRING_CHARS} are allowed"),
        ("stop_token_ids", (-1,), "stop_token_ids=-1 is out of range"),
        ("stop_token_ids", ("2",), "stop_token_ids must be a whole number, got '2'"),
        ("stop_token_ids", 2, "stop_token_ids must be a list, got 2"),
        ("stop_token_ids", "23", "stop_token_ids must be a list, got '23'"),
        ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
        ("include_stop", "no", "include_stop must be true or false, got 'no'"),
        ("skip_special_tokens", None, "skip_special_tokens must be true or false, got None"),
        ("logprobs", -1, "logprobs=-1 is out of range"),
        ("logprobs", 21, f"logprobs=21 is out of range, must be at least 0 and at most {MAX_LOGPROBS}"),
        ("logprobs", True, "logprobs must be a whole number, got True"),
        ("allowed_token_ids", (), "allowed_token_ids is empty"),
        ("allowed_token_ids", (-1,), "allowed_token_ids=-1 is out of range"),
        ("allowed_token_ids", 7, "allowed_token_ids must be a list, got 7"),
        ("allowed_token_ids", range(301), f"name 301 tokens, at most {MAX_BIASED_TOKENS} are allowed"),
        ("logit_bias", {-1: 1.0}, "logit_bias=-1 is out of range"),
        ("logit_bias", {"7": 1.0}, "logit_bias must be a whole number, got '7'"),
        ("logit_bias", {7: 100.5}, r"logit_bias[7]=100.5 is out of range, must be at least -100.0 and at most 100.0"),
        ("logit_bias", {7: NAN}, r"logit_bias[7] must be finite"),
        ("logit_bias", {7: None}, r"logit_bias[7] must be a number, got None"),
        ("logit_bias", [7], "logit_bias must map token ids to numbers, got [7]"),
        ("logit_bias", dict.fromkeys(range(301), 0.0), f"name 301 tokens, at most {MAX_BIASED_TOKENS} are allowed"),
        ("n", 0, "n=0 is out of range"),
        ("n", 65, f"n=65 is out of range, must be at least 1 and at most {MAX_SAMPLES}"),
    ],
)
def test_a_parameter_out_of_range_is_named_with_value_and_limit(field: str, value: object, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 100.0),
        ("top_k", -1),
        ("top_k", 10**6),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("min_p", 1.0),
        ("presence_penalty", -2),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 0.001),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("logprobs", 0),
        ("logprobs", MAX_LOGPROBS),
        ("n", MAX_SAMPLES),
        ("stop", ("x" * MAX_STOP_STRING_CHARS,) * MAX_STOP_STRINGS),
        ("allowed_token_ids", tuple(range(MAX_BIASED_TOKENS))),
        ("logit_bias", {7: -100, 8: 100.0}),
    ],
)
def test_the_limits_themselves_are_allowed(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens=5 must not exceed max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_biased_and_allowed_tokens_count_once_together() -> None:
    ids = range(MAX_BIASED_TOKENS)
    SamplingParams(logit_bias=dict.fromkeys(ids, 1.0), allowed_token_ids=tuple(ids))

    with pytest.raises(InvalidRequest, match="name 301 tokens"):
        SamplingParams(logit_bias=dict.fromkeys(ids, 1.0), allowed_token_ids=(1, 300))


def test_lists_become_tuples_and_a_lone_stop_string_a_list() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[7], allowed_token_ids=[8, 9])

    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a", "b"), (7,), (8, 9))
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    ("fields", "penalised"),
    [
        ({}, False),
        ({"presence_penalty": -1.0}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 1}, False),
    ],
)
def test_only_real_penalties_need_counts(fields: dict[str, float], penalised: bool) -> None:
    assert SamplingParams(**fields).has_penalties is penalised


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ((), "the prompt has no tokens"),
        ("hello", "prompt_token_ids must be a list of token ids, got text"),
        (b"hello", "prompt_token_ids must be a list of token ids, got text"),
        (7, "prompt_token_ids must be a list, got 7"),
        (tuple(range(13)), r"the prompt has 13 tokens, at most 12 fit (context 16); shorten it"),
        ((5, 100), "prompt_token_ids holds 100, outside the vocabulary [0, 100)"),
        ((-1,), "prompt_token_ids holds -1, outside the vocabulary [0, 100)"),
        ((True,), "prompt_token_ids must hold whole numbers, got True"),
        ((1.0,), "prompt_token_ids must hold whole numbers, got 1.0"),
        ((None,), "prompt_token_ids must hold whole numbers, got None"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: object, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        create(prompt)

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop_token_ids": (100,)}, "stop_token_ids holds 100, outside the vocabulary [0, 100)"),
        ({"allowed_token_ids": (7, 100)}, "allowed_token_ids holds 100, outside the vocabulary"),
        ({"logit_bias": {100: 1.0}}, "logit_bias holds 100, outside the vocabulary"),
        ({"min_tokens": 14}, "min_tokens=14 exceeds the 13 tokens left after the prompt"),
        ({"min_tokens": 1, "allowed_token_ids": (2, 3)}, "allowed_token_ids holds only tokens that end the sequence"),
        ({"stop_token_ids": tuple(range(4, 19))}, f"are 17, at most {MAX_STOP_TOKEN_IDS} fit"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        create(**fields)

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0 is out of range, must be above 0.0"),
        ({"timeout_seconds": -1}, "timeout_seconds=-1"),
        ({"timeout_seconds": NAN}, "timeout_seconds must be finite"),
        ({"priority": 2**31}, "priority=2147483648 is out of range"),
        ({"priority": 0.5}, "priority must be a whole number"),
        ({"request_id": "x" * 257}, "request_id must be printable text of at most 256 characters"),
        ({"request_id": "a\nb"}, "request_id must be printable text"),
        ({"request_id": "\ud800"}, "request_id must be printable text"),
        ({"request_id": 7}, "request_id must be printable text"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request.create((5,), SamplingParams(), LIMITS, **arguments)

    assert said in str(caught.value)


@pytest.mark.parametrize(("asked", "given"), [(None, 13), (1, 1), (13, 13), (14, 13), (10**9, 13)])
def test_max_tokens_is_what_was_asked_cut_to_the_room_left(asked: int | None, given: int) -> None:
    assert create(max_tokens=asked).max_tokens == given


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, (2, 3)),
        ({"stop_token_ids": (9, 3, 9)}, (2, 3, 9)),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": (9,)}, (9,)),
    ],
)
def test_stop_ids_are_the_models_and_the_requests(fields: dict[str, object], ids: tuple[int, ...]) -> None:
    assert create(**fields).stop_token_ids == ids


def test_allowed_end_tokens_are_fine_without_min_tokens() -> None:
    assert create(allowed_token_ids=(2, 3)).params.allowed_token_ids == (2, 3)


def test_the_deadline_counts_from_arrival() -> None:
    request = Request.create((5,), SamplingParams(), LIMITS, timeout_seconds=2.5, now=100.0)

    assert (request.arrival_seconds, request.deadline_seconds) == (100.0, 102.5)
    assert create().deadline_seconds is None


def test_ids_are_kept_or_drawn_fresh() -> None:
    assert Request.create((5,), SamplingParams(), LIMITS, request_id="mine").request_id == "mine"
    drawn = {Request.create((5,), SamplingParams(), LIMITS, request_id=given).request_id for given in (None, "", None)}
    assert len(drawn) == 3


def test_unseeded_requests_draw_different_seeds() -> None:
    assert len({create().params.seed for _ in range(50)}) == 50


@pytest.mark.parametrize(("seed", "kept"), [(0, 0), (7, 7), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seeds_are_kept_modulo_64_bits(seed: int, kept: int) -> None:
    assert create(seed=seed).params.seed == kept


def test_samples_of_one_request_have_distinct_fixed_seeds() -> None:
    seeds = [create(seed=7).sample_seed(index) for index in range(MAX_SAMPLES)]

    assert seeds[0] == 7
    assert seeds[1] == (7 + 0x9E3779B97F4A7C15) % 2**64
    assert len(set(seeds)) == MAX_SAMPLES
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_request_cannot_change() -> None:
    request = create()

    with pytest.raises(dataclasses.FrozenInstanceError):
        request.priority = 1  # type: ignore[misc]


def test_usage_adds_up() -> None:
    assert Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4).total_tokens == 8


def test_finish_reasons_are_their_words() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort"]


def test_a_wrong_request_is_a_request_error() -> None:
    assert issubclass(InvalidRequest, RequestError)
    assert issubclass(RequestError, JetserveError)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.one_of(st.integers(-2, 120), st.text(max_size=3), st.none()), max_size=20),
    st.dictionaries(
        st.one_of(st.integers(-2, 120), st.text(max_size=3)), st.one_of(st.floats(), st.none()), max_size=4
    ),
)
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4), ANYTHING)
def test_whatever_is_sent_is_a_valid_request_or_one_kind_of_error(fields: dict[str, object], prompt: object) -> None:
    try:
        request = create(prompt, **fields)
    except InvalidRequest:
        return

    assert 1 <= request.max_tokens <= LIMITS.max_length - len(request.prompt_token_ids)
    assert request.params.min_tokens <= request.max_tokens
    assert request.params.seed is not None
    assert 0 <= request.params.seed < 2**64
    assert len(request.stop_token_ids) == len(set(request.stop_token_ids)) <= MAX_STOP_TOKEN_IDS
    assert all(0 <= token < LIMITS.vocab_size for token in (*request.prompt_token_ids, *request.stop_token_ids))


VALID = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.none() | st.integers(8, 2**40),
        "min_tokens": st.integers(0, 4),
        "temperature": st.floats(0, 100),
        "top_k": st.integers(-1, 2**31),
        "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0, 100, exclude_min=True),
        "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=5),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "stop": st.text(min_size=1, max_size=20) | st.lists(st.text(min_size=1, max_size=20), max_size=16),
        "stop_token_ids": st.lists(st.integers(0, 99), max_size=14),
        "logprobs": st.none() | st.integers(0, 20),
        "n": st.integers(1, 64),
    },
)


@given(VALID, st.lists(st.integers(0, 99), min_size=1, max_size=12))
def test_everything_in_range_is_accepted_and_kept(fields: dict[str, object], prompt: list[int]) -> None:
    request = create(prompt, **fields)

    assert request.prompt_token_ids == tuple(prompt)
    kept = dataclasses.replace(request.params, max_tokens=None, seed=None)
    assert kept == dataclasses.replace(SamplingParams(**fields), max_tokens=None, seed=None)
