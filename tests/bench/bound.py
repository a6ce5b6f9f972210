"""What the model itself allows: a bare jitted decode loop over a dense cache, same weights, same batch.

No pages, no slots, no sampling parameters, no scheduler: one token per row and call, greedy, cache donated.
"""

from __future__ import annotations

import time
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jetserve.models import transformer
from jetserve.models.spec import ModelConfig

# Per layer k, v: f32[B, S, K, H]. A ring: each layer takes the first and puts it last, so that none asks for its index.
Cache = tuple[tuple[Array, Array], ...]


def decode_tokens_per_second(
    config: ModelConfig, weights: transformer.Weights[Array], batch: int, start: int, steps: int
) -> float:
    """Decodes `steps` tokens per row from position `start` on and returns the rate of the best of three runs.

    Best, not median: it is a bound. XLA:CPU multiplies one bfloat16 row slowly, so a batch of one runs as two.
    """
    rows = max(batch, 2)
    length = -(-(start + steps) // 128) * 128
    shape = (rows, length, config.num_kv_heads, config.head_dim)
    step = jax.jit(partial(_step, config), donate_argnums=(3,))
    tokens = jnp.ones((rows,), jnp.int32)
    cache: Cache = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers))
    tokens, cache = step(weights, tokens, start, cache)
    best = float("inf")
    for _ in range(3):
        jax.block_until_ready(tokens)
        began = time.perf_counter()
        for position in range(start, start + steps):
            tokens, cache = step(weights, tokens, position, cache)
        jax.block_until_ready(tokens)
        best = min(best, time.perf_counter() - began)
    return batch * steps / best


def _step(
    config: ModelConfig, weights: transformer.Weights[Array], tokens: Array, position: Array, cache: Cache
) -> tuple[Array, Cache]:
    attend = partial(_attend, config, position)
    positions = jnp.broadcast_to(position, tokens.shape)
    hidden, cache = transformer.forward(config, weights, tokens, positions, attend, cache)
    logits = transformer.logits(config, weights, hidden)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    top = jnp.max(logits, axis=-1, keepdims=True)  # max and then min is faster than argmax on CPU
    return jnp.min(jnp.where(logits == top, ids, config.vocab_size), axis=-1), cache


def _attend(
    config: ModelConfig, position: Array, info: transformer.LayerInfo, q: Array, k: Array, v: Array, cache: Cache
) -> tuple[Array, Cache]:
    keys, values = (
        lax.dynamic_update_slice(old, new[:, None], (0, position, 0, 0))
        for old, new in zip(cache[0], (k, v), strict=True)
    )
    rows, heads, width = q.shape
    q_bkgh = q.reshape(rows, k.shape[1], heads // k.shape[1], width) * config.attention_scale
    scores = transformer.layers.softcap(jnp.einsum("bkgh,bskh->bkgs", q_bkgh, keys), config.attention_softcap)
    at = lax.iota(jnp.int32, keys.shape[1])
    seen = (at <= position) & ((info.window == 0) | (at > position - info.window))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgs,bskh->bkgh", weights, values).reshape(rows, heads, width)
    return out, (*cache[1:], (keys, values))
