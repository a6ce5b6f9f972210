"""Families of Prometheus metrics with fixed series, rendered faster than prometheus_client does. Imports no jax."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client.utils import floatToGoString


class Histogram:
    """Counts by bucket. Bounds are the union of what the faces show, so that one observation feeds them all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, *faces: Sequence[float]) -> None:
        self.bounds = sorted({bound for face in faces for bound in face})
        self.counts = [0] * (len(self.bounds) + 1)  # the last one is above all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Family:
    """One metric family: fixed series, and a function that reads their values in the same order."""

    __slots__ = ("header", "help", "kind", "name", "rendered", "series", "values")

    def __init__(
        self,
        name: str,
        kind: Literal["gauge", "counter", "histogram"],
        text: str,
        series: Sequence[tuple[str, dict[str, str]]],
        values: Callable[[], list[float]],
    ) -> None:
        """Takes series as (suffix of the sample's name, labels)."""
        self.name, self.kind, self.help, self.values = name, kind, text, values
        self.series = [(name + suffix, labels) for suffix, labels in series]
        exposed = f"{name}_total" if kind == "counter" else name
        self.header = f"# HELP {exposed} {text}\n# TYPE {exposed} {kind}\n"
        self.rendered = [_render(sample, labels) for sample, labels in self.series]


def gauge(name: str, text: str, labels: dict[str, str], read: Callable[[], float]) -> Family:
    return Family(name, "gauge", text, [("", labels)], lambda: [read()])


def counter(name: str, text: str, labels: dict[str, str], read: Callable[[], float]) -> Family:
    return Family(name, "counter", text, [("_total", labels)], lambda: [read()])


def histogram(
    name: str, text: str, labels: dict[str, str], observed: Histogram, bounds: Sequence[float] | None
) -> Family:
    """Shows a histogram under some of its bounds; all of them when None."""
    shown = observed.bounds if bounds is None else bounds
    places = [observed.bounds.index(bound) for bound in shown]
    bounds_text = [str(floatToGoString(bound)) for bound in (*shown, float("inf"))]  # type: ignore[no-untyped-call]
    series = [("_bucket", {**labels, "le": text}) for text in bounds_text]

    def values() -> list[float]:
        cumulative = list(accumulate(observed.counts))
        count = cumulative[-1]
        return [*[cumulative[place] for place in places], count, count, observed.total]

    return Family(name, "histogram", text, [*series, ("_count", labels), ("_sum", labels)], values)


def _render(name: str, labels: dict[str, str]) -> str:
    escaped = (
        (key, text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")) for key, text in labels.items()
    )
    pairs = ",".join(f'{key}="{text}"' for key, text in sorted(escaped))
    return f"{name}{{{pairs}}}"
