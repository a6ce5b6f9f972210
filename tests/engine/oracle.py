"""What a token must be: an independent sampler in float64 NumPy, and a model without a cache.

Written from the words of `SamplingParams`, not from the device code: lists, sets and dicts instead of masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jetserve.models import transformer
from jetserve.models.spec import ModelConfig
from jetserve.models.transformer import LayerInfo, Weights
from jetserve.request import Request, SamplingParams

Float = NDArray[np.float64]


class Choice(NamedTuple):
    """Tokens that may come next and their probabilities, in the order in which the draw walks them."""

    tokens: list[int]
    probabilities: Float

    def at(self, u: float) -> int:
        """The token whose share of [0, 1) holds u."""
        reached = 0.0
        for token, share in zip(self.tokens, self.probabilities, strict=True):
            reached += share
            if u < reached:
                return token
        return self.tokens[-1]

    def near(self, u: float, slack: float) -> set[int]:
        """All tokens a draw may give whose sums are off by `slack`."""
        ends = np.cumsum(self.probabilities)
        starts = np.concatenate([[0.0], ends[:-1]])
        held = (starts - slack <= u) & (u <= ends + slack)
        return {self.tokens[at] for at in np.flatnonzero(held)} | {self.at(u)}


def choose(
    logits: NDArray[np.float32],
    params: SamplingParams,
    *,
    stop_token_ids: Sequence[int] = (),
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> Choice:
    """What may follow, of logits over the real vocabulary (no padding)."""
    scores = _edited(np.asarray(logits, np.float64), params, stop_token_ids, prompt, generated)
    by_score = sorted(np.flatnonzero(scores > -np.inf).tolist(), key=lambda token: (-scores[token], token))
    if params.temperature == 0:
        return Choice(by_score[:1], np.ones(1))
    weight = {token: np.exp((scores[token] - scores[by_score[0]]) / params.temperature) for token in by_score}
    kept = [token for token in by_score if weight[token] > 0]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        total, before, short = sum(weight[token] for token in kept), 0.0, []
        for token in kept:
            if short and before >= params.top_p * total:
                break
            short.append(token)
            before += weight[token]
        kept = short
    if params.min_p > 0:
        kept = [token for token in kept if weight[token] >= params.min_p]
    if params.top_k <= 0 and params.top_p == 1 and params.min_p == 0:
        kept = sorted(kept)  # a draw from everything walks the vocabulary in order
    shares = np.array([weight[token] for token in kept])
    return Choice(kept, shares / shares.sum())


def _edited(
    scores: Float,
    params: SamplingParams,
    stop_token_ids: Sequence[int],
    prompt: Sequence[int],
    generated: Sequence[int],
) -> Float:
    scores = scores.copy()
    for token in {*prompt, *generated}:
        scores[token] *= params.repetition_penalty ** (-1.0 if scores[token] > 0 else 1.0)
    for token in generated:
        scores[token] -= params.frequency_penalty
    for token in set(generated):
        scores[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.allowed_token_ids is not None:
        scores[[token for token in range(len(scores)) if token not in params.allowed_token_ids]] = -np.inf
    if len(generated) < params.min_tokens:
        scores[list(stop_token_ids)] = -np.inf
    return scores


def uniform(seed: int, position: int) -> float:
    """The documented draw: threefry of the 64-bit seed, folded with the position of the token in its sequence."""
    return float(_uniform(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), np.int32(position)))


@jax.jit
def _uniform(words: Array, position: Array) -> Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


class CachelessModel:
    """The decoder stack with dense attention over whole sequences of at most `longest` tokens."""

    def __init__(self, config: ModelConfig, weights: Weights[Array], longest: int) -> None:
        self.config = config
        self._weights = weights
        self._longest = longest
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self._forward = jax.jit(self._all_logits)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """f32[len(tokens), V]: what is predicted after each token."""
        key = tuple(tokens)
        if key not in self._known:
            padded = np.zeros(self._longest, np.int32)
            padded[: len(key)] = key
            self._known[key] = np.asarray(self._forward(padded))[: len(key)]
        return self._known[key]

    def require_answer(self, request: Request, tokens: Sequence[int], index: int = 0, slack: float = 1e-4) -> None:
        """Checks every token of an answer, and that it ends where it must.

        Args:
          slack: of logits and of sums of probabilities; a token is accepted when it wins within it.
        """
        params, prompt = request.params, list(request.prompt_token_ids)
        logits = self.logits([*prompt, *tokens])
        for at, token in enumerate(tokens):
            before = list(tokens[:at])
            choice = choose(
                logits[len(prompt) + at - 1],
                params,
                stop_token_ids=request.stop_token_ids,
                prompt=prompt,
                generated=before,
            )
            if params.temperature == 0:
                right = _ties(logits[len(prompt) + at - 1], params, request, before, slack)
            else:
                right = choice.near(uniform(request.sample_seed(index), len(prompt) + at), slack)
            assert token in right, f"token {at} of {request.request_id}/{index} is {token}, must be one of {right}"
            is_end = token in request.stop_token_ids or at + 1 == request.max_tokens
            assert is_end == (at + 1 == len(tokens)), f"{request.request_id}/{index} ends after {len(tokens)}, {tokens}"

    def _all_logits(self, tokens: Array) -> Array:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        at = jnp.arange(self._longest)

        def attend(layer: LayerInfo, q: Array, k: Array, v: Array, carry: None) -> tuple[Array, None]:
            keys, values = (jnp.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
            scores = jnp.einsum("tnh,snh->nts", q, keys) * self.config.attention_scale
            if self.config.attention_softcap is not None:
                scores = self.config.attention_softcap * jnp.tanh(scores / self.config.attention_softcap)
            distance = at[:, None] - at
            seen = (distance >= 0) & ((layer.window == 0) | (distance < layer.window))
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            return jnp.einsum("nts,snh->tnh", weights, values), carry

        hidden, _ = transformer.forward(self.config, self._weights, tokens, at, attend, None)
        return transformer.logits(self.config, self._weights, hidden)


def _ties(
    logits: NDArray[np.float32], params: SamplingParams, request: Request, generated: list[int], slack: float
) -> set[int]:
    scores = _edited(
        np.asarray(logits, np.float64), params, request.stop_token_ids, request.prompt_token_ids, generated
    )
    return set(np.flatnonzero(scores >= scores.max() - slack).tolist())
