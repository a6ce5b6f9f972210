"""Shows on stderr what takes long: a bar on a terminal, a line per stage elsewhere. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import rich.console
import rich.progress


class ProgressBar:
    """One bar that the stages of a task fill one after the other. May be told from any thread."""

    def __init__(self) -> None:
        console = rich.console.Console(stderr=True)
        self._console = console
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: rich.progress.TaskID | None = None
        self._stage = ""

    def report(self, stage: str, fraction: float) -> None:
        """Shows how far, from 0 to 1, a stage is."""
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(stage, total=1.0)
        if stage != self._stage:
            self._stage = stage
            if not self._console.is_terminal:
                self._console.print(stage, highlight=False)
            self._bar.reset(self._task)  # a full bar stops its clock for good
        self._bar.update(self._task, description=stage, completed=fraction)

    def report_bytes(self, stage: str) -> Callable[[int, int], None]:
        """A reporter of so many bytes of so many."""
        return lambda done, total: self.report(f"{stage} ({total / 1e6:.0f} MB)", done / total if total else 1.0)

    @property
    def is_full(self) -> bool:
        """Whether the stage is done, and its clock stands."""
        return self._bar.finished

    def close(self) -> None:
        self._bar.stop()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
