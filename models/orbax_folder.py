"""Our own checkpoint form: weights by Orbax, configuration as JSON, the tokenizer's files beside them.

    jetserve_config.json    format number and `ModelConfig`
    weights/                an Orbax PyTree checkpoint: {"model": {name: array}, "layers": {"0": {name: array}, ...}}
    tokenizer.json, ...     as in the Hugging Face folder, or
    tokenizer.gguf          a GGUF file's metadata without its tensors

Arrays are named and shaped as in `spec.parameter_table` and carry no sharding: they are read as numpy arrays and placed
as the server's mesh asks, whatever mesh wrote them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from jetserve import gguf_header
from jetserve.errors import CheckpointError
from jetserve.models.safetensors_folder import read_json
from jetserve.models.spec import Family, ModelConfig, RopeScaling, parameter_table
from jetserve.models.stored_tensors import CONVERTED_CONFIG_FILE, StoredTensor, check_tensors, parameters

if TYPE_CHECKING:
    from jetserve.models.checkpoint import Checkpoint

_FORMAT = 1
_WEIGHTS = "weights"
_GGUF_VOCABULARY = "tokenizer.gguf"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_TARGET_DTYPES = ("float32", "bfloat16")


class OrbaxFolder:
    """Weights `convert` wrote, checked when opened.

    A layer is read whole (opening the store costs more than a layer does) and each array let go when it is asked for,
    so going through the parameters in order holds one layer at most.

    Attributes:
      path: the folder.
      config: as it was when the checkpoint was written.
    """

    def __init__(self, path: Path) -> None:
        """Reads the configuration and the description of the arrays. Raises: CheckpointError naming all faults."""
        self.path = path
        self.config: ModelConfig = _read_config(path / CONVERTED_CONFIG_FILE)
        self._stored = _describe(path / _WEIGHTS)
        self._layer: int | None = None
        self._arrays: dict[str, NDArray[np.generic]] = {}
        self.check()

    def read(self, name: str, layer: int | None) -> NDArray[np.generic]:
        """The parameter in its stored dtype."""
        if layer is None:
            return _restore(self.path / _WEIGHTS, None, [name])[name]
        if layer != self._layer or name not in self._arrays:
            self._arrays = {}  # before the next layer comes, not after
            self._arrays = _restore(self.path / _WEIGHTS, layer, list(parameter_table(self.config).layer))
            self._layer = layer
        return self._arrays.pop(name)

    def check(self) -> None:
        """Compares the arrays with what the model needs. Raises: CheckpointError that names all differences."""
        wanted = {_stored_name(p.name, p.layer): p.spec.shape for p in parameters(self.config)}
        check_tensors(self.path, self._stored, wanted, tuple(_DTYPES))

    def tokenizer_source(self) -> Path:
        """The folder, or the vocabulary taken from a GGUF file."""
        vocabulary = self.path / _GGUF_VOCABULARY
        return vocabulary if vocabulary.exists() else self.path


def convert(
    checkpoint: Checkpoint, out: Path, dtype: str | None = None, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes `checkpoint` as an Orbax checkpoint that `open_checkpoint` opens.

    The converted weights are held in memory while Orbax writes them.

    Args:
      out: a folder that does not exist yet, or an empty one. It appears when it is complete.
      dtype: "float32" or "bfloat16"; None keeps what is stored (float32 for quantised tensors).
      progress: called with (parameters read, in all).
    Raises: CheckpointError when `out` is in use or cannot be written.
    """
    if dtype is not None and dtype not in _TARGET_DTYPES:
        raise CheckpointError(f"cannot convert to dtype {dtype!r}; choose from {', '.join(_TARGET_DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder; give another one or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
            folder = Path(name) / "checkpoint"
            folder.mkdir()
            _write_weights(checkpoint, folder / _WEIGHTS, dtype, progress)
            _copy_tokenizer(checkpoint.tokenizer_source(), folder)
            described = {"format": _FORMAT, "config": dataclasses.asdict(checkpoint.config)}
            (folder / CONVERTED_CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
            folder.rename(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error


def _write_weights(
    checkpoint: Checkpoint, folder: Path, dtype: str | None, progress: Callable[[int, int], None] | None
) -> None:
    every = list(parameters(checkpoint.config))
    tree: dict[str, dict[str, object]] = {"model": {}, "layers": {}}
    total_bytes = 0
    for done, parameter in enumerate(every, start=1):
        values = checkpoint.read(parameter.name, parameter.layer)
        if dtype is not None:
            values = values.astype(_DTYPES[dtype])
        total_bytes += values.nbytes
        if parameter.layer is None:
            tree["model"][parameter.name] = values
        else:
            layer = cast(dict[str, object], tree["layers"].setdefault(str(parameter.layer), {}))
            layer[parameter.name] = values
        if progress is not None:
            progress(done, len(every))
    _require_space(folder.parent, total_bytes)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))
    except ValueError as error:  # tensorstore's word for what the disk said
        raise CheckpointError(f"cannot write the weights: {error}") from error


def _require_space(folder: Path, wanted_bytes: int) -> None:
    """Raises: CheckpointError. A disk that fills up while Orbax writes ends in dozens of traces from its threads."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < wanted_bytes:
        raise CheckpointError(
            f"the weights take up to {wanted_bytes / 1e6:.0f} MB, {folder.parent.parent} has {free_bytes / 1e6:.0f} MB "
            f"free; give another folder or a smaller dtype"
        )


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if source.is_file():
        if source.suffix == ".gguf":
            gguf_header.copy_metadata(source, folder / _GGUF_VOCABULARY)
        return
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _stored_name(name: str, layer: int | None) -> str:
    return f"model.{name}" if layer is None else f"layers.{layer}.{name}"


def _describe(folder: Path) -> dict[str, StoredTensor]:
    """Every array by its path in the tree, from Orbax's metadata; no data is read."""
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(folder.absolute()).item_metadata.tree
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is not a complete Orbax checkpoint ({error}); convert the model again"
        ) from error
    return dict(_flat(tree, ""))


def _flat(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, StoredTensor]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            described = cast(ocp.metadata.ArrayMetadata, value)
            yield f"{prefix}{name}", StoredTensor(tuple(described.shape), str(np.dtype(described.dtype)))


def _restore(folder: Path, layer: int | None, names: list[str]) -> dict[str, NDArray[np.generic]]:
    """Reads some arrays of one group as numpy, whatever devices wrote them."""
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    holes: dict[str, object] = dict.fromkeys(names, 0)

    def nested(group: Mapping[str, object]) -> dict[str, object]:
        return {"model": group} if layer is None else {"layers": {str(layer): group}}

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arguments = ocp.args.PyTreeRestore(nested(holes), restore_args=nested(as_numpy), partial_restore=True)
            tree = checkpointer.restore(folder.absolute(), args=arguments)
    except (OSError, ValueError, KeyError) as error:
        where = "the parameters outside the layers" if layer is None else f"layer {layer}"
        raise CheckpointError(f"{folder} is damaged: cannot read {where} ({error}); convert the model again") from error
    group: dict[str, NDArray[np.generic]] = tree["model"] if layer is None else tree["layers"][str(layer)]
    return dict(group)


def _read_config(path: Path) -> ModelConfig:
    described = read_json(path)
    if described.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {described.get('format')!r}, this version reads {_FORMAT}; convert the model again"
        )
    try:
        values = cast(dict[str, Any], described["config"])
        scaling = values["rope_scaling"]
        return ModelConfig(
            **{
                **values,
                "family": Family(values["family"]),
                "windows": tuple(values["windows"]),
                "eos_token_ids": tuple(values["eos_token_ids"]),
                "rope_scaling": None if scaling is None else RopeScaling(**scaling),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe a model ({error!r}); convert the model again") from error
