"""Converted checkpoints: same parameters, any mesh, whole or not there (user-needs R96)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from numpy.typing import NDArray

from jetserve.errors import CheckpointError
from jetserve.gguf_header import read_header
from jetserve.models import demo
from jetserve.models.checkpoint import Checkpoint, open_checkpoint
from jetserve.models.orbax_folder import OrbaxFolder, convert
from jetserve.models.spec import ModelConfig
from jetserve.models.stored_tensors import parameters

WriteFolder = Callable[[str], Path]


def assert_same_parameters(got: Checkpoint, expected: Checkpoint) -> None:
    assert got.config == expected.config
    for p in parameters(expected.config):
        values = expected.read(p.name, p.layer)
        read = got.read(p.name, p.layer)
        assert read.dtype == values.dtype
        np.testing.assert_array_equal(read, values, err_msg=f"{p.name} of layer {p.layer}")


@pytest.mark.parametrize("case", ["llama-rope-yarn-tuned", "llama-biases", "gemma3-gqa4-linear"])
def test_a_converted_checkpoint_has_the_same_configuration_and_parameters(
    case: str, tiny_folder: WriteFolder, tmp_path: Path
) -> None:
    source = open_checkpoint(tiny_folder(case))
    convert(source, tmp_path / "converted")
    opened = open_checkpoint(tmp_path / "converted")
    assert isinstance(opened, OrbaxFolder)
    assert_same_parameters(opened, source)


def test_parameters_can_be_read_in_any_order_and_again(tiny_folder: WriteFolder, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_folder("llama-biases"))
    convert(source, tmp_path / "converted")
    opened = open_checkpoint(tmp_path / "converted")
    for name, layer in (("q_proj", 1), ("q_proj", 0), ("q_proj", 0), ("head", None), ("up_bias", 0), ("q_proj", 1)):
        np.testing.assert_array_equal(opened.read(name, layer), source.read(name, layer))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_asked_dtype_is_written(dtype: str, tiny_folder: WriteFolder, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_folder("gemma3-gqa2"))
    convert(source, tmp_path / "converted", dtype)
    opened = open_checkpoint(tmp_path / "converted")
    for p in parameters(source.config):
        got = opened.read(p.name, p.layer)
        assert got.dtype.name == dtype
        expected = source.read(p.name, p.layer).astype({"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype])
        np.testing.assert_array_equal(got, expected)


def test_progress_counts_parameters(tiny_folder: WriteFolder, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_folder("llama-gqa2-tied"))
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "converted", progress=lambda *got: seen.append(got))
    count = len(list(parameters(source.config)))
    assert seen == [(done, count) for done in range(1, count + 1)]


def test_the_tokenizer_s_files_come_along(tiny_folder: WriteFolder, tmp_path: Path) -> None:
    folder = tiny_folder("llama-gqa2-tied")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (folder / name).write_text(name)
    convert(open_checkpoint(folder), tmp_path / "converted")
    source = open_checkpoint(tmp_path / "converted").tokenizer_source()
    assert source == tmp_path / "converted"
    assert sorted(path.name for path in source.iterdir()) == [
        "chat_template.jinja", "jetserve_config.json", "tokenizer.json", "tokenizer_config.json", "weights",
    ]  # fmt: skip
    assert (source / "tokenizer.json").read_text() == "tokenizer.json"


def write_llama_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "a", "b"])
    shapes = {"attn_q": (8, 8), "attn_k": (8, 8), "attn_v": (8, 8), "attn_output": (8, 8), "ffn_gate": (16, 8),
              "ffn_up": (16, 8), "ffn_down": (8, 16), "attn_norm": (8,), "ffn_norm": (8,)}  # fmt: skip
    draw = np.random.default_rng(0).standard_normal
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", draw(shape).astype(np.float32))
    writer.add_tensor("token_embd.weight", draw((3, 8)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_s_vocabulary_comes_along_without_its_tensors(tmp_path: Path) -> None:
    source = open_checkpoint(write_llama_gguf(tmp_path / "tiny.gguf"))
    convert(source, tmp_path / "converted")
    opened = open_checkpoint(tmp_path / "converted")
    assert_same_parameters(opened, source)
    vocabulary = read_header(opened.tokenizer_source())
    assert vocabulary.metadata == read_header(tmp_path / "tiny.gguf").metadata
    assert vocabulary.tensors == {}


def test_a_converted_checkpoint_can_be_converted_again(tmp_path: Path) -> None:
    source = open_checkpoint(write_llama_gguf(tmp_path / "tiny.gguf"))
    convert(source, tmp_path / "once")
    convert(open_checkpoint(tmp_path / "once"), tmp_path / "twice")
    opened = open_checkpoint(tmp_path / "twice")
    assert_same_parameters(opened, source)
    assert opened.tokenizer_source() == tmp_path / "twice" / "tokenizer.gguf"


SAVE_ON_EIGHT = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jetserve.models.checkpoint import load_weights, open_checkpoint
source, out = open_checkpoint(sys.argv[1]), Path(sys.argv[2])
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
def place(name, spec, values):
    rows = "tensor" if values.shape[0] % 4 == 0 else None
    columns = "data" if values.ndim == 2 else None
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*(rows, columns)[:values.ndim])))
weights = load_weights(source, place, stacked=False)
tree = {"model": weights.model, "layers": {str(n): layer for n, layer in enumerate(weights.layers)}}
with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    checkpointer.save(out / "weights", args=ocp.args.PyTreeSave(tree), force=True)
print("saved from", len(weights.layers[0]["q_proj"].sharding.device_set))
"""


@pytest.mark.slow
def test_arrays_saved_on_eight_devices_are_read_on_one(tiny_folder: WriteFolder, tmp_path: Path) -> None:
    # Placing on 1, 2 and 4 devices is the loader's and tested there: what is read carries no mesh.
    folder, out = tiny_folder("llama-mha-untied"), tmp_path / "converted"
    convert(open_checkpoint(folder), out)
    saved = subprocess.run(
        [sys.executable, "-c", SAVE_ON_EIGHT, folder, out], capture_output=True, text=True, check=False
    )
    assert saved.stdout.strip() == "saved from 8", saved.stderr
    assert_same_parameters(open_checkpoint(out), open_checkpoint(folder))


def test_an_existing_folder_is_not_overwritten(tiny_folder: WriteFolder, tmp_path: Path) -> None:
    out = tmp_path / "taken"
    out.mkdir()
    (out / "precious").write_text("")
    with pytest.raises(CheckpointError, match="taken exists and is not an empty folder"):
        convert(open_checkpoint(tiny_folder("llama-gqa2-tied")), out)
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_an_empty_folder_is_filled(tiny_folder: WriteFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert(open_checkpoint(tiny_folder("llama-gqa2-tied")), tmp_path / "empty")
    assert open_checkpoint(tmp_path / "empty").config.num_layers == 2


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = open_checkpoint(write_llama_gguf(tmp_path / "tiny.gguf"))

    class Failing:
        path, config, check, tokenizer_source = source.path, source.config, source.check, source.tokenizer_source

        def read(self, name: str, layer: int | None) -> NDArray[np.generic]:
            if name == "down_proj":
                raise CheckpointError("damaged")
            return source.read(name, layer)

    with pytest.raises(CheckpointError, match="damaged"):
        convert(Failing(), tmp_path / "converted")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_disk_without_room_is_found_before_writing(
    tiny_folder: WriteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(tiny_folder("llama-biases"))
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    monkeypatch.setattr(ocp.Checkpointer, "save", lambda *_, **__: pytest.fail("wrote"))
    with pytest.raises(CheckpointError, match=r"the weights take up to \d+ MB, .* has 0 MB free"):
        convert(source, tmp_path / "converted")
    assert list(tmp_path.glob("*converted*")) == []


def test_what_the_disk_says_while_writing_is_an_error(
    tiny_folder: WriteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object, **__: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

    source = open_checkpoint(tiny_folder("llama-biases"))
    monkeypatch.setattr(ocp.Checkpointer, "save", save)
    with pytest.raises(CheckpointError, match="cannot write the weights: RESOURCE_EXHAUSTED"):
        convert(source, tmp_path / "converted")
    assert list(tmp_path.glob("*converted*")) == []


def test_an_unknown_dtype_lists_those_there_are(tiny_folder: WriteFolder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype 'int4'; choose from float32, bfloat16"):
        convert(open_checkpoint(tiny_folder("llama-gqa2-tied")), tmp_path / "converted", "int4")


@pytest.fixture
def converted(tiny_folder: WriteFolder, tmp_path: Path) -> Path:
    convert(open_checkpoint(tiny_folder("llama-mha-untied")), tmp_path / "converted")
    return tmp_path / "converted"


def edit_config(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    file = folder / "jetserve_config.json"
    described = json.loads(file.read_text())
    change(described)
    file.write_text(json.dumps(described))


def test_arrays_that_do_not_fit_the_configuration_are_named(converted: Path) -> None:
    def widen(described: dict[str, object]) -> None:
        config = described["config"]
        assert isinstance(config, dict)
        config.update(vocab_size=62, qk_norm=True)

    edit_config(converted, widen)
    with pytest.raises(CheckpointError) as info:
        open_checkpoint(converted)
    assert "4 missing: layers.0.q_norm, layers.0.k_norm, layers.1.q_norm, layers.1.k_norm" in str(info.value)
    assert "model.embedding is [61, 32], needs [62, 32]" in str(info.value)


def test_another_format_is_refused_by_number(converted: Path) -> None:
    edit_config(converted, lambda described: described.update(format=2))
    with pytest.raises(CheckpointError, match="has format 2, this version reads 1"):
        open_checkpoint(converted)


def test_an_unknown_hyperparameter_is_named(converted: Path) -> None:
    edit_config(converted, lambda described: described.update(config={"family": "llama"}))
    with pytest.raises(CheckpointError, match=r"does not describe a model \(.*rope_scaling"):
        open_checkpoint(converted)


def test_lacking_weights_are_an_error(converted: Path) -> None:
    (converted / "weights").rename(converted / "elsewhere")
    with pytest.raises(CheckpointError, match=r"weights is not a complete Orbax checkpoint .*convert the model again"):
        open_checkpoint(converted)


def read_all(folder: Path) -> None:
    opened = open_checkpoint(folder)
    for p in parameters(opened.config):
        opened.read(p.name, p.layer)


def data_files(converted: Path) -> list[Path]:
    """Orbax's data files, the largest (the arrays) last."""
    files = [path for path in (converted / "weights").rglob("*") if path.is_file() and path.parent.name == "d"]
    return sorted(files, key=lambda path: path.stat().st_size)


def test_damaged_arrays_are_an_error_that_says_which(converted: Path) -> None:
    file = data_files(converted)[-1]
    data = bytearray(file.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"weights is damaged: cannot read .*; convert the model again"):
        read_all(converted)


def test_truncated_files_are_an_error(converted: Path) -> None:
    for file in data_files(converted):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="weights is not a complete Orbax checkpoint"):
        open_checkpoint(converted)


@pytest.mark.demo
def test_the_demo_converts_and_reads_back(tmp_path: Path) -> None:
    source = open_checkpoint(demo.fetch("demo"))
    convert(source, tmp_path / "converted")
    assert_same_parameters(open_checkpoint(tmp_path / "converted"), source)


def test_every_field_of_the_configuration_survives(tiny_folder: WriteFolder, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_folder("gemma3-rope-parameters"))
    convert(source, tmp_path / "converted")
    config: ModelConfig = open_checkpoint(tmp_path / "converted").config
    assert config == source.config
    assert (type(config.windows), type(config.eos_token_ids), type(config.family)) == (
        tuple, tuple, type(source.config.family),
    )  # fmt: skip
