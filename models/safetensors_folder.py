"""A Hugging Face folder: config.json, generation_config.json and safetensors. Host side; imports no jax.

Which files are read:
  - with model.safetensors.index.json: the files it names, and of them the tensors it names;
  - without: model.safetensors and the complete set model-*-of-*.safetensors, whichever are there. A tensor that two
    files hold is an error.
Other files, such as consolidated.safetensors, are never read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from jetserve.errors import CheckpointError
from jetserve.models import hugging_face
from jetserve.models.spec import ModelConfig, parameter_table
from jetserve.models.stored_tensors import Parameter, StoredTensor, check_tensors, parameters

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"

_SINGLE_FILE = "model.safetensors"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_DTYPES = ("BF16", "F16", "F32")
_HEAD, _EMBEDDING = "head", "embedding"
_COMPARED_ROWS = 4096  # of two embeddings at a time
# Ours -> (the part of the name that a fused tensor replaces, by what, the parameters it holds one below the other).
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", ("q_proj", "k_proj", "v_proj"))),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), ("qkv_proj", ("q_bias", "k_bias", "v_bias"))),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", ("gate_proj", "up_proj"))),
    **dict.fromkeys(("gate_bias", "up_bias"), ("gate_up_proj", ("gate_bias", "up_bias"))),
}


class _Located(NamedTuple):
    """A stored tensor: its file, its name in there, and what the file says of it."""

    file: Path
    stored_name: str
    tensor: StoredTensor


class _Source(NamedTuple):
    """Rows [start, stop) of a tensor; the plain name as `hugging_face.weight_names` has it."""

    name: str
    start: int
    stop: int
    total: int


class SafetensorsFolder:
    """Weights of one folder, checked when opened, read one at a time.

    Attributes:
      path: the folder.
      config: what config.json and generation_config.json say.
    """

    def __init__(self, path: Path) -> None:
        """Reads the configuration and every file's header, no weights (but those of a tied head's copy).

        Raises: CheckpointError that names the file, key or all tensors at fault.
        """
        self.path = path
        self.config: ModelConfig = _read_config(path)
        self._tensors = _locate(path)
        self._sources = {p.key: self._source(p) for p in parameters(self.config)}
        self.check()

    def read(self, name: str, layer: int | None) -> NDArray[np.generic]:
        """The parameter in the dtype it is stored in; fresh memory, the file's pages are let go."""
        source = self._sources[name, layer]
        return _read_rows(self._tensors[source.name], source.start, source.stop)

    def check(self) -> None:
        """Compares the files with what the model needs. Raises: CheckpointError that names all differences."""
        table = {p.key: p.spec for p in parameters(self.config)}
        wanted = {s.name: (s.total, *table[key].shape[1:]) for key, s in self._sources.items()}
        head = hugging_face.weight_names(_untied(self.config)).model[_HEAD]
        tied_copy = self.config.tied_head and head in self._tensors
        if tied_copy:
            wanted[head] = table[_EMBEDDING, None].shape
        notes = []
        if not self.config.tied_head and head not in self._tensors:
            notes.append(f"{CONFIG_FILE} has tie_word_embeddings false; if the head is the embedding, set it to true")
        stored = {name: located.tensor for name, located in self._tensors.items()}
        check_tensors(self.path, stored, wanted, _DTYPES, notes)
        if tied_copy:
            self._compare_tied(head, self._sources[_EMBEDDING, None].name)

    def tokenizer_source(self) -> Path:
        """Where `jetserve.tokenizer` finds the vocabulary."""
        return self.path

    def _source(self, parameter: Parameter) -> _Source:
        """Where the parameter is, in a tensor of its own or fused with its neighbours (as Phi-3 stores them)."""
        names, rows = hugging_face.weight_names(self.config), parameter.spec.shape[0]
        if parameter.layer is None:
            return _Source(names.model[parameter.name], 0, rows, rows)
        own = names.layer[parameter.name].format(layer=parameter.layer)
        if own not in self._tensors and parameter.name in _FUSED:
            fused_part, members = _FUSED[parameter.name]
            fused = re.sub(r"\.\w+_proj\.", f".{fused_part}.", own)
            if fused in self._tensors:
                return _rows_of(fused, parameter.name, members, self.config)
        return _Source(own, 0, rows, rows)

    def _compare_tied(self, head: str, embedding: str) -> None:
        rows = self.config.vocab_size
        for start in range(0, rows, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, rows)
            a, b = (_read_rows(self._tensors[name], start, stop) for name in (head, embedding))
            if not np.array_equal(a.astype(np.float32), b.astype(np.float32)):
                raise CheckpointError(
                    f"{self.path}: {CONFIG_FILE} has tie_word_embeddings true, but {head} differs from {embedding}; "
                    f"set it to false to use the head that is stored, or remove that"
                )
        log.info("%s: %s equals %s, as the configuration says; it is not loaded twice", self.path, head, embedding)


def _rows_of(fused: str, name: str, members: tuple[str, ...], config: ModelConfig) -> _Source:
    table = parameter_table(config).layer
    rows = {member: table[member].shape[0] for member in members}
    start = sum(rows[member] for member in members[: members.index(name)])
    return _Source(fused, start, start + rows[name], sum(rows[member] for member in members))


def _read_rows(located: _Located, start: int, stop: int) -> NDArray[np.generic]:
    # Opened for each read: a mapping that stays open keeps all it ever touched in our resident memory.
    with safe_open(located.file, framework="numpy") as file:
        if (start, stop) == (0, located.tensor.shape[0]):
            whole: NDArray[np.generic] = file.get_tensor(located.stored_name)
            return whole
        rows: NDArray[np.generic] = file.get_slice(located.stored_name)[start:stop]
        return rows


def read_json(path: Path) -> dict[str, object]:
    """Raises: CheckpointError when the file cannot be read or holds something else than an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold an object, holds {type(value).__name__}")
    return value


def _read_config(folder: Path) -> ModelConfig:
    generation = folder / "generation_config.json"
    config = hugging_face.read_config(
        read_json(folder / CONFIG_FILE), read_json(generation) if generation.exists() else None
    )
    return dataclasses.replace(config, name=config.name or folder.resolve().name)


def _locate(folder: Path) -> dict[str, _Located]:
    """Every tensor by its plain name (`hugging_face.text_name`), those no text model needs left out."""
    index = folder / INDEX_FILE
    found = _indexed(folder, index) if index.exists() else _unindexed(folder)
    tensors: dict[str, _Located] = {}
    for stored_name, located in found:
        name = hugging_face.text_name(stored_name)
        if name is None:
            continue
        if name in tensors:
            other = tensors[name]
            raise CheckpointError(
                f"{folder}: {name} is stored twice, as {other.stored_name} in {other.file.name} and as {stored_name} "
                f"in {located.file.name}; remove the file that does not belong to the model"
            )
        tensors[name] = located
    return tensors


def _indexed(folder: Path, index: Path) -> Iterator[tuple[str, _Located]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names files outside of its folder: {', '.join(outside)}")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{folder} lacks files that {index.name} names: {', '.join(absent)}; download them again")
    headers = {name: _read_header(folder / name) for name in names}
    lost = [f"{tensor} in {file}" for tensor, file in weight_map.items() if tensor not in headers[file]]
    if lost:
        raise CheckpointError(f"{index} names tensors their files do not hold: {', '.join(lost)}; download them again")
    for tensor, file in weight_map.items():
        yield tensor, _Located(folder / file, tensor, headers[file][tensor])


def _unindexed(folder: Path) -> Iterator[tuple[str, _Located]]:
    shards = sorted(path for path in folder.glob("*.safetensors") if _SHARD.fullmatch(path.name))
    if shards:
        _check_complete(folder, shards)
    files = [path for path in (folder / _SINGLE_FILE,) if path.is_file()] + shards
    if not files:
        others = ", ".join(sorted(path.name for path in folder.glob("*.safetensors"))) or "none"
        raise CheckpointError(
            f"{folder} holds no {INDEX_FILE}, {_SINGLE_FILE} or model-*-of-*.safetensors (other safetensors: {others})"
        )
    for file in files:
        for tensor, described in _read_header(file).items():
            yield tensor, _Located(file, tensor, described)


def _check_complete(folder: Path, shards: list[Path]) -> None:
    present = {path.name for path in shards}
    for path in shards:
        match = _SHARD.fullmatch(path.name)
        assert match is not None
        width, count = len(match[1]), match[2]
        wanted = [f"model-{number:0{width}d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
        absent = [name for name in wanted if name not in present]
        if absent:
            raise CheckpointError(
                f"{folder} lacks shards of {path.name}'s set: {', '.join(absent)}; download them again"
            )


def _read_header(file: Path) -> Mapping[str, StoredTensor]:
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            return {name: StoredTensor(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        raise CheckpointError(f"{file} is truncated or damaged ({error}); download it again") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error


def _untied(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, tied_head=False)
