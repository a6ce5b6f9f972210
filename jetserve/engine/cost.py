"""How long a step takes, by its shape. Host side; imports no jax."""

from __future__ import annotations

from typing import Protocol

from jetserve.engine.plan import StepShape


class StepCost(Protocol):
    """Predicts step times and learns from those that were measured."""

    def seconds(self, shape: StepShape) -> float:
        """Of one step with this shape."""
        ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes in that a step with this shape took so long."""
        ...
