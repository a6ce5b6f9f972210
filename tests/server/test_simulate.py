"""`jetserve simulate`, as people type it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jetserve.server import cli
from jetserve.simulation.report import Report

runner = CliRunner()
COST = """
model: tiny
device: cpu x1
platform: cpu
date: 2026-03-01
method: made up
max_position: 4096
kv_bytes_per_token: 1024
host_seconds: 0.0005
step_seconds: 0.001
prefill_position_seconds: 1.0e-8
generate_position_seconds: 1.0e-8
prefill:
- {tokens: 32, seconds: 0.01}
- {tokens: 128, seconds: 0.02}
- {tokens: 512, seconds: 0.06}
generate:
- {steps: 1, rows: 2, seconds: 0.01}
- {steps: 1, rows: 8, seconds: 0.011}
- {steps: 1, rows: 32, seconds: 0.013}
"""
TRACE = """{"arrival_seconds": 0.0, "prompt_tokens": 40, "output_tokens": 3}
{"arrival_seconds": 1.0, "prompt_tokens": 20, "output_tokens": 2}
{"arrival_seconds": 3.0, "prompt_tokens": 9000, "output_tokens": 4}
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a cost file and a trace, to be in."""
    (tmp_path / "cost.yaml").write_text(COST)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "config.yaml").write_text("scheduler: {ttft_target_ms: 70, tpot_target_ms: 50}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(*arguments):
    return runner.invoke(cli.app, ["simulate", "--cost", "cost.yaml", *arguments])


def reported(*arguments):
    answer = simulate(*arguments, "--json", "-")
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


def test_it_loads_no_jax_and_tells_the_same_in_every_process(files):
    program = (
        "import sys\nfrom jetserve.server.cli import main\n"
        "sys.argv = 'jetserve simulate --cost cost.yaml --workload multi-turn --requests 40 --json -'.split()\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('LOADED', *sorted({'jax', 'grpc', 'starlette', 'matplotlib'} & set(sys.modules)))"
    )
    told = set()
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=files,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        assert ran.stdout.splitlines()[-1] == "LOADED", ran.stderr
        told.add(ran.stdout)
    assert len(told) == 1


def test_a_trace_becomes_a_table(files):
    answer = simulate("--trace", "trace.jsonl")
    assert answer.exit_code == 0, answer.output
    shown = answer.stdout
    assert shown.startswith("trace.jsonl, config defaults, cost cost.yaml, seed 0\n")
    for words in ("requests / finished", "3 / 3", "goodput, requests/s", "hit rate", "TTFT", "TPOT", "ITL", "E2E"):
        assert words in shown
    # 9000 tokens do not fit 2048: that is said, and what did not happen is not.
    assert "prompts clipped to the context" in shown
    assert "6,956" in shown
    assert "refused" not in shown
    assert "3 requests, 3." in answer.stderr  # seconds of the device
    assert "requests/s)" in answer.stderr


def test_times_of_the_report_are_those_of_the_cost_file(files):
    told = reported("--trace", "trace.jsonl", "--requests", "1")
    # 40 tokens in a program of 128 and a decode of 2 rows, 0.5 ms of the host before them.
    positions = (40 * 41 // 2 + 41) * 1e-8
    assert told["ttft_ms"]["mean"] == pytest.approx((0.0005 + 0.001 + 0.02 + 0.01 + positions) * 1e3, rel=1e-6)
    assert (told["requests"], told["workload"]) == (1, "trace.jsonl")


def test_json_alone_is_on_stdout_and_the_same_every_time(files):
    first = simulate("--workload", "sharegpt", "--requests", "30", "--json", "-")
    second = simulate("--workload", "sharegpt", "--requests", "30", "--json", "-")
    assert first.stdout == second.stdout
    told = json.loads(first.stdout)
    assert list(told) == [field.name for field in dataclasses.fields(Report)]
    assert (told["workload"], told["config"], told["seed"]) == ("sharegpt", "defaults", 0)
    assert told["finished"] == 30
    assert {"goodput", "hit_rate"} <= set(told)
    assert simulate("--workload", "sharegpt", "--requests", "30", "--json", "-", "--seed", "1").stdout != first.stdout


def test_json_goes_to_a_file_beside_the_table(files):
    answer = simulate("--trace", "trace.jsonl", "--json", "out.json")
    assert "3 / 3" in answer.stdout
    assert json.loads((files / "out.json").read_text())["finished"] == 3


def test_rates_are_run_one_by_one(files):
    told = reported("--workload", "multi-turn", "--requests", "40", "--rates", "2,4,8.5")
    assert [one["rate_requests_per_second"] for one in told["runs"]] == pytest.approx([2, 4, 8.5])
    assert reported("--workload", "multi-turn", "--requests", "40", "--rate", "4") == told["runs"][1]


def test_limits_are_flags_then_the_workloads_then_the_configurations(files):
    def limits(*arguments):
        told = reported("--requests", "5", *arguments)
        return told["ttft_limit_ms"], told["tpot_limit_ms"]

    assert limits("--workload", "sharegpt") == (None, None)
    assert limits("--workload", "sharegpt", "--config", "config.yaml") == (70, 50)
    assert limits("--workload", "mlperf-llama2-70b", "--config", "config.yaml") == (2000, 200)
    assert limits("--workload", "mlperf-llama2-70b", "--ttft-ms", "450", "--tpot-ms", "40") == (450, 40)


def test_settings_are_simulated_and_named(files):
    told = reported(
        "--workload", "sharegpt", "--requests", "20", "--config", "config.yaml", "--set", "engine.slots=3",
        "--set", "engine.kv_pages=40",
    )  # fmt: skip
    assert (told["slots"], told["pages"]) == (3, 39)
    assert told["config"] == "config.yaml, engine.slots=3, engine.kv_pages=40"


def test_sizes_that_were_not_measured_are_named(files):
    answer = simulate("--trace", "trace.jsonl", "--set", "engine.prefill_sizes=[64,512]", "--set", "engine.slots=40")
    assert "note: prefill sizes 64 are not in the cost file" in answer.stderr
    assert "note: generate steps x rows 1x40 are not in the cost file" in answer.stderr
    assert "note" not in simulate("--trace", "trace.jsonl").stderr


def test_a_trace_is_written_and_gives_the_same_report(files):
    told = reported("--workload", "multi-turn", "--requests", "30", "--rate", "3", "--write-trace", "t.jsonl")
    again = reported("--trace", "t.jsonl")
    assert again == told | {"workload": "t.jsonl"}


def test_a_plot_is_drawn_over_rates_around_the_traces_own(files):
    answer = simulate("--workload", "sharegpt", "--requests", "20", "--ttft-ms", "90", "--plot", "p.png")
    assert answer.exit_code == 0, answer.output
    assert (files / "p.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [f" {rate} " in answer.stdout for rate in (2, 4, 8, 16, 32)] == [True] * 5


def test_a_plot_is_drawn_over_the_rates_asked_for(files):
    told = reported("--workload", "sharegpt", "--requests", "9", "--rates", "1,2", "--plot", "p.png")
    assert len(told["runs"]) == 2
    assert (files / "p.png").exists()


def test_a_plot_without_matplotlib_says_how_to_get_it(files, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert failed(monkeypatch, capsys, "--workload", "sharegpt", "--plot", "p.png").endswith(
        "--plot needs matplotlib; install it with: pip install 'jetserve[plot]'\n"
    )


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(files, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    arguments = ["simulate", "--cost", "cost.yaml", "--workload", "sharegpt", "--requests", "20", "--rate", "3"]
    cli.app(arguments, standalone_mode=False)
    drawn = sys.stderr.getvalue()
    assert "simulating sharegpt at 3 requests/s" in drawn
    assert "%" in drawn
    assert "\x1b[" not in simulate(*arguments[3:]).stderr
    assert "20 / 20" in capsys.readouterr().out


def failed(monkeypatch, capsys, *arguments):
    """The one line on stderr of a command that exits with 2."""
    monkeypatch.setattr(sys, "argv", ["jetserve", "simulate", *arguments])
    if "--cost" not in arguments:
        sys.argv += ["--cost", "cost.yaml"]
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("jetserve: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--workload azure", "there is no workload 'azure'; there are azure-conversation, azure-code, mooncake-conv"),
        ("", "give one of --trace FILE and --workload NAME; names are azure-conversation"),
        ("--workload sharegpt --trace trace.jsonl", "give one of --trace FILE and --workload NAME"),
        ("--trace none.jsonl", "cannot read the trace none.jsonl: No such file or directory"),
        ("--trace trace.jsonl --cost none.yaml", "cannot read the step times none.yaml: No such file or directory"),
        ("--trace trace.jsonl --config none.yaml", "cannot read the configuration none.yaml"),
        ("--trace trace.jsonl --set engine.slotz=3", "did you mean engine.slots?"),
        ("--trace trace.jsonl --set engine.max_length=9999", "engine.max_length=9999 exceeds the model's 4096"),
        ("--trace trace.jsonl --rate 0", "--rate: 0.0 must be a number of requests per second above 0"),
        ("--trace trace.jsonl --rate inf", "--rate: inf must be from 1e-06 to 1e+09 requests per second"),
        ("--trace trace.jsonl --rates 1,1e-308", "--rates: '1e-308' must be from 1e-06 to 1e+09"),
        ("--trace trace.jsonl --seed 99999999999999999999", "--seed 99999999999999999999 must be at least 0, and"),
        ("--trace trace.jsonl --rate nan", "--rate: nan must be a number"),
        ("--trace trace.jsonl --rates 1,x", "--rates: 'x' must be a number"),
        ("--trace trace.jsonl --rates 1,,2", "--rates: '' must be a number"),
        ("--trace trace.jsonl --rates -1", "--rates: '-1' must be a number"),
        ("--trace trace.jsonl --rates 1 --rate 1", "give one of --rate and --rates"),
        ("--trace trace.jsonl --requests 0", "--requests 0 must be at least 1"),
        ("--trace trace.jsonl --seed -1", "--seed -1 must be at least 0"),
        ("--trace trace.jsonl --ttft-ms 0", "--ttft-ms 0 must be a number above 0"),
        ("--trace trace.jsonl --tpot-ms -2", "--tpot-ms -2 must be a number above 0"),
        ("--trace trace.jsonl --json none/x.json", "cannot write none/x.json: there is no folder none"),
        ("--trace trace.jsonl --json .", "cannot write .: it is a folder"),
        ("--trace trace.jsonl --write-trace none/x", "cannot write none/x: No such file or directory"),
        ("--trace trace.jsonl --rates 1 --plot none/x.png", "cannot write none/x.png: there is no folder none"),
        ("--trace at-once.jsonl --rate 1", "all requests of at-once.jsonl arrive at the same time"),
        ("--trace at-once.jsonl --plot p.png", "all requests of at-once.jsonl arrive at the same time"),
        ("--trace trace.jsonl --set engine.max_length=1", "raise engine.max_length"),
    ],
)
def test_a_known_failure_is_one_line_on_stderr(arguments, words, files, monkeypatch, capsys):
    (files / "at-once.jsonl").write_text('{"arrival_seconds": 1, "prompt_tokens": 4, "output_tokens": 3}\n' * 2)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    assert words in failed(monkeypatch, capsys, *arguments.split())


def test_the_cost_file_is_required():
    answer = runner.invoke(cli.app, ["simulate", "--workload", "sharegpt"])
    assert answer.exit_code == 2
    assert "Missing option '--cost'" in answer.output


def test_every_option_is_explained_and_tried_above():
    answer = runner.invoke(cli.app, ["simulate", "--help"], env={"COLUMNS": "200"})
    assert answer.exit_code == 0
    with open(__file__, encoding="utf-8") as source:
        tried = source.read()
    options = {word.strip("│") for word in answer.output.split() if word.strip("│").startswith("--")} - {"--help"}
    assert len(options) == 14
    assert [option for option in options if f'"{option}"' not in tried and f"{option} " not in tried] == []
