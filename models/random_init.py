"""Weights of the right shapes without a checkpoint: random ones for tests and benchmarks, abstract ones to compile."""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jetserve.models.spec import ModelConfig, ParamSpec, parameter_table
from jetserve.models.transformer import Weights


def random_weights(config: ModelConfig, dtype: DTypeLike, seed: int, stacked: bool) -> Weights[Array]:
    """Draws every parameter as its `ParamSpec.init` says; the same numbers in both forms.

    Pure, so a sharded model is drawn in place: `jax.jit(lambda: random_weights(...), out_shardings=...)()`.
    """
    table = parameter_table(config)
    key = jax.random.key(seed)

    def layer(index: int) -> dict[str, Array]:
        inner = jax.random.fold_in(key, index + 1)
        return {name: _draw(inner, name, spec, dtype) for name, spec in table.layer.items()}

    model = {name: _draw(jax.random.fold_in(key, 0), name, spec, dtype) for name, spec in table.model.items()}
    each = tuple(layer(index) for index in range(config.num_layers))
    if not stacked:
        return Weights(model=model, layers=each)
    return Weights(model=model, layers={name: jnp.stack([params[name] for params in each]) for name in table.layer})


def abstract_weights(config: ModelConfig, dtype: DTypeLike, stacked: bool) -> Weights[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of every parameter, with nothing behind them."""
    abstract: Weights[jax.ShapeDtypeStruct] = jax.eval_shape(lambda: random_weights(config, dtype, 0, stacked))
    return abstract


def _draw(key: Array, name: str, spec: ParamSpec, dtype: DTypeLike) -> Array:
    if spec.init != "normal":
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, dtype)
    noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), spec.shape, jnp.float32)
    return (noise / math.sqrt(spec.shape[-1])).astype(dtype)
