"""Draws latency and goodput against the offered rate. Needs matplotlib, which only this module does. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jetserve.errors import ConfigError
from jetserve.simulation.report import Report, Spread


def require_matplotlib() -> None:
    """Raises: ConfigError when it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'jetserve[plot]'") from None


def draw(reports: Sequence[Report], file: Path) -> None:
    """Writes a PNG: time to first token, time per output token and goodput, each over the offered rate.

    Args:
      reports: of one workload at several rates.
    Raises: ConfigError when matplotlib is missing or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    ordered = sorted(reports, key=lambda one: one.rate_requests_per_second or 0.0)
    rates = [one.rate_requests_per_second or 0.0 for one in ordered]
    figure = Figure(figsize=(12, 4), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    for axes, title, spreads, limit in (
        (first, "time to first token", [one.ttft_ms for one in ordered], ordered[0].ttft_limit_ms),
        (second, "time per output token", [one.tpot_ms for one in ordered], ordered[0].tpot_limit_ms),
    ):
        for name in ("p50", "p99"):
            axes.plot(rates, [_percentile(spread, name) for spread in spreads], marker="o", label=name)
        if limit is not None:
            axes.axhline(limit, color="grey", linestyle="--", label="limit")
        axes.set(title=title, ylabel="ms", yscale="log" if all(spread.p50 > 0 for spread in spreads) else "linear")
        axes.legend()
    third.plot(rates, [one.goodput for one in ordered], marker="o", label="goodput")
    third.plot(rates, rates, color="grey", linestyle="--", label="offered")
    third.set(title="goodput", ylabel="requests/s", ylim=(0, None))
    third.legend()
    for axes in (first, second, third):
        axes.set(xlabel="offered requests/s", xlim=(0, None))
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(f"{ordered[0].workload}, {ordered[0].config}, {ordered[0].cost}")
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def _percentile(spread: Spread, name: str) -> float:
    return spread.p50 if name == "p50" else spread.p99
