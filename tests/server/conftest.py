"""A whole server without a device: FakeExecutor, a vocabulary of numbers, real ports."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import pytest

from jetserve import config
from jetserve.engine.engine import LoadedModel
from jetserve.engine.fake import FakeExecutor
from jetserve.server.async_client import AsyncClient
from jetserve.server.serving import Server
from tests.server.numbers import MAX_LENGTH, SLOTS, VOCAB_SIZE, loaded_model, sizing


class Answer(NamedTuple):
    """Of an HTTP request."""

    status: int
    text: str
    headers: dict[str, str]


@dataclass
class Running:
    """A server that listens, and ways to it."""

    server: Server
    client: AsyncClient
    channel: grpc.aio.Channel
    address: str

    @property
    def executor(self) -> FakeExecutor:
        return self.server.orchestrator.model.engine._executor

    async def get(self, path: str) -> Answer:
        return await self._ask("GET", path)

    async def post(self, path: str) -> Answer:
        return await self._ask("POST", path)

    async def _ask(self, method: str, path: str) -> Answer:
        url = f"http://127.0.0.1:{self.server.http.port}{path}"
        return await asyncio.to_thread(_ask, urllib.request.Request(url, method=method))

    async def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics."""
        for line in (await self.get("/metrics")).text.splitlines():
            if line.startswith(name + "{") and all(f'{key}="{text}"' in line for key, text in labels.items()):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no sample {name} {labels}")

    async def until_idle(self) -> None:
        """Waits until the engine says that no slot is in use, and no page but for the prefix cache."""
        while (status := self.server.orchestrator.status()).slots_used or status.pages_used or status.waiting_requests:
            await asyncio.sleep(0.002)


def _ask(request: urllib.request.Request) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return Answer(reply.status, reply.read().decode(), dict(reply.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(), dict(error.headers))


@pytest.fixture
def serve():
    """`async with serve(step_seconds=.., settings=[..]) as running`. Loading waits for `gate`."""

    @contextlib.asynccontextmanager
    async def running(
        *,
        step_seconds: float = 0.0,
        settings: Sequence[str] = (),
        slots: int = SLOTS,
        max_length: int = MAX_LENGTH,
        prefix_cache: bool = True,
        fail_at: int | None = None,
        gate: threading.Event | None = None,
    ) -> AsyncIterator[Running]:
        def load(report: Callable[[str, float], None]) -> LoadedModel:
            report("counting to ten", 0.5)
            if gate is not None:
                assert gate.wait(10)
            shapes = dataclasses.replace(sizing(slots, max_length), prefix_cache=prefix_cache)
            return loaded_model(
                lambda s: FakeExecutor(s, VOCAB_SIZE, step_seconds=step_seconds, fail_at=fail_at),
                shapes,
                tree.scheduler,
            )

        tree = config.load(None, ["server.grpc_port=0", "server.http_port=0", "model.name=num-bers", *settings])
        server = Server(tree, load)
        await server.start()
        address = f"127.0.0.1:{server.grpc.port}"
        async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
            try:
                if gate is None:
                    await server.wait_until_ready()
                yield Running(server, client, channel, address)
            finally:
                if gate is not None:
                    gate.set()
                await server.stop()

    return running


@pytest.fixture
def run() -> Callable[[Coroutine], object]:
    """Runs a coroutine in a loop of its own, within a time that only a hang exceeds."""
    return lambda coroutine: asyncio.run(asyncio.wait_for(coroutine, 60))
