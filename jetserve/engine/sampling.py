"""From logits to tokens, exactly, per row. Device side, pure functions.

Most rows are greedy, so the common path is one argmax over the logits. Rows that sample are gathered into small groups,
as many groups as there are such rows, and each group is edited, truncated and drawn from. So a row meets the same
operations on the same shapes whatever else is in the batch: with a seed it draws the same token alone, in any batch, on
any slot and after a preemption. Greedy rows pay for none of it.

A draw inverts the cumulative distribution at u, uniform from fold_in(seed, position). The vocabulary is sorted only if
its `_CANDIDATES` most likely tokens do not hold all that top_k, top_p and min_p keep.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from jetserve.engine.state import NOWHERE, SamplingRows, rows_where
from jetserve.request import MAX_LOGPROBS
from jetserve.sharding.rules import partition, replicated

_CANDIDATES = 64
_SEGMENT = 512  # vocabulary entries looked at together by `_argmax` and `_draw_from_all`
_NEVER = -jnp.inf
_TINY, _HUGE = 1.2e-38, 1e38  # the smallest normal float32, and a number that can be added to itself


class Logprobs(NamedTuple):
    """Natural logs of the model's raw distribution: f32[B], i32[B, MAX_LOGPROBS], f32[B, MAX_LOGPROBS]."""

    chosen: Array
    top_ids: Array
    top: Array


class History(NamedTuple):
    """What came before the token that is chosen now.

    Attributes:
      counts: i32[slots, V] of state.py, read for rows with penalties only.
      slots: i32[B], the row of `counts`.
      positions: i32[B], where in its sequence the token will be.
      generated: i32[B], tokens generated before it.
    """

    counts: Array
    slots: Array
    positions: Array
    generated: Array


class SampleRule(NamedTuple):
    """What is the same for all rows. Static.

    Attributes:
      vocab_limit: ids from here on are padding and never chosen (R53).
      group: rows that sample together: 8 fill a TPU tile, fewer waste less on CPU.
      mesh: the chips that logits are split over by vocabulary. Greedy rows stay so; rows to draw from are made whole on
        every chip, for otherwise each step of a draw would exchange something. None is a single chip.
    """

    vocab_limit: int
    group: int
    mesh: Mesh | None = None

    def mask(self, logits: Array) -> Array:
        """Padding at minus infinity."""
        vocab = logits.shape[-1]
        return logits if self.vocab_limit >= vocab else jnp.where(jnp.arange(vocab) < self.vocab_limit, logits, _NEVER)

    def split(self, logits: Array) -> Array:
        """Every chip holds its part of the vocabulary, as they were computed."""
        return logits if self.mesh is None else _held(logits, NamedSharding(self.mesh, partition((None, "vocab"))))

    def gather(self, logits: Array) -> Array:
        """Every chip holds all of it."""
        return logits if self.mesh is None else _held(logits, replicated(self.mesh))


def sample(
    logits: Array,
    rows: SamplingRows,
    history: History,
    active: Array,
    rule: SampleRule,
) -> Array:
    """Chooses the next token of every row.

    Args:
      logits: f32[B, V], raw.
      active: bool[B]; the result of other rows is undefined.
    Returns: i32[B].
    """
    logits = rule.split(logits)
    with jax.named_scope("greedy"):
        tokens = _argmax(rule.mask(logits), is_split=rule.mesh is not None)
    is_edited = rows.has_penalties | (rows.bias_ids[:, 0] != NOWHERE) | (history.generated < rows.min_tokens)
    order, count = rows_where(active & ((rows.temperature > 0) | is_edited))
    group = rule.group
    order = jnp.pad(order, (0, group - 1), mode="edge")

    def draw(index: Array, tokens: Array) -> Array:
        at = lax.dynamic_slice_in_dim(order, index * group, group)
        own, scores = rows.at(at), rule.mask(rule.gather(logits[at]))
        scores = lax.cond(jnp.any(is_edited[at]), lambda: _edit(scores, own, history, at), lambda: scores)
        # The last group may reach into rows that do not sample.
        is_member = index * group + jnp.arange(group) < count
        return tokens.at[jnp.where(is_member, at, NOWHERE)].set(_draw(scores, own, history.positions[at]), mode="drop")

    with jax.named_scope("draw"):
        drawn: Array = lax.fori_loop(0, (count + group - 1) // group, draw, tokens)
    return drawn


def logprobs(logits: Array, tokens: Array, wanted: Array, rule: SampleRule) -> Logprobs:
    """Log probabilities of the chosen and of the most likely tokens; zeros, at no cost, when no row wants them.

    Args:
      logits: f32[B, V], raw.
      tokens: i32[B], chosen.
      wanted: bool[B].
    """
    logits = rule.split(logits)
    batch, vocab = logits.shape
    width = min(MAX_LOGPROBS, vocab)

    def compute() -> Logprobs:
        real = rule.mask(rule.gather(logits))
        total = jax.nn.logsumexp(real, axis=-1)
        top, ids = lax.top_k(real, width)
        chosen = jnp.take_along_axis(real, tokens[:, None], axis=1)[:, 0] - total
        pad = ((0, 0), (0, MAX_LOGPROBS - width))
        return Logprobs(chosen, jnp.pad(ids, pad), jnp.pad(top - total[:, None], pad, constant_values=_NEVER))

    def skip() -> Logprobs:
        nothing = jnp.zeros((batch, MAX_LOGPROBS))
        return Logprobs(jnp.zeros((batch,)), nothing.astype(jnp.int32), nothing)

    with jax.named_scope("logprobs"):
        found: Logprobs = lax.cond(jnp.any(wanted), compute, skip)
    return found


def _held(logits: Array, sharding: NamedSharding) -> Array:
    held: Array = lax.with_sharding_constraint(logits, sharding)
    return held


def _argmax(logits: Array, *, is_split: bool = False) -> Array:
    """Lowest id of the largest of f32[B, V].

    One pass over the logits finds the largest of each segment, and only the winning segment is searched: 32 x 262,144
    took 2.8 ms where max and compare took 45 ms and XLA:CPU's own argmax 33 ms (2 cores, shared machine). Logits split
    over chips are compared where they are: a segment would have to be sent.
    """
    if is_split:
        return _first(logits == jnp.max(logits, axis=-1, keepdims=True))
    batch, vocab = logits.shape
    segment = math.gcd(vocab, _SEGMENT)
    segments = logits.reshape(batch, vocab // segment, segment)
    best = jnp.max(segments, axis=-1)
    top = jnp.max(best, axis=-1, keepdims=True)
    winner = _first(best == top)
    inside = jnp.take_along_axis(segments, winner[:, None, None], axis=1)[:, 0]
    return winner * segment + _first(inside == top)


def _first(mask: Array) -> Array:
    """i32[B], the first column of bool[B, W] that is set."""
    width = mask.shape[-1]
    return jnp.min(jnp.where(mask, jnp.arange(width, dtype=jnp.int32), width - 1), axis=-1)


def _edit(logits: Array, rows: SamplingRows, history: History, at: Array) -> Array:
    """Penalties, biases, allowed tokens and min_tokens on f32[C, V], the rows `at` of the batch."""
    logits = lax.cond(
        jnp.any(rows.has_penalties), lambda: _penalise(logits, rows, history.counts[history.slots[at]]), lambda: logits
    )
    row = jnp.arange(logits.shape[0])[:, None]
    biased = logits.at[row, rows.bias_ids].add(rows.bias, mode="drop")
    listed = (
        jnp.full_like(logits, _NEVER)
        .at[row, rows.bias_ids]
        .set(jnp.take_along_axis(biased, jnp.minimum(rows.bias_ids, logits.shape[1] - 1), axis=1), mode="drop")
    )
    logits = jnp.where(rows.only_listed[:, None], listed, biased)
    forbidden = jnp.where((history.generated[at] < rows.min_tokens)[:, None], rows.stop_ids, NOWHERE)
    return logits.at[row, forbidden].set(_NEVER, mode="drop")


def _penalise(logits: Array, rows: SamplingRows, counts: Array) -> Array:
    """Presence and frequency over generated tokens; repetition (arXiv:1909.05858) over prompt and generated ones."""
    times = (counts // 2).astype(jnp.float32)
    # Both bounds keep the smallest penalties from making infinities, whose differences are no numbers.
    repetition = jnp.where(counts > 0, jnp.maximum(rows.repetition_penalty, _TINY)[:, None], 1.0)
    logits = jnp.where(logits > 0, jnp.minimum(logits / repetition, _HUGE), logits * repetition)
    return logits - rows.frequency_penalty[:, None] * times - rows.presence_penalty[:, None] * (times > 0)


def _draw(logits: Array, rows: SamplingRows, positions: Array) -> Array:
    """One token of each row of f32[C, V] after temperature, top_k, top_p and min_p; the argmax at temperature 0."""
    hot = rows.temperature > 0
    # Subtracting the maximum first keeps tiny temperatures finite (R72).
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(hot, rows.temperature, 1.0)[:, None]
    u = jax.vmap(_uniform)(rows.seed, positions)
    is_truncated = rows.is_truncated
    greedy = _argmax(logits)
    truncated = lax.cond(jnp.any(hot & is_truncated), lambda: _draw_truncated(scaled, rows, u), lambda: greedy)
    plain = lax.cond(jnp.any(hot & ~is_truncated), lambda: _draw_from_all(scaled, u), lambda: greedy)
    return jnp.where(hot, jnp.where(is_truncated, truncated, plain), greedy)


def _draw_truncated(scaled: Array, rows: SamplingRows, u: Array) -> Array:
    total = jnp.sum(jnp.exp(scaled), axis=-1)
    values, ids = lax.top_k(scaled, min(_CANDIDATES, scaled.shape[1]))
    few = _draw_sorted(values, ids, total, rows, u)

    def from_sorted() -> Array:
        ids = lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
        falling, ids = lax.sort((-scaled, ids), num_keys=1, is_stable=True)
        return jnp.where(few.is_whole, few.token, _draw_sorted(-falling, ids, total, rows, u).token)

    token: Array = lax.cond(jnp.all(few.is_whole | ~rows.is_truncated), lambda: few.token, from_sorted)
    return token


def _uniform(seed: Array, position: Array) -> Array:
    key = jax.random.wrap_key_data(lax.bitcast_convert_type(seed, jnp.uint32), impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


class _Draw(NamedTuple):
    token: Array  # i32[C]
    is_whole: Array  # bool[C], whether the sorted values hold every token the filters keep


def _draw_sorted(values: Array, ids: Array, total: Array, rows: SamplingRows, u: Array) -> _Draw:
    """Draws from the most likely tokens, most likely first.

    Args:
      values: f32[C, W] falling, scaled logits less the maximum.
      ids: i32[C, W], ascending among equal values.
      total: f32[C], sum of exp over the whole vocabulary.
      u: f32[C] in [0, 1).
    """
    width = values.shape[1]
    weights = jnp.exp(values)
    rank = jnp.arange(width)
    in_top_k = (rows.top_k[:, None] == 0) | (rank < rows.top_k[:, None])
    weights_k = jnp.where(in_top_k, weights, 0.0)
    # top_p counts in what top_k left; without top_k that is the whole vocabulary.
    mass = jnp.where(rows.top_k > 0, jnp.sum(weights_k, axis=-1), total)
    before = jnp.cumsum(weights_k, axis=-1) - weights_k
    in_top_p = (rows.top_p[:, None] >= 1) | (before < rows.top_p[:, None] * mass[:, None])
    in_min_p = weights >= rows.min_p[:, None] * weights[:, :1]
    keep = in_top_k & in_top_p & in_min_p & (weights > 0)
    keep = keep.at[:, 0].set(True)
    reached = jnp.cumsum(jnp.where(keep, weights, 0.0), axis=-1)
    index = jnp.sum(reached <= u[:, None] * reached[:, -1:], axis=-1)
    index = jnp.minimum(index, jnp.sum(keep, axis=-1) - 1)  # u * reached may round up to reached
    token = jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0]
    # What top_p counts in is not all here when top_k keeps more.
    knows_mass = (rows.top_k <= width) | (rows.top_p >= 1)
    return _Draw(token, knows_mass & (~keep[:, -1] | (rows.top_k == width)))


def _draw_from_all(scaled: Array, u: Array) -> Array:
    """Draws from the whole vocabulary in id order: first the segment, then the token in it. f32[C, V] -> i32[C]."""
    rows, vocab = scaled.shape
    weights = jnp.pad(jnp.exp(scaled), ((0, 0), (0, -vocab % _SEGMENT))).reshape(rows, -1, _SEGMENT)
    reached = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)  # [C, segments]
    target = u * reached[:, -1]
    segment = jnp.sum(reached <= target[:, None], axis=-1)
    segment = jnp.minimum(segment, reached.shape[1] - 1)
    before = jnp.where(
        segment > 0, jnp.take_along_axis(reached, jnp.maximum(segment - 1, 0)[:, None], axis=1)[:, 0], 0.0
    )
    inside = jnp.take_along_axis(weights, segment[:, None, None], axis=1)[:, 0]  # [C, _SEGMENT]
    within = jnp.cumsum(inside, axis=-1) + before[:, None]
    index = jnp.sum(within <= target[:, None], axis=-1)
    # Rounding between the two sums may point behind the segment's last possible token.
    last = jnp.max(jnp.where(inside > 0, jnp.arange(_SEGMENT), -1), axis=-1)
    token = segment * _SEGMENT + jnp.minimum(index, last)
    return jnp.where(last >= 0, token, _argmax(scaled)).astype(jnp.int32)
