"""GGUF files against the Hugging Face weights they are made from, and against the gguf package (user-needs R97)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from jetserve.errors import CheckpointError
from jetserve.models import demo, gguf_config, gguf_file, hugging_face
from jetserve.models.gguf_file import GgufFile
from jetserve.models.spec import Family, ModelConfig
from jetserve.models.stored_tensors import parameters

Tensors = dict[str, NDArray[np.generic]]
ConfigOf = Callable[[str], ModelConfig]
TensorsOf = Callable[[str], dict[str, NDArray[np.float32]]]
Write = Callable[..., Path]

GQA, GEMMA = "llama-gqa2-tied", "gemma3-gqa2"


def permuted(weights: NDArray[np.generic], heads: int) -> NDArray[np.generic]:
    """Rows as llama.cpp's converter lays them out: row 2i of a head is its row i, row 2i+1 its row i + H/2."""
    head_dim = weights.shape[0] // heads
    order = []
    for head in range(heads):
        for i in range(head_dim // 2):
            order += [head * head_dim + i, head * head_dim + i + head_dim // 2]
    return weights[order]


def converted(config: ModelConfig, tensors: Mapping[str, NDArray[np.float32]]) -> Tensors:
    """Hugging Face weights under llama.cpp's names and in its layout. Names come from the gguf package's own table."""
    arch = gguf.MODEL_ARCH.LLAMA if config.family is Family.LLAMA else gguf.MODEL_ARCH.GEMMA3
    table = gguf.get_tensor_name_map(arch, config.num_layers)
    found: Tensors = {}
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".")
        target = table.get_name(stem)
        assert target is not None, name
        new: NDArray[np.generic] = values
        if config.family is Family.LLAMA and "q_proj" in name:
            new = permuted(values, config.num_heads)
        if config.family is Family.LLAMA and "k_proj" in name:
            new = permuted(values, config.num_kv_heads)
        if config.family is Family.GEMMA3 and name.endswith("norm.weight"):
            new = values + np.float32(1)
        found[f"{target}.{kind}"] = new
    return found


def write_gguf(path: Path, config: ModelConfig, tensors: Tensors, types: Mapping[str, Type], **keys: object) -> Path:
    """A file with the metadata that llama.cpp's converter writes. `types`: suffix of a name -> quantisation."""
    arch = config.family.value
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.embed_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if config.family is Family.GEMMA3:
        writer.add_sliding_window(max(config.windows))
    for key, value in keys.items():
        key = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, list)
            writer.add_array(key, value)
    for name, values in tensors.items():
        kind = next((kind for suffix, kind in types.items() if name.endswith(suffix)), None)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write(tiny_config: ConfigOf, tiny_tensors: TensorsOf, tmp_path: Path) -> Write:
    """Writes a tiny case as GGUF. `change` may edit the tensors first; other keywords are metadata."""

    def written(
        case: str,
        types: Mapping[str, Type] | None = None,
        change: Callable[[Tensors], object] = lambda tensors: None,
        **keys: object,
    ) -> Path:
        config = tiny_config(case)
        tensors = converted(config, tiny_tensors(case))
        change(tensors)
        return write_gguf(tmp_path / "tiny.gguf", config, tensors, types or {}, **keys)

    return written


def read_all(checkpoint: GgufFile) -> Tensors:
    """Every parameter by its Hugging Face name."""
    names = hugging_face.weight_names(checkpoint.config)
    return {
        names.model[p.name] if p.layer is None else names.layer[p.name].format(layer=p.layer): checkpoint.read(
            p.name, p.layer
        )
        for p in parameters(checkpoint.config)
    }


@pytest.mark.parametrize(
    "case", ["llama-mha-untied", GQA, "llama-gqa4-wide-heads", "llama-biases", GEMMA, "gemma3-mha"]
)
def test_a_converted_model_has_the_tensors_it_was_made_from(case: str, write: Write, tiny_tensors: TensorsOf) -> None:
    got, expected = read_all(GgufFile(write(case))), tiny_tensors(case)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        # Adding and taking away Gemma's 1 rounds to the last place of numbers near 1.
        bound = 2.0**-24 if case.startswith("gemma3") and name.endswith("norm.weight") else 0.0
        np.testing.assert_allclose(got[name], values, rtol=0, atol=bound, err_msg=name)


def test_permuted_rows_are_those_of_llama_cpp() -> None:
    # reshape(heads, 2, H/2).swapaxes(1, 2) of conversion/llama.py, on head_dim 4: 0 2 1 3.
    assert permuted(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert permuted(np.arange(8), 2).tolist() == np.arange(8).reshape(2, 2, 2).swapaxes(1, 2).reshape(8).tolist()


@pytest.mark.parametrize("case", ["llama-mha-untied", GQA, "llama-rope-linear", "gemma3-gqa2", "gemma3-gqa4-linear"])
def test_metadata_gives_the_same_configuration_as_config_json(
    case: str, write: Write, tiny_config: ConfigOf, tiny: ModuleType
) -> None:
    expected = tiny_config(case)
    arch = expected.family.value
    keys: dict[str, object] = {}
    if expected.rope_scaling is not None:
        keys = {
            f"{arch}__rope__scaling__type": "linear",
            f"{arch}__rope__scaling__factor": expected.rope_scaling.factor,
            f"{arch}__rope__scaling__original_context_length": expected.rope_scaling.original_max_position,
        }
    if expected.family is Family.GEMMA3:
        keys[f"{arch}__attention__sliding_window_pattern"] = tiny.CASES[case].config["sliding_window_pattern"]
    keys["tokenizer__ggml__bos_token_id"] = expected.bos_token_id
    keys["tokenizer__ggml__eos_token_id"] = expected.eos_token_ids[0]
    assert GgufFile(write(case, **keys)).config == dataclasses.replace(expected, name="Tiny")


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
@pytest.mark.parametrize("case", [GQA, GEMMA])
def test_quantised_tensors_are_what_the_gguf_package_dequantises(
    case: str, kind: Type, write: Write, tiny_config: ConfigOf, tiny_tensors: TensorsOf
) -> None:
    types = dict.fromkeys(("attn_q.weight", "attn_k.weight", "attn_output.weight", "token_embd.weight"), kind)
    got = read_all(GgufFile(write(case, types)))
    for name, values in tiny_tensors(case).items():
        if any(part in name for part in ("q_proj", "k_proj", "o_proj", "embed_tokens")):
            # Rows are quantised one by one, so the order they are stored in changes nothing.
            expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            assert got[name].dtype == np.float32
            np.testing.assert_array_equal(got[name], expected, err_msg=name)
            np.testing.assert_allclose(got[name], values, atol=np.ptp(values) / 14, err_msg=name)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.F32])
def test_unquantised_tensors_come_in_their_own_type(kind: Type, write: Write, tiny_tensors: TensorsOf) -> None:
    got = read_all(GgufFile(write(GQA, {"attn_q.weight": kind, "ffn_up.weight": kind})))
    for name, values in tiny_tensors(GQA).items():
        if "q_proj" in name or "up_proj" in name:
            assert got[name].dtype.name == {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[kind.name]
            np.testing.assert_array_equal(got[name], values.astype(got[name].dtype), err_msg=name)


@pytest.mark.parametrize("name", gguf_file.QUANTISED_TYPES)
def test_every_type_called_readable_is_dequantised_in_pieces_as_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Type[name]
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Small bytes: none of the scales among them is a NaN.
    data = np.random.default_rng(0).integers(0, 60, (7, 3 * block_bytes), np.uint8)
    monkeypatch.setattr(gguf_file, "CHUNK_ELEMENTS", 2 * block_elements)
    got = gguf_file.dequantise(data.reshape(-1), kind)
    np.testing.assert_array_equal(got.reshape(7, -1), gguf.quants.dequantize(data, kind))


def test_types_that_cannot_be_read_are_named_with_their_tensors(write: Write) -> None:
    def whole_numbers(tensors: Tensors) -> None:
        tensors["blk.0.ffn_up.weight"] = np.ones((48, 32), np.int32)
        tensors["blk.1.ffn_up.weight"] = np.ones((48, 32), np.float64)

    with pytest.raises(CheckpointError) as info:
        GgufFile(write(GQA, change=whole_numbers))
    assert "2 of an unsupported type (F32, F16, BF16, Q4_0," in str(info.value)
    assert "blk.0.ffn_up.weight is I32; blk.1.ffn_up.weight is F64" in str(info.value)


def test_a_type_nobody_knows_is_named_by_its_number(write: Write) -> None:
    path = write(GQA)
    data = path.read_bytes()
    name = b"blk.1.ffn_gate.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # number of dimensions, two dimensions
    path.write_bytes(data[:at] + (999).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_gate\.weight is type 999"):
        GgufFile(path)


def test_all_missing_and_misshapen_tensors_are_in_one_error(write: Write) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["output_norm.weight"], tensors["blk.1.attn_v.weight"]
        tensors["blk.0.ffn_down.weight"] = np.zeros((48, 32), np.float32)

    with pytest.raises(CheckpointError) as info:
        GgufFile(write(GQA, change=damage))
    assert "2 missing: output_norm.weight, blk.1.attn_v.weight" in str(info.value)
    assert "1 of another shape: blk.0.ffn_down.weight is [48, 32], needs [32, 48]" in str(info.value)


def test_a_truncated_file_is_an_error_that_names_the_tensor(write: Write) -> None:
    path = write(GQA)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is truncated: tensor blk\..* ends at byte \d+, the file at"):
        GgufFile(path)


def test_a_head_of_its_own_unties_the_model(write: Write, tiny_tensors: TensorsOf) -> None:
    checkpoint = GgufFile(write("llama-mha-untied"))
    assert not checkpoint.config.tied_head
    np.testing.assert_array_equal(checkpoint.read("head", None), tiny_tensors("llama-mha-untied")["lm_head.weight"])
    assert GgufFile(write(GQA)).config.tied_head


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'bert'; supported are llama, gemma3"):
        GgufFile(tmp_path / "bert.gguf")


@pytest.mark.demo
@pytest.mark.parametrize("name", ["demo", "demo-gemma"])
def test_demo_models_are_what_the_gguf_package_dequantises(name: str) -> None:
    path = demo.fetch(name)
    checkpoint = GgufFile(path)
    config, reader = checkpoint.config, gguf.GGUFReader(path)
    names = gguf_config.MODEL_NAMES | gguf_config.LAYER_NAMES
    ours = {names[p.name].format(layer=p.layer): p for p in parameters(config)}
    assert {tensor.name for tensor in reader.tensors} == ours.keys()
    for tensor in reader.tensors:
        p = ours[tensor.name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if config.family is Family.GEMMA3 and p.name.endswith("norm"):
            expected = expected - 1
        got = checkpoint.read(p.name, p.layer)
        if config.family is Family.LLAMA and p.name in ("q_proj", "k_proj"):
            got = permuted(got, config.num_heads if p.name == "q_proj" else config.num_kv_heads)
        np.testing.assert_array_equal(got, expected, err_msg=tensor.name)
