"""`grpc.health.v1` as the server's one answer for all its services. Imports no jax.

grpc's own servicer ends a watch never, so that one open watch holds a server that stops until its grace is over, and
forgets the other watches of a service when one of them ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

_Context = grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse]


class Health(health_pb2_grpc.HealthServicer):
    """NOT_SERVING for every service at first.

    Args:
      services: whose health is asked; "" is the server's.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._is_ready = False
        self._is_over = False
        self._changed = asyncio.Event()

    def set(self, *, is_ready: bool) -> None:
        """Tells every watch that has not heard it."""
        self._is_ready = is_ready
        self._wake()

    def end(self) -> None:
        """Ends the watches, each after the last status."""
        self._is_over = True
        self._wake()

    async def Check(self, request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:  # noqa: N802
        """The status now; NOT_FOUND for another service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return pb.HealthCheckResponse(status=self._status_of(request.service))

    async def Watch(self, request: pb.HealthCheckRequest, context: _Context) -> None:  # noqa: N802
        """The status now and whenever it changes; SERVICE_UNKNOWN for another service."""
        said = None
        while True:
            changed = self._changed
            status = self._status_of(request.service)
            if status != said:
                await context.write(pb.HealthCheckResponse(status=status))
                said = status
            elif self._is_over:
                return
            else:
                await changed.wait()

    def _status_of(self, service: str) -> int:
        if service not in self._services:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return pb.HealthCheckResponse.SERVING if self._is_ready else pb.HealthCheckResponse.NOT_SERVING

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
