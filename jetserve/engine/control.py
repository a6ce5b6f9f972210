"""What the host tells a device program each call: named fields packed in one int32 vector.

One transfer a call instead of a tree of small arrays (placing each on CPU costs 28 us, measured). A `Layout` is the one
table both sides read: the host packs NumPy arrays by it, the program takes them out again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

Kind = Literal["int", "float", "bool"]


@dataclass(frozen=True)
class Field:
    """One array in the vector; floats travel as their bits. `fill` is what the host leaves where it sets nothing."""

    shape: tuple[int, ...]
    kind: Kind = "int"
    fill: float = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout:
    """Fields by name, one behind the other."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = dict(fields)
        self._starts = np.cumsum([0, *[field.size for field in fields.values()]]).tolist()
        self._blank = np.zeros(self.size, np.int32)
        for name, array in self.views(self._blank).items():
            array[...] = self.fields[name].fill

    @property
    def size(self) -> int:
        return int(self._starts[-1])

    def blank(self) -> NDArray[np.int32]:
        """A fresh vector with every field at its fill."""
        return self._blank.copy()

    def views(self, vector: NDArray[np.int32]) -> dict[str, NDArray[np.int32] | NDArray[np.float32]]:
        """Host side: writable views of all fields of `vector`. A bool field is an int one there."""
        found: dict[str, NDArray[np.int32] | NDArray[np.float32]] = {}
        for (name, field), start in zip(self.fields.items(), self._starts, strict=False):
            part = vector[start : start + field.size]
            found[name] = (part.view(np.float32) if field.kind == "float" else part).reshape(field.shape)
        return found

    def unpack(self, vector: Array) -> dict[str, Array]:
        """Device side: all fields of i32[size]."""
        found = {}
        for (name, field), start in zip(self.fields.items(), self._starts, strict=False):
            part = lax.slice(vector, (start,), (start + field.size,)).reshape(field.shape)
            if field.kind == "float":
                part = lax.bitcast_convert_type(part, jnp.float32)
            found[name] = part != 0 if field.kind == "bool" else part
        return found
