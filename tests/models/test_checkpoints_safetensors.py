"""Hugging Face folders: which files and tensors are read, and what is refused (user-needs R24, R92 to R95)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from jetserve.errors import CheckpointError
from jetserve.models import hugging_face
from jetserve.models.safetensors_folder import SafetensorsFolder
from jetserve.models.stored_tensors import parameters

WriteFolder = Callable[[str], Path]
Tensors = dict[str, NDArray[np.float32]]
TensorsOf = Callable[[str], Tensors]

LLAMA, TIED, GEMMA = "llama-mha-untied", "llama-gqa2-tied", "gemma3-gqa2"
HEAD, EMBEDDING, Q1 = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"


def read_all(checkpoint: SafetensorsFolder) -> dict[str, NDArray[np.generic]]:
    """Every parameter by its Hugging Face name."""
    names = hugging_face.weight_names(checkpoint.config)
    found = {}
    for p in parameters(checkpoint.config):
        name = names.model[p.name] if p.layer is None else names.layer[p.name].format(layer=p.layer)
        found[name] = checkpoint.read(p.name, p.layer)
    return found


def assert_same(got: Mapping[str, NDArray[np.generic]], expected: Mapping[str, NDArray[np.generic]]) -> None:
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert got[name].dtype == values.dtype, name
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def shard(folder: Path, count: int, *, index: bool) -> dict[str, str]:
    """Splits model.safetensors into shards. Returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = dict(list(tensors.items())[number::count])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if index:
        write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("case", [LLAMA, TIED, "llama-gqa4-wide-heads", "llama-biases", GEMMA, "gemma3-untied-bias"])
def test_every_parameter_is_what_the_file_holds(case: str, tiny_folder: WriteFolder, tiny_tensors: TensorsOf) -> None:
    checkpoint = SafetensorsFolder(tiny_folder(case))
    assert_same(read_all(checkpoint), tiny_tensors(case))
    assert checkpoint.tokenizer_source() == checkpoint.path


def test_the_folder_names_a_model_whose_configuration_does_not(tiny_folder: WriteFolder) -> None:
    assert SafetensorsFolder(tiny_folder(LLAMA)).config.name == LLAMA


def test_end_tokens_of_the_generation_config_join_those_of_the_config(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    change_config(folder, eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert SafetensorsFolder(folder).config.eos_token_ids == (2, 7)


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_shards_are_read_together(index: bool, tiny_folder: WriteFolder, tiny_tensors: TensorsOf) -> None:
    folder = tiny_folder(LLAMA)
    shard(folder, 4, index=index)
    assert_same(read_all(SafetensorsFolder(folder)), tiny_tensors(LLAMA))


@pytest.mark.parametrize("stray", ["model.safetensors", "consolidated.safetensors", "model-00001-of-00001.safetensors"])
def test_with_an_index_other_files_are_not_read(
    stray: str, tiny_folder: WriteFolder, tiny_tensors: TensorsOf, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder(LLAMA)
    shard(folder, 2, index=True)
    save_file({name: -values for name, values in tiny_tensors(LLAMA).items()}, folder / stray)
    assert_same(read_all(SafetensorsFolder(folder)), tiny_tensors(LLAMA))
    assert caplog.records == []


def test_without_an_index_consolidated_files_are_not_read(tiny_folder: WriteFolder, tiny_tensors: TensorsOf) -> None:
    folder = tiny_folder(LLAMA)
    save_file({name: -values for name, values in tiny_tensors(LLAMA).items()}, folder / "consolidated.safetensors")
    assert_same(read_all(SafetensorsFolder(folder)), tiny_tensors(LLAMA))


def test_without_an_index_a_tensor_in_two_files_is_an_error(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    whole = (folder / "model.safetensors").read_bytes()
    shard(folder, 2, index=False)
    (folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(
        CheckpointError, match=r"stored twice, as .* in model\.safetensors and as .* in model-0000\d-of-"
    ):
        SafetensorsFolder(folder)


def test_without_an_index_a_lacking_shard_is_named(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    shard(folder, 3, index=False)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks shards .*: model-00002-of-00003\.safetensors; download"):
        SafetensorsFolder(folder)


def test_a_folder_without_model_files_lists_what_there_is(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"holds no .*other safetensors: consolidated\.safetensors"):
        SafetensorsFolder(folder)


def test_a_shard_the_index_names_and_nobody_has_is_named(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    shard(folder, 4, index=True)
    for number in (2, 4):
        (folder / f"model-{number:05d}-of-00004.safetensors").unlink()
    absent = "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors"
    with pytest.raises(
        CheckpointError, match=re.escape(f"lacks files that model.safetensors.index.json names: {absent}")
    ):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("left", [0, 4, 100, -1], ids=["nothing", "half a size", "half a header", "all but a byte"])
def test_a_truncated_shard_is_named(left: int, tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    shard(folder, 2, index=True)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated or damaged"):
        SafetensorsFolder(folder)


def test_a_tensor_its_file_does_not_hold_is_named(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    weight_map = shard(folder, 2, index=True)
    other = next(file for file in weight_map.values() if file != weight_map[Q1])
    write_index(folder, weight_map | {Q1: other})
    with pytest.raises(CheckpointError, match=re.escape(f"names tensors their files do not hold: {Q1} in {other}")):
        SafetensorsFolder(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("not json", "is not valid JSON"),
        ("[]", "must hold an object, holds list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', r"names files outside of its folder: \.\./a"),
    ],
)
def test_a_damaged_index_is_named(index: str, message: str, tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(folder)


def test_tied_and_no_head_stored_has_no_head(tiny_folder: WriteFolder) -> None:
    checkpoint = SafetensorsFolder(tiny_folder(TIED))
    assert "head" not in {p.name for p in parameters(checkpoint.config)}


def test_tied_and_an_equal_head_stored_is_noted_and_not_loaded(
    tiny_folder: WriteFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder(TIED)
    change_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
    with caplog.at_level(logging.INFO):
        checkpoint = SafetensorsFolder(folder)
    assert "head" not in {p.name for p in parameters(checkpoint.config)}
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert f"{HEAD} equals {EMBEDDING}" in caplog.text


def test_tied_and_a_different_head_stored_is_an_error(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(TIED)

    def differ_in_the_last_row(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].copy()
        tensors[HEAD][-1, -1] += 1

    change_tensors(folder, differ_in_the_last_row)
    with pytest.raises(CheckpointError, match=f"tie_word_embeddings true, but {HEAD} differs from {EMBEDDING}"):
        SafetensorsFolder(folder)


def test_untied_and_no_head_stored_is_an_error_that_names_the_setting(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    change_tensors(folder, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(CheckpointError, match=rf"1 missing: {HEAD}\. config\.json has tie_word_embeddings false"):
        SafetensorsFolder(folder)


def test_all_missing_misshapen_and_unreadable_tensors_are_in_one_error(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    norm, down, up = "model.norm.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"

    def damage(tensors: Tensors) -> None:
        tensors["model.layers.1.attn.query.weight"] = tensors.pop(Q1)
        del tensors[norm]
        tensors[down] = tensors[down].T.copy()
        tensors[up] = tensors[up].astype(ml_dtypes.float8_e4m3fn)

    change_tensors(folder, damage)
    with pytest.raises(CheckpointError) as info:
        SafetensorsFolder(folder)
    message = str(info.value)
    assert f"2 missing: {norm}, {Q1}" in message
    assert f"1 of another shape: {down} is [48, 32], needs [32, 48]" in message
    assert f"1 of an unsupported type (BF16, F16, F32 can be read): {up} is F8_E4M3" in message
    assert "1 not needed: model.layers.1.attn.query.weight" in message


def test_an_extra_tensor_is_one_warning_that_names_it(
    tiny_folder: WriteFolder, tiny_tensors: TensorsOf, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder(LLAMA)
    change_tensors(folder, lambda tensors: tensors.update({"model.extra.weight": np.zeros(2, np.float32)}))
    assert_same(read_all(SafetensorsFolder(folder)), tiny_tensors(LLAMA))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "holds 1 tensors the model does not need: model.extra.weight" in caplog.text


def test_rope_tables_of_old_files_are_left_out_silently(
    tiny_folder: WriteFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder(LLAMA)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: np.zeros(4, np.float32)}))
    SafetensorsFolder(folder)
    assert caplog.records == []


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_file_is_read(
    prefix: str, tiny_folder: WriteFolder, tiny_tensors: TensorsOf
) -> None:
    folder = tiny_folder(GEMMA)
    nested = {prefix + name.removeprefix("model."): values for name, values in tiny_tensors(GEMMA).items()}
    save_file(nested, folder / "model.safetensors")
    assert_same(read_all(SafetensorsFolder(folder)), tiny_tensors(GEMMA))


@pytest.mark.parametrize("case", ["llama-biases", "llama-gqa4-wide-heads"])
def test_fused_tensors_give_the_same_parameters_as_split_ones(
    case: str, tiny_folder: WriteFolder, tiny_tensors: TensorsOf
) -> None:
    folder = tiny_folder(case)

    def fuse(tensors: Tensors) -> None:
        for layer in (0, 1):
            for block, fused, parts in (
                ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
                ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
            ):
                for kind in ("weight", "bias"):
                    names = [f"model.layers.{layer}.{block}.{part}.{kind}" for part in parts]
                    if names[0] in tensors:
                        joined = np.concatenate([tensors.pop(name) for name in names])
                        tensors[f"model.layers.{layer}.{block}.{fused}.{kind}"] = joined

    change_tensors(folder, fuse)
    assert_same(read_all(SafetensorsFolder(folder)), tiny_tensors(case))


def test_a_fused_tensor_of_another_height_is_an_error(tiny_folder: WriteFolder, tiny_tensors: TensorsOf) -> None:
    folder = tiny_folder("llama-gqa4-wide-heads")
    fused = "model.layers.0.self_attn.qkv_proj.weight"

    def fuse(tensors: Tensors) -> None:
        for part in "qkv":
            del tensors[f"model.layers.0.self_attn.{part}_proj.weight"]
        tensors[fused] = np.zeros((95, 32), np.float32)

    change_tensors(folder, fuse)
    with pytest.raises(CheckpointError, match=re.escape(f"{fused} is [95, 32], needs [96, 32]")):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_half_precisions_come_as_they_are_stored(
    dtype: type[np.generic], tiny_folder: WriteFolder, tiny_tensors: TensorsOf
) -> None:
    folder = tiny_folder(GEMMA)
    halves = {name: values.astype(dtype) for name, values in tiny_tensors(GEMMA).items()}
    save_file(halves, folder / "model.safetensors")
    assert_same(read_all(SafetensorsFolder(folder)), halves)


def test_a_configuration_that_is_no_json_is_named(tiny_folder: WriteFolder) -> None:
    folder = tiny_folder(LLAMA)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        SafetensorsFolder(folder)
