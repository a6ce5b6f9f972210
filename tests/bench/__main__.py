"""`python -m tests.bench`: measures this checkout and prints what it found. Never fails because of a time."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.bench import report
from tests.bench.workloads import (
    HOST_WORKLOADS,
    MODEL_WORKLOADS,
    MODELS,
    QUICK,
    QUICK_TRACE,
    SCHEDULE_SHAPES,
    SIMULATED_TRACES,
    Workload,
)

BENCHES = ("host", "schedule", "model", "simulate")


def main(
    benches: Annotated[list[str] | None, typer.Argument(help=f"which: {', '.join(BENCHES)}; all when none")] = None,
    model: Annotated[list[str] | None, typer.Option(help="of the model and simulate benches; may be repeated")] = None,
    only: Annotated[list[str] | None, typer.Option(help="names of workloads; may be repeated")] = None,
    grpc: Annotated[bool, typer.Option("--grpc", help="the model bench goes through gRPC too")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="path=value, as for jetserve serve")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few tokens of each, of a tiny model: does it run")] = False,
    json: Annotated[Path | None, typer.Option(help="write everything to this file")] = None,
) -> None:
    """Measures the host path over a fake device, the scheduler alone, and the demo models beside a bare jitted loop."""
    console = Console()
    if not console.is_terminal:
        console.width = 120  # of a file or a log nobody knows
    chosen = tuple(benches or BENCHES)
    if unknown := set(chosen) - set(BENCHES):
        raise typer.BadParameter(f"there is no bench {sorted(unknown)}; there are {', '.join(BENCHES)}")
    measurements: list[report.Measurement] = []
    with ExitStack() as stack:
        status = stack.enter_context(console.status(""))

        def announce(text: str) -> None:
            status.update(text)

        if "host" in chosen:
            from tests.bench import host  # only what is asked for is imported: the host bench runs without jax

            for workload in _choose(HOST_WORKLOADS, only, quick=quick):
                announce(f"host: {workload.name}")
                measurements.append(host.measure(workload))
        if "schedule" in chosen:
            from tests.bench import schedule

            for slots, context_tokens in SCHEDULE_SHAPES[:1] if quick else SCHEDULE_SHAPES:
                announce(f"schedule: {slots} slots")
                measurements.append(schedule.measure(slots, context_tokens, steps=5 if quick else 100))
        if "model" in chosen:
            from tests.bench import model as model_bench

            names, own = _models(stack, model or MODELS, settings, tiny=quick and not model)
            workloads = _choose(MODEL_WORKLOADS, only, quick=quick)
            for name, through_grpc in itertools.product(names if workloads else [], (False, True)[: 1 + grpc]):
                measurements += model_bench.measure(name, workloads, own, announce, through_grpc=through_grpc)
        if "simulate" in chosen:
            from tests.bench import simulate

            names, own = _models(stack, model or MODELS[:1], settings, tiny=quick and not model)
            traces = tuple(trace for trace in SIMULATED_TRACES if not only or trace.name in only)
            for name in names if traces else []:
                measurements += simulate.measure(name, (QUICK_TRACE,) if quick else traces, own, announce)
    report.show(console, measurements)
    if json is not None:
        report.write(json, measurements)


def _models(
    stack: ExitStack, models: Sequence[str], settings: list[str] | None, *, tiny: bool
) -> tuple[list[str], list[str]]:
    """Models and settings to load them with; with `tiny` one of random weights, for as long as the stack lasts."""
    if not tiny:
        return list(models), list(settings or [])
    from tests.bench.tiny_model import write_tiny_model

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    write_tiny_model(Path(folder))
    return [folder], ["model.random_weights=true", "model.served_name=tiny", *(settings or [])]


def _choose(workloads: tuple[Workload, ...], only: list[str] | None, *, quick: bool) -> tuple[Workload, ...]:
    if quick:
        paced = any(workload.step_seconds for workload in workloads)
        return (QUICK, dataclasses.replace(QUICK, name="quick-1ms", step_seconds=0.001)) if paced else (QUICK,)
    return tuple(workload for workload in workloads if not only or workload.name in only)


if __name__ == "__main__":
    typer.run(main)
