"""Rotary position embedding: which angles a position turns by, and the turning.

The rotation of a token depends on its own position alone, so chunks, packing and shared prefixes cannot change it.
Sources: RoFormer arXiv:2104.09864; linear scaling arXiv:2306.15595; NTK-aware and YaRN arXiv:2309.00071; "llama3" as in
Meta's llama-models reference (`apply_scaling`). Names of the kinds are Hugging Face's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jetserve.models.spec import ModelConfig, RopeScaling


class Rotation(NamedTuple):
    """cos, sin: f32[T, R/2], R the rotating dimensions of a head; attention factor of YaRN included."""

    cos: Array
    sin: Array


def rotation(config: ModelConfig, positions: Array, *, local: bool) -> Rotation:
    """The rotation at each position.

    Args:
      positions: i32[T].
      local: of the layers with a window that have a base of their own (never scaled).
    """
    theta = config.local_rope_theta if local else config.rope_theta
    assert theta is not None
    scaling = None if local else config.rope_scaling
    frequencies = inverse_frequencies(theta, config.rotary_dim or config.head_dim, scaling)
    at = positions.astype(jnp.float32)
    angles = at[:, None] * frequencies[None, :]
    if scaling is not None and scaling.kind == "dynamic":
        angles = angles * _dynamic_ratio(at, scaling, frequencies.size)
    factor = np.float32(attention_factor(scaling))
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: Array, rotation: Rotation) -> Array:
    """Turns the first R dimensions of each head, dimension i together with i + R/2; the others pass.

    Args:
      x: f32[T, N, H].
    """
    half = rotation.cos.shape[-1]
    cos, sin = rotation.cos[:, None, :], rotation.sin[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def inverse_frequencies(theta: float, dim: int, scaling: RopeScaling | None) -> NDArray[np.float32]:
    """Radians per position of each pair of dimensions: f32[dim/2]. Of "dynamic", those within the original length."""
    plain: NDArray[np.float64] = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None or scaling.kind == "dynamic":
        return plain.astype(np.float32)
    if scaling.kind == "linear":
        return (plain / scaling.factor).astype(np.float32)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling).astype(np.float32)
    return _yarn(plain, theta, dim, scaling).astype(np.float32)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied with: YaRN's temperature (arXiv:2309.00071 eq. 22), 1 for the other kinds."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _temperature(scaling.factor, scaling.mscale) / _temperature(scaling.factor, scaling.mscale_all_dim)
    return _temperature(scaling.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    # Turns within the original length:  below low_freq_factor: slowed by factor; above high_freq_factor: untouched;
    # between: blended linearly.
    turns = scaling.original_max_position * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


def _yarn(plain: NDArray[np.float64], theta: float, dim: int, scaling: RopeScaling) -> NDArray[np.float64]:
    def dimension(turns: float) -> float:
        """Pair index that makes `turns` full turns within the original length."""
        return dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    slow: NDArray[np.float64] = np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)
    return plain * (1.0 - slow) + plain / scaling.factor * slow


def _dynamic_ratio(at: Array, scaling: RopeScaling, pairs: int) -> Array:
    """How much slower each pair turns at each position than within the original length: f32[T, R/2].

    NTK-aware scaling grows the base with the length. The length here is the position's own, position + 1: what
    Hugging Face does when it decodes token by token. Its one-shot prefill of a long prompt turns all keys by the whole
    prompt's base instead, which no cache that is filled in chunks or shared between prompts can do.
    """
    length = jnp.maximum(at + 1.0, np.float32(scaling.original_max_position))
    stretch = scaling.factor * length / scaling.original_max_position - (scaling.factor - 1.0)
    exponent = -np.arange(pairs, dtype=np.float32) / max(pairs - 1, 1)
    return jnp.exp(jnp.log(stretch)[:, None] * exponent[None, :])
