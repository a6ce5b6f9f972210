"""From settings to an engine: forms, limits, the compilation cache, refusals."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jetserve import config
from jetserve.engine import loading
from jetserve.engine.compilations import COUNTER
from jetserve.engine.cost import LinearCost
from jetserve.engine.engine import LoadedModel
from jetserve.errors import ConfigError
from jetserve.sharding import chips
from tests.bench.tiny_model import CONFIG, write_tiny_model
from tests.engine.conftest import LLAMA, Serve, Served, settings_of, weights_of

PROGRAMS = 5
START = """
import json, sys
from jetserve import config
from jetserve.engine import loading
from jetserve.engine.compilations import COUNTER
loading.load(config.load(settings=sys.argv[1:]))
print(json.dumps([COUNTER.cache_hits, COUNTER.cache_misses]))
"""

Load = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is padded beyond its tokenizer's, as real ones are."""
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    (path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": CONFIG["vocab_size"] + 256}))
    return path


@pytest.fixture(scope="module")
def settings(folder: Path, serve: Serve) -> list[str]:
    return [
        f"model.name={folder}",
        "model.random_weights=true",
        "model.dtype=float32",
        "engine.slots=2",
        "engine.max_length=96",
        "engine.kv_pages=5",
        "engine.prefill_sizes=[32]",
        "engine.prefill_rows=2",
        f"engine.compilation_cache={serve.folder}",  # type: ignore[attr-defined]
    ]


@pytest.fixture(scope="module")
def load(settings: list[str]) -> Iterator[Load]:
    def run(*more: str, report: loading.Report = lambda *_: None) -> LoadedModel:
        return loading.load(config.load(settings=[*settings, *more]), report)

    yield run
    loading.use_compilation_cache(None)


@pytest.fixture(scope="module")
def loaded(load: Load) -> LoadedModel:
    return load()


def test_second_start_reads_every_program_from_the_cache(load: Load, loaded: LoadedModel) -> None:
    """R04. Also when much was compiled in the process before the folder was named, as here."""
    hits, misses = COUNTER.cache_hits, COUNTER.cache_misses
    load()
    assert COUNTER.cache_misses == misses
    assert COUNTER.cache_hits - hits >= PROGRAMS


@pytest.mark.slow
def test_start_of_another_process_does_too(loaded: LoadedModel, settings: list[str]) -> None:
    # Twice: what earlier tests of this process had compiled already was not written to the folder by `loaded`.
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", START, *settings], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        hits, misses = json.loads(done.stdout)
    assert misses == 0
    assert hits >= PROGRAMS


def test_cache_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        ConfigError, match=rf"engine\.compilation_cache='{file}/x' cannot be written \(Not a directory\)"
    ):
        loading.use_compilation_cache(f"{file}/x")


def test_without_a_writable_home_there_is_no_cache_but_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(Path, "home", lambda: file)
    with caplog.at_level(logging.WARNING):
        loading.use_compilation_cache("auto")
    assert "no persistent compilation cache" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None


def test_named_folder_is_made_and_null_is_none(tmp_path: Path) -> None:
    loading.use_compilation_cache(str(tmp_path / "a" / "b"))
    jax.jit(lambda x: x * 3 + 7)(1)
    assert list((tmp_path / "a" / "b").glob("*-cache"))
    loading.use_compilation_cache(str(tmp_path / "c"))
    jax.jit(lambda x: x * 3 + 8)(1)
    assert list((tmp_path / "c").glob("*-cache"))
    loading.use_compilation_cache(None)
    before = set(tmp_path.rglob("*"))
    jax.jit(lambda x: x * 3 + 9)(1)
    assert set(tmp_path.rglob("*")) == before


def test_limits_are_those_of_tokenizer_and_pool(loaded: LoadedModel) -> None:
    """R53: ids that the tokenizer does not know cannot be asked for; four pages of 16 hold no 96 tokens."""
    assert loaded.limits.vocab_size == loaded.tokenizer.vocab_size == CONFIG["vocab_size"]
    assert (loaded.limits.max_length, loaded.limits.max_prompt_tokens) == (64, 63)
    assert (loaded.info.family, loaded.info.dtype, loaded.info.max_length) == ("llama", "float32", 64)
    assert loaded.info.devices == "cpu x1"


def test_before_a_step_was_measured_its_time_is_what_the_chip_allows(loaded: LoadedModel) -> None:
    cost = loaded.engine.scheduler.pacer.cost
    assert isinstance(cost, LinearCost)
    assert not cost.is_measured
    # Two layers: queries and outputs 64 x 64, keys and values 64 x 32, three 64 x 128 of the mlp, two norms.
    layers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    head = (CONFIG["vocab_size"] + 256) * 64
    peak = chips.speed("cpu", "cpu")

    times = cost.times

    reading = 4 * (layers + head) / peak.bytes_per_second
    assert times.prefill == pytest.approx(
        {32: max(2 * (layers * 32 + head * 2) / peak.flops_per_second, reading)}, rel=1e-9
    )
    assert times.generate == pytest.approx({(1, 2): reading}, rel=1e-9)
    # Keys and values: two layers, two heads, 16 numbers each; queries: two layers, four heads, scores and values.
    assert times.generate_position == pytest.approx(2 * 2 * 2 * 16 * 4 / peak.bytes_per_second, rel=1e-9)
    assert times.prefill_position == pytest.approx(2 * 2 * 2 * 4 * 16 / peak.flops_per_second, rel=1e-9)


def test_every_stage_is_reported(load: Load) -> None:
    seen: list[tuple[str, float]] = []
    load(report=lambda what, fraction: seen.append((what, fraction)))
    said = [what for what, _ in seen]
    compiled = ("compiled insert", "compiled prefill[32]", "compiled generate[1, 2]")
    for stage in ("drawing random weights", f"compiling {PROGRAMS} programs", *compiled):
        assert stage in said
    assert all(0 <= fraction <= 1 for _, fraction in seen)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.max_length=1024", "engine.max_length=1024 exceeds the model's 512 positions"),
        ("mesh.tensor=64", "mesh.tensor=64, but this machine has"),
        ("engine.host_kv_bytes=17592186044416", "engine.host_kv_bytes=17592186044416 does not fit the"),
        ("model.name=/nowhere", "model.random_weights needs model.name to be a folder with a config.json"),
    ],
)
def test_what_cannot_be_is_refused(load: Load, setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        load(setting)


@pytest.mark.slow
def test_ids_beyond_the_limit_are_never_sampled(serve: Serve) -> None:
    """R53: their rows of the head make them the most likely by far."""
    weights = weights_of(LLAMA)
    head = weights.model["head"]
    weights.model["head"] = head.at[80:].multiply(100.0)
    cache = serve.folder  # type: ignore[attr-defined]
    tree = settings_of(cache, "engine.prefill_sizes=[8]", "engine.generate_rows=[4]")
    served = Served(LLAMA, weights, loading.build_engine(tree, LLAMA, weights, vocab_limit=80))
    requests = [served.request((at, 3), 30, temperature=float(at), seed=at, logprobs=20) for at in range(4)]
    for tokens in served.answers(*requests):
        assert max(tokens) < 80
    free = served.truth.logits((0, 3))[-1]
    assert int(free.argmax()) >= 80


@pytest.mark.slow
def test_stacked_layers_give_the_tokens_of_unrolled_ones(serve: Serve, gemma: Served) -> None:
    """The form that accelerators run."""
    layers = {name: jnp.stack([layer[name] for layer in gemma.weights.layers]) for name in gemma.weights.layers[0]}
    weights = gemma.weights.replace(layers=layers)
    cache = serve.folder  # type: ignore[attr-defined]
    tree = settings_of(cache, "engine.prefill_sizes=[16]", "engine.generate_rows=[4]")
    stacked = Served(gemma.model, weights, loading.build_engine(tree, gemma.model, weights))
    requests = [gemma.request(range(1, n), 25, temperature=t, seed=1) for n, t in ((3, 0.0), (20, 0.0), (38, 1.0))]
    assert stacked.answers(*requests) == gemma.answers(*requests)
    for program in stacked.executor._programs.generate.values():
        assert program.memory_analysis().temp_size_in_bytes < stacked.executor._kv.nbytes / 4
