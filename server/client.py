"""Calls a running server over gRPC, from plain Python or from asyncio. Imports no jax.

    from jetserve.client import Client, SamplingParams

    with Client("127.0.0.1:9000") as client:
        client.wait_until_ready(timeout_seconds=60)
        for delta in client.stream("The capital of France is", SamplingParams(max_tokens=16)):
            print(delta.text, end="")

Everything raises what is in `jetserve.errors`, as the server would have in the same process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import grpc
from google.protobuf.message import Message

from jetserve.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    RequestError,
    Unavailable,
)
from jetserve.request import Delta, SamplingParams
from jetserve.server.messages import decompose, write_params, write_token_ids
from jetserve.server.protos import inference_pb2 as pb
from jetserve.server.replies import Collector, Completion, ModelDescription, ServerStatus
from jetserve.server.status_codes import error_of

DEFAULT_ADDRESS = "127.0.0.1:9000"
_SERVICE = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 1.0  # the server's own deadline comes first, with more to say
_CONTROL_SECONDS = 10.0  # of calls that only ask
_LONGEST_SECONDS = 1e9  # a longer deadline overflows in gRPC and is over at once; the server keeps it alone
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),  # the server has the limit, and names its setting
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


class Client:
    """A connection for plain Python; may be shared by threads.

    Args:
      address: host:port.
      root_certificates: PEM of who signed the server's certificate; with it the connection is TLS.
    Raises: ConfigError when these cannot be an address and certificates; nothing is connected yet.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, root_certificates: bytes | None = None) -> None:
        credentials = _credentials(address, root_certificates)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        self._generate = self._channel.unary_stream(
            f"{_SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        self._abort = self._channel.unary_unary(
            f"{_SERVICE}/Abort", pb.AbortRequest.SerializeToString, pb.AbortResponse.FromString
        )
        self._model_info = self._channel.unary_unary(
            f"{_SERVICE}/GetModelInfo",
            pb.GetModelInfoRequest.SerializeToString,
            pb.GetModelInfoResponse.FromString,
        )
        self._status = self._channel.unary_unary(
            f"{_SERVICE}/GetServerStatus",
            pb.GetServerStatusRequest.SerializeToString,
            pb.GetServerStatusResponse.FromString,
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> list[Completion]:
        """Waits for all samples of a prompt and returns them by index. Arguments are those of `stream`."""
        collector = Collector()
        stream = self.stream(
            prompt,
            params,
            request_id=request_id,
            timeout_seconds=timeout_seconds,
            priority=priority,
            add_special_tokens=add_special_tokens,
        )
        for delta in stream:
            collector.add(delta)
        return collector.completions(stream.request_id, stream.prompt_token_ids)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> Stream:
        """Sends a prompt and returns what comes back as it comes.

        Args:
          prompt: text, or token ids that are taken as they are.
          request_id: one is drawn when None.
          timeout_seconds: from now to the last token.
          priority: lower runs first.
          add_special_tokens: of text: put the model's BOS in front.
        Raises: InvalidRequest; the stream raises the other errors.
        """
        call = _call(prompt, params, request_id, timeout_seconds, priority, add_special_tokens)
        with _failures():
            return Stream(self._generate(call, timeout=_deadline(timeout_seconds)), call.request_id)

    def abort(self, request_id: str) -> bool:
        """Ends a request. False when the server has none of that id (any more)."""
        with _failures():
            return self._abort(_abort_call(request_id), timeout=_CONTROL_SECONDS).found

    def model_info(self) -> ModelDescription:
        """Raises: Unavailable while there is no model."""
        with _failures():
            answer = self._model_info(pb.GetModelInfoRequest(), timeout=_CONTROL_SECONDS)
        return ModelDescription.read(answer)

    def status(self) -> ServerStatus:
        with _failures():
            answer = self._status(pb.GetServerStatusRequest(), timeout=_CONTROL_SECONDS)
        return ServerStatus.read(answer)

    def wait_until_ready(self, timeout_seconds: float = 600.0) -> ServerStatus:
        """Waits until the server would answer a request.

        Raises: DeadlineExceeded; EngineFailed when it never will.
        """
        waiting = _Waiting(timeout_seconds)
        while True:
            try:
                if waiting.is_over(self.status()):
                    return waiting.status
            except Unavailable as error:
                waiting.try_again_after(error)
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Closes the connection; streams that are open end."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Call(Protocol):
    """What grpc gives for a stream: an iterator that is a call."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> bool: ...


class Stream(Iterator[Delta]):
    """The deltas of one request. Closing it before its end aborts the request.

    Attributes:
      prompt_token_ids: known from the first delta on; empty before.
    """

    def __init__(self, call: _Call, request_id: str) -> None:
        self.request_id = request_id
        self.prompt_token_ids: tuple[int, ...] = ()
        self._call = call

    def __next__(self) -> Delta:
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            raise _error(error) from None
        if message.prompt_token_ids:
            self.prompt_token_ids = tuple(message.prompt_token_ids)
        return decompose(message)

    def close(self) -> None:
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """A connection for asyncio; to be made and used in one event loop. As `Client` otherwise."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, root_certificates: bytes | None = None) -> None:
        credentials = _credentials(address, root_certificates)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        self._generate = self._channel.unary_stream(
            f"{_SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        self._abort = self._channel.unary_unary(
            f"{_SERVICE}/Abort", pb.AbortRequest.SerializeToString, pb.AbortResponse.FromString
        )
        self._model_info = self._channel.unary_unary(
            f"{_SERVICE}/GetModelInfo",
            pb.GetModelInfoRequest.SerializeToString,
            pb.GetModelInfoResponse.FromString,
        )
        self._status = self._channel.unary_unary(
            f"{_SERVICE}/GetServerStatus",
            pb.GetServerStatusRequest.SerializeToString,
            pb.GetServerStatusResponse.FromString,
        )

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> list[Completion]:
        """As `Client.generate`."""
        collector = Collector()
        stream = self.stream(
            prompt,
            params,
            request_id=request_id,
            timeout_seconds=timeout_seconds,
            priority=priority,
            add_special_tokens=add_special_tokens,
        )
        async with stream:
            async for delta in stream:
                collector.add(delta)
        return collector.completions(stream.request_id, stream.prompt_token_ids)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> AsyncStream:
        """As `Client.stream`."""
        call = _call(prompt, params, request_id, timeout_seconds, priority, add_special_tokens)
        with _failures():
            return AsyncStream(self._generate(call, timeout=_deadline(timeout_seconds)), call.request_id)

    async def abort(self, request_id: str) -> bool:
        """As `Client.abort`."""
        with _failures():
            return (await self._abort(_abort_call(request_id), timeout=_CONTROL_SECONDS)).found

    async def model_info(self) -> ModelDescription:
        """As `Client.model_info`."""
        with _failures():
            answer = await self._model_info(pb.GetModelInfoRequest(), timeout=_CONTROL_SECONDS)
        return ModelDescription.read(answer)

    async def status(self) -> ServerStatus:
        """As `Client.status`."""
        with _failures():
            answer = await self._status(pb.GetServerStatusRequest(), timeout=_CONTROL_SECONDS)
        return ServerStatus.read(answer)

    async def wait_until_ready(self, timeout_seconds: float = 600.0) -> ServerStatus:
        """As `Client.wait_until_ready`."""
        waiting = _Waiting(timeout_seconds)
        while True:
            try:
                if waiting.is_over(await self.status()):
                    return waiting.status
            except Unavailable as error:
                waiting.try_again_after(error)
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Closes the connection; streams that are open end."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream(AsyncIterator[Delta]):
    """As `Stream`."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Message, pb.GenerateResponse], request_id: str) -> None:
        self.request_id = request_id
        self.prompt_token_ids: tuple[int, ...] = ()
        self._call = call
        self._messages = aiter(call)

    async def __anext__(self) -> Delta:
        try:
            message = await anext(self._messages)
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        if message.prompt_token_ids:
            self.prompt_token_ids = tuple(message.prompt_token_ids)
        return decompose(message)

    def close(self) -> None:
        self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Waiting:
    """What the clients' waiting for readiness has in common."""

    status: ServerStatus

    def __init__(self, timeout_seconds: float) -> None:
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


def _credentials(address: str, root_certificates: bytes | None) -> grpc.ChannelCredentials | None:
    """What makes the connection TLS; None for one that is not."""
    if not isinstance(address, str) or not address:
        raise ConfigError(f"the server's address must be host:port, got {address!r}")
    if root_certificates is None:
        return None
    if b"-----BEGIN CERTIFICATE-----" not in root_certificates:
        raise ConfigError("the root certificates hold no PEM certificate (-----BEGIN CERTIFICATE-----)")
    return grpc.ssl_channel_credentials(root_certificates)


def _call(
    prompt: str | Sequence[int],
    params: SamplingParams | None,
    request_id: str | None,
    timeout_seconds: float | None,
    priority: int,
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
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request does not fit the wire: {error}") from None
    if not isinstance(prompt, str):
        call.token_ids.CopyFrom(write_token_ids(prompt))
    if not add_special_tokens:
        call.add_special_tokens = False
    return call


def _abort_call(request_id: str) -> pb.AbortRequest:
    try:
        return pb.AbortRequest(request_id=request_id)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"request_id={request_id!r} does not fit the wire: {error}") from None


def _deadline(timeout_seconds: float | None) -> float | None:
    """Of the call; the server says what is wrong with a time that is none."""
    if timeout_seconds is None or not math.isfinite(timeout_seconds) or timeout_seconds > _LONGEST_SECONDS:
        return None
    return max(timeout_seconds, 0.0) + _GRACE_SECONDS


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raises what `jetserve.errors` has for what grpc raises. Messages are made outside: a ValueError is grpc's."""
    try:
        yield
    except grpc.RpcError as error:
        raise _error(error) from None
    except (ValueError, grpc.aio.UsageError):
        raise InvalidRequest("this client is closed; make a new one") from None


def _error(error: grpc.RpcError) -> RequestError:
    if isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return error_of(error.code(), error.details(), error.trailing_metadata())
    return EngineFailed(f"the call failed: {error}")
