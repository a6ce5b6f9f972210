"""`jetserve cost`, as people type it."""

from __future__ import annotations

import datetime
import io
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetserve.config import Config
from jetserve.engine import loading
from jetserve.engine.cost import LinearCost, StepTimes
from jetserve.engine.cost_file import CostFile
from jetserve.engine.engine import Engine, Footprint, LoadedModel, ModelInfo
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import resolve
from jetserve.request import ModelLimits
from jetserve.server import cli
from jetserve.simulation.device import SimulatedClock, SimulatedExecutor
from tests.bench.fake_engine import byte_pair_tokenizer
from tests.bench.tiny_model import write_tiny_model

runner = CliRunner()
FOOTPRINT = Footprint("cpu", 128, 512, cache_bytes=1 << 20)
TIMES = StepTimes(
    step=0.001,
    prefill={8: 0.010, 32: 0.030},
    generate={(1, 2): 0.020, (1, 4): 0.024},
    prefill_position=2e-6,
    generate_position=1e-6,
    walked_position=5e-6,
)
SIZES = ("--set", "engine.prefill_sizes=[8,32]", "--set", "engine.slots=4")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that were loaded: with a device of known times, whatever the model is. In an empty folder."""
    seen: list[Config] = []
    tokenizer = byte_pair_tokenizer()

    def load(config: Config, report: loading.Report) -> LoadedModel:
        seen.append(config)
        report("loading weights", 0.5)
        sizing = resolve(config.engine, config.scheduler, **FOOTPRINT._asdict())
        clock = SimulatedClock()
        executor = SimulatedExecutor(sizing, LinearCost(TIMES), clock, host_seconds=0.0005)
        engine = Engine(Scheduler(sizing, config.scheduler, LinearCost(TIMES)), executor, clock=clock)
        info = ModelInfo("fake", 0, "float32", 100, sizing.max_length, "cpu x1")
        return LoadedModel(engine, tokenizer, ModelLimits(100, 64, (), 63), config.model.name, info, FOOTPRINT)

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.chdir(tmp_path)
    return seen


def test_what_was_measured_is_written_and_shown(asked: list[Config]) -> None:
    answer = runner.invoke(cli.app, ["cost", "--out", "m.yaml", "--max-length", "64", *SIZES])

    assert answer.exit_code == 0, answer.output
    found = CostFile.read(Path("m.yaml"))
    assert found.times.prefill == pytest.approx(TIMES.prefill, rel=0.05)
    assert found.times.generate == pytest.approx(TIMES.generate, rel=0.05)
    assert found.host_seconds == pytest.approx(0.0005)
    assert (found.model, found.device, found.platform) == ("demo", "cpu x1", "cpu")
    assert (found.max_position, found.kv_bytes_per_token, found.cache_bytes) == (128, 512, 1 << 20)
    assert abs(found.date - datetime.date.today()) <= datetime.timedelta(days=1)
    for words in ("demo, cpu x1", "prefill of 32 tokens", "generate, 4 rows", "every step", "the host"):
        assert words in answer.stdout
    said = next(line for line in answer.stdout.splitlines() if line.startswith("median error of the prediction: "))
    assert said.split()[5].rstrip(",") in found.method
    assert answer.stdout.endswith("wrote m.yaml\n")


def test_a_simulation_runs_on_what_was_written(asked: list[Config]) -> None:
    runner.invoke(cli.app, ["cost", "--out", "m.yaml", "--max-length", "64", *SIZES])

    sizes = [*SIZES, "--set", "engine.max_length=64"]
    answer = runner.invoke(
        cli.app, ["simulate", "--cost", "m.yaml", "--workload", "sharegpt", "--requests", "5", *sizes]
    )
    assert answer.exit_code == 0, answer.output
    assert "5 / 5" in answer.stdout
    assert "not in the cost file" not in answer.stderr


def test_every_flag_reaches_the_configuration_that_is_loaded(asked: list[Config]) -> None:
    Path("c.yaml").write_text("engine: {slots: 3, max_length: 40}\nmodel: {name: other}\n")
    given = "--config c.yaml --model mine --dtype float32 --max-length 64 --set engine.prefill_sizes=[8] --out m.yaml"

    answer = runner.invoke(cli.app, ["cost", *given.split()])

    assert answer.exit_code == 0, answer.output
    (config,) = asked
    assert (config.model.name, config.model.dtype) == ("mine", "float32")
    assert (config.engine.slots, config.engine.max_length, config.engine.prefill_sizes) == (3, 64, (8,))


def test_targets_and_subscribers_do_not_keep_programs_from_running(asked: list[Config]) -> None:
    settings = (
        "scheduler.tpot_target_ms=1.0", "scheduler.ttft_target_ms=1.0", "scheduler.shed_hopeless=true",
        "kv_events.endpoint=tcp://*:*", "engine.generate_steps=[1,4]",
    )  # fmt: skip
    answer = runner.invoke(
        cli.app,
        [
            "cost",
            "--out",
            "m.yaml",
            "--max-length",
            "64",
            *SIZES,
            *(part for one in settings for part in ("--set", one)),
        ],
    )

    assert answer.exit_code == 0, answer.output
    assert "none: a guess" not in answer.stdout
    (config,) = asked
    assert (config.scheduler.tpot_target_ms, config.scheduler.ttft_target_ms) == (None, None)
    assert (config.scheduler.shed_hopeless, config.kv_events.endpoint) == (False, None)


def test_a_program_that_never_ran_is_told_apart(asked: list[Config]) -> None:
    answer = runner.invoke(
        cli.app, ["cost", "--out", "m.yaml", "--max-length", "64", *SIZES, "--set", "scheduler.prefill_tokens=8"]
    )

    (line,) = [line for line in answer.stdout.splitlines() if "prefill of 32 tokens" in line]
    assert "none: a guess" in line


def test_a_file_that_is_there_is_overwritten_only_when_that_is_said(asked: list[Config]) -> None:
    Path("m.yaml").write_text("mine")

    refused = runner.invoke(cli.app, ["cost", "--out", "m.yaml", "--max-length", "64", *SIZES])

    assert (refused.exit_code, asked, Path("m.yaml").read_text()) == (1, [], "mine")
    assert str(refused.exception) == "m.yaml is there already; --force overwrites it"
    forced = runner.invoke(cli.app, ["cost", "--out", "m.yaml", "--force", "--max-length", "64", *SIZES])
    assert forced.exit_code == 0
    assert CostFile.read(Path("m.yaml")).model == "demo"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--out none/m.yaml", "cannot write none/m.yaml: there is no folder none"),
        ("--out .", "cannot write .: it is a folder"),
        ("--out m.yaml --set engine.slotz=3", "did you mean engine.slots?"),
        ("--out m.yaml --config none.yaml", "cannot read the configuration none.yaml"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    arguments: str, words: str, asked: list[Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jetserve", "cost", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()

    out, err = capsys.readouterr()
    assert (ended.value.code, out, asked) == (2, "", [])
    assert err.startswith("jetserve: ")
    assert words in err
    assert err.count("\n") == 1


def test_where_to_write_is_required() -> None:
    answer = runner.invoke(cli.app, ["cost"])
    assert answer.exit_code == 2
    assert "Missing option '--out'" in answer.output


def test_a_bar_is_drawn_on_a_terminal_and_lines_elsewhere(asked: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    command = ["cost", "--out", "m.yaml", "--max-length", "64", *SIZES]
    said = runner.invoke(cli.app, command).stderr
    assert said.splitlines() == ["importing jax", "loading weights", "measuring step times"]

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    cli.app([*command, "--force"], standalone_mode=False)
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "measuring step times" in drawn
    assert "%" in drawn


def test_every_option_is_explained_and_tried_above() -> None:
    answer = runner.invoke(cli.app, ["cost", "--help"], env={"COLUMNS": "200"})
    assert answer.exit_code == 0
    tried = Path(__file__).read_text(encoding="utf-8")
    options = set(re.findall(r"│[ *]+(--[\w-]+)", answer.output)) - {"--help"}
    assert options == {"--out", "--model", "--config", "--set", "--dtype", "--max-length", "--force"}
    assert [option for option in options if f'"{option}"' not in tried and f"{option} " not in tried] == []


@pytest.mark.slow
def test_a_real_model_is_measured(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    out = tmp_path / "m.yaml"
    settings = (
        f"model.name={tmp_path}", "model.random_weights=true", "model.served_name=tiny", "engine.slots=2",
        "engine.prefill_sizes=[8]", "engine.prefill_rows=2", f"engine.compilation_cache={tmp_path / 'compiled'}",
    )  # fmt: skip
    given = [part for one in settings for part in ("--set", one)]
    try:
        answer = runner.invoke(cli.app, ["cost", "--out", str(out), "--max-length", "48", *given])
    finally:
        loading.use_compilation_cache(None)

    assert answer.exit_code == 0, answer.output
    found = CostFile.read(out)
    assert (found.model, found.platform, found.max_position) == ("tiny", "cpu", 512)
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, heads, keys and values, 16 numbers of 4 bytes
    assert found.cache_bytes is None  # there is no memory budget on a CPU
    assert set(found.times.prefill) == {8}
    assert set(found.times.generate) == {(1, 2)}
    assert found.host_seconds > 0
