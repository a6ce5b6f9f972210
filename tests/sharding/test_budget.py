"""What is left of a chip for keys and values."""

from __future__ import annotations

import pytest

from jetserve.errors import ConfigError
from jetserve.sharding.budget import ProgramMemory, cache_bytes


def test_budget_is_the_limit_less_margin_weights_temporaries_and_code() -> None:
    assert cache_bytes(1000, 500, ProgramMemory(temporary_bytes=100, code_bytes=20)) == 970 - 620


def test_model_that_leaves_nothing_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"weights 900, temporaries 60 and code 10 bytes of a chip's 1000"):
        cache_bytes(1000, 900, ProgramMemory(60, 10))
