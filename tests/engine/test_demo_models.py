"""Both demo models against what transformers answered in float32 (tests/models/goldens/make_demo.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetserve import LLM, SamplingParams
from tests.links import ROOT

GOLDENS = Path(ROOT) / "tests" / "models" / "goldens" / "demo.json"
STEPS = 32
NEARLY_A_TIE = 1e-3  # logits; float32 sums in another order differ by less than a tenth of it

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def goldens() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module", params=["demo", "demo-gemma"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    with LLM(
        request.param,
        dtype="float32",
        slots=8,
        max_length=768,
        prefill_sizes=(256,),
        generate_rows=(8,),
        kv_bytes=1 << 29,
        strict_compile=True,
    ) as llm:
        yield request.param, llm


def test_greedy_answers_are_those_of_transformers(model: tuple[str, LLM], goldens: dict[str, Any]) -> None:
    """At least 19 of 20; a difference only begins where the two best logits were nearly equal."""
    name, llm = model
    rows = goldens[name]["prompts"]
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    found = llm.generate([row["text"] for row in rows], params)
    different = []
    for row, completion in zip(rows, found, strict=True):
        assert list(completion.prompt_token_ids) == row["prompt_token_ids"]
        if list(completion.token_ids) != row["token_ids"]:
            at = next(i for i, pair in enumerate(zip(completion.token_ids, row["token_ids"])) if pair[0] != pair[1])  # noqa: B905
            assert row["gaps"][at] < NEARLY_A_TIE, f"{row['text'][:60]!r} differs at {at}, gap {row['gaps'][at]}"
            different.append(row["text"][:60])
    assert len(rows) == 20
    assert len(different) <= 1, different


def test_answers_are_the_same_one_by_one(model: tuple[str, LLM], goldens: dict[str, Any]) -> None:
    name, llm = model
    some = [row["text"] for row in goldens[name]["prompts"][:3]]
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=12)
    assert [llm.generate(text, params)[0] for text in some] == llm.generate(some, params)
