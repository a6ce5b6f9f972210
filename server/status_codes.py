"""The written table of how a failure is worded in gRPC, both ways. Nothing here names a Python trace. Imports no jax.

InvalidRequest    INVALID_ARGUMENT
MessageTooLarge   RESOURCE_EXHAUSTED  an InvalidRequest; without retry-after-ms, as trying again cannot help
Overloaded        RESOURCE_EXHAUSTED  with retry-after-ms in the trailing metadata
Unavailable       UNAVAILABLE         with retry-after-ms while loading
DeadlineExceeded  DEADLINE_EXCEEDED
RequestAborted    CANCELLED
EngineFailed      INTERNAL            the request is lost and may have been answered in part
anything else     INTERNAL            logged with its trace; the client learns the request id
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from jetserve import errors

RETRY_AFTER = "retry-after-ms"
UNAVAILABLE_RETRY_SECONDS = 2.0


class MessageTooLarge(errors.InvalidRequest):
    """A message is larger than server.max_message_bytes."""


_CODES: dict[type[errors.RequestError], grpc.StatusCode] = {
    MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestAborted: grpc.StatusCode.CANCELLED,
    errors.EngineFailed: grpc.StatusCode.INTERNAL,
}
_ERRORS: dict[grpc.StatusCode, type[errors.RequestError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: MessageTooLarge,
    grpc.StatusCode.UNIMPLEMENTED: errors.InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.RequestAborted,
}


def code_of(error: errors.RequestError) -> grpc.StatusCode:
    """The status code of a failure, its nearest class deciding."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.INTERNAL)


def retry_after(error: errors.RequestError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that says when to try again, where that helps."""
    if isinstance(error, errors.Overloaded):
        return ((RETRY_AFTER, str(max(1, round(error.retry_after_seconds * 1000)))),)
    if isinstance(error, errors.Unavailable):
        return ((RETRY_AFTER, str(round(UNAVAILABLE_RETRY_SECONDS * 1000))),)
    return ()


def error_of(
    code: grpc.StatusCode, details: str | None, metadata: Iterable[tuple[str, str | bytes]] | None
) -> errors.RequestError:
    """The failure a client sees, made from what came over the wire."""
    message = details or code.name
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        waits = [value for key, value in metadata or () if key == RETRY_AFTER]
        if waits:
            return errors.Overloaded(message, float(waits[0]) / 1000)
        if "larger than max" in message:  # gRPC's own words, far above the server's setting
            message = f"{message}; the limit is the server's server.max_message_bytes"
    return _ERRORS.get(code, errors.EngineFailed)(message)
