"""What the device knows of a slot, and how an admission sets it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jetserve.engine import state as states
from jetserve.engine.plan import Admission
from jetserve.engine.sizing import Sizing
from jetserve.engine.state import NOWHERE, DecodeState, insert_layout, rows_where, write_admission
from jetserve.kernels import TRASH_PAGE
from jetserve.request import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS, SamplingParams

VOCAB = 23
SIZING = Sizing(
    slots=5,
    max_length=12,
    page_size=4,
    pages=20,
    prefill_sizes=(8,),
    prefill_rows=3,
    prefill_tokens=8,
    generate_rows=(5,),
    generate_steps=(1,),
)


def packed(*admissions: Admission) -> NDArray[np.int32]:
    layout = insert_layout(SIZING.prefill_rows)
    vector = layout.blank()
    fields = layout.views(vector)
    for row, admission in enumerate(admissions):
        write_admission(fields, row, admission)
    return vector


@jax.jit
def _insert(state: DecodeState, vector: jax.Array) -> DecodeState:
    return states.insert(state, insert_layout(SIZING.prefill_rows).unpack(vector))


def inserted(state: DecodeState, *admissions: Admission) -> dict[str, NDArray[np.generic]]:
    return flat(_insert(state, jnp.asarray(packed(*admissions))))


def flat(state: DecodeState) -> dict[str, NDArray[np.generic]]:
    own = {name: np.asarray(array) for name, array in vars(state).items() if name != "sampling"}
    return own | {name: np.asarray(array) for name, array in vars(state.sampling).items()}


def rubbish() -> DecodeState:
    """No field at a value that an admission would leave."""
    fresh = states.initial(SIZING, VOCAB)
    return jax.tree.map(
        lambda x: jnp.full_like(x, True if x.dtype == bool else jnp.nan if x.dtype == jnp.float32 else 777), fresh
    )


def admission(
    slot: int, stop_token_ids: tuple[int, ...] = (), seed: int = 0, generated: int = 0, **params: Any
) -> Admission:
    made = SamplingParams(**{"max_tokens": 9, **params})
    return Admission(slot, made, stop_token_ids, seed, prompt_tokens=4, generated=generated)


EVERYTHING = admission(
    3,
    stop_token_ids=(4, 9),
    seed=2**64 - 2**32 + 5,
    generated=2,
    max_tokens=8,
    min_tokens=3,
    temperature=0.75,
    top_k=11,
    top_p=0.5,
    min_p=0.125,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    logit_bias={7: -2.0, 3: 4.0},
    logprobs=0,
)


def test_every_parameter_reaches_its_row() -> None:
    found = inserted(rubbish(), EVERYTHING)
    row = {name: array[3].tolist() for name, array in found.items()}
    assert row["page_table"] == [TRASH_PAGE] * 3
    assert (row["last_token"], row["length"], row["active"]) == (0, 1, False)
    assert (row["generated"], row["max_tokens"], row["min_tokens"]) == (2, 8, 3)
    assert [row[name] for name in ("temperature", "top_p", "min_p")] == [0.75, 0.5, 0.125]
    assert [row[f"{name}_penalty"] for name in ("presence", "frequency", "repetition")] == [-1.5, 0.25, 1.5]
    assert (row["top_k"], row["wants_logprobs"], row["only_listed"]) == (11, True, False)
    assert np.array(row["seed"], np.int32).view(np.uint32).tolist() == [2**32 - 1, 5]
    assert row["stop_ids"] == [4, 9] + [NOWHERE] * (MAX_STOP_TOKEN_IDS - 2)
    assert row["bias_ids"] == [7, 3] + [NOWHERE] * (MAX_BIASED_TOKENS - 2)
    assert row["bias"] == [-2.0, 4.0] + [0.0] * (MAX_BIASED_TOKENS - 2)
    assert row["counts"] == [0] * VOCAB


@pytest.mark.parametrize(
    "each", [EVERYTHING, admission(3), admission(3, allowed_token_ids=(1, 2), frequency_penalty=1)]
)
def test_nothing_of_an_earlier_owner_is_left(each: Admission) -> None:
    """R55: the row is the same over a fresh state and over rubbish; counts are only set where they are read."""
    over_fresh, over_rubbish = (inserted(state, each) for state in (states.initial(SIZING, VOCAB), rubbish()))
    if not each.params.has_penalties:
        over_rubbish["counts"] = over_fresh["counts"]
    for name, array in over_fresh.items():
        np.testing.assert_array_equal(array[3], over_rubbish[name][3], err_msg=name)


def test_other_slots_keep_all_they_have() -> None:
    before = flat(rubbish())
    after = inserted(rubbish(), EVERYTHING)
    others = [0, 1, 2, 4]
    for name, array in before.items():
        np.testing.assert_array_equal(array[others], after[name][others], err_msg=name)


def test_unused_rows_of_the_vector_go_nowhere() -> None:
    before, after = flat(rubbish()), inserted(rubbish())
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)


def test_several_slots_at_once_in_any_order() -> None:
    found = inserted(rubbish(), admission(4, top_k=1), admission(0, top_k=2, presence_penalty=1), admission(2, top_k=3))
    assert found["top_k"].tolist() == [2, 777, 3, 777, 1]
    assert [int(counts.max()) for counts in found["counts"]] == [0, 777, 777, 777, 777]


@pytest.mark.parametrize(("given", "kept"), [(-1, 0), (0, 0), (1, 1), (2**31, 2**31 - 1), (2**70, 2**31 - 1)])
def test_top_k_off_and_out_of_range(given: int, kept: int) -> None:
    assert inserted(rubbish(), admission(0, top_k=given))["top_k"][0] == kept


def test_only_allowed_tokens_are_listed_with_their_bias() -> None:
    found = inserted(rubbish(), admission(0, allowed_token_ids=(5, 2, 5), logit_bias={2: 1.5, 8: 3.0}))
    assert found["only_listed"][0]
    assert found["bias_ids"][0, :3].tolist() == [5, 2, NOWHERE]
    assert found["bias"][0, :3].tolist() == [0.0, 1.5, 0.0]


def test_seeds_are_64_bits() -> None:
    """Ones that differ in one bit only, the highest and the lowest."""
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]
    words = {tuple(inserted(rubbish(), admission(0, seed=seed))["seed"][0].tolist()) for seed in seeds}
    assert len(words) == len(seeds)


@pytest.mark.parametrize(("mask", "first"), [([0, 1, 0, 1], [1, 3]), ([0, 0, 0, 0], []), ([1, 1, 1, 1], [0, 1, 2, 3])])
def test_rows_of_a_mask_come_first_and_in_order(mask: list[int], first: list[int]) -> None:
    order, count = rows_where(jnp.array(mask, bool))
    assert int(count) == len(first)
    assert order[: len(first)].tolist() == first
    assert sorted(order.tolist()) == list(range(4))


def test_all_slots_are_free_at_first() -> None:
    fresh = flat(states.initial(SIZING, VOCAB))
    assert not fresh["active"].any()
    assert fresh["page_table"].shape == (5, 3)
    assert (fresh["page_table"] == TRASH_PAGE).all()
    assert fresh["counts"].shape == (5, VOCAB)
