"""How measurements are shown: one rich table per bench, one JSON file for all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

PACKAGES = ("jetserve", "jax", "jaxlib", "libtpu", "numpy", "grpcio", "protobuf", "uvloop")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, or the spread of many."""

    name: str
    unit: str
    median: float
    p90: float | None = None
    p99: float | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload of one bench.

    Attributes:
      bound: what limits it, as far as the bench can tell.
    """

    bench: str
    workload: str
    shape: str
    figures: tuple[Figure, ...]
    bound: str


def spread(name: str, unit: str, values: Sequence[float], scale: float = 1.0) -> Figure:
    """Median, p90 and p99 of values, each multiplied with `scale`."""
    median, p90, p99 = (float(value) * scale for value in np.percentile(values, (50, 90, 99)))
    return Figure(name, unit, median, p90, p99, len(values))


def machine() -> dict[str, str]:
    """Chip, cores and versions: without them no number means anything."""
    installed = {found.name for found in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu_name(), "cores": str(cores), "python": platform.python_version(), **versions}


def show(console: Console, measurements: Sequence[Measurement]) -> None:
    """Prints the machine and a table per bench."""
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()), highlight=False, soft_wrap=True)
    for bench in dict.fromkeys(measurement.bench for measurement in measurements):
        table = Table("workload", "figure", title=bench, title_justify="left")
        for name in ("median", "p90", "p99"):
            table.add_column(name, justify="right")
        table.add_column("unit")
        for measurement in measurements:
            if measurement.bench == bench:
                _add(table, measurement)
        console.print(table)


def _add(table: Table, measurement: Measurement) -> None:
    said = [measurement.workload, *textwrap.wrap(measurement.shape, 34), *textwrap.wrap(measurement.bound, 34)]
    for row, figure in enumerate(measurement.figures):
        numbers = [_text(number) for number in (figure.median, figure.p90, figure.p99)]
        table.add_row(said[row] if row < len(said) else "", figure.name, *numbers, figure.unit)
    for rest in said[len(measurement.figures) :]:
        table.add_row(rest)
    table.add_section()


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def write(file: Path, measurements: Sequence[Measurement]) -> None:
    """Writes all of it as JSON."""
    report = {"machine": machine(), "measurements": [asdict(measurement) for measurement in measurements]}
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
