"""A checkpoint, whatever its form, and the way from it onto the devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from jetserve.errors import CheckpointError
from jetserve.models import demo
from jetserve.models.gguf_file import GgufFile
from jetserve.models.safetensors_folder import CONFIG_FILE, SafetensorsFolder
from jetserve.models.spec import ModelConfig, ParamSpec
from jetserve.models.stored_tensors import CONVERTED_CONFIG_FILE, Parameter, parameters
from jetserve.models.transformer import Weights

Progress = Callable[[int, int], None]
Place = Callable[[str, ParamSpec, NDArray[np.generic]], Array]

_PROGRESS_ITEM_BYTES = 4


class Checkpoint(Protocol):
    """Weights in files. One that exists has been checked: names, shapes and types fit the model.

    Attributes:
      path: the file or folder.
      config: hyperparameters, as the files say.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def read(self, name: str, layer: int | None) -> NDArray[np.generic]:
        """One parameter of `parameter_table(config)`, in its shape; `layer` is None for those outside the layers.

        The dtype is the stored one (float32, float16 or ml_dtypes.bfloat16; quantised tensors come as float32). The
        array may be a view of the file.
        """
        ...

    def check(self) -> None:
        """Compares the files with what the model needs; done when opened. Raises: CheckpointError naming all faults."""
        ...

    def tokenizer_source(self) -> Path:
        """The folder or .gguf file `jetserve.tokenizer` reads the vocabulary from."""
        ...


def open_checkpoint(name_or_path: str | Path, *, progress: Progress | None = None) -> Checkpoint:
    """Opens what a user calls a model.

    Args:
      name_or_path: a demo model ("demo", "demo-gemma"; fetched when absent), a Hugging Face folder, a .gguf file, or a
        folder that `convert` wrote.
      progress: of the fetch, in bytes done and in all.
    Raises: CheckpointError, or FetchError of a demo model.
    """
    if str(name_or_path) in demo.DEMO_MODELS:
        return GgufFile(demo.fetch(str(name_or_path), progress=progress))
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return GgufFile(path)
    if (path / CONVERTED_CONFIG_FILE).is_file():
        from jetserve.models.orbax_folder import OrbaxFolder  # Orbax takes a second to import; only this form needs it

        return OrbaxFolder(path)
    if (path / CONFIG_FILE).is_file():
        return SafetensorsFolder(path)
    if path.is_dir():
        raise CheckpointError(
            f"{path} holds neither {CONFIG_FILE} (Hugging Face) nor {CONVERTED_CONFIG_FILE} (jetserve convert); "
            f"of a GGUF model, name the .gguf file itself"
        )
    raise CheckpointError(
        f"there is no model {str(name_or_path)!r}: give {' or '.join(demo.DEMO_MODELS)}, a Hugging Face folder, "
        f"a .gguf file or a folder written by jetserve convert; models are not downloaded from the Hugging Face Hub"
    )


def load_weights(
    checkpoint: Checkpoint, place: Place, *, stacked: bool, progress: Progress | None = None
) -> Weights[Array]:
    """Moves every parameter to the devices, one at a time: the host holds one of them at once.

    Args:
      place: (name, spec, values as read) -> the device array of that one parameter, cast and sharded. It owns the
        choice of dtype and sharding, so it is called once per parameter and layer in both forms.
      stacked: layers become arrays [L, ...], sharded as `place` shards one layer with the L axis whole. Each layer is
        written into them in place, so devices hold one layer more than the model at most.
      progress: called after every parameter with (done, in all), counted as 4 bytes an element whatever is stored.
    """
    total = sum(math.prod(p.spec.shape) for p in parameters(checkpoint.config)) * _PROGRESS_ITEM_BYTES
    layers = _Stack(checkpoint.config.num_layers) if stacked else _Layers(checkpoint.config.num_layers)
    model: dict[str, Array] = {}
    done = 0
    for parameter in parameters(checkpoint.config):
        # No name for what was placed: it would keep a layer alive beside the stack it was written to.
        if parameter.layer is None:
            model[parameter.name] = _placed(checkpoint, parameter, place)
        else:
            layers.put(parameter.name, parameter.layer, _placed(checkpoint, parameter, place))
        done += math.prod(parameter.spec.shape) * _PROGRESS_ITEM_BYTES
        if progress is not None:
            progress(done, total)
    return Weights(model=model, layers=layers.finished())


def _placed(checkpoint: Checkpoint, parameter: Parameter, place: Place) -> Array:
    placed = place(parameter.name, parameter.spec, checkpoint.read(parameter.name, parameter.layer))
    # Transfers run behind our back and keep the host's copy alive: without waiting all of them would pile up.
    return placed.block_until_ready()


class _Layers:
    """A mapping per layer."""

    def __init__(self, num_layers: int) -> None:
        self._layers: tuple[dict[str, Array], ...] = tuple({} for _ in range(num_layers))

    def put(self, name: str, layer: int, values: Array) -> None:
        self._layers[layer][name] = values

    def finished(self) -> tuple[dict[str, Array], ...]:
        return self._layers


class _Stack:
    """One array [L, ...] per name, written layer by layer."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._stacks: dict[str, Array] = {}

    def put(self, name: str, layer: int, values: Array) -> None:
        if name not in self._stacks:
            shape = (self._num_layers, *values.shape)
            self._stacks[name] = jnp.zeros(shape, values.dtype, device=_stacked(values.sharding))
        self._stacks[name] = _write_layer(self._stacks[name], values, layer)

    def finished(self) -> dict[str, Array]:
        return self._stacks


def _stacked(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = PartitionSpec(None, *sharding.spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


@functools.partial(jax.jit, donate_argnums=0)
def _write_layer(stack: Array, values: Array, layer: int) -> Array:
    written: Array = jax.lax.dynamic_update_index_in_dim(stack, values, layer, 0)
    return written
