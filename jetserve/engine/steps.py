"""The step programs `insert`, `seen`, `prefill[T]` and `generate[N, rows]`: pure functions of state, cache, control.

Forward, logits, sampling and state update are one program each; state and cache are donated. Shapes come from the
arguments, so that one function serves every size of the program table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax

from jetserve.engine import sampling
from jetserve.engine.control import Field, Layout
from jetserve.engine.state import NOWHERE, DecodeState, SamplingRows, insert_layout, rows_where
from jetserve.engine.state import insert as insert_rows
from jetserve.kernels.attention import Attention, DecodeRows, PackedRows, ScoreRule
from jetserve.models import transformer
from jetserve.models.spec import ModelConfig
from jetserve.models.transformer import LayerInfo, Weights

GRANTS_PER_ROW = 2  # a generate of at most page_size steps touches at most two new pages of a row


@dataclass(frozen=True)
class StepRule:
    """What the programs are specialised on: everything static but the shapes."""

    config: ModelConfig
    attention: Attention
    scores: ScoreRule
    sample: sampling.SampleRule


@flax.struct.dataclass
class Sampled:
    """What a program sampled: a leading axis of R chunks, or of N steps and the rows.

    Attributes:
      tokens: i32[...]; -1 where a row was not active.
      logprobs: of the same shape; zeros unless a row wants them.
    """

    tokens: Array
    logprobs: sampling.Logprobs


def prefill_layout(tokens: int, rows: int, pages_per_slot: int) -> Layout:
    """Control vector of `prefill[tokens]`; `slot` is NOWHERE for unused rows, `token_rows` is `rows` for padding."""
    return Layout(
        {
            "tokens": Field((tokens,)),
            "token_rows": Field((tokens,), fill=rows),
            "slot": Field((rows,), fill=NOWHERE),
            "starts": Field((rows,)),
            "lengths": Field((rows,)),
            "offsets": Field((rows,)),
            "prompt_tokens": Field((rows,)),
            "is_last": Field((rows,), "bool"),
            "page_table": Field((rows, pages_per_slot)),
        }
    )


def generate_layout(rows: int) -> Layout:
    """Control vector of `generate[*, rows]`: who goes on, and (slot, index, page) grants; unused ones to NOWHERE."""
    return Layout({"active": Field((rows,), "bool"), "grants": Field((rows * GRANTS_PER_ROW, 3), fill=NOWHERE)})


def seen_layout(tokens: int) -> Layout:
    """Control vector of `seen`: up to `tokens` tokens of one slot, the first of them at position `start`."""
    return Layout(
        {
            "slot": Field((), fill=NOWHERE),
            "start": Field(()),
            "length": Field(()),
            "prompt_tokens": Field(()),
            "tokens": Field((tokens,)),
        }
    )


def insert(state: DecodeState, control: Array, *, rows: int) -> DecodeState:
    """Initialises the slots of up to `rows` admissions."""
    return insert_rows(state, insert_layout(rows).unpack(control))


def seen(state: DecodeState, control: Array, *, tokens: int) -> DecodeState:
    """Counts tokens that were prefilled for somebody else; comes between `insert` and the row's first chunk."""
    told = seen_layout(tokens).unpack(control)
    at = jnp.arange(tokens)
    is_prompt = told["start"] + at < told["prompt_tokens"]
    counts = _count(state.counts, told["slot"], told["tokens"], at < told["length"], is_prompt)
    return replace(state, counts=counts)


def prefill(
    weights: Weights[Array], state: DecodeState, kv: Array, control: Array, *, rule: StepRule, tokens: int, rows: int
) -> tuple[DecodeState, Array, Sampled]:
    """Runs packed chunks; a last chunk's row gets its first token and becomes active.

    Returns: state, cache, and R sampled tokens.
    """
    packed = prefill_layout(tokens, rows, state.page_table.shape[1]).unpack(control)
    slot, starts, lengths = packed["slot"], packed["starts"], packed["lengths"]
    is_last = packed["is_last"] & (slot != NOWHERE)
    state = replace(state, page_table=state.page_table.at[slot].set(packed["page_table"], mode="drop"))
    chunks = PackedRows.create(
        packed["page_table"], starts, lengths, packed["offsets"], packed["token_rows"], kv.shape[4]
    )

    def attend(layer: LayerInfo, q: Array, k: Array, v: Array, kv: Array) -> tuple[Array, Array]:
        return rule.attention.prefill(q, k, v, kv, layer.index, layer.window, chunks, rule.scores)

    hidden, kv = transformer.forward(rule.config, weights, packed["tokens"], chunks.positions, attend, kv)
    state = _count_prompt(state, packed, chunks.positions)
    here = jnp.minimum(slot, state.active.shape[0] - 1)  # any slot will do for an unused row
    own = state.sampling.at(here)
    end = starts + lengths
    last = jnp.clip(packed["offsets"] + lengths - 1, 0, tokens - 1)

    def sample_rows() -> Sampled:
        logits = transformer.logits(rule.config, weights, hidden[last])
        chosen = sampling.sample(
            logits, own, sampling.History(state.counts, here, end, state.generated[here]), is_last, rule.sample
        )
        return Sampled(chosen, sampling.logprobs(logits, chosen, is_last & own.wants_logprobs, rule.sample))

    def sample_none() -> Sampled:
        nothing: Sampled = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sample_rows))
        return nothing

    sampled: Sampled = lax.cond(jnp.any(is_last), sample_rows, sample_none)
    target = jnp.where(is_last, slot, NOWHERE)
    generated = state.generated[here] + 1
    state = replace(
        state,
        last_token=state.last_token.at[target].set(sampled.tokens, mode="drop"),
        length=state.length.at[target].set(end + 1, mode="drop"),
        generated=state.generated.at[target].set(generated, mode="drop"),
        active=state.active.at[target].set(
            _goes_on(sampled.tokens, generated, state.max_tokens[here], own), mode="drop"
        ),
    )
    state = _count_generated(state, target, sampled.tokens, is_last)
    return state, kv, sampled


def generate(
    weights: Weights[Array], state: DecodeState, kv: Array, control: Array, *, rule: StepRule, steps: int, rows: int
) -> tuple[DecodeState, Array, Sampled]:
    """Decodes up to `steps` tokens of each active row below `rows`; a row stops by itself at its end.

    Returns: state, cache, and [steps, rows] sampled tokens.
    """
    told = generate_layout(rows).unpack(control)
    slot, index, page = told["grants"].T
    state = replace(
        state,
        page_table=state.page_table.at[slot, index].set(page, mode="drop"),
        active=state.active.at[:rows].set(state.active[:rows] & told["active"]),
    )

    def step(carry: tuple[DecodeState, Array], _: None) -> tuple[tuple[DecodeState, Array], Sampled]:
        state, kv = carry
        state, kv, sampled = _decode(weights, state, kv, rule, rows)
        return (state, kv), sampled

    if steps == 1:
        state, kv, sampled = _decode(weights, state, kv, rule, rows)
        return state, kv, jax.tree.map(lambda x: x[None], sampled)
    (state, kv), sampled = lax.scan(step, (state, kv), None, length=steps)
    return state, kv, sampled


def _decode(
    weights: Weights[Array], state: DecodeState, kv: Array, rule: StepRule, rows: int
) -> tuple[DecodeState, Array, Sampled]:
    """One token for each active row below `rows`."""
    active, length = state.active[:rows], state.length[:rows]
    batch = DecodeRows.create(state.page_table[:rows], length - 1, active, kv.shape[4])

    def attend(layer: LayerInfo, q: Array, k: Array, v: Array, kv: Array) -> tuple[Array, Array]:
        return rule.attention.decode(q, k, v, kv, layer.index, layer.window, batch, rule.scores)

    hidden, kv = transformer.forward(rule.config, weights, state.last_token[:rows], length - 1, attend, kv)
    logits = transformer.logits(rule.config, weights, hidden)
    own = jax.tree.map(lambda field: field[:rows], state.sampling)
    generated = state.generated[:rows]
    chosen = sampling.sample(
        logits, own, sampling.History(state.counts, jnp.arange(rows), length, generated), active, rule.sample
    )
    sampled = Sampled(
        jnp.where(active, chosen, -1), sampling.logprobs(logits, chosen, active & own.wants_logprobs, rule.sample)
    )
    more = active.astype(jnp.int32)
    goes_on = _goes_on(chosen, generated + more, state.max_tokens[:rows], own)
    state = replace(
        state,
        last_token=state.last_token.at[:rows].set(jnp.where(active, chosen, state.last_token[:rows])),
        length=state.length.at[:rows].add(more),
        generated=state.generated.at[:rows].add(more),
        active=state.active.at[:rows].set(active & goes_on),
    )
    return _count_generated(state, jnp.arange(rows), chosen, active), kv, sampled


def _goes_on(tokens: Array, generated: Array, max_tokens: Array, rows: SamplingRows) -> Array:
    """Whether rows go on after these tokens: neither an end token nor the last one allowed."""
    return ~jnp.any(tokens[:, None] == rows.stop_ids, axis=-1) & (generated < max_tokens)


def _count_generated(state: DecodeState, slots: Array, tokens: Array, valid: Array) -> DecodeState:
    """Adds tokens to the counts of rows with penalties; others' are not touched."""
    here = jnp.minimum(slots, state.active.shape[0] - 1)
    order, count = rows_where(valid & state.sampling.has_penalties[here])

    def add(index: Array, counts: Array) -> Array:
        row = order[index]
        return counts.at[here[row], tokens[row]].add(2)

    return replace(state, counts=lax.fori_loop(0, count, add, state.counts))


def _count_prompt(state: DecodeState, packed: dict[str, Array], positions: Array) -> DecodeState:
    """Counts the chunks' tokens of rows with penalties; those behind the prompt were generated before a preemption."""
    here = jnp.minimum(packed["slot"], state.active.shape[0] - 1)
    order, count = rows_where((packed["lengths"] > 0) & state.sampling.has_penalties[here])

    def add(index: Array, counts: Array) -> Array:
        row = order[index]
        is_prompt = positions < packed["prompt_tokens"][row]
        return _count(counts, here[row], packed["tokens"], packed["token_rows"] == row, is_prompt)

    return replace(state, counts=lax.fori_loop(0, count, add, state.counts))


def _count(counts: Array, slot: Array, tokens: Array, own: Array, is_prompt: Array) -> Array:
    """Adds those of `tokens` that are the slot's own to its counts, as `DecodeState.counts` says."""
    # Prompt tokens come before generated ones, so their mark never meets a count.
    counts = counts.at[slot, jnp.where(own & is_prompt, tokens, NOWHERE)].max(1, mode="drop")
    return counts.at[slot, jnp.where(own & ~is_prompt, tokens, NOWHERE)].add(2, mode="drop")
