"""The gRPC server: both services, health and reflection on one port. Imports no jax."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jetserve.config import ServerSettings
from jetserve.errors import ConfigError
from jetserve.orchestrator import Orchestrator
from jetserve.server import inference, jetstream
from jetserve.server.calls import register
from jetserve.server.health import Health

log = logging.getLogger(__name__)

_SERVICES = (inference.DESCRIPTOR.full_name, jetstream.DESCRIPTOR.full_name)
_HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_ANOTHER_PORT = "set server.grpc_port (--grpc-port) to another or 0"
_WATCH_SECONDS = 0.05  # how late health may follow the orchestrator
# Above server.max_message_bytes we answer ourselves, naming the setting; above this gRPC refuses unread.
_MIN_HARD_LIMIT_BYTES = 256 << 20


class GrpcServer:
    """Serves an orchestrator over gRPC. Health follows the orchestrator's readiness until `close_health`."""

    def __init__(self, orchestrator: Orchestrator, settings: ServerSettings) -> None:
        """Binds the port.

        Raises: ConfigError when the port is taken or the TLS files cannot be used.
        """
        self._orchestrator = orchestrator
        self._server = grpc.aio.server(options=_options(settings.max_message_bytes))
        self._health = Health(("", *_SERVICES))
        self._watcher: asyncio.Task[None] | None = None
        self._is_closing = False
        self._said_ready = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for service in (inference.inference_service(orchestrator), jetstream.jetstream_service(orchestrator)):
            register(self._server, service, settings.max_message_bytes)
        reflection.enable_server_reflection((*_SERVICES, _HEALTH_SERVICE, reflection.SERVICE_NAME), self._server)
        self.port = _bind(self._server, settings)

    async def start(self) -> None:
        await self._server.start()
        self._watcher = asyncio.create_task(self._watch(), name="grpc-health")

    async def close_health(self) -> None:
        """Says NOT_SERVING from now on, whatever the orchestrator says."""
        self._is_closing = True
        self._health.set(is_ready=False)

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more calls and waits so long for those that run; what is left then is cancelled."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._health.end()
        await self._server.stop(grace_seconds)

    async def refresh_health(self) -> None:
        """Says what the orchestrator is by now. Done by itself every `_WATCH_SECONDS`."""
        is_ready = self._orchestrator.is_ready
        if is_ready is not self._said_ready and not self._is_closing:
            self._said_ready = is_ready
            log.info("health serving=%s state=%s", is_ready, self._orchestrator.state)
            self._health.set(is_ready=is_ready)

    async def _watch(self) -> None:
        while not self._is_closing:
            await self.refresh_health()
            await asyncio.sleep(_WATCH_SECONDS)


def _options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    hard_limit = max(4 * max_message_bytes, _MIN_HARD_LIMIT_BYTES)
    return [
        ("grpc.max_receive_message_length", hard_limit),
        ("grpc.max_send_message_length", hard_limit),
        ("grpc.so_reuseport", 0),  # a taken port is an error, not a port shared with a stranger
        ("grpc.optimization_target", "throughput"),
        # A client that vanished without a word is noticed and its slot freed.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may ping as often as every 5 s, also while a request waits in the queue.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    address = f"{_bracketed(settings.host)}:{settings.grpc_port}"
    _require_free(settings.host, settings.grpc_port)
    try:
        if settings.tls_certificate is None or settings.tls_key is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials(settings.tls_certificate, settings.tls_key))
    except RuntimeError:
        raise ConfigError(
            f"cannot listen for gRPC on {address}: the port is taken, or not ours to use; {_ANOTHER_PORT}"
        ) from None


def _require_free(host: str, port: int) -> None:
    """Tries the port first: where it is taken, gRPC writes lines of its own to stderr and does not say why."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise ConfigError(
            f"cannot listen for gRPC on {_bracketed(host)}:{port}: {error.strerror}; {_ANOTHER_PORT}"
        ) from None


def _credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    try:
        credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
        # gRPC would find out as it binds, and say no more than that it failed. No password: it would be asked for.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        return credentials
    except ssl.SSLError as error:
        raise ConfigError(
            f"server.tls_certificate={certificate} and server.tls_key={key} are no PEM certificate and the key of it, "
            f"without a password: {error.reason or error}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename}: {error.strerror}; see server.tls_certificate and server.tls_key"
        ) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
