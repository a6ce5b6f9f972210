"""The mesh: which chips, in which order, under which axis names."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jetserve.errors import ConfigError
from jetserve.sharding.rules import TENSOR


def make_mesh(tensor: int) -> Mesh:
    """A mesh of the first `tensor` devices, in the order of their coordinates.

    Raises: ConfigError when there are fewer.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if tensor > len(devices):
        raise ConfigError(
            f"mesh.tensor={tensor}, but this machine has {len(devices)} {devices[0].platform} device(s); "
            f"set mesh.tensor to at most {len(devices)}"
        )
    return Mesh(np.array(devices[:tensor]), (TENSOR,))
