"""What both clients share: how they connect, the messages of calls, and what failures become. Imports no jax."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TypedDict

import grpc

from jetserve.errors import ConfigError, DeadlineExceeded, EngineFailed, InvalidRequest, RequestError
from jetserve.request import SamplingParams
from jetserve.server.messages import write_params, write_token_ids
from jetserve.server.protos import inference_pb2 as pb
from jetserve.server.replies import ServerStatus
from jetserve.server.status_codes import error_of

DEFAULT_ADDRESS = "127.0.0.1:9000"
SERVICE = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}"
POLL_SECONDS = 0.1
CONTROL_SECONDS = 10.0  # of calls that only ask
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),  # the server has the limit, and names its setting
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
_GRACE_SECONDS = 1.0  # the server's own deadline comes first, with more to say
_LONGEST_SECONDS = 1e9  # a longer deadline overflows in gRPC and is over at once; the server keeps it alone


class CallOptions(TypedDict, total=False):
    """Of one request, beside its prompt and sampling parameters; as `Client.stream` has them."""

    request_id: str | None
    timeout_seconds: float | None
    priority: int
    cache_salt: str | None
    add_special_tokens: bool


class Waiting:
    """Waits for readiness, by answers that others bring."""

    status: ServerStatus

    def __init__(self, timeout_seconds: float) -> None:
        if not timeout_seconds >= 0:
            raise ConfigError(f"waiting for the server for {timeout_seconds} s cannot be; give 0 seconds or more")
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds

    def is_over(self, status: ServerStatus) -> bool:
        self.status = status
        if status.state in ("failed", "stopped"):
            raise EngineFailed(f"the server has {status.state} and will not become ready")
        if not status.ready:
            self.try_again_after(f"it is {status.state} ({status.progress})")
        return status.ready

    def try_again_after(self, reason: object) -> None:
        if time.monotonic() > self._deadline:
            raise DeadlineExceeded(f"the server was not ready within {self._timeout_seconds} s: {reason}")


def credentials(address: str, root_certificates: bytes | None) -> grpc.ChannelCredentials | None:
    """What makes the connection TLS; None for one that is not."""
    if not isinstance(address, str) or not address:
        raise ConfigError(f"the server's address must be host:port, got {address!r}")
    if root_certificates is None:
        return None
    if b"-----BEGIN CERTIFICATE-----" not in root_certificates:
        raise ConfigError("the root certificates hold no PEM certificate (-----BEGIN CERTIFICATE-----)")
    return grpc.ssl_channel_credentials(root_certificates)


def request_message(
    prompt: str | Sequence[int],
    params: SamplingParams | None,
    request_id: str | None,
    timeout_seconds: float | None,
    priority: int,
    cache_salt: str | None,
    add_special_tokens: bool,
) -> pb.GenerateRequest:
    """The request as a message. It always has an id, so that it can be aborted before its first token."""
    call = pb.GenerateRequest(params=write_params(params or SamplingParams()))
    try:
        call.request_id = request_id or f"client-{secrets.token_hex(12)}"
        call.priority = priority
        if isinstance(prompt, str):
            call.text = prompt
        if timeout_seconds is not None:
            call.timeout_seconds = timeout_seconds
        if cache_salt is not None:
            call.cache_salt = cache_salt
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request does not fit the wire: {error}") from None
    if not isinstance(prompt, str):
        call.token_ids.CopyFrom(write_token_ids(prompt))
    if not add_special_tokens:
        call.add_special_tokens = False
    return call


def abort_message(request_id: str) -> pb.AbortRequest:
    try:
        return pb.AbortRequest(request_id=request_id)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"request_id={request_id!r} does not fit the wire: {error}") from None


def call_deadline(timeout_seconds: float | None) -> float | None:
    """Of the call; the server says what is wrong with a time that is none."""
    if timeout_seconds is None or not math.isfinite(timeout_seconds) or timeout_seconds > _LONGEST_SECONDS:
        return None
    return max(timeout_seconds, 0.0) + _GRACE_SECONDS


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Raises what `jetserve.errors` has for what grpc raises. Messages are made outside: a ValueError is grpc's."""
    try:
        yield
    except grpc.RpcError as error:
        raise failure_of(error) from None
    except (ValueError, grpc.aio.UsageError):
        raise InvalidRequest("this client is closed; make a new one") from None


def failure_of(error: grpc.RpcError) -> RequestError:
    if isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return error_of(error.code(), error.details(), error.trailing_metadata())
    return EngineFailed(f"the call failed: {error}")
