"""The one configuration tree: defaults < one YAML file < `path=value` settings. Host side; imports no jax.

A setting is a field with a default, a range and one line of why. Unknown keys are errors that name the nearest one.
What follows from settings, model and chips together is computed once, in `engine/sizing.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from jetserve.errors import ConfigError

Whole = Annotated[int, Field(strict=True)]  # strict: true and "8" are no numbers
Positive = Annotated[Whole, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(strict=True, gt=0)]
PositiveMilliseconds = Annotated[float, Field(strict=True, gt=0)]
Sizes = Annotated[tuple[Positive, ...], Field(min_length=1)]
_ZMQ_ADDRESS = re.compile(r"tcp://(?:\[[^\]]+\]|[^:\[\]/;\s]+):(?:\*|(?P<port>[0-9]{1,5}))|ipc://\S+")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSettings(_Section):
    """Which weights, and how they are held."""

    name: str = Field("demo", min_length=1, description="demo, demo-gemma, a folder or a .gguf file")
    served_name: str | None = Field(None, description="the name clients see; the model's own name when not set")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of weights and matmuls; auto is bfloat16 where the chip multiplies it natively"
    )
    tokenizer: str | None = Field(None, description="file or directory; the model's own when not set")
    random_weights: bool = Field(False, description="random weights of the model's shapes: for tests and benchmarks")


class MeshSettings(_Section):
    """How chips are laid out. Axis words as in sharding/."""

    tensor: Positive = Field(1, description="chips that share each weight matrix and the KV heads")


class EngineSettings(_Section):
    """Shapes of the device programs. Every size here is compiled at start; none is compiled later."""

    slots: Positive = Field(32, le=4096, description="most sequences decoded together")
    max_length: Positive | None = Field(
        None,
        description="tokens of prompt and answer together; when not set the model's own limit, at most 8192 on TPU "
        "and 2048 elsewhere",
    )
    page_size: Positive | None = Field(None, description="tokens in a KV page; 128 on TPU, 16 elsewhere when not set")
    kv_pages: Positive | None = Field(
        None, description="pages in the pool, one for padding included; from the memory budget when not set"
    )
    kv_bytes: Positive = Field(1 << 30, description="KV pool on machines whose memory is not ours to fill (CPU)")
    prefix_cache: bool = Field(True, description="sequences with an equal beginning share its KV pages")
    host_kv_bytes: Whole = Field(
        0, ge=0, le=1 << 44, description="host memory for KV pages that leave the pool and may come back; 0 is none"
    )
    prefill_sizes: Sizes = Field((32, 128, 512), description="tokens a prefill program packs")
    prefill_rows: Positive = Field(8, description="most prompts packed in one prefill")
    generate_rows: Sizes | None = Field(
        None, description="batch sizes of generate, over the first slots; 2, 8, 32, .. slots when not set"
    )
    generate_steps: Sizes = Field((1,), description="tokens a generate program decodes per dispatch")
    attention: Literal["auto", "xla"] = Field("auto", description="attention implementation; auto is the chip's best")
    strict_compile: bool = Field(False, description="a compilation after warm-up is an error instead of a warning")
    compilation_cache: str | None = Field(
        "auto", description="folder of the persistent compilation cache; auto is the user's cache folder, null is none"
    )


class SchedulerSettings(_Section):
    """Who runs when."""

    prefill_tokens: Positive | None = Field(
        None, description="most prompt tokens prefilled between two decode steps; the largest prefill size when not set"
    )
    policy: Literal["fcfs", "longest_prefix"] = Field(
        "fcfs",
        description="who goes first within a priority: who came first, or who finds most of its prompt in the cache",
    )
    ageing: Positive = Field(
        16, description="of so many admissions one goes to whoever waits longest, whatever its priority or prefix"
    )
    ttft_target_ms: PositiveMilliseconds | None = Field(
        None, description="time to first token that prompts should meet"
    )
    tpot_target_ms: PositiveMilliseconds | None = Field(
        None, description="time between two tokens that running requests should meet; chunks are cut to keep it"
    )
    shed_hopeless: bool = Field(
        False, description="refuse requests that, by the measured step times, cannot meet ttft_target_ms or deadline"
    )
    max_waiting_requests: Positive = Field(1024, description="requests waiting before new ones are refused")
    max_waiting_tokens: Positive = Field(1 << 22, description="prompt tokens waiting before new ones are refused")
    default_timeout_seconds: PositiveSeconds | None = Field(None, description="of requests that bring none")


class ServerSettings(_Section):
    """Where and how the server listens."""

    host: str = Field("127.0.0.1", min_length=1, description="address both ports listen on; 0.0.0.0 is all of them")
    grpc_port: Whole = Field(9000, ge=0, le=65535, description="0 takes a free one")
    http_port: Whole = Field(8000, ge=0, le=65535, description="0 takes a free one")
    max_message_bytes: Whole = Field(64 << 20, ge=4096, description="largest gRPC message, both ways")
    tls_certificate: Path | None = Field(None, description="PEM chain; with tls_key gRPC is served over TLS")
    tls_key: Path | None = Field(None, description="PEM key of tls_certificate")
    drain_timeout_seconds: PositiveSeconds = Field(30.0, description="running requests may finish for so long")
    step_timeout_seconds: PositiveSeconds = Field(60.0, description="a device step longer than this is not ready")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least that is logged")

    @pydantic.model_validator(mode="after")
    def _tls_is_whole(self) -> ServerSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together; set both or neither")
        return self


class KvEventsSettings(_Section):
    """Events about cached KV blocks for routers, in vLLM's ZMQ format. Off unless there is an endpoint."""

    endpoint: str | None = Field(None, min_length=1, description="ZMQ address to publish on, as in tcp://*:5557")
    replay_endpoint: str | None = Field(
        None, min_length=1, description="ZMQ address that repeats missed batches, as in tcp://*:6557"
    )
    topic: str = Field("", description="first frame of each message; llm-d wants kv@<pod address>@<model>")
    encoding: Literal["map", "array"] = Field("map", description="of an event; array is for older routers")
    buffer_steps: Positive = Field(
        10_000, le=2**31 - 1, description="batches kept for replay; about 4 bytes a token in them"
    )
    high_water_mark: Positive = Field(
        100_000, le=2**31 - 1, description="messages kept for a slow subscriber; the rest it misses"
    )

    @pydantic.field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        if address is not None and address:
            found = _ZMQ_ADDRESS.fullmatch(address)
            if found is None or int(found["port"] or 0) > 65535:
                raise ValueError(
                    "must be tcp://address:port or ipc:///path, as in tcp://*:5557; port * takes a free one"
                )
        return address

    @pydantic.model_validator(mode="after")
    def _replays_what_is_published(self) -> KvEventsSettings:
        if self.replay_endpoint is not None:
            if self.endpoint is None:
                raise ValueError("replay_endpoint repeats what endpoint publishes; set endpoint too")
            if self.replay_endpoint == self.endpoint and not self.endpoint.endswith((":*", ":0")):
                raise ValueError(f"endpoint and replay_endpoint are both {self.endpoint}; give each a port of its own")
        return self


class Config(_Section):
    """The whole tree."""

    model: ModelSettings = ModelSettings()
    mesh: MeshSettings = MeshSettings()
    engine: EngineSettings = EngineSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    kv_events: KvEventsSettings = KvEventsSettings()
    server: ServerSettings = ServerSettings()


def load(
    file: Path | None = None, settings: Iterable[str] = (), overrides: Mapping[str, object] | None = None
) -> Config:
    """Builds the tree.

    Args:
      file: a YAML mapping with (some of) the tree's sections.
      settings: `path=value` texts, the value in YAML: `engine.slots=8`. Later ones win.
      overrides: dotted path -> value, from command-line flags; None values are left out. They win over all.
    Raises: ConfigError naming the path, the value and what would be right.
    """
    tree = read_mapping(file) if file is not None else {}
    for text in settings:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"setting {text!r} is not of the form path=value, as in engine.slots=8")
        try:
            parsed = _yaml(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"setting {text!r}: {value!r} is not a YAML value") from error
        _put(tree, path.strip(), parsed)
    for path, given in (overrides or {}).items():
        if given is not None:
            _put(tree, path, given)
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        found = [item for item in error.errors() if not (item["type"] == "too_short" and item["input"])]
        raise ConfigError("; ".join(_explain(item) for item in found)) from None


def path_of(name: str) -> str:
    """The path of a setting given by its own name alone, as Python keywords are; a path stays what it is."""
    found = [path for path in _paths(Config) if path.rpartition(".")[2] == name and "." in path]
    return found[0] if len(found) == 1 else name


def read_mapping(file: Path, what: str = "configuration") -> dict[str, Any]:
    """Reads a YAML file that holds a mapping; keys without a value are left out.

    Args:
      what: the file is, for the message.
    Raises: ConfigError when it cannot be read, is not YAML, holds a key twice or no mapping.
    """
    try:
        tree = _yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {file}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {_place(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold a mapping, holds {type(tree).__name__}")
    return {name: section for name, section in tree.items() if section is not None}  # all of it commented out


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: of two `engine:` sections YAML would drop the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except ValueError as error:  # a date such as 2026-13-45
        raise yaml.YAMLError(str(error)) from error


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return place + ", ".join(part for part in (error.context, error.problem) if part)


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, last = path.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {section} is a value, not a section")
        tree = inner
    tree[last] = value


def _explain(item: Any) -> str:
    path = [str(part) for part in item["loc"]]
    name = ".".join(path)
    if item["type"] == "extra_forbidden":
        # Python keywords are names without their section.
        paths = {path if "." in name else path.rpartition(".")[2]: path for path in _paths(Config)}
        near = [paths[found] for found in difflib.get_close_matches(name, paths, n=1, cutoff=0.5)]
        hint = f"; did you mean {near[0]}?" if near else f"; sections are {', '.join(Config.model_fields)}"
        return f"unknown setting {name}{hint}"
    given = item.get("input")
    said = {"model_type": "must be a section of settings", "tuple_type": "must be a list, as in [32, 128]"}
    value = "" if given is None or isinstance(given, dict) else f"={given!r}"
    return f"{name}{value}: {said.get(item['type']) or item['msg'].removeprefix('Value error, ')}"


def _paths(section: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, info in section.model_fields.items():
        found.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found.extend(_paths(info.annotation, f"{prefix}{name}."))
    return found
