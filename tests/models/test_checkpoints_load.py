"""From any checkpoint onto the devices: both forms, any mesh, little host memory (user-needs R11)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jetserve.errors import CheckpointError, FetchError
from jetserve.models import demo
from jetserve.models.checkpoint import load_weights, open_checkpoint
from jetserve.models.gguf_file import GgufFile
from jetserve.models.safetensors_folder import SafetensorsFolder
from jetserve.models.spec import ParamSpec, parameter_table
from jetserve.models.stored_tensors import parameters

WriteFolder = Callable[[str], Path]


def place(name: str, spec: ParamSpec, values: NDArray[np.generic]) -> Array:
    return jnp.asarray(values, jnp.float32)


def test_layers_become_a_tuple_of_mappings(tiny_folder: WriteFolder) -> None:
    checkpoint = open_checkpoint(tiny_folder("llama-biases"))
    weights = load_weights(checkpoint, place, stacked=False)
    assert isinstance(weights.layers, tuple)
    table = parameter_table(checkpoint.config)
    assert (weights.model.keys(), len(weights.layers)) == (table.model.keys(), 2)
    for layer, arrays in enumerate(weights.layers):
        assert arrays.keys() == table.layer.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, checkpoint.read(name, layer))


def test_stacked_layers_are_the_same_arrays_one_above_the_other(tiny_folder: WriteFolder) -> None:
    checkpoint = open_checkpoint(tiny_folder("gemma3-default-pattern"))
    weights = load_weights(checkpoint, place, stacked=True)
    assert isinstance(weights.layers, dict)
    for name, array in weights.layers.items():
        np.testing.assert_array_equal(array, np.stack([checkpoint.read(name, layer) for layer in range(7)]))


def test_each_parameter_is_placed_once_with_its_own_spec(tiny_folder: WriteFolder) -> None:
    checkpoint = open_checkpoint(tiny_folder("llama-mha-untied"))
    seen: list[tuple[str, ParamSpec, tuple[int, ...]]] = []

    def watch(name: str, spec: ParamSpec, values: NDArray[np.generic]) -> Array:
        seen.append((name, spec, values.shape))
        return place(name, spec, values)

    for stacked in (False, True):
        seen.clear()
        load_weights(checkpoint, watch, stacked=stacked)
        assert seen == [(p.name, p.spec, p.spec.shape) for p in parameters(checkpoint.config)]


def test_progress_ends_at_all_bytes_and_never_goes_back(tiny_folder: WriteFolder) -> None:
    checkpoint = open_checkpoint(tiny_folder("llama-mha-untied"))
    seen: list[tuple[int, int]] = []
    load_weights(checkpoint, place, stacked=False, progress=lambda *got: seen.append(got))
    elements = sum(int(np.prod(p.spec.shape)) for p in parameters(checkpoint.config))
    assert seen[-1] == (4 * elements, 4 * elements)
    assert seen == sorted(seen)
    assert len(seen) == len(list(parameters(checkpoint.config)))


def test_a_stack_is_written_in_place(tiny_folder: WriteFolder) -> None:
    # Live arrays while a layer is placed: the model so far, never two copies of a stack.
    checkpoint = open_checkpoint(tiny_folder("llama-mha-untied"))
    whole = sum(4 * int(np.prod(p.spec.shape)) for p in parameters(checkpoint.config))
    before, peak = live_bytes(), 0

    def watch(name: str, spec: ParamSpec, values: NDArray[np.generic]) -> Array:
        nonlocal peak
        placed = place(name, spec, values)
        peak = max(peak, live_bytes() - before)
        return placed

    weights = load_weights(checkpoint, watch, stacked=True)
    assert live_bytes() - before <= whole
    largest = max(4 * int(np.prod(p.spec.shape)) for p in parameters(checkpoint.config))
    assert peak <= whole + largest
    del weights


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


MESHES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jetserve.models.checkpoint import load_weights, open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
for size in (1, 2, 4):
    mesh = Mesh(np.array(jax.devices()[:size]), ("tensor",))
    def place(name, spec, values):
        axes = [("tensor" if axis in ("heads", "kv_heads", "mlp") else None) for axis in spec.axes]
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))
    for stacked in (False, True):
        weights = load_weights(checkpoint, place, stacked=stacked)
        first = weights.layers["q_proj"] if stacked else weights.layers[0]["q_proj"]
        assert len(first.sharding.device_set) == size, first.sharding
        layer = (None,) if stacked else ()
        assert first.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*layer, "tensor", None)), first.ndim)
        for number in range(checkpoint.config.num_layers):
            for name in ("q_proj", "down_proj", "attention_norm"):
                got = weights.layers[name][number] if stacked else weights.layers[number][name]
                np.testing.assert_array_equal(got, checkpoint.read(name, number))
print("same on 1, 2 and 4 of", jax.device_count())
"""


def test_layers_are_sharded_as_placed_and_stacks_likewise(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder("llama-mha-untied")
    done = subprocess.run([sys.executable, "-c", MESHES, folder], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same on 1, 2 and 4 of 8", done.stderr


MEMORY = """
import json, resource, sys
import jax, jax.numpy as jnp
import numpy as np
from jetserve.models.checkpoint import load_weights, open_checkpoint
def resident_bytes():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmHWM"].split()[0]) * 1024
jnp.zeros(8).block_until_ready()
before = resident_bytes()
checkpoint = open_checkpoint(sys.argv[1])
copy = jax.jit(lambda values: values.astype(jnp.float32) * 1)
def place(name, spec, values):
    return copy(values)
weights = load_weights(checkpoint, place, stacked=sys.argv[2] == "stacked")
print(json.dumps(resident_bytes() - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["layers", "stacked"])
def test_host_memory_stays_below_the_model_and_one_tensor(form: str, tmp_path: Path) -> None:
    """R11. 273 MB of float32 weights on CPU, where the devices' memory is the host's."""
    # fmt: off
    shapes = {"self_attn.q_proj": (1024, 1024), "self_attn.k_proj": (1024, 1024), "self_attn.v_proj": (1024, 1024),
              "self_attn.o_proj": (1024, 1024), "mlp.gate_proj": (4096, 1024), "mlp.up_proj": (4096, 1024),
              "mlp.down_proj": (1024, 4096), "input_layernorm": (1024,), "post_attention_layernorm": (1024,)}
    # fmt: on
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    }  # fmt: skip
    tensors = {
        f"model.layers.{n}.{name}.weight": np.ones(shape, np.float32)
        for n in range(4)
        for name, shape in shapes.items()
    }
    tensors |= {
        "model.embed_tokens.weight": np.ones((1024, 1024), np.float32),
        "model.norm.weight": np.ones(1024, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_bytes = sum(values.nbytes for values in tensors.values())
    largest_bytes = max(values.nbytes for values in tensors.values())
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path, form], capture_output=True, text=True, check=True)
    grown_bytes = int(done.stdout)
    # Compiling and the allocator take 90 to 155 MB, whatever the model; a second copy of it would be 273 MB.
    assert grown_bytes < model_bytes + largest_bytes + (200 << 20), f"{grown_bytes=} {model_bytes=}"


def test_a_folder_is_opened_as_what_it_holds(tiny_folder: WriteFolder) -> None:
    assert isinstance(open_checkpoint(tiny_folder("llama-mha-untied")), SafetensorsFolder)


def test_a_folder_with_nothing_known_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"holds neither config\.json .* nor jetserve_config\.json .*name the \.gguf"
    ):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "demos", "/nowhere/model.gguf"])
def test_a_name_that_is_nothing_lists_what_a_model_can_be(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"no model '{name}': give demo or demo-gemma, a Hugging Face folder"):
        open_checkpoint(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\x00(X")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        open_checkpoint(tmp_path / "model.bin")


def test_a_demo_is_fetched_and_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, *, progress: object) -> Path:
        raise FetchError(f"asked for {name} {progress}")

    monkeypatch.setattr(demo, "fetch", fetch)
    with pytest.raises(FetchError, match="asked for demo-gemma None"):
        open_checkpoint("demo-gemma")


@pytest.mark.demo
@pytest.mark.parametrize("name", ["demo", "demo-gemma"])
def test_demo_models_load(name: str) -> None:
    checkpoint = open_checkpoint(name)
    assert isinstance(checkpoint, GgufFile)
    weights = load_weights(checkpoint, lambda name, spec, values: jnp.asarray(values, jnp.bfloat16), stacked=False)
    assert len(jax.tree.leaves(weights)) == {"demo": 272, "demo-gemma": 236}[name]
