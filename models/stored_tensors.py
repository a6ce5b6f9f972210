"""What a checkpoint stores against what its model needs: every difference in one error. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from jetserve.errors import CheckpointError
from jetserve.models.spec import ModelConfig, ParamSpec, parameter_table

log = logging.getLogger(__name__)

CONVERTED_CONFIG_FILE = "jetserve_config.json"  # tells a folder that `orbax_folder.convert` wrote

_MOST_EXTRA_NAMES = 20  # in the log line: a vision tower may bring hundreds


class StoredTensor(NamedTuple):
    """A tensor as its file describes it; `dtype` in the words of the format ("BF16", "Q4_1")."""

    shape: tuple[int, ...]
    dtype: str


class Parameter(NamedTuple):
    """One parameter of the model; `layer` is None outside the layers."""

    name: str
    layer: int | None
    spec: ParamSpec

    @property
    def key(self) -> tuple[str, int | None]:
        return self.name, self.layer


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter, those outside the layers first, then layer by layer: the order of loading."""
    table = parameter_table(config)
    for name, spec in table.model.items():
        yield Parameter(name, None, spec)
    for layer in range(config.num_layers):
        for name, spec in table.layer.items():
            yield Parameter(name, layer, spec)


def check_tensors(
    path: Path,
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, tuple[int, ...]],
    readable: Collection[str],
    notes: Iterable[str] = (),
) -> None:
    """Compares names, shapes and dtypes. Tensors nobody wants are logged as a warning.

    Args:
      stored, wanted: by the file's own names.
      readable: dtypes that can be read, in the words of the format.
      notes: added to the error, if there is one.
    Raises: CheckpointError that names every missing, misshapen and unreadable tensor.
    """
    missing = [name for name in wanted if name not in stored]
    present = [(name, shape, stored[name]) for name, shape in wanted.items() if name in stored]
    misshapen = [
        f"{name} is {list(got.shape)}, needs {list(shape)}" for name, shape, got in present if got.shape != shape
    ]
    unreadable = [f"{name} is {got.dtype}" for name, _, got in present if got.dtype not in readable]
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing: {', '.join(missing)}")
    if misshapen:
        faults.append(f"{len(misshapen)} of another shape: {'; '.join(misshapen)}")
    if unreadable:
        faults.append(
            f"{len(unreadable)} of an unsupported type ({', '.join(readable)} can be read): {'; '.join(unreadable)}"
        )
    extra = [name for name in stored if name not in wanted]
    if faults:
        if missing and extra:
            faults.append(f"{len(extra)} not needed: {_shortened(extra)}")
        raise CheckpointError(f"{path} does not fit its model: tensors {'. '.join([*faults, *notes])}")
    if extra:
        log.warning("%s holds %d tensors the model does not need: %s", path, len(extra), _shortened(extra))


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_EXTRA_NAMES} more" if len(names) > _MOST_EXTRA_NAMES else ""
    return ", ".join(names[:_MOST_EXTRA_NAMES]) + more
