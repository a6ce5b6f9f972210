"""What every rpc shares: raw bytes in and out, one place that turns failures into status codes. Imports no jax.

Handlers take the request's bytes, so that a message that cannot be read is answered by our table and not by gRPC's own
words, and write serialised messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, NoReturn

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from jetserve.errors import DeadlineExceeded, RequestError
from jetserve.server.status_codes import MessageTooLarge, code_of, retry_after

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
Unary = Callable[[bytes, Context], Awaitable[bytes]]
Stream = Callable[[bytes, Context], Awaitable[None]]

# The engine gives a request up this much before the call's own deadline, so that the client gets our words.
_DEADLINE_MARGIN_SECONDS = 0.02


class Service(NamedTuple):
    """The rpcs of one service, by name."""

    descriptor: ServiceDescriptor
    unary: Mapping[str, Unary]
    streams: Mapping[str, Stream]


def register(server: grpc.aio.Server, service: Service, max_message_bytes: int) -> None:
    """Adds a service to a server that has not started.

    Args:
      max_message_bytes: larger requests are refused by the setting's name.
    """
    name = service.descriptor.full_name
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        method: grpc.unary_unary_rpc_method_handler(_guard_unary(f"{name}/{method}", call, max_message_bytes))
        for method, call in service.unary.items()
    }
    handlers |= {
        method: grpc.unary_stream_rpc_method_handler(_guard(f"{name}/{method}", call, max_message_bytes))
        for method, call in service.streams.items()
    }
    assert set(handlers) == {method.name for method in service.descriptor.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def time_left(context: Context, timeout_seconds: float | None) -> float | None:
    """Seconds a request may take, by its own wish and the call's deadline; None for ever.

    Raises: DeadlineExceeded when the call's deadline is over.
    """
    remaining = context.time_remaining()
    if remaining is None:
        return timeout_seconds
    if remaining <= 0:
        raise DeadlineExceeded("the call's deadline passed before the request was queued")
    remaining = max(remaining - _DEADLINE_MARGIN_SECONDS, remaining / 2)
    if timeout_seconds is None or remaining < timeout_seconds < math.inf:
        return remaining
    return timeout_seconds  # where it is no time at all, the request says so


def _guard_unary(name: str, call: Unary, max_message_bytes: int) -> Unary:
    async def handler(data: bytes, context: Context) -> bytes:
        answer = b""

        async def keep(data: bytes, context: Context) -> None:
            nonlocal answer
            answer = await call(data, context)

        await _guard(name, keep, max_message_bytes)(data, context)
        return answer

    return handler


def _guard(name: str, call: Stream, max_message_bytes: int) -> Stream:
    async def handler(data: bytes, context: Context) -> None:
        try:
            if len(data) > max_message_bytes:
                raise MessageTooLarge(
                    f"the message has {len(data)} bytes, at most {max_message_bytes} are taken; "
                    f"shorten it or raise server.max_message_bytes"
                )
            await call(data, context)
        except RequestError as error:
            log.debug("refused rpc=%s error=%s", name, error)
            await context.abort(code_of(error), str(error), retry_after(error))
        except asyncio.CancelledError:
            log.info("client left rpc=%s peer=%s", name, context.peer())
            raise
        except Exception:  # the boundary to the client: a bug is logged here and never shown to it
            await _fail(name, context)

    return handler


async def _fail(name: str, context: Context) -> NoReturn:
    if context.cancelled() or context.done():
        raise asyncio.CancelledError  # writing to a client that has gone fails in many ways
    log.exception("failed rpc=%s peer=%s", name, context.peer())
    await context.abort(grpc.StatusCode.INTERNAL, f"{name} failed inside the server; its log has the details")
