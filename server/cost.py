"""The body of `jetserve cost`: loads a model, measures its steps, writes the cost file, shows it. Imports no jax."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jetserve.config import Config, KvEventsSettings
from jetserve.engine.calibration import Calibration, calibrate
from jetserve.engine.cost_file import CostFile, GenerateTime, PrefillTime
from jetserve.engine.engine import LoadedModel
from jetserve.errors import ConfigError
from jetserve.server.outputs import require_writable
from jetserve.server.progress import ProgressBar


def require_new(out: Path, *, is_forced: bool) -> None:
    """Raises: ConfigError when the file could not be written, or is there already and is not to be overwritten."""
    require_writable(out)
    if out.exists() and not is_forced:
        raise ConfigError(f"{out} is there already; --force overwrites it")


def cost(config: Config, out: Path) -> None:
    """Runs the command.

    Raises: what loading raises; ConfigError when the file cannot be written.
    """
    with ProgressBar() as bar:
        bar.report("importing jax", 0.0)

        from jetserve.engine import loading

        model = loading.load(measurable(config), bar.report)
        calibration = calibrate(model.engine, model.limits, bar.report)
    cost_file(model, calibration, datetime.date.today()).write(out)
    _show(model, calibration, out)


def measurable(config: Config) -> Config:
    """The same programs under a scheduler that runs all of them: without targets, and with nobody listening."""
    free = {"ttft_target_ms": None, "tpot_target_ms": None, "shed_hopeless": False}
    scheduler = config.scheduler.model_copy(update=free)
    return config.model_copy(update={"scheduler": scheduler, "kv_events": KvEventsSettings()})


def cost_file(model: LoadedModel, calibration: Calibration, date: datetime.date) -> CostFile:
    """What was measured, with all that a simulation must know of the model."""
    footprint, times = model.footprint, calibration.times
    assert footprint is not None, "the model was loaded"
    return CostFile(
        model=model.name,
        device=model.info.devices,
        platform=footprint.platform,
        date=date,
        method=(
            f"jetserve {version('jetserve')} cost: fitted to {calibration.fitted} steps, the median error for "
            f"{calibration.steps - calibration.fitted} others is {calibration.error:.1%}"
        ),
        max_position=footprint.max_position,
        kv_bytes_per_token=footprint.page_bytes_per_token,
        cache_bytes=footprint.cache_bytes,
        host_seconds=calibration.host_seconds,
        step_seconds=times.step,
        prefill_position_seconds=times.prefill_position,
        generate_position_seconds=times.generate_position,
        walked_position_seconds=times.walked_position,
        prefill=tuple(PrefillTime(tokens=tokens, seconds=seconds) for tokens, seconds in times.prefill.items()),
        generate=tuple(
            GenerateTime(steps=steps, rows=rows, seconds=seconds) for (steps, rows), seconds in times.generate.items()
        ),
    )


def _show(model: LoadedModel, calibration: Calibration, out: Path) -> None:
    times, console = calibration.times, Console()
    shown = Table("part of a step", "ms", "steps measured", title=f"{model.name}, {model.info.devices}")
    for column in shown.columns[1:]:
        column.justify = "right"
    for size, seconds in times.prefill.items():
        shown.add_row(f"prefill of {size} tokens", *_cells(seconds, calibration.prefill_counts[size]))
    for (steps, rows), seconds in times.generate.items():
        name = f"generate, {rows} rows" + (f", {steps} steps" if steps > 1 else "")
        shown.add_row(name, *_cells(seconds, calibration.generate_counts[steps, rows]))
    shown.add_section()
    shown.add_row("prefill, for 1,000 positions attended to", *_cells(1e3 * times.prefill_position))
    shown.add_row("generate, for 1,000 positions attended to", *_cells(1e3 * times.generate_position))
    shown.add_row("generate, for 1,000 positions of rows x longest", *_cells(1e3 * times.walked_position))
    shown.add_row("every step", *_cells(times.step))
    shown.add_row("the host, while the device is busy", *_cells(calibration.host_seconds))
    console.print(shown)
    tested = calibration.steps - calibration.fitted
    console.print(f"median error of the prediction: {calibration.error:.1%}, over {tested} steps that were not fitted")
    console.print(f"wrote {out}", highlight=False, soft_wrap=True)


def _cells(seconds: float, count: int | None = None) -> tuple[str, str]:
    """A program that never ran has a guess for its time, from those that did."""
    return f"{seconds * 1e3:,.3f}", "" if count is None else f"{count:,}" if count else "none: a guess"
