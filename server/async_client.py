"""Calls a running server over gRPC from asyncio, as `jetserve.server.client` does otherwise. Imports no jax."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Unpack

import grpc
from google.protobuf.message import Message

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


class AsyncClient:
    """A connection for asyncio; to be made and used in one event loop. As `Client` otherwise."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, root_certificates: bytes | None = None) -> None:
        trust = credentials(address, root_certificates)
        if trust is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, trust, options=CHANNEL_OPTIONS)
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

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion]:
        """As `Client.generate`."""
        collector = Collector()
        stream = self.stream(prompt, params, **options)
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
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncStream:
        """As `Client.stream`."""
        call = request_message(prompt, params, request_id, timeout_seconds, priority, cache_salt, add_special_tokens)
        with failures():
            return AsyncStream(self._generate(call, timeout=call_deadline(timeout_seconds)), call.request_id)

    async def abort(self, request_id: str) -> bool:
        """As `Client.abort`."""
        with failures():
            return (await self._abort(abort_message(request_id), timeout=CONTROL_SECONDS)).found

    async def flush_cache(self) -> int:
        """As `Client.flush_cache`."""
        with failures():
            return (await self._flush(pb.FlushCacheRequest(), timeout=CONTROL_SECONDS)).pages_freed

    async def model_info(self) -> ModelDescription:
        """As `Client.model_info`."""
        with failures():
            answer = await self._model_info(pb.GetModelInfoRequest(), timeout=CONTROL_SECONDS)
        return ModelDescription.read(answer)

    async def status(self) -> ServerStatus:
        """As `Client.status`."""
        with failures():
            answer = await self._status(pb.GetServerStatusRequest(), timeout=CONTROL_SECONDS)
        return ServerStatus.read(answer)

    async def wait_until_ready(self, timeout_seconds: float = 600.0) -> ServerStatus:
        """As `Client.wait_until_ready`."""
        waiting = Waiting(timeout_seconds)
        while True:
            try:
                if waiting.is_over(await self.status()):
                    return waiting.status
            except Unavailable as error:
                waiting.try_again_after(error)
            await asyncio.sleep(POLL_SECONDS)

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
            raise failure_of(error) from None
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
