"""Step times in a file: what is written is read, what is wrong is said."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jetserve.engine.cost import LinearCost, StepTimes
from jetserve.engine.cost_file import CostFile
from jetserve.engine.plan import StepShape
from jetserve.errors import ConfigError

TEXT = """
model: demo
device: cpu x1
platform: cpu
date: 2026-03-01
method: learnt from 5120 steps
max_position: 8192
kv_bytes_per_token: 46080
host_seconds: 0.0003
step_seconds: 2e-4
prefill_position_seconds: 2.0e-9
generate_position_seconds: 3e-9
prefill:
- {tokens: 32, seconds: 0.03}
- {tokens: 128, seconds: 0.1}
generate:
- {steps: 1, rows: 8, seconds: 0.02}
- {steps: 4, rows: 8, seconds: 0.07}
"""
TIMES = StepTimes(
    step=2e-4,
    prefill={32: 0.03, 128: 0.1},
    generate={(1, 8): 0.02, (4, 8): 0.07},
    prefill_position=2e-9,
    generate_position=3e-9,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cost.yaml"


def read(path: Path, text: str) -> CostFile:
    path.write_text(text, encoding="utf-8")
    return CostFile.read(path)


def test_a_file_gives_facts_and_times(path: Path) -> None:
    found = read(path, TEXT)

    assert (found.model, found.device, found.platform, found.max_position) == ("demo", "cpu x1", "cpu", 8192)
    assert (found.kv_bytes_per_token, found.cache_bytes, found.host_seconds) == (46080, None, 0.0003)
    assert found.date == datetime.date(2026, 3, 1)
    assert found.times == TIMES


def test_a_shape_costs_the_sum_of_what_the_file_says(path: Path) -> None:
    cost = LinearCost(read(path, TEXT).times)

    predicted = cost.seconds(StepShape(128, 1000, 8, 4, 2000))

    assert predicted == pytest.approx(2e-4 + 0.1 + 0.07 + 1000 * 2e-9 + 2000 * 3e-9, rel=1e-12)


def test_what_is_written_is_read(path: Path) -> None:
    before = read(path, TEXT + "cache_bytes: 123456\n")

    before.write(path)

    assert CostFile.read(path) == before
    assert path.read_text(encoding="utf-8").startswith("#")


seconds = st.floats(1e-12, 1e6)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.integers(1, 10_000), seconds, min_size=1, max_size=5),
    st.sets(st.integers(1, 64), min_size=1, max_size=3),
    st.dictionaries(st.integers(1, 4096), seconds, min_size=1, max_size=3),
    st.tuples(seconds, st.just(0.0) | seconds, seconds),
)
def test_learnt_times_survive_the_file_to_the_last_bit(
    path: Path,
    prefill: dict[int, float],
    steps: set[int],
    rows: dict[int, float],
    terms: tuple[float, float, float],
) -> None:
    generate = {(count, row): second for count in steps for row, second in rows.items()}
    times = StepTimes(terms[0], prefill, generate, terms[1], terms[2])

    read(path, TEXT).with_times(times).write(path)

    assert CostFile.read(path).times == times


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_position", "max_positions", r"unknown key max_positions; did you mean max_position\?"),
        ("rows: 8, seconds: 0.07", "rows: 8, secs: 0.07", r"unknown key generate.1.secs; did you mean seconds\?"),
        ("seconds: 0.03", "seconds: -1", r"prefill.0.seconds=-1: Input should be greater than 0"),
        ("seconds: 0.03", "seconds: .inf", r"prefill.0.seconds=inf: Input should be a finite number"),
        ("seconds: 0.03", "seconds: soon", r"prefill.0.seconds='soon': could not convert string to float"),
        ("seconds: 0.03", "seconds: true", r"prefill.0.seconds=True: Input should be a valid number"),
        ("tokens: 32", "tokens: 0", r"prefill.0.tokens=0: Input should be greater than or equal to 1"),
        ("tokens: 32", "tokens: 128", r"prefill has sizes twice, \[128, 128\]; keep one of each"),
        ("steps: 4", "steps: 1", r"generate has \(steps, rows\) twice"),
        ("steps: 4, rows: 8", "steps: 4, rows: 2", r"generate lacks \(steps, rows\) \[\(1, 2\), \(4, 8\)\]"),
        ("platform: cpu", "platform: abacus", r"platform='abacus': Input should be 'cpu', 'gpu' or 'tpu'"),
        ("date: 2026-03-01", "date: lately", r"date='lately': Input should be a valid date"),
        ("host_seconds: 0.0003", "", r"host_seconds is missing"),
        ("host_seconds: 0.0003", "host_seconds:", r"host_seconds is missing"),
        ("model: demo", "device: demo", r"'device' is there twice"),
        ("model: demo", "- demo", r"is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_and_its_value(path: Path, old: str, new: str, message: str) -> None:
    assert TEXT.count(old) >= 1

    with pytest.raises(ConfigError, match=message) as raised:
        read(path, TEXT.replace(old, new, 1))

    assert str(path) in str(raised.value)


def test_no_program_at_all_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill: .*at least 1 item"):
        read(path, TEXT.partition("prefill:")[0] + "prefill: []\ngenerate:\n- {steps: 1, rows: 8, seconds: 0.02}\n")


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the step times .*cost.yaml: No such file"):
        CostFile.read(path)


def test_a_folder_that_is_not_there_is_named(path: Path) -> None:
    file = read(path, TEXT)

    with pytest.raises(ConfigError, match=r"cannot write the step times to .*nowhere.*: No such file"):
        file.write(path.parent / "nowhere" / "cost.yaml")
