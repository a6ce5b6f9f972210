"""What the device knows of every slot, and how a slot is initialised. Device side, pure functions."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from jetserve.engine.control import Field, Layout
from jetserve.engine.plan import Admission
from jetserve.engine.sizing import Sizing
from jetserve.kernels import TRASH_PAGE
from jetserve.request import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS

NOWHERE = 2**31 - 1  # an index no array has: scatters drop it, gathers are masked
_DTYPES = {"int": jnp.int32, "float": jnp.float32, "bool": jnp.bool_}
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@flax.struct.dataclass
class SamplingRows:
    """How each of B rows samples; request.py says what the numbers mean.

    Attributes:
      seed: i32[B, 2], the bits of its high and low word.
      top_k: i32[B]; 0 for off.
      stop_ids: i32[B, MAX_STOP_TOKEN_IDS]; NOWHERE where unused.
      bias_ids, bias: i32 and f32[B, MAX_BIASED_TOKENS]; NOWHERE where unused.
      only_listed: bool[B]; only ids in bias_ids can be sampled.
      wants_logprobs: bool[B].
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    presence_penalty: Array
    frequency_penalty: Array
    repetition_penalty: Array
    seed: Array
    min_tokens: Array
    stop_ids: Array
    bias_ids: Array
    bias: Array
    only_listed: Array
    wants_logprobs: Array

    @property
    def has_penalties(self) -> Array:
        """bool[B]"""
        return (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)

    @property
    def is_truncated(self) -> Array:
        """bool[B], whether unlikely tokens are left out."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    def at(self, rows: Array) -> SamplingRows:
        """The rows with these indices."""
        picked: SamplingRows = jax.tree.map(lambda field: field[rows], self)
        return picked


@flax.struct.dataclass
class DecodeState:
    """One row per slot.

    Attributes:
      page_table: i32[B, M].
      last_token: i32[B], the newest token; its keys and values are not in the cache yet.
      length: i32[B], tokens of the sequence, `last_token` included.
      active: bool[B].
      generated, max_tokens: i32[B].
      counts: i32[B, V], 2 * times generated + (1 if in the prompt); touched only for rows with penalties.
    """

    page_table: Array
    last_token: Array
    length: Array
    active: Array
    generated: Array
    max_tokens: Array
    sampling: SamplingRows
    counts: Array


def initial(sizing: Sizing, vocab_size: int) -> DecodeState:
    """All slots free."""
    slots = sizing.slots
    rows = {
        name: jnp.full(field.shape, field.fill, _DTYPES[field.kind]) for name, field in sampling_fields(slots).items()
    }
    return DecodeState(
        page_table=jnp.full((slots, sizing.pages_per_slot), TRASH_PAGE, jnp.int32),
        last_token=jnp.zeros((slots,), jnp.int32),
        length=jnp.ones((slots,), jnp.int32),
        active=jnp.zeros((slots,), bool),
        generated=jnp.zeros((slots,), jnp.int32),
        max_tokens=jnp.zeros((slots,), jnp.int32),
        sampling=SamplingRows(**rows),
        counts=jnp.zeros((slots, vocab_size), jnp.int32),
    )


def sampling_fields(rows: int) -> dict[str, Field]:
    """`SamplingRows` on the wire, field for field."""
    return {
        **{name: Field((rows,), "float") for name in _FLOATS},
        "top_k": Field((rows,)),
        "seed": Field((rows, 2)),
        "min_tokens": Field((rows,)),
        "stop_ids": Field((rows, MAX_STOP_TOKEN_IDS), fill=NOWHERE),
        "bias_ids": Field((rows, MAX_BIASED_TOKENS), fill=NOWHERE),
        "bias": Field((rows, MAX_BIASED_TOKENS), "float"),
        "only_listed": Field((rows,), "bool"),
        "wants_logprobs": Field((rows,), "bool"),
    }


def insert_layout(rows: int) -> Layout:
    """Control vector of the `insert` program for up to `rows` admissions; unused rows go to slot NOWHERE."""
    slot_fields = {
        "slot": Field((rows,), fill=NOWHERE),
        "generated": Field((rows,)),
        "max_tokens": Field((rows,)),
    }
    return Layout({**slot_fields, **sampling_fields(rows)})


def write_admission(fields: dict[str, NDArray[np.int32] | NDArray[np.float32]], row: int, admission: Admission) -> None:
    """Host side: puts one admission into a row of an insert vector's views."""
    params = admission.params
    assert params.max_tokens is not None
    fields["slot"][row] = admission.slot
    fields["generated"][row] = admission.generated
    fields["max_tokens"][row] = params.max_tokens
    for name in (*_FLOATS, "min_tokens"):
        fields[name][row] = getattr(params, name)
    fields["top_k"][row] = min(max(params.top_k, 0), NOWHERE)
    fields["seed"].view(np.uint32)[row] = admission.seed >> 32, admission.seed & 0xFFFFFFFF
    fields["stop_ids"][row, : len(admission.stop_token_ids)] = admission.stop_token_ids
    listed = dict.fromkeys(params.allowed_token_ids or (), 0.0)
    listed |= {token: bias for token, bias in params.logit_bias.items() if not listed or token in listed}
    fields["bias_ids"][row, : len(listed)] = list(listed)
    fields["bias"][row, : len(listed)] = list(listed.values())
    fields["only_listed"][row] = params.allowed_token_ids is not None
    fields["wants_logprobs"][row] = params.logprobs is not None


def insert(state: DecodeState, control: dict[str, Array]) -> DecodeState:
    """Initialises the slots of all admissions; every per-slot field is set (R55). Copies no keys or values."""
    slot = control["slot"]
    fresh = SamplingRows(**{name: control[name] for name in vars(state.sampling)})

    def put(field: Array, value: Array | int | bool) -> Array:
        return field.at[slot].set(value, mode="drop")

    def clear(index: Array, counts: Array) -> Array:
        return lax.dynamic_update_slice(counts, jnp.zeros_like(counts[:1]), (slot[order[index]], 0))

    order, count = rows_where(fresh.has_penalties & (slot != NOWHERE))
    return DecodeState(
        page_table=put(state.page_table, TRASH_PAGE),
        last_token=put(state.last_token, 0),
        length=put(state.length, 1),
        active=put(state.active, False),
        generated=put(state.generated, control["generated"]),
        max_tokens=put(state.max_tokens, control["max_tokens"]),
        sampling=jax.tree.map(put, state.sampling, fresh),
        counts=lax.fori_loop(0, count, clear, state.counts),
    )


def rows_where(mask: Array) -> tuple[Array, Array]:
    """Row indices, those of the mask first, and how many those are: a loop over none of them costs nothing."""
    return jnp.argsort(~mask, stable=True), jnp.sum(mask)
