"""Logical axes to mesh axes, and arrays onto a mesh. A parameter's axes are named in models/spec.py.

Mesh axes are words: "tensor" splits weight matrices, heads and the vocabulary. Heads must come out even; key and value
heads fewer than chips are repeated when they are loaded, never per step; the vocabulary is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jetserve.errors import ConfigError

TENSOR = "tensor"
_SPLIT = frozenset({"vocab", "heads", "kv_heads", "mlp"})


class HeadCounts(NamedTuple):
    """Heads of a model, and how often a mesh repeats its key and value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    repeats: int = 1

    @property
    def loaded_kv_heads(self) -> int:
        return self.kv_heads * self.repeats

    @staticmethod
    def on(mesh: Mesh, *, heads: int, kv_heads: int, head_dim: int) -> HeadCounts:
        """Checks that heads can be split over the mesh and says how.

        Raises: ConfigError naming the sizes that would work.
        """
        tensor = mesh.shape[TENSOR]
        if heads % tensor or (kv_heads % tensor and tensor % kv_heads):
            fit = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
            raise ConfigError(
                f"mesh.tensor={tensor} cannot split {heads} query and {kv_heads} kv heads evenly; "
                f"use one of {', '.join(map(str, fit))}"
            )
        return HeadCounts(heads, kv_heads, head_dim, max(1, tensor // kv_heads))


def partition(axes: Sequence[str | None]) -> PartitionSpec:
    """The mesh axis of each logical axis."""
    return PartitionSpec(*(TENSOR if axis in _SPLIT else None for axis in axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every chip."""
    return NamedSharding(mesh, PartitionSpec())


def padded_vocab(vocab_size: int, mesh: Mesh) -> int:
    """Rows of the embedding so that every chip holds as many."""
    chips: int = mesh.shape[TENSOR]
    return vocab_size + -vocab_size % chips


def place(values: NDArray[np.generic], axes: Sequence[str | None], mesh: Mesh, heads: HeadCounts) -> Array:
    """Puts one parameter on its chips, shard by shard: no chip and no host copy ever holds more than it keeps.

    Args:
      values: in the dtype it is to have; a "kv_heads" dimension still has the model's own heads.
      axes: logical axis of each dimension.
    Raises: ConfigError when a dimension cannot be split.
    """
    tensor = mesh.shape[TENSOR]
    for dimension, axis in enumerate(axes):
        if axis == "kv_heads" and heads.repeats > 1:
            values = _repeat_heads(values, dimension, heads)
        if axis == "vocab" and values.shape[dimension] % tensor:
            pad = [(0, -size % tensor if index == dimension else 0) for index, size in enumerate(values.shape)]
            values = np.pad(values, pad)
        if axis in _SPLIT and values.shape[dimension] % tensor:
            raise ConfigError(
                f"mesh.tensor={tensor} cannot split the model's {axis} axis of {values.shape[dimension]}; "
                f"use a divisor of it"
            )
    sharding = NamedSharding(mesh, partition(axes))
    if len(mesh.devices.flat) == 1:
        placed: Array = jax.device_put(values, sharding)
        return placed
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _repeat_heads(values: NDArray[np.generic], dimension: int, heads: HeadCounts) -> NDArray[np.generic]:
    shape = values.shape
    split = values.reshape(*shape[:dimension], heads.kv_heads, heads.head_dim, *shape[dimension + 1 :])
    repeated = np.repeat(split, heads.repeats, axis=dimension)
    return repeated.reshape(*shape[:dimension], heads.loaded_kv_heads * heads.head_dim, *shape[dimension + 1 :])
