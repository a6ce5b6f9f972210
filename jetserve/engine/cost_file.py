"""Step times in a file: what `jetserve simulate` must know of a model and a chip, and no more. Imports no jax.

A YAML mapping; unknown keys are refused:

    model: demo-gemma                 the name clients see
    device: cpu x1                    kind and number of chips
    platform: cpu                     cpu, gpu or tpu: decides defaults of sizes
    date: 2026-03-01                  of the measurement
    method: learnt from 5120 steps    how it was measured
    max_position: 32768               the model's own limit of positions
    kv_bytes_per_token: 18432         keys and values of one token in all layers, on all chips together
    cache_bytes: 8000000000           for the KV pool, where the memory budget decides; left out elsewhere
    host_seconds: 0.0003              of scheduling, for each step; hidden while the device is slower
    step_seconds: 0.0002              the terms of `cost.StepTimes` from here on
    prefill_position_seconds: 2.0e-9
    generate_position_seconds: 3.0e-9
    walked_position_seconds: 0.0      left out: 0
    prefill:
    - {tokens: 32, seconds: 0.03}
    generate:
    - {steps: 1, rows: 8, seconds: 0.02}

The sizes are those compiled when it was measured; others lie on the line through the two nearest.
"""

from __future__ import annotations

import datetime
import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jetserve import config
from jetserve.engine.cost import StepTimes
from jetserve.errors import ConfigError

Count = Annotated[int, Field(strict=True, ge=1)]
Text = Annotated[str, Field(min_length=1)]


def _number(value: object) -> object:
    """YAML takes 2e-9 for a text; it wants 2.0e-9."""
    return float(value) if isinstance(value, str) else value


Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(_number)]
Seconds = Annotated[Number, Field(ge=0)]
PositiveSeconds = Annotated[Number, Field(gt=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PrefillTime(_Record):
    """Of a prefill program."""

    tokens: Count
    seconds: PositiveSeconds


class GenerateTime(_Record):
    """Of a generate program."""

    steps: Count
    rows: Count
    seconds: PositiveSeconds


class CostFile(_Record):
    """The file's keys; what they mean stands at the top of this module."""

    model: Text
    device: Text
    platform: Literal["cpu", "gpu", "tpu"]
    date: datetime.date
    method: Text
    max_position: Count
    kv_bytes_per_token: Count
    cache_bytes: Count | None = None
    host_seconds: Seconds
    step_seconds: Seconds
    prefill_position_seconds: Seconds
    generate_position_seconds: Seconds
    walked_position_seconds: Seconds = 0.0
    prefill: Annotated[tuple[PrefillTime, ...], Field(min_length=1)]
    generate: Annotated[tuple[GenerateTime, ...], Field(min_length=1)]

    @pydantic.model_validator(mode="after")
    def _programs_are_whole(self) -> Self:
        tokens = [program.tokens for program in self.prefill]
        pairs = [(program.steps, program.rows) for program in self.generate]
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"prefill has sizes twice, {sorted(tokens)}; keep one of each")
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"generate has (steps, rows) twice, {sorted(pairs)}; keep one of each")
        every = {(steps, rows) for steps, _ in pairs for _, rows in pairs}
        if missing := every - set(pairs):
            raise ValueError(f"generate lacks (steps, rows) {sorted(missing)}; each steps goes with each rows")
        return self

    @property
    def times(self) -> StepTimes:
        return StepTimes(
            step=self.step_seconds,
            prefill={program.tokens: program.seconds for program in self.prefill},
            generate={(program.steps, program.rows): program.seconds for program in self.generate},
            prefill_position=self.prefill_position_seconds,
            generate_position=self.generate_position_seconds,
            walked_position=self.walked_position_seconds,
        )

    def with_times(self, times: StepTimes) -> Self:
        """The same facts with other step times."""
        return self.model_validate(self.model_dump() | _terms(times))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises: ConfigError naming the file, the key, its value and what would be right."""
        tree = config.read_mapping(path, "step times")
        try:
            return cls.model_validate(tree)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{path}: " + "; ".join(_explain(item) for item in error.errors())) from None

    def write(self, path: Path) -> None:
        """Raises: ConfigError when the file cannot be written."""
        tree = self.model_dump(exclude_none=True)
        for programs in ("prefill", "generate"):
            tree[programs] = list(tree[programs])
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        try:
            path.write_text(f"# Step times, for `jetserve simulate --cost`.\n{text}", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the step times to {path}: {error.strerror}") from error


def _terms(times: StepTimes) -> dict[str, object]:
    return {
        "step_seconds": times.step,
        "prefill_position_seconds": times.prefill_position,
        "generate_position_seconds": times.generate_position,
        "walked_position_seconds": times.walked_position,
        "prefill": [{"tokens": tokens, "seconds": seconds} for tokens, seconds in sorted(times.prefill.items())],
        "generate": [
            {"steps": steps, "rows": rows, "seconds": seconds}
            for (steps, rows), seconds in sorted(times.generate.items())
        ],
    }


def _explain(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        records: dict[str, type[_Record]] = {"prefill": PrefillTime, "generate": GenerateTime}
        keys = list(records.get(str(item["loc"][0]), CostFile).model_fields)
        near = difflib.get_close_matches(str(item["loc"][-1]), keys, n=1, cutoff=0.5)
        return f"unknown key {name}; " + (f"did you mean {near[0]}?" if near else f"keys are {', '.join(keys)}")
    if item["type"] == "missing":
        return f"{name} is missing"
    given = item.get("input")
    value = "" if isinstance(given, dict | list | tuple) else f"={given!r}"
    return f"{name}{value}: {item['msg'].removeprefix('Value error, ')}".removeprefix(": ")
