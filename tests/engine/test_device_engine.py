"""The whole engine on a device: whatever else happens, a request gets the tokens of its solo run.

Every answer is compared with a recompute without a cache (oracle.py), and every plan is checked by the fake executor.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from jetserve.engine.compilations import COUNTER
from jetserve.request import FinishReason, Request
from tests.engine.conftest import MAX_LENGTH, Asked, Serve, Served

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 70, "top_p": 0.9},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.4, "logprobs": 3},
    {"logit_bias": {3: 4.0, 50: -100.0}, "logprobs": 0},
    {"temperature": 1.0, "allowed_token_ids": (1, 5, 9, 40)},
    {"min_tokens": 4, "stop_token_ids": (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)},
    {"temperature": 1.5, "n": 2},
)


def mixed(served: Served, chance: random.Random, count: int, longest: int = MAX_LENGTH) -> list[Request]:
    """Requests of all kinds and lengths; end ids are ordinary tokens."""
    requests = []
    for _ in range(count):
        kind = dict(chance.choice(KINDS))
        prompt = served.prompt(chance, chance.randint(1, longest - 1))
        room = longest - len(prompt)
        kind["min_tokens"] = min(kind.get("min_tokens", 0), room)
        max_tokens = max(kind["min_tokens"], chance.randint(1, room))
        requests.append(served.request(prompt, max_tokens, eos=(11, 60), seed=chance.randrange(2**64), **kind))
    return requests


def test_answers_hang_on_the_whole_prompt(served: Served) -> None:
    """What makes the other tests worth something: a wrong key or value anywhere shows."""
    chance = random.Random(0)
    prompt = list(served.prompt(chance, 24))
    answer = served.solo(served.request(prompt, 24))
    assert len(set(answer)) >= 8
    for at in (0, 12):
        other = [*prompt[:at], (prompt[at] + 1) % served.model.vocab_size, *prompt[at + 1 :]]
        assert served.solo(served.request(other, 24)) != answer


def test_together_as_alone(served: Served) -> None:
    """R52: greedy and seeded, all at once and in several orders."""
    chance = random.Random(1)
    requests = [request for request in mixed(served, chance, 14) if request.params.n == 1]
    alone = [served.solo(request) for request in requests]
    served.require_right([])
    for _ in range(3):
        order = chance.sample(range(len(requests)), len(requests))
        assert served.answers(*(requests[at] for at in order)) == [alone[at] for at in order]
    asked = [Asked(request, arrival=chance.randrange(40)) for request in requests]
    served.run(asked)
    assert [one.tokens[0] for one in asked] == alone
    served.require_right(asked)


SCHEDULES = {
    "seed": st.integers(0, 2**32),
    "count": st.integers(1, 7),
    "longest": st.sampled_from([8, 24, MAX_LENGTH]),
    "slots": st.integers(1, 4),
    "spare_pages": st.sampled_from([0, 1, 3, 1000]),
    "prefill_tokens": st.integers(1, 32),
    "prefill_rows": st.integers(1, 3),
    "spread": st.sampled_from([0, 10, 60]),
    "aborts": st.booleans(),
}


def any_schedule(served: Served, draw: dict[str, Any]) -> None:
    """A pool that just holds the longest sequence alone, or some pages more."""
    chance = random.Random(draw["seed"])
    asked = [
        Asked(
            request,
            arrival=chance.randint(0, draw["spread"]),
            abort=chance.randint(0, 80) if draw["aborts"] and chance.random() < 0.4 else None,
        )
        for request in mixed(served, chance, draw["count"], draw["longest"])
    ]
    pages = -(-draw["longest"] // served.sizing.page_size)
    served.run(
        asked,
        slots=draw["slots"],
        pages=min(served.sizing.pages, pages + 1 + draw["spare_pages"]),
        prefill_tokens=min(draw["prefill_tokens"], served.sizing.prefill_sizes[-1]),
        prefill_rows=draw["prefill_rows"],
    )
    served.require_right(asked)


THOROUGH = settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)


@given(draw=st.fixed_dictionaries(SCHEDULES))
@THOROUGH
def test_any_schedule_gives_llama_its_tokens(llama: Served, draw: dict[str, Any]) -> None:
    any_schedule(llama, draw)


@given(draw=st.fixed_dictionaries(SCHEDULES))
@THOROUGH
def test_any_schedule_gives_gemma_its_tokens(gemma: Served, draw: dict[str, Any]) -> None:
    any_schedule(gemma, draw)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("page_size", "steps"), [(1, "[1]"), (16, "[1, 4]")])
def test_any_schedule_on_pages_of_any_size(serve: Serve, name: str, page_size: int, steps: str) -> None:
    served = serve(
        name, f"engine.page_size={page_size}", "engine.prefill_sizes=[8, 32]", f"engine.generate_steps={steps}"
    )

    @given(draw=st.fixed_dictionaries(SCHEDULES))
    @settings(THOROUGH, max_examples=60)
    def check(draw: dict[str, Any]) -> None:
        any_schedule(served, draw)

    check()


@pytest.mark.parametrize("budget", [8, 16, 32])
def test_prompts_around_chunk_borders(served: Served, budget: int) -> None:
    """R63: one less, as many, one more than one and two chunks; each chunk within its budget, the answer the same."""
    chance = random.Random(2)
    lengths = sorted({n for k in (8, 16, 32) for n in (k - 1, k, k + 1)})
    requests = [served.request(served.prompt(chance, n), 6) for n in lengths]
    asked = [Asked(request) for request in requests]
    budget = min(budget, served.sizing.prefill_tokens)
    served.run(asked, prefill_tokens=budget)
    assert max(plan.prefill_tokens for plan in served.plans) == budget
    served.require_right(asked)
    assert [one.tokens[0] for one in asked] == [served.solo(request) for request in requests]


def test_every_prompt_length_up_to_the_limit(served: Served) -> None:
    """Prompts of 1 to 63 tokens, each answered to the end of the context; one more token than fits is never made."""
    chance = random.Random(3)
    asked = [Asked(served.request(served.prompt(chance, n), None)) for n in range(1, MAX_LENGTH)]
    served.run(asked)
    for one in asked:
        assert len(one.request.prompt_token_ids) + len(one.tokens[0]) == MAX_LENGTH
        assert one.reasons == {0: FinishReason.LENGTH}
    served.require_right(asked)


def test_chunks_of_several_prompts_share_a_program(served: Served) -> None:
    chance = random.Random(4)
    asked = [Asked(served.request(served.prompt(chance, n), 3)) for n in (3, 4, 5, 2)]
    served.run(asked, prefill_tokens=16)
    assert len(served.plans[0].chunks) == 3
    served.require_right(asked)


def test_preempted_requests_go_on_with_the_same_tokens(served: Served) -> None:
    """Seeded, penalised and greedy ones, resumed from what was generated, more than once."""
    chance = random.Random(5)
    requests = [
        served.request(served.prompt(chance, 6), 40, seed=at, **kind)
        for at, kind in enumerate(KINDS)
        if kind.get("n", 1) == 1 and "min_tokens" not in kind
    ]
    alone = [served.solo(request) for request in requests]
    # Room for one at its longest; small pages let several start.
    pages = -(-45 // served.sizing.page_size) + 2
    assert served.answers(*requests, pages=pages) == alone
    assert served.preemptions > len(requests)


def test_neighbours_that_vanish_leave_no_trace(served: Served) -> None:
    """R33: a long prompt in many chunks while short ones come, end and are cancelled in all other slots."""
    chance = random.Random(6)
    for round_ in range(6):
        long = Asked(served.request(served.prompt(chance, 50), 10), arrival=chance.randrange(4))
        others = [
            Asked(
                served.request(served.prompt(chance, chance.randint(1, 9)), chance.randint(1, 8), temperature=1.0),
                arrival=chance.randrange(20),
                abort=chance.choice([None, chance.randrange(30)]),
            )
            for _ in range(12)
        ]
        served.run([long, *others], prefill_tokens=7, pages=40 + round_)
        served.require_right([long, *others])


def test_blocks_of_four_tokens_give_the_tokens_of_single_steps(gemma: Served) -> None:
    chance = random.Random(7)
    requests = [
        gemma.request(gemma.prompt(chance, n), m, temperature=t, seed=n, eos=(11, 60))
        for n, m, t in ((5, 30, 0.0), (9, 17, 1.0), (1, 40, 0.8))
    ]
    blocks = gemma.answers(*requests)
    assert {plan.generate.steps for plan in gemma.plans if plan.generate} == {1, 4}
    singles = gemma.answers(*requests, generate_steps=(1,))
    assert {plan.generate.steps for plan in gemma.plans if plan.generate} == {1}
    assert blocks == singles


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_end_token_is_part_of_the_answer_and_ends_it(served: Served, length: int) -> None:
    """R44. The end token comes after `length` tokens, also inside a block of four."""
    prompt = served.prompt(random.Random(8), 10)
    free = served.solo(served.request(prompt, 20))
    end = next(token for token in free[length - 1 :] if free.index(token) >= length - 1)
    asked = Asked(served.request(prompt, 20, eos=(end,)))
    served.run([asked])
    assert asked.tokens[0] == free[: free.index(end) + 1]
    assert asked.reasons == {0: FinishReason.STOP}


def test_ignored_end_tokens_and_stop_ids(served: Served) -> None:
    """R43: ignore_eos ignores all of the model's end ids, and stop_token_ids still end."""
    prompt = served.prompt(random.Random(9), 10)
    free = served.solo(served.request(prompt, 20))
    first, second = free[2], next(token for token in free[5:] if token not in free[:5])
    ignoring, stopping = (
        Asked(served.request(prompt, 20, eos=(first, 1), ignore_eos=True, stop_token_ids=ids))
        for ids in ((), (second,))
    )
    served.run([ignoring, stopping])
    assert (ignoring.tokens[0], ignoring.reasons[0]) == (free, FinishReason.LENGTH)
    assert (stopping.tokens[0], stopping.reasons[0]) == (free[: free.index(second) + 1], FinishReason.STOP)


def test_no_end_token_before_min_tokens(served: Served) -> None:
    prompt = served.prompt(random.Random(10), 10)
    free = served.solo(served.request(prompt, 20))
    ends = tuple(dict.fromkeys(free))[:12]
    for least in (1, 2, 7, 20):
        asked = Asked(served.request(prompt, 20, eos=ends, min_tokens=least))
        served.run([asked])
        assert not set(asked.tokens[0][:least]) & set(ends)
        served.require_right([asked])


def test_single_token(served: Served) -> None:
    """R73, R77: max_tokens=1 gives one token, whose end is the limit unless it is an end token."""
    prompt = served.prompt(random.Random(11), 10)
    [token] = served.solo(served.request(prompt, 1))
    asked = [
        Asked(served.request(prompt, 1)),
        Asked(served.request(prompt, 1, eos=(token,))),
        Asked(served.request(served.prompt(random.Random(12), MAX_LENGTH - 1))),
    ]
    served.run(asked)
    assert [one.reasons[0] for one in asked] == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    assert [len(one.tokens[0]) for one in asked] == [1, 1, 1]
    assert asked[0].tokens == asked[1].tokens == {0: [token]}


def test_seeds(served: Served) -> None:
    """R50: without a seed answers differ, with one they repeat; every sample has its own."""
    prompt = served.prompt(random.Random(13), 5)

    def ask(**params: Any) -> dict[int, list[int]]:
        asked = Asked(served.request(prompt, 16, **{"temperature": 1.0, **params}))
        served.run([asked])
        served.require_right([asked])
        return asked.tokens

    assert len({tuple(ask()[0]) for _ in range(5)}) == 5
    assert ask(seed=7) == ask(seed=7)
    assert ask(seed=7) != ask(seed=8)
    assert ask(seed=-1) == ask(seed=2**64 - 1)
    samples = ask(seed=7, n=3)
    assert samples[0] == ask(seed=7)[0]
    assert len({tuple(tokens) for tokens in samples.values()}) == 3


def test_logprobs_come_with_their_tokens(served: Served) -> None:
    """Of the raw distribution, for those who asked, of the first token and of all later ones."""
    chance = random.Random(14)
    asked = [
        Asked(
            served.request(served.prompt(chance, 9), 11, temperature=t, logprobs=n, eos=(11, 60), logit_bias={5: 9.0})
        )
        for t, n in ((0.0, 4), (1.0, None), (1.0, 0), (0.0, 20))
    ]
    served.run(asked)
    for one in asked:
        wanted = one.request.params.logprobs
        if wanted is None:
            assert one.logprobs[0] == []
            continue
        logits = served.truth.logits([*one.request.prompt_token_ids, *one.tokens[0]]).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert [entry.token_id for entry in one.logprobs[0]] == one.tokens[0]
        for at, entry in enumerate(one.logprobs[0]):
            right = logprobs[len(one.request.prompt_token_ids) - 1 + at]
            assert entry.logprob == pytest.approx(right[entry.token_id], abs=1e-4)
            assert len(entry.top) == wanted
            assert [value for _, value in entry.top] == pytest.approx(np.sort(right)[::-1][:wanted].tolist(), abs=1e-4)
            for token, value in entry.top:
                assert value == pytest.approx(right[token], abs=1e-4)


def test_nothing_compiles_over_three_hundred_mixed_requests(llama: Served, gemma: Served) -> None:
    """R01, R02: every kind of parameter, length and number of neighbours."""
    chance = random.Random(15)
    for served in (llama, gemma):
        asked = [
            Asked(
                request, arrival=chance.randrange(200), abort=chance.choice([None, None, None, chance.randrange(300)])
            )
            for request in mixed(served, chance, 150)
        ]
        served.require_right([])
        before = COUNTER.compiled
        served.run(asked, pages=40)
        assert COUNTER.compiled == before
        assert sum(bool(one.reasons) for one in asked) > 75


POISONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "largest": lambda x: np.full_like(x, True if x.dtype == bool else np.nan if x.dtype.kind == "f" else 2**31 - 1),
    "negative": lambda x: np.full_like(x, True if x.dtype == bool else -np.inf if x.dtype.kind == "f" else -(2**31)),
    "plausible": lambda x: np.full_like(x, True if x.dtype == bool else 3),
}


@pytest.mark.parametrize("poison", POISONS)
def test_slots_and_pages_are_clean_whatever_was_in_them(served: Served, poison: str) -> None:
    """R55: all per-slot state and every page, the trash page included, hold rubbish before a request comes."""
    chance = random.Random(16)
    requests = [request for request in mixed(served, chance, 10) if request.params.n == 1]
    clean = served.answers(*requests)
    for some in (requests, requests[:1]):
        served.poison(POISONS[poison])
        assert served.answers(*some) == clean[: len(some)]


@example(stop=3)
@given(stop=st.integers(1, 12))
@settings(THOROUGH, max_examples=5)
def test_row_ends_by_itself_while_others_go_on(gemma: Served, stop: int) -> None:
    chance = random.Random(17)
    requests = [gemma.request(gemma.prompt(chance, 4), n) for n in (stop, 20, 13, 20)]
    assert gemma.answers(*requests) == [gemma.solo(request) for request in requests]
