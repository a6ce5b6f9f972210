"""The command line. Each command imports what it needs when it runs, so that `--help` is quick. Imports no jax.

Exit codes: 0 done; 1 it could not be done; 2 the command or its settings are wrong. A failure we know is one line on
stderr.
"""

from __future__ import annotations

import enum
import json
import logging
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetserve.errors import ConfigError, InvalidRequest, JetserveError

if TYPE_CHECKING:
    from jetserve.config import Config
    from jetserve.request import Usage
    from jetserve.server.client import Client, Stream
    from jetserve.server.connection import CallOptions
    from jetserve.server.replies import Completion

app = typer.Typer(
    name="jetserve",
    help="Serve large language models on TPUs, and on CPU, over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"


class DType(enum.StrEnum):
    """`model.dtype`."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class LogLevel(enum.StrEnum):
    """`server.log_level`."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Model = Annotated[
    str | None, typer.Option(help="demo, demo-gemma, a Hugging Face or Orbax folder, or a .gguf file. Default: demo.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="One setting, as engine.slots=8. Repeatable.")
]
DTypeOption = Annotated[DType | None, typer.Option(help="Of weights and matmuls.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")]
Prompt = Annotated[str, typer.Option(help="The text to continue.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate. Default: what the context has left.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 keeps every token.")]
TopP = Annotated[float, typer.Option(help="1 keeps every token.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer. Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main() -> None:
    """The entry point."""
    try:
        app()
    except JetserveError as error:
        print(f"jetserve: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | InvalidRequest) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def serve(
    model: Model = None,
    config: ConfigFile = None,
    settings: Settings = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0 takes a free one. Default: 9000.")] = None,
    http_port: Annotated[int | None, typer.Option(help="0 takes a free one. Default: 8000.")] = None,
    served_name: Annotated[str | None, typer.Option(help="The name clients and metrics see.")] = None,
    dtype: DTypeOption = None,
    max_length: MaxLength = None,
    slots: Annotated[int | None, typer.Option(help="Most sequences decoded together.")] = None,
    strict_compile: Annotated[
        bool | None, typer.Option("--strict-compile", help="A compilation after warm-up is an error.")
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="What is logged to stderr.")] = None,
) -> None:
    """Serve a model over gRPC, with metrics and probes over HTTP, until SIGTERM or Ctrl-C."""
    overrides: dict[str, object] = {
        "server.host": host,
        "server.grpc_port": grpc_port,
        "server.http_port": http_port,
        "server.log_level": log_level and log_level.value,
        "model.served_name": served_name,
        "engine.slots": slots,
        "engine.strict_compile": strict_compile,
    }
    tree = _config(config, settings, overrides | _engine_overrides(model, dtype, max_length))
    logging.basicConfig(level=tree.server.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    for library in ("jax", "uvicorn", "asyncio"):  # what they say below a warning is not about serving
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.root.level))

    from jetserve.engine.engine import LoadedModel
    from jetserve.orchestrator.engine_thread import ReportProgress
    from jetserve.server import serving
    from jetserve.server.progress import ProgressBar

    bar = ProgressBar()

    def load(report: ReportProgress) -> LoadedModel:
        def both(stage: str, fraction: float) -> None:
            bar.report(stage, fraction)
            report(stage, fraction)

        both("importing jax", 0.0)  # takes seconds, with the ports open

        from jetserve.engine import loading

        with bar:
            return loading.load(tree, both)

    sys.exit(serving.run(tree, load, lambda text: print(text, flush=True)))


@app.command()
def generate(
    prompt: Prompt,
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
    dtype: DTypeOption = None,
    max_length: MaxLength = None,
) -> None:
    """Load a model, continue one prompt and exit. For many prompts use the Python API or a server."""
    from jetserve.request import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    tree = _config(config, settings, _engine_overrides(model, dtype, max_length))
    logging.basicConfig(level="WARNING", format=_LOG_FORMAT, stream=sys.stderr)

    from jetserve.llm import LLM

    with LLM.from_config(tree) as llm:
        (completion,) = llm.generate([prompt], params)
    if as_json:
        _print_answer(
            completion.text,
            completion.token_ids,
            completion.prompt_token_ids,
            completion.finish_reason,
            completion.usage,
        )
    else:
        print(completion.text)


@app.command()
def client(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    server: Annotated[str, typer.Option(help="host:port of the gRPC face.")] = "127.0.0.1:9000",
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    as_json: AsJson = False,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Share cached prefixes only with requests of this salt.")
    ] = None,
    priority: Annotated[int, typer.Option(help="Lower runs first.")] = 0,
    usage: Annotated[
        bool | None, typer.Option("--usage/--no-usage", help="Token counts on stderr. Default: on a terminal.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Show how the server is doing.")] = False,
    model_info: Annotated[bool, typer.Option("--model-info", help="Show the server's model.")] = False,
    flush_cache: Annotated[
        bool, typer.Option("--flush-cache", help="Forget cached prefixes, before the prompt.")
    ] = False,
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait so long for the server to be ready.")] = 0.0,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Give the request up after so long.")] = None,
    root_certificates: Annotated[Path | None, typer.Option(help="PEM file; the connection is TLS.")] = None,
) -> None:
    """Send a prompt to a running server and print the answer as it comes, or ask how the server is doing.

    What --flush-cache, --status and --model-info have to say is one JSON object, printed before the answer.
    """
    from jetserve.request import SamplingParams
    from jetserve.server.client import Client

    if prompt is None and not (status or model_info or flush_cache):
        raise InvalidRequest("nothing to do: give a prompt, --status, --model-info or --flush-cache")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    trusted = None if root_certificates is None else _read(root_certificates)
    with Client(server, root_certificates=trusted) as caller:
        if wait:
            caller.wait_until_ready(wait)
        if status or model_info or flush_cache:
            _print_server(caller, status=status, model_info=model_info, flush_cache=flush_cache)
        if prompt is not None:
            options: CallOptions = {"timeout_seconds": timeout, "priority": priority, "cache_salt": cache_salt}
            if as_json:
                _print_completion(caller.generate(prompt, params, **options)[0])
            else:
                shows_usage = sys.stderr.isatty() if usage is None else usage
                _print_stream(caller.stream(prompt, params, **options), shows_usage=shows_usage)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, demo or demo-gemma.")],
    out: Annotated[Path, typer.Argument(help="The folder to write: new, or empty.")],
    dtype: Annotated[DType, typer.Option(help="What to store; auto keeps what is there.")] = DType.AUTO,
) -> None:
    """Write a model as an Orbax checkpoint, which loads straight to many chips."""
    from jetserve.models import orbax_folder
    from jetserve.models.checkpoint import open_checkpoint
    from jetserve.server.progress import ProgressBar

    with ProgressBar() as bar:
        checkpoint = open_checkpoint(source, progress=bar.report_bytes(f"fetching {source}"))
        orbax_folder.convert(
            checkpoint,
            out,
            None if dtype is DType.AUTO else dtype.value,
            progress=lambda done, total: bar.report(f"converting {source}", done / total),
        )
    print(out)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="demo or demo-gemma.")]) -> None:
    """Download a demo model to the user's cache folder, once, and print where it is."""
    from jetserve.models import demo
    from jetserve.server.progress import ProgressBar

    with ProgressBar() as bar:
        path = demo.fetch(name, progress=bar.report_bytes(f"fetching {name}"))
    print(path)


@app.command()
def cost(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The YAML file to write.")],
    model: Model = None,
    config: ConfigFile = None,
    settings: Settings = None,
    dtype: DTypeOption = None,
    max_length: MaxLength = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Load a model, measure what its steps take on this machine, and write that for `jetserve simulate --cost`.

    Settings that shape programs and the KV pool count; targets, deadlines and KV events do not. Nothing else should run
    meanwhile.
    """
    from jetserve.server import cost as body

    body.require_new(out, is_forced=force)
    tree = _config(config, settings, _engine_overrides(model, dtype, max_length))
    logging.basicConfig(level="WARNING", format=_LOG_FORMAT, stream=sys.stderr)
    body.cost(tree, out)


@app.command()
def simulate(
    cost: Annotated[Path, typer.Option(metavar="FILE", help="YAML file with the step times of a model and a chip.")],
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="azure-conversation, sharegpt, ..: a wrong name lists them all.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines of ours or Mooncake's, or Azure's CSV.")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    requests: Annotated[int | None, typer.Option(help="How many. Default: the workload's, all of a trace.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second. Default: the trace's own.")] = None,
    rates: Annotated[str | None, typer.Option(metavar="R1,R2,..", help="Run once at each of these rates.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same report.")] = 0,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Goodput: most time to first token. Default: the workload's, the target's.")
    ] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Goodput: most time per output token. Default: alike.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is stdout, and no table.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a PNG: latency and goodput against the offered rate.")
    ] = None,
    write_trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the requests, as JSON lines.")] = None,
) -> None:
    """Run the scheduler and the KV pool against a simulated device, and say how requests would fare."""
    from jetserve.server import simulate as body

    wanted = body.Wanted(
        trace, workload, cost, requests, rate, rates, seed, ttft_ms, tpot_ms, json_file, plot, write_trace
    )
    source = ", ".join([str(config) if config else "defaults", *(settings or ())])
    body.simulate(wanted, _config(config, settings, {}), source)


@app.command()
def version() -> None:
    """Print the version."""
    print(installed_version("jetserve"))


def _config(file: Path | None, settings: list[str] | None, overrides: dict[str, object]) -> Config:
    from jetserve.config import load

    return load(file, settings or (), overrides)


def _engine_overrides(model: str | None, dtype: DType | None, max_length: int | None) -> dict[str, object]:
    return {"model.name": model, "model.dtype": dtype and dtype.value, "engine.max_length": max_length}


def _print_server(caller: Client, *, status: bool, model_info: bool, flush_cache: bool) -> None:
    import dataclasses

    answer: dict[str, object] = {}
    if flush_cache:
        answer |= {"pages_freed": caller.flush_cache()}
    if status:
        answer |= dataclasses.asdict(caller.status())
    if model_info:
        answer |= dataclasses.asdict(caller.model_info())
    print(json.dumps(answer, indent=2))


def _print_completion(answer: Completion) -> None:
    _print_answer(answer.text, answer.token_ids, answer.prompt_token_ids, answer.finish_reason, answer.usage)


def _print_stream(stream: Stream, *, shows_usage: bool) -> None:
    """The text as it comes; then, when asked for, a line of counts on stderr, so that stdout is the text alone."""
    last = None
    with stream:
        for last in stream:
            print(last.text, end="", flush=True)
    print()
    if shows_usage and last is not None and last.usage is not None:
        counts = last.usage
        print(
            f"{counts.prompt_tokens} prompt tokens ({counts.cached_tokens} cached), "
            f"{counts.completion_tokens} generated; ended by {last.finish_reason}",
            file=sys.stderr,
        )


def _print_answer(
    text: str,
    token_ids: tuple[int, ...],
    prompt_token_ids: tuple[int, ...],
    finish_reason: str | None,
    usage: Usage | None,
) -> None:
    """The one JSON object of `--json`."""
    counts = usage and {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    answer = {
        "text": text,
        "token_ids": list(token_ids),
        "prompt_token_ids": list(prompt_token_ids),
        "finish_reason": finish_reason,
        "usage": counts,
    }
    print(json.dumps(answer))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
