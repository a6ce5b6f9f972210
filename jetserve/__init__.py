"""jetserve serves large language models on TPUs. Importing it is light: no jax until an `LLM` is made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetserve.llm import LLM, Completion
    from jetserve.request import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]
_HOMES = {"LLM": "jetserve.llm", "Completion": "jetserve.llm", "SamplingParams": "jetserve.request"}


def __getattr__(name: str) -> object:
    """Imports public names on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jetserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
