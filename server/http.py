"""The HTTP port: metrics, the two probes, and what forgets the prefix cache. Imports no jax."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jetserve.config import ServerSettings
from jetserve.errors import ConfigError, Unavailable
from jetserve.metrics import CONTENT_TYPE, Metrics
from jetserve.orchestrator import Orchestrator, State
from jetserve.server.status_codes import UNAVAILABLE_RETRY_SECONDS

_BACKLOG = 1024


def application(orchestrator: Orchestrator, metrics: Metrics) -> Starlette:
    """`/metrics`, `/healthz` (is the process worth keeping) and `/readyz` (would a request be answered now).

    `POST /flush_cache` forgets all cached prefixes: SGLang's name; vLLM's is `/reset_prefix_cache`.
    """
    retry = {"Retry-After": str(math.ceil(UNAVAILABLE_RETRY_SECONDS))}

    async def show_metrics(_request: Request) -> Response:
        return Response(metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(_request: Request) -> Response:
        if orchestrator.is_live:
            return PlainTextResponse("live\n")
        return PlainTextResponse(f"not live: {orchestrator.state}\n", status_code=503)

    async def readyz(_request: Request) -> Response:
        if orchestrator.is_ready:
            return PlainTextResponse("ready\n")
        state = orchestrator.state
        text = {State.LOADING: f"loading: {orchestrator.progress}", State.READY: "a device step takes too long"}
        return PlainTextResponse(f"not ready: {text.get(state, state)}\n", status_code=503, headers=retry)

    async def flush_cache(_request: Request) -> Response:
        try:
            pages = await orchestrator.flush_cache()
        except Unavailable as error:
            return JSONResponse({"success": False, "error": str(error)}, status_code=503, headers=retry)
        return JSONResponse({"success": True, "pages_freed": pages})

    return Starlette(
        routes=[
            Route("/metrics", show_metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/flush_cache", flush_cache, methods=["POST"]),
            Route("/reset_prefix_cache", flush_cache, methods=["POST"]),
        ]
    )


class HttpServer:
    """Serves the application from a socket it binds itself, so that a taken port is known at once."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        """Raises: ConfigError when the port is taken."""
        self._socket = _listen(settings.host, settings.http_port)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Uvicorn(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", backlog=_BACKLOG)
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self.close()

    def close(self) -> None:
        """Gives the port back."""
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `serving`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen for HTTP on {host}:{port}: {error.strerror}; "
            f"set server.http_port (--http-port) to another or 0"
        ) from None
    return listener
