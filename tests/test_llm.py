"""The offline Python API on a tiny random model."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetserve import LLM, Completion, SamplingParams, config
from jetserve import llm as llm_module
from jetserve.config import SchedulerSettings
from jetserve.engine.pacing import Pacer
from jetserve.errors import ConfigError, InvalidRequest, Overloaded
from jetserve.request import FinishReason
from tests.bench.tiny_model import CONFIG, write_tiny_model

VOCAB = int(str(CONFIG["vocab_size"]))
MAX_LENGTH = 64  # of the pool, which two prompts may have to share
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["def schedule(", "return", "class Engine:", "import jax", "x", "the device runs plans in order"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is padded beyond its tokenizer's."""
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    (path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": VOCAB + 256}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    cache = request.config.cache.mkdir("jetserve-programs")
    made = LLM(str(folder), dtype="float32", **settings(cache))
    yield made
    made.close()
    from jetserve.engine import loading

    loading.use_compilation_cache(None)


def settings(cache: Path) -> dict[str, Any]:
    return {
        "random_weights": True,
        "slots": 2,
        "max_length": 96,
        "kv_pages": 5,
        "prefill_sizes": (32,),
        "prefill_rows": 2,
        "engine.strict_compile": True,
        "compilation_cache": str(cache),
    }


def is_idle(llm: LLM) -> bool:
    status = llm.loaded.engine.status()
    llm.loaded.engine.check()
    return not llm.loaded.engine.has_work and (status.running, status.waiting, status.pages_used) == (0, 0, 0)


def warm(completions: list[Completion]) -> list[Completion]:
    """Without what the prefix cache had of the prompts: that depends on what ran before, and nothing else does."""
    return [
        dataclasses.replace(found, usage=dataclasses.replace(found.usage, cached_tokens=0)) for found in completions
    ]


def test_text_and_its_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.loaded.tokenizer.encode("def schedule(")
    [from_text], [from_ids], [from_tuple] = (
        warm(llm.generate(prompt, GREEDY)) for prompt in ("def schedule(", list(ids), tuple(ids))
    )
    assert from_text == from_ids == from_tuple
    assert from_text.prompt_token_ids == tuple(ids)
    assert (len(from_text.token_ids), from_text.finish_reason) == (12, FinishReason.LENGTH)
    assert from_text.text == llm.loaded.tokenizer.decode(from_text.token_ids)
    assert (from_text.usage.prompt_tokens, from_text.usage.completion_tokens) == (len(ids), 12)


def test_many_prompts_are_answered_in_their_order(llm: LLM) -> None:
    """More than there are slots, of both kinds, each as alone."""
    prompts = [*PROMPTS, [5, 6, 7], [1]]
    together = warm(llm.generate(prompts, GREEDY))
    assert together == [warm(llm.generate([prompt], GREEDY))[0] for prompt in prompts]
    assert len({completion.token_ids for completion in together}) == len(prompts)
    assert is_idle(llm)


def test_no_prompts_no_completions(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_samples_of_a_prompt_stand_behind_one_another(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=5, n=3)
    found = llm.generate(PROMPTS[:2], params)
    assert [completion.prompt_token_ids for completion in found] == [
        tuple(llm.loaded.tokenizer.encode(prompt)) for prompt in PROMPTS[:2] for _ in range(3)
    ]
    assert len({completion.token_ids for completion in found}) == 6
    single = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=8, seed=5))
    assert warm([found[0], found[3]]) == warm(single)


def test_without_parameters_it_samples_to_the_end_of_the_context(llm: LLM) -> None:
    one, other = llm.generate([[1, 2, 3], [1, 2, 3]])
    assert len(one.token_ids) == MAX_LENGTH - 3
    assert one.finish_reason is FinishReason.LENGTH
    assert one.token_ids != other.token_ids


def test_unknown_ids_are_never_sampled(llm: LLM) -> None:
    """R53: at this temperature all are about as likely, and one in 17 of the model's is unknown to the tokenizer."""
    found = llm.generate([[at] for at in range(8)], SamplingParams(temperature=100.0, seed=1))
    assert max(token for completion in found for token in completion.token_ids) < VOCAB


def test_stop_string_ends_the_text(llm: LLM) -> None:
    [whole] = llm.generate("import jax", GREEDY)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 2]
    [found] = llm.generate("import jax", SamplingParams(temperature=0.0, max_tokens=12, stop=(stop,)))
    assert found.text == whole.text[: whole.text.index(stop)]
    assert (found.finish_reason, found.stop_reason) == (FinishReason.STOP, stop)
    assert found.token_ids == whole.token_ids[: len(found.token_ids)]
    assert len(found.token_ids) < 12
    assert is_idle(llm)


def test_stop_id_and_logprobs(llm: LLM) -> None:
    [whole] = llm.generate("x", GREEDY)
    end = whole.token_ids[4]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(end,), logprobs=2)
    [found] = llm.generate("x", params)
    assert found.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert (found.finish_reason, found.stop_reason) == (FinishReason.STOP, end)
    assert [entry.token_id for entry in found.logprobs] == list(found.token_ids)
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in found.logprobs)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (["x", ""], "prompt 1: the prompt has no tokens"),
        (["x", "x", []], "prompt 2: the prompt has no tokens"),
        ([[1], [VOCAB]], f"prompt 1: prompt_token_ids holds {VOCAB}, outside the vocabulary"),
        ([[1] * MAX_LENGTH], "prompt 0: the prompt has 64 tokens, at most 63 fit"),
        (["x", 5], "prompt 1: prompt_token_ids must be a list, got 5"),
        ([["x"]], "prompt 0: prompt_token_ids must hold whole numbers, got 'x'"),
    ],
)
def test_bad_prompt_is_named_and_nothing_runs(llm: LLM, prompts: Any, said: str) -> None:
    before = llm.loaded.engine.status().steps
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, GREEDY)
    assert said in str(caught.value)
    assert llm.loaded.engine.status().steps == before
    assert is_idle(llm)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_interrupt_frees_everything_and_the_next_call_is_right(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    expected = warm(llm.generate(PROMPTS, GREEDY))
    engine = llm.loaded.engine
    real, calls = engine.step, 0

    def step(now: float) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return real(now)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert engine.status().pages_used == engine.status().waiting == 0
    assert warm(llm.generate(PROMPTS, GREEDY)) == expected
    assert is_idle(llm)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Raises KeyboardInterrupt on SIGINT, which a shell's background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_ctrl_c_waits_for_the_step_that_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Inside of it the device's state has been given away, and what comes back is not at hand yet."""
    expected = warm(llm.generate(PROMPTS, GREEDY))
    programs = llm.loaded.engine._executor._programs.generate
    calls = 0

    def interrupted(program: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        answer = program(*given)
        if calls > after:
            signal.raise_signal(signal.SIGINT)
        return answer

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        for size, program in programs.items():
            patch.setitem(programs, size, functools.partial(interrupted, program))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert calls == after + 1
    assert signal.getsignal(signal.SIGINT) is before
    assert warm(llm.generate(PROMPTS, GREEDY)) == expected
    assert is_idle(llm)


@pytest.mark.usefixtures("ctrl_c")
def test_second_ctrl_c_is_not_held_back(llm: LLM) -> None:
    with llm_module._interrupts_held() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupt()  # nothing is left to tell


def test_cached_prefixes_are_counted_kept_apart_by_salt_and_flushed(llm: LLM) -> None:
    llm.flush_cache()

    def cached(salt: str | None = None) -> int:
        [found] = llm.generate([[1, 2, 3, 4, 5, 6]], SamplingParams(temperature=0.0, max_tokens=4), cache_salt=salt)
        return found.usage.cached_tokens

    assert (cached(), cached(), cached("")) == (0, 5, 5)
    assert (cached("mine"), cached("mine"), cached()) == (0, 5, 5)
    assert llm.flush_cache() == 2
    assert llm.loaded.engine.status().cached_pages == 0
    assert (cached(), cached()) == (0, 5)
    assert is_idle(llm)


def test_salt_that_is_none_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt 0: cache_salt must be text of at most 256 characters"):
        llm.generate(["x"], GREEDY, cache_salt="x" * 257)


def test_a_request_that_is_shed_ends_the_call_with_the_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = llm.loaded.engine.scheduler
    settings = SchedulerSettings(shed_hopeless=True)
    late = Pacer(scheduler.sizing, cost=scheduler.pacer.cost, ttft_target_seconds=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_settings", settings)
        patch.setattr(scheduler, "pacer", late)
        with pytest.raises(Overloaded, match="was given up: its first token is predicted"):
            llm.generate(PROMPTS, GREEDY)
    assert is_idle(llm)
    assert len(llm.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_nothing_is_shown_unless_asked_for(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate("x", GREEDY)
    assert capfd.readouterr() == ("", "")


def test_progress_is_shown_on_stderr(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "Console", functools.partial(llm_module.Console, force_terminal=True))
    monkeypatch.setattr(llm, "_shows_progress", True)
    llm.generate(["x", "y"], GREEDY)
    out, error = capfd.readouterr()
    assert out == ""
    assert "generating" in error


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"slotz": 3}, "did you mean engine.slots?"),
        ({"max_len": 3}, "did you mean engine.max_length?"),
        ({"engine.slotz": 3}, "did you mean engine.slots?"),
        ({"slots": 0}, "engine.slots=0"),
        ({"slots": "many"}, "engine.slots='many'"),
        ({"dtype": "float16"}, "model.dtype='float16'"),
        ({"prefill_sizes": ()}, "engine.prefill_sizes"),
    ],
)
def test_wrong_overrides_are_refused_before_anything_loads(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("/nowhere", **overrides)
    assert said in str(caught.value)


def test_whole_configuration(folder: Path, llm: LLM, request: pytest.FixtureRequest) -> None:
    cache = request.config.cache.mkdir("jetserve-programs")
    paths = {config.path_of(name): value for name, value in settings(cache).items()}
    tree = config.load(overrides={"model.name": str(folder), "model.dtype": "float32", **paths})
    with LLM.from_config(tree) as other:
        assert warm(other.generate(PROMPTS, GREEDY)) == warm(llm.generate(PROMPTS, GREEDY))
    with pytest.raises(ConfigError, match="closed"):
        other.generate("x")
