"""One process that serves: orchestrator, gRPC and HTTP in one event loop, and how it ends. Imports no jax.

Exit codes: 0 when asked to stop and everything finished in time; 1 when loading or the engine failed, or when requests
were cut off, by the drain timeout or a second signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from jetserve.config import Config
from jetserve.engine.engine import LoadedModel
from jetserve.metrics import Metrics, ModelRecord
from jetserve.orchestrator import Orchestrator
from jetserve.orchestrator.engine_thread import Load, ReportProgress
from jetserve.server.grpc_server import GrpcServer
from jetserve.server.http import HttpServer, application
from jetserve.server.kv_events import KvEventPublisher

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 1.0  # for the streams to carry their errors
_STOP_SECONDS = 5.0  # for the engine thread; a program that is compiling cannot be interrupted


class Server:
    """Everything that listens, around one orchestrator. Ports are open from the start, also while the model loads."""

    def __init__(self, config: Config, load: Load) -> None:
        """Binds all ports; to be called in the event loop.

        Raises: ConfigError when one cannot be had.
        """
        self.failed = asyncio.Event()
        self.metrics = Metrics(config.model.served_name or config.model.name)
        self._load = load
        self._load_seconds = 0.0
        self._started_seconds = time.monotonic()
        self.kv_events: KvEventPublisher | None = None
        with contextlib.ExitStack() as undo:
            if config.kv_events.endpoint is not None:
                self.kv_events = KvEventPublisher(config.kv_events)
                undo.callback(self.kv_events.stop)
            self.orchestrator = Orchestrator(
                self._timed_load,
                config.scheduler,
                self.metrics,
                step_timeout_seconds=config.server.step_timeout_seconds,
                on_failure=lambda _error: self.failed.set(),
                on_cached=None if self.kv_events is None else self.kv_events.publish,
            )
            self.http = HttpServer(application(self.orchestrator, self.metrics), config.server)
            undo.callback(self.http.close)
            self.grpc = GrpcServer(self.orchestrator, config.server)
            undo.pop_all()

    async def start(self) -> None:
        """Opens all faces and begins to load."""
        if self.kv_events is not None:
            self.kv_events.start()
        await self.grpc.start()
        await self.http.start()
        await self.orchestrator.start()

    async def wait_until_ready(self) -> float:
        """Waits for the model and returns the seconds since the server was made.

        Raises: what loading raised.
        """
        await self.orchestrator.wait_until_ready()
        seconds = time.monotonic() - self._started_seconds
        model = self.orchestrator.model
        sizing = model.engine.scheduler.sizing
        self.metrics.model_loaded(
            ModelRecord(sizing.page_size, sizing.usable_pages, sizing.slots, self._load_seconds, seconds)
        )
        await self.grpc.refresh_health()
        gc.collect()
        gc.freeze()  # what was loaded stays: the collector need not walk it in the middle of a step
        return seconds

    async def drain(self, timeout_seconds: float) -> bool:
        """Turns readiness off, takes no more requests, lets the others finish. False when the time was too short."""
        deadline = time.monotonic() + timeout_seconds
        await self.grpc.close_health()
        is_finished = await self.orchestrator.drain(timeout_seconds)
        left = deadline - time.monotonic()  # slow readers may have it for what is written already
        await self.grpc.stop(max(left, _LAST_WORDS_SECONDS) if is_finished else _LAST_WORDS_SECONDS)
        return is_finished

    async def stop(self) -> bool:
        """Ends what is left, with an error to each stream. False when the engine thread could not be ended."""
        await self.grpc.close_health()
        stopping = asyncio.create_task(self.orchestrator.stop())
        await asyncio.sleep(0)  # the streams have their error now
        await self.grpc.stop(_LAST_WORDS_SECONDS)
        await self.http.stop()
        try:
            await asyncio.wait_for(stopping, _STOP_SECONDS)
        except TimeoutError:
            return False
        finally:
            if self.kv_events is not None:
                await asyncio.to_thread(self.kv_events.stop)
        return True

    def _timed_load(self, report: ReportProgress) -> LoadedModel:
        start = time.monotonic()
        model = self._load(report)
        self._load_seconds = time.monotonic() - start
        return model


class _Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second to hurry."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._heard, number)

    def _heard(self, number: int) -> None:
        event = self.second if self.first.is_set() else self.first
        log.info("signal %s: %s", signal.Signals(number).name, "stopping" if event is self.second else "draining")
        event.set()


async def serve(config: Config, load: Load, announce: Callable[[str], None]) -> int:
    """Serves until a signal or a failure, and returns the exit code.

    Args:
      announce: takes what a person at the terminal should read.
    Raises: ConfigError when a port cannot be had; what loading raised.
    """
    signals = _Signals()
    server = Server(config, load)
    await server.start()
    announce(_listening(config, server))
    failed = asyncio.create_task(server.failed.wait())
    first, second = asyncio.create_task(signals.first.wait()), asyncio.create_task(signals.second.wait())
    ready = asyncio.create_task(server.wait_until_ready())
    is_drained = False
    try:
        await asyncio.wait({ready, first, failed}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            announce(_ready(config, server, ready.result()))
            await asyncio.wait({first, failed}, return_when=asyncio.FIRST_COMPLETED)
        if not failed.done():
            drain = asyncio.create_task(server.drain(config.server.drain_timeout_seconds))
            await asyncio.wait({drain, second, failed}, return_when=asyncio.FIRST_COMPLETED)
            is_drained = drain.done() and drain.result()
    finally:
        ready.cancel()
        await asyncio.gather(
            ready, return_exceptions=True
        )  # what loading had to say was raised, or nobody waits for it
        is_stopped = await server.stop()
    code = 0 if is_drained and not server.failed.is_set() else 1
    log.info("stopped drained=%s exit_code=%d", is_drained, code)
    if not is_stopped:
        _leave(code)
    return code


def run(config: Config, load: Load, announce: Callable[[str], None]) -> int:
    """`serve` in an event loop of its own; uvloop's where it is installed: a third less CPU per streamed token."""
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(serve(config, load, announce))


def _leave(code: int) -> None:
    """Ends the process under a thread that does not listen: waiting for it is what the operator asked not to do."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listening(config: Config, server: Server) -> str:
    grpc, http = _address(config.server.host, server.grpc.port), _address(config.server.host, server.http.port)
    tls = " (TLS)" if config.server.tls_certificate else ""
    return (
        f"jetserve {version('jetserve')}: {config.model.served_name or config.model.name}\n"
        f"  gRPC  {grpc}{tls}  jetserve.v1.Inference, jetstream_proto.Orchestrator, health, reflection\n"
        f"  HTTP  http://{http}  /metrics /healthz /readyz{_kv_events(server.kv_events)}"
    )


def _kv_events(publisher: KvEventPublisher | None) -> str:
    if publisher is None:
        return ""
    replay = "" if publisher.replay_endpoint is None else f", replay {publisher.replay_endpoint}"
    return f"\n  ZMQ   {publisher.endpoint}  KV events{replay}"


def _ready(config: Config, server: Server, seconds: float) -> str:
    address = _address(config.server.host, server.grpc.port)
    if config.server.tls_certificate:
        return f"ready after {seconds:.1f} s"
    command, python = as_typed()
    return (
        f"ready after {seconds:.1f} s; try\n"
        f"  {command} client --server {address} --max-tokens 16 'The capital of France is'\n"
        f'  grpcurl -plaintext -d \'{{"text": "The capital of France is", "params": {{"max_tokens": 16}}}}\' \\\n'
        f"    {address} jetserve.v1.Inference/Generate\n"
        f"  {python} -c 'from jetserve.client import Client, SamplingParams as P; "
        f'print(Client("{address}").generate("The capital of France is", P(max_tokens=16))[0].text)\''
    )


def as_typed() -> tuple[str, str]:
    """What runs jetserve and its Python from here: of an environment that is not activated neither is on the path."""
    command = Path(sys.argv[0])
    if command.name != "jetserve" or shutil.which("jetserve") == str(command.absolute()):
        return "jetserve", "python"
    python = command.with_name("python")
    return str(command), str(python) if python.exists() else sys.executable


def _address(host: str, port: int) -> str:
    """An address a client on this machine can use."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
