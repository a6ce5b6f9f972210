"""The goldens of tests/models/goldens, as fixtures."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jetserve.models import hugging_face
from jetserve.models.spec import ModelConfig, parameter_table

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """goldens/tiny.py: the cases, their weights and tokens."""
    spec = importlib.util.spec_from_file_location("jetserve_goldens_tiny", GOLDENS / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden_logits() -> dict[str, NDArray[np.float32]]:
    """What transformers computed: NAME/prefill and NAME/decode."""
    with np.load(GOLDENS / "tiny.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def golden_ropes() -> dict[str, NDArray[np.float32]]:
    """NAME/frequencies and NAME/factor of transformers for the settings in tiny.ROPES."""
    with np.load(GOLDENS / "rope.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def saved_configs() -> dict[str, dict[str, object]]:
    """The config of each case as transformers 5 saves it."""
    configs: dict[str, dict[str, object]] = json.loads((GOLDENS / "tiny.json").read_text())
    return configs


@pytest.fixture(scope="session")
def tiny_config(tiny: ModuleType) -> Callable[[str], ModelConfig]:
    """A case's configuration."""
    return lambda case: hugging_face.read_config(tiny.config_json(tiny.CASES[case]))


@pytest.fixture(scope="session")
def tiny_tensors(
    tiny: ModuleType, tiny_config: Callable[[str], ModelConfig]
) -> Callable[[str], dict[str, NDArray[np.float32]]]:
    """A case's weights by their Hugging Face names."""

    def tensors(case: str) -> dict[str, NDArray[np.float32]]:
        config = tiny_config(case)
        table, names = parameter_table(config), hugging_face.weight_names(config)
        shapes = {names.model[name]: spec.shape for name, spec in table.model.items()}
        for layer in range(config.num_layers):
            shapes |= {names.layer[name].format(layer=layer): spec.shape for name, spec in table.layer.items()}
        return {name: tiny.weight(case, name, shape) for name, shape in shapes.items()}

    return tensors


@pytest.fixture
def tiny_folder(
    tiny: ModuleType, tiny_tensors: Callable[[str], dict[str, NDArray[np.float32]]], tmp_path: Path
) -> Callable[[str], Path]:
    """Writes a case as a Hugging Face folder with one model.safetensors."""

    def write(case: str) -> Path:
        folder = tmp_path / case
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(tiny.config_json(tiny.CASES[case])))
        save_file(tiny_tensors(case), folder / "model.safetensors")
        return folder

    return write
