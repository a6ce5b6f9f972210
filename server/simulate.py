"""The body of `jetserve simulate`: reads what is wanted, runs it at each rate, shows the reports. Imports no jax."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jetserve.config import Config
from jetserve.engine.cost_file import CostFile
from jetserve.engine.sizing import Sizing, resolve
from jetserve.errors import ConfigError
from jetserve.server.outputs import require_writable
from jetserve.server.progress import ProgressBar
from jetserve.simulation import plot, workloads
from jetserve.simulation.report import Limits, Report, Spread, report
from jetserve.simulation.run import Setup, run
from jetserve.simulation.trace import Trace
from jetserve.simulation.trace_files import read_trace, write_trace

_LEAST_RATE, _MOST_RATE = 1e-6, 1e9  # what a simulated clock can tell apart
_PLOTTED = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the trace's own rate, when a plot is wanted and nobody says at which rates


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command's options, as they were given."""

    trace: Path | None
    workload: str | None
    cost: Path
    requests: int | None
    rate: float | None
    rates: str | None
    seed: int
    ttft_ms: float | None
    tpot_ms: float | None
    json_file: str | None
    plot_file: Path | None
    trace_file: Path | None


def simulate(wanted: Wanted, config: Config, source: str) -> None:
    """Runs the command.

    Args:
      config: the tree that is simulated.
      source: where it is from, for the report.
    Raises: ConfigError.
    """
    rates = _rates(wanted)
    if wanted.plot_file is not None:
        plot.require_matplotlib()
        require_writable(wanted.plot_file)
    if wanted.json_file is not None and wanted.json_file != "-":
        require_writable(Path(wanted.json_file))
    trace, limits = _trace(wanted, config)
    cost = CostFile.read(wanted.cost)
    sizing = resolve(
        config.engine,
        config.scheduler,
        platform=cost.platform,
        max_position=cost.max_position,
        page_bytes_per_token=cost.kv_bytes_per_token,
        cache_bytes=cost.cache_bytes,
    )
    if wanted.trace_file is not None:
        write_trace(trace if rates[0] is None else trace.at_rate(rates[0]), wanted.trace_file)
    if wanted.plot_file is not None and rates == (None,):
        own = trace.rate_requests_per_second
        if own is None:
            raise ConfigError(f"all requests of {trace.name} arrive at the same time: --plot has no rates to draw over")
        rates = tuple(own * scale for scale in _PLOTTED)
    for note in _notes(cost, sizing):
        print(note, file=sys.stderr)
    setup = Setup(sizing, config.scheduler, cost.times, cost.host_seconds, wanted.seed)
    reports = _run_all(trace, setup, rates, lambda at: report(at, limits, config=source, cost=wanted.cost.name))
    _show(reports, wanted)


def _trace(wanted: Wanted, config: Config) -> tuple[Trace, Limits]:
    """What is run, and what a good request meets: flags before the workload's limits before the configuration's."""
    if (wanted.trace is None) == (wanted.workload is None):
        raise ConfigError(f"give one of --trace FILE and --workload NAME; names are {', '.join(workloads.WORKLOADS)}")
    if wanted.requests is not None and wanted.requests < 1:
        raise ConfigError(f"--requests {wanted.requests} must be at least 1")
    if not 0 <= wanted.seed < 1 << 31:
        raise ConfigError(f"--seed {wanted.seed} must be at least 0, and below {1 << 31}")
    for name, limit in (("--ttft-ms", wanted.ttft_ms), ("--tpot-ms", wanted.tpot_ms)):
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(f"{name} {limit:g} must be a number above 0")
    ttft_ms, tpot_ms = config.scheduler.ttft_target_ms, config.scheduler.tpot_target_ms
    if wanted.workload is not None:
        workload = workloads.named(wanted.workload)
        trace = workload.generate(wanted.requests, wanted.seed)
        ttft_ms, tpot_ms = workload.ttft_limit_ms or ttft_ms, workload.tpot_limit_ms or tpot_ms
    else:
        assert wanted.trace is not None, "one of the two was given"
        trace = read_trace(wanted.trace)
        trace = Trace(trace.name, trace.requests[: wanted.requests])
    return trace, Limits(wanted.ttft_ms or ttft_ms, wanted.tpot_ms or tpot_ms)


def _rates(wanted: Wanted) -> tuple[float | None, ...]:
    """At which rates to run; None is the trace's own."""
    if wanted.rates is None:
        if wanted.rate is None:
            return (None,)
        return (_rate("--rate", wanted.rate),)
    if wanted.rate is not None:
        raise ConfigError("give one of --rate and --rates")
    return tuple(_rate("--rates", text) for text in wanted.rates.split(","))


def _rate(flag: str, given: str | float) -> float:
    try:
        rate = float(given)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ConfigError(f"{flag}: {given!r} must be a number of requests per second above 0, as in {flag} 4")
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ConfigError(f"{flag}: {given!r} must be from {_LEAST_RATE:g} to {_MOST_RATE:g} requests per second")
    return rate


def _notes(cost: CostFile, sizing: Sizing) -> list[str]:
    """What is guessed because it was not measured."""
    times = cost.times
    prefill = [str(size) for size in sizing.prefill_sizes if size not in times.prefill]
    generate = [
        f"{steps}x{rows}"
        for steps in sizing.generate_steps
        for rows in sizing.generate_rows
        if (steps, rows) not in times.generate
    ]
    return [
        f"note: {what} {', '.join(sizes)} are not in the cost file; their times lie between or beyond others'"
        for what, sizes in (("prefill sizes", prefill), ("generate steps x rows", generate))
        if sizes
    ]


def _run_all(
    trace: Trace, setup: Setup, rates: Sequence[float | None], summarise: Callable[..., Report]
) -> list[Report]:
    """Runs the trace at each rate."""
    reports = []
    with ProgressBar() if sys.stderr.isatty() else contextlib.nullcontext() as bar:
        for rate in rates:
            stage = f"simulating {trace.name}" + ("" if rate is None else f" at {rate:g} requests/s")
            moved = trace if rate is None else trace.at_rate(rate)
            started = time.perf_counter()
            ran = run(moved, setup, None if bar is None else functools.partial(_advance, bar, stage))
            took = time.perf_counter() - started
            reports.append(summarise(ran))
            print(
                f"{stage}: {len(ran.records)} requests, {ran.seconds:.1f} s of the device, in {took:.1f} s "
                f"({len(ran.records) / took:.0f} requests/s)",
                file=sys.stderr,
            )
    return reports


def _advance(bar: ProgressBar, stage: str, done: int, requests: int) -> None:
    bar.report(stage, done / requests)


def _show(reports: Sequence[Report], wanted: Wanted) -> None:
    """JSON and plot where they are wanted, and the table unless JSON has stdout for itself."""
    if wanted.plot_file is not None:
        plot.draw(reports, wanted.plot_file)
    if wanted.json_file is not None:
        dicts = [one.as_dict() for one in reports]
        text = json.dumps(dicts[0] if wanted.rates is None and len(dicts) == 1 else {"runs": dicts}, indent=2)
        if wanted.json_file == "-":
            print(text)
            return
        try:
            Path(wanted.json_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {wanted.json_file}: {error.strerror}") from None
    console = Console()
    first = reports[0]
    title = f"{first.workload}, config {first.config}, cost {first.cost}, seed {first.seed}"
    console.print(title, highlight=False, soft_wrap=True)
    console.print(_counts(reports))
    console.print(_latencies(reports))


def _counts(reports: Sequence[Report]) -> Table:
    """A column for each report."""
    shown = Table("offered requests/s")
    for one in reports:
        shown.add_column(_rate_of(one), justify="right")
    for section in _SECTIONS:
        for name, cell in section:
            cells = [cell(one) for one in reports]
            if any(cells):
                shown.add_row(name, *cells)
        shown.add_section()
    return shown


def _latencies(reports: Sequence[Report]) -> Table:
    """A section for each report."""
    shown = Table("offered requests/s", "ms")
    for field in fields(Spread):
        shown.add_column(field.name, justify="right")
    for one in reports:
        rate = _rate_of(one)
        for name, spread in (
            ("TTFT", one.ttft_ms), ("TPOT", one.tpot_ms), ("ITL", one.itl_ms), ("E2E", one.e2e_ms),
            ("queue", one.queue_ms),
        ):  # fmt: skip
            shown.add_row(rate, name, *(f"{value:,.1f}" for value in astuple(spread)))
            rate = ""
        shown.add_section()
    return shown


def _rate_of(one: Report) -> str:
    rate = one.rate_requests_per_second
    return "all at once" if rate is None else f"{rate:.3g}"


Row = tuple[str, Callable[[Report], str]]  # an empty cell in every column leaves the row out


def _limits(one: Report) -> str:
    limits = (("TTFT", one.ttft_limit_ms), ("TPOT", one.tpot_limit_ms))
    return ", ".join(f"{name} {limit:g} ms" for name, limit in limits if limit is not None) or "none"


def _count(name: str, count: Callable[[Report], int]) -> Row:
    """A row that is there only where something was counted."""
    return name, lambda one: f"{count(one):,}" if count(one) else ""


_SECTIONS: tuple[Sequence[Row], ...] = (
    (
        ("requests / finished", lambda one: f"{one.requests:,} / {one.finished:,}"),
        _count("refused: the queue was full", lambda one: one.refused),
        _count("shed: hopeless", lambda one: one.shed),
        _count("expired: out of time", lambda one: one.expired),
        _count("unsent: session without answer or context", lambda one: one.unsent),
        _count("prompts clipped to the context", lambda one: one.clipped_prompts),
        _count("prompt tokens lost so", lambda one: one.clipped_prompt_tokens),
        _count("answers clipped to the context", lambda one: one.clipped_outputs),
        _count("answer tokens lost so", lambda one: one.clipped_output_tokens),
        ("duration, simulated", lambda one: f"{one.duration_seconds:,.1f} s"),
    ),
    (
        ("limits", _limits),
        ("goodput, requests/s", lambda one: f"{one.goodput:.4g}"),
        ("goodput, tokens/s", lambda one: f"{one.goodput_tokens_per_second:,.1f}"),
        ("requests within the limits", lambda one: f"{one.good_share:.1%}"),
    ),
    (("largest gap between tokens", lambda one: f"{one.largest_gap_ms:,.1f} ms"),),
    (
        ("output tokens/s", lambda one: f"{one.output_tokens_per_second:,.1f}"),
        ("input tokens/s", lambda one: f"{one.input_tokens_per_second:,.1f}"),
        ("hit rate / of an infinite cache", lambda one: f"{one.hit_rate:.1%} / {one.ideal_hit_rate:.1%}"),
        (
            "prompt tokens computed / with it",
            lambda one: f"{one.computed_prompt_tokens:,} / {one.ideal_computed_prompt_tokens:,}",
        ),
        (
            "padding of prefill / by powers of two",
            lambda one: f"{one.padded_share:.1%} / {one.power_of_two_padded_share:.1%}",
        ),
    ),
    (
        ("device busy", lambda one: f"{one.device_busy_share:.1%}"),
        ("slots: mean / max / all", lambda one: f"{one.slots_mean:.1f} / {one.slots_max} / {one.slots}"),
        ("pages: mean / max / all", lambda one: f"{one.pages_mean:,.1f} / {one.pages_max:,} / {one.pages:,}"),
        ("preemptions", lambda one: f"{one.preemptions:,}"),
        _count("pages evicted from the cache", lambda one: one.evicted_pages),
        _count("pages saved to host memory", lambda one: one.host_saved_pages),
        _count("pages loaded from host memory", lambda one: one.host_loaded_pages),
        ("steps", lambda one: f"{one.steps:,}"),
    ),
)
