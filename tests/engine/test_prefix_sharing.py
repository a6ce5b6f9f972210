"""Shared prefixes on a device: a warm answer is the cold answer, whatever was shared and however it got there.

Every plan is checked by the strict fake executor as well, and answers against a model without a cache.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from jetserve.engine.plan import StepPlan
from jetserve.request import Request
from tests.engine.conftest import LLAMA_SETTINGS, MAX_LENGTH, Asked, Serve, Served

PAGE = 4
LATER = 400  # steps; whatever came before has ended by then


@pytest.fixture(scope="session")
def hosted(serve: Serve) -> Served:
    """With host memory for ever so many pages."""
    return serve("llama", *LLAMA_SETTINGS, "engine.host_kv_bytes=262144")


def prefilled(plans: list[StepPlan]) -> int:
    return sum(plan.prefill_tokens for plan in plans)


def in_turn(served: Served, *requests: Request, **sizes: Any) -> list[Asked]:
    """Serves one after the other, each when the one before has ended long ago."""
    asked = [Asked(request, arrival=at * LATER) for at, request in enumerate(requests)]
    served.run(asked, **sizes)
    return asked


def heard(asked: Asked) -> tuple[list[int], list[tuple[int, float]]]:
    return asked.tokens[0], [(entry.token_id, entry.logprob) for entry in asked.logprobs[0]]


SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
)


@pytest.mark.parametrize("params", SAMPLING, ids=["greedy", "seeded", "penalties"])
@pytest.mark.parametrize("shared", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 2, 5 * PAGE - 1, 5 * PAGE, 22])
def test_warm_answer_is_the_cold_answer(served: Served, shared: int, params: dict[str, Any]) -> None:
    """R54, around every border: of a page, inside one, and the whole prompt."""
    chance = random.Random(shared)
    prompt = served.prompt(chance, 22)
    writer = served.request((*prompt[:shared], *served.prompt(chance, 9)), 5)
    reader = served.request(prompt, 20, logprobs=0, **params)
    [cold] = in_turn(served, reader)
    asked = in_turn(served, writer, *(served.request(prompt, 20, logprobs=0, **params) for _ in range(3)))
    for warm in asked[1:]:
        assert warm.tokens == cold.tokens
        np.testing.assert_allclose([p for _, p in heard(warm)[1]], [p for _, p in heard(cold)[1]], atol=2e-5)
    served.require_right(asked)
    served.truth.require_answer(reader, cold.tokens[0], 0)


@pytest.mark.parametrize("shared", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 2, 5 * PAGE - 1, 5 * PAGE, 22])
def test_warm_logprobs_are_the_cold_ones_to_the_bit_with_one_prefill_size(gemma: Served, shared: int) -> None:
    """XLA:CPU's sums depend on the size of the program, so with several sizes they differ in the last bits."""
    chance = random.Random(shared)
    prompt = gemma.prompt(chance, 22)
    writer = gemma.request((*prompt[:shared], *gemma.prompt(chance, 9)), 1)
    [cold] = in_turn(gemma, gemma.request(prompt, 20, logprobs=3))
    _, warm = in_turn(gemma, writer, gemma.request(prompt, 20, logprobs=3))
    assert warm.tokens == cold.tokens
    assert warm.logprobs == cold.logprobs


def test_only_what_is_not_shared_is_computed(served: Served) -> None:
    chance = random.Random(1)
    prompt = served.prompt(chance, 30)
    first, second = served.request(prompt, 10), served.request((*prompt[:18], *served.prompt(chance, 7)), 4)
    in_turn(served, first, second, served.request(prompt, 3))
    assert prefilled(served.plans) == 30 + 7 + 1


def test_next_turn_computes_only_what_is_new(served: Served) -> None:
    """Generated tokens are shared too, but for the last one, which was never written."""
    chance = random.Random(2)
    prompt = served.prompt(chance, 13)
    [answer] = served.answers(served.request(prompt, 10))
    turn = (*prompt, *answer, *served.prompt(chance, 6))
    asked = in_turn(served, served.request(prompt, 10), served.request(turn, 10))
    assert prefilled(served.plans) == 13 + 1 + 6
    served.require_right(asked)


def test_samples_share_their_prompt(served: Served) -> None:
    chance = random.Random(3)
    asked = Asked(served.request(served.prompt(chance, 23), 8, n=4, temperature=1.0, seed=3))
    served.run([asked])
    assert prefilled(served.plans) == 23 + 3 * 3  # the fifth page was not full when the others began
    served.require_right([asked])


def test_prefix_that_is_being_written_is_waited_for(served: Served) -> None:
    chance = random.Random(4)
    common = served.prompt(chance, 32)
    asked = [Asked(served.request((*common, *served.prompt(chance, 3)), 6)) for _ in range(4)]
    served.run(asked)
    assert prefilled(served.plans) == 32 + 4 * 3
    served.require_right(asked)


@pytest.mark.parametrize("at", range(1, 9))
def test_cancelled_writer_leaves_nothing_wrong(served: Served, at: int) -> None:
    """R56: whoever comes at once with the same prefix gets the cold answer."""
    chance = random.Random(at)
    prompt = served.prompt(chance, 40)
    asked = [Asked(served.request(prompt, 20), abort=at), Asked(served.request(prompt, 20), arrival=at)]
    served.run(asked, prefill_tokens=8)
    served.require_right(asked)


def test_other_salt_finds_nothing(served: Served) -> None:
    """R58"""
    prompt = served.prompt(random.Random(6), 20)
    plain = served.request(prompt, 4)
    salted = [Request.create(prompt, plain.params, served.limits, cache_salt=salt, now=0.0) for salt in ("a", "b", "a")]
    asked = in_turn(served, plain, *salted)
    assert prefilled(served.plans) == 20 + 20 + 20 + 1
    served.require_right(asked)


def test_slots_that_held_others_start_clean_with_a_prefix_hit(served: Served) -> None:
    """R55: whatever a slot's state was, a sequence that begins behind cached tokens is the same."""
    chance = random.Random(7)
    prompt = served.prompt(chance, 21)
    params = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "logprobs": 0}
    [cold] = in_turn(served, served.request(prompt, 12, **params))
    served.poison_slots(lambda values: np.full_like(values, 1 if values.dtype == bool else 77))
    asked = [Asked(served.request(prompt[:20], 4)), Asked(served.request(prompt, 12, **params), arrival=LATER)]
    served.run(asked, between=lambda: served.poison_slots(lambda values: np.full_like(values, values.dtype != bool)))
    assert asked[1].tokens == cold.tokens
    served.require_right(asked)


def test_answers_after_eviction_are_the_cold_ones(served: Served) -> None:
    chance = random.Random(8)
    prompt = served.prompt(chance, 30)
    others = [served.request(served.prompt(chance, 40), 8) for _ in range(4)]
    asked = in_turn(served, served.request(prompt, 10), *others, served.request(prompt, 10), pages=17)
    assert prefilled(served.plans) == 30 + 4 * 40 + 30
    assert asked[0].tokens == asked[-1].tokens
    served.require_right(asked)


def test_pages_come_back_from_host_memory(hosted: Served) -> None:
    chance = random.Random(9)
    prompt = hosted.prompt(chance, 30)
    others = [hosted.request(hosted.prompt(chance, 40), 8) for _ in range(4)]
    asked = in_turn(hosted, hosted.request(prompt, 10), *others, hosted.request(prompt, 10), pages=17)
    assert sum(len(plan.loads) for plan in hosted.plans) == 8  # seven whole pages, and the eighth to its first token
    assert prefilled(hosted.plans) == 30 + 4 * 40 + 1
    assert asked[0].tokens == asked[-1].tokens
    hosted.require_right(asked)


def conversations(served: Served, chance: random.Random, count: int) -> list[Asked]:
    """Prompts that begin alike, in any order, some of them given up."""
    systems = [served.prompt(chance, chance.randint(1, 30)) for _ in range(2)]
    asked = []
    for _ in range(count):
        system = chance.choice(systems)
        prompt = (*system[: chance.randint(1, len(system))], *served.prompt(chance, chance.randint(0, 12)))
        params = dict(chance.choice(SAMPLING)) | {"seed": chance.randrange(100), "n": chance.choice((1, 1, 1, 2))}
        request = served.request(prompt, chance.randint(1, MAX_LENGTH - len(prompt)), eos=(11, 60), **params)
        arrival = chance.randint(0, 60)
        abort = arrival + chance.randint(0, 30) if chance.random() < 0.2 else None
        asked.append(Asked(request, arrival, abort))
    return asked


def play(served: Served, draw: dict[str, Any]) -> None:
    chance = random.Random(draw.pop("seed"))
    asked = conversations(served, chance, draw.pop("count"))
    served.run(asked, **draw)
    served.require_right(asked)


ANY_SCHEDULE = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "count": st.integers(2, 12),
        "pages": st.sampled_from([17, 18, 24, 40, 200]),
        "prefill_tokens": st.sampled_from([1, 3, 8]),
    }
)
FEW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@given(ANY_SCHEDULE)
@FEW
def test_any_schedule_of_prefixes_gives_the_right_tokens(served: Served, draw: dict[str, Any]) -> None:
    play(served, draw)


@given(ANY_SCHEDULE, st.sampled_from([1, 5, 60]))
@FEW
def test_any_schedule_through_host_memory_gives_the_right_tokens(
    hosted: Served, draw: dict[str, Any], blocks: int
) -> None:
    play(hosted, draw | {"host_blocks": blocks})


@pytest.mark.slow
@given(ANY_SCHEDULE)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules_through_host_memory_give_the_right_tokens(hosted: Served, draw: dict[str, Any]) -> None:
    play(hosted, draw | {"host_blocks": 20})
