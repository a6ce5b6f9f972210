"""The goldens of tests/models/goldens, as fixtures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

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
