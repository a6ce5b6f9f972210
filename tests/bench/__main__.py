"""`python -m tests.bench`: measures this checkout and prints what it found. Never fails because of a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.bench import report
from tests.bench.workloads import HOST_WORKLOADS, MODEL_WORKLOADS, MODELS, QUICK, Workload

BENCHES = ("host", "model")


def main(
    benches: Annotated[list[str] | None, typer.Argument(help=f"which: {', '.join(BENCHES)}; all when none")] = None,
    model: Annotated[list[str] | None, typer.Option(help="of the model bench; may be repeated")] = None,
    only: Annotated[list[str] | None, typer.Option(help="names of workloads; may be repeated")] = None,
    grpc: Annotated[bool, typer.Option("--grpc", help="the model bench goes through gRPC too")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="path=value, as for jetserve serve")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few tokens of each: does it run at all")] = False,
    json: Annotated[Path | None, typer.Option(help="write everything to this file")] = None,
) -> None:
    """Measures the host path over a fake device, and the demo models next to a bare jitted loop."""
    console = Console()
    if not console.is_terminal:
        console.width = 120  # of a file or a log nobody knows
    chosen = tuple(benches or BENCHES)
    if unknown := set(chosen) - set(BENCHES):
        raise typer.BadParameter(f"there is no bench {sorted(unknown)}; there are {', '.join(BENCHES)}")
    measurements: list[report.Measurement] = []
    with console.status("") as status:

        def announce(text: str) -> None:
            status.update(text)

        if "host" in chosen:
            from tests.bench import host  # only what is asked for is imported: the host bench runs without jax

            for workload in _choose(HOST_WORKLOADS, only, quick=quick):
                announce(f"host: {workload.name}")
                measurements.append(host.measure(workload))
        if "model" in chosen:
            from tests.bench import model as model_bench

            workloads = _choose(MODEL_WORKLOADS, only, quick=quick)
            for name in (model or MODELS) if workloads else ():
                for through_grpc in (False, True) if grpc else (False,):
                    measurements += model_bench.measure(
                        name, workloads, settings or [], announce, through_grpc=through_grpc
                    )
    report.show(console, measurements)
    if json is not None:
        report.write(json, measurements)


def _choose(workloads: tuple[Workload, ...], only: list[str] | None, *, quick: bool) -> tuple[Workload, ...]:
    if quick:
        paced = any(workload.step_seconds for workload in workloads)
        return (QUICK, dataclasses.replace(QUICK, name="quick-1ms", step_seconds=0.001)) if paced else (QUICK,)
    return tuple(workload for workload in workloads if not only or workload.name in only)


if __name__ == "__main__":
    typer.run(main)
