"""Calls a running server over gRPC from plain Python; `jetserve.server.async_client` does from asyncio. Imports no jax.

    from jetserve.client import Client, SamplingParams

    with Client("127.0.0.1:9000") as client:
        client.wait_until_ready(timeout_seconds=60)
        for delta in client.stream("The capital of France is", SamplingParams(max_tokens=16)):
            print(delta.text, end="")

Everything raises what is in `jetserve.errors`, as the server would have in the same process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Unpack

import grpc

from jetserve.errors import Unavailable
from jetserve.request import Delta, SamplingParams
from jetserve.server.connection import (
    CHANNEL_OPTIONS,
    CONTROL_SECONDS,
    DEFAULT_ADDRESS,
    POLL_SECONDS,
    SERVICE,
    CallOptions,
    Waiting,
    abort_message,
    call_deadline,
    credentials,
    failure_of,
    failures,
    request_message,
)
from jetserve.server.messages import decompose
from jetserve.server.protos import inference_pb2 as pb
from jetserve.server.replies import Collector, Completion, ModelDescription, ServerStatus


class Client:
    """A connection for plain Python; may be shared by threads.

    Args:
      address: host:port.
      root_certificates: PEM of who signed the server's certificate; with it the connection is TLS.
    Raises: ConfigError when these cannot be an address and certificates; nothing is connected yet.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, root_certificates: bytes | None = None) -> None:
        trust = credentials(address, root_certificates)
        if trust is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, trust, options=CHANNEL_OPTIONS)
        self._generate = self._channel.unary_stream(
            f"{SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        self._abort = self._channel.unary_unary(
            f"{SERVICE}/Abort", pb.AbortRequest.SerializeToString, pb.AbortResponse.FromString
        )
        self._flush = self._channel.unary_unary(
            f"{SERVICE}/FlushCache", pb.FlushCacheRequest.SerializeToString, pb.FlushCacheResponse.FromString
        )
        self._model_info = self._channel.unary_unary(
            f"{SERVICE}/GetModelInfo",
            pb.GetModelInfoRequest.SerializeToString,
            pb.GetModelInfoResponse.FromString,
        )
        self._status = self._channel.unary_unary(
            f"{SERVICE}/GetServerStatus",
            pb.GetServerStatusRequest.SerializeToString,
            pb.GetServerStatusResponse.FromString,
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion]:
        """Waits for all samples of a prompt and returns them by index. Arguments are those of `stream`."""
        collector = Collector()
        stream = self.stream(prompt, params, **options)
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
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> Stream:
        """Sends a prompt and returns what comes back as it comes.

        Args:
          prompt: text, or token ids that are taken as they are.
          request_id: one is drawn when None.
          timeout_seconds: from now to the last token.
          priority: lower runs first.
          cache_salt: cached prefixes are shared only among requests with an equal one.
          add_special_tokens: of text: put the model's BOS in front.
        Raises: InvalidRequest; the stream raises the other errors.
        """
        call = request_message(prompt, params, request_id, timeout_seconds, priority, cache_salt, add_special_tokens)
        with failures():
            return Stream(self._generate(call, timeout=call_deadline(timeout_seconds)), call.request_id)

    def abort(self, request_id: str) -> bool:
        """Ends a request. False when the server has none of that id (any more)."""
        with failures():
            return self._abort(abort_message(request_id), timeout=CONTROL_SECONDS).found

    def flush_cache(self) -> int:
        """Makes the server forget all cached prefixes; requests may run meanwhile.

        Returns: KV pages that this freed at once.
        Raises: Unavailable while nothing is served.
        """
        with failures():
            return self._flush(pb.FlushCacheRequest(), timeout=CONTROL_SECONDS).pages_freed

    def model_info(self) -> ModelDescription:
        """Raises: Unavailable while there is no model."""
        with failures():
            answer = self._model_info(pb.GetModelInfoRequest(), timeout=CONTROL_SECONDS)
        return ModelDescription.read(answer)

    def status(self) -> ServerStatus:
        with failures():
            answer = self._status(pb.GetServerStatusRequest(), timeout=CONTROL_SECONDS)
        return ServerStatus.read(answer)

    def wait_until_ready(self, timeout_seconds: float = 600.0) -> ServerStatus:
        """Waits until the server would answer a request.

        Raises: DeadlineExceeded; EngineFailed when it never will.
        """
        waiting = Waiting(timeout_seconds)
        while True:
            try:
                if waiting.is_over(self.status()):
                    return waiting.status
            except Unavailable as error:
                waiting.try_again_after(error)
            time.sleep(POLL_SECONDS)

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
            raise failure_of(error) from None
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
