"""Both demo models against what transformers answered in float32 (tests/models/goldens/make_demo.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetserve import LLM, Completion, SamplingParams
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
    alone = [llm.generate(text, params)[0].token_ids for text in some]
    assert alone == [completion.token_ids for completion in llm.generate(some, params)]


def test_warm_answer_is_the_cold_answer_to_the_bit(model: tuple[str, LLM], goldens: dict[str, Any]) -> None:
    """R54: cold, five times warm, behind other prompts' prefixes, and after others filled the cache."""
    name, llm = model
    rows = goldens[name]["prompts"]
    prompt = next(row["prompt_token_ids"] for row in rows if len(row["prompt_token_ids"]) > 48)[:48]

    def answer(tokens: int, cached: int) -> Completion:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1)
        [found] = llm.generate([prompt], params)
        assert found.usage.cached_tokens == cached
        return found

    llm.flush_cache()
    cold = answer(64, cached=0)
    for _ in range(5):
        warm = answer(64, cached=47)
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    for shared in (15, 16, 17, 40):
        llm.flush_cache()
        llm.generate([[*prompt[:shared], prompt[shared] + 1]], SamplingParams(temperature=0.0, max_tokens=1))
        warm = answer(12, cached=shared)
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids[:12], cold.logprobs[:12])
    llm.generate([row["prompt_token_ids"] for row in rows], SamplingParams(temperature=1.0, seed=1, max_tokens=4))
    warm = answer(12, cached=47)
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids[:12], cold.logprobs[:12])
