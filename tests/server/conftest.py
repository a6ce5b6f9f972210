"""A whole server without a device: FakeExecutor, a vocabulary of numbers, real ports."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from jetserve import config
from jetserve.engine.engine import Engine, LoadedModel, ModelInfo
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.request import ModelLimits
from jetserve.server.client import AsyncClient
from jetserve.server.serving import Server
from jetserve.tokenizer.pieces import Pieces

VOCAB_SIZE = 1000
BOS, EOS = 998, 999
SLOTS = 4
MAX_LENGTH = 256


@dataclass
class NumberTokenizer:
    """The text of id 7 is " 7"; "5 6" is 5, 6, and a word that is no number is its length."""

    pieces: Pieces = field(
        default_factory=lambda: Pieces([f" {i}".encode() for i in range(VOCAB_SIZE)], special=frozenset({BOS, EOS}))
    )
    vocab_size: int = VOCAB_SIZE
    bos_token_id: int | None = BOS
    eos_token_ids: tuple[int, ...] = (EOS,)
    chat_template: str | None = "{{ messages }}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [int(word) if word.isdecimal() else len(word) for word in text.split()]
        return [BOS, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in token_ids if not (skip_special_tokens and token in (BOS, EOS)))

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()


def sizing(slots: int = SLOTS, max_length: int = MAX_LENGTH) -> Sizing:
    page_size = 16
    return Sizing(
        slots=slots,
        max_length=max_length,
        page_size=page_size,
        pages=slots * (max_length // page_size) + 1,
        prefill_sizes=(32, 512),
        prefill_rows=8,
        prefill_tokens=512,
        generate_rows=(slots,),
        generate_steps=(1,),
    )


def loaded_model(executor_of: Callable[[Sizing], FakeExecutor], shapes: Sizing) -> LoadedModel:
    limits = ModelLimits(VOCAB_SIZE, shapes.max_length, (EOS,), shapes.max_length - 1)
    info = ModelInfo("llama", 12345, "float32", VOCAB_SIZE, shapes.max_length, "fake x1")
    engine = Engine(Scheduler(shapes), executor_of(shapes))
    return LoadedModel(engine, NumberTokenizer(), limits, "numbers", info)


@dataclass
class Running:
    """A server that listens, and a client to it."""

    server: Server
    client: AsyncClient
    address: str
    http: str

    @property
    def executor(self) -> FakeExecutor:
        return self.server.orchestrator.model.engine._executor


@pytest.fixture
def serve():
    """`async with serve(step_seconds=..., settings=[...]) as running`. `gate`: loading waits for it."""

    @contextlib.asynccontextmanager
    async def running(
        *,
        step_seconds: float = 0.0,
        settings: Sequence[str] = (),
        slots: int = SLOTS,
        max_length: int = MAX_LENGTH,
        fail_at: int | None = None,
        gate: threading.Event | None = None,
        wait: bool = True,
    ) -> AsyncIterator[Running]:
        def load(report: Callable[[str, float], None]) -> LoadedModel:
            report("counting to ten", 0.5)
            if gate is not None:
                assert gate.wait(10)
            shapes = sizing(slots, max_length)
            return loaded_model(
                lambda s: FakeExecutor(s, VOCAB_SIZE, step_seconds=step_seconds, fail_at=fail_at), shapes
            )

        tree = config.load(None, ["server.grpc_port=0", "server.http_port=0", "model.name=num-bers", *settings])
        server = Server(tree, load)
        await server.start()
        client = AsyncClient(f"127.0.0.1:{server.grpc.port}")
        try:
            if wait:
                await server.wait_until_ready()
            yield Running(server, client, f"127.0.0.1:{server.grpc.port}", f"http://127.0.0.1:{server.http.port}")
        finally:
            if gate is not None:
                gate.set()
            await client.close()
            await server.stop()

    return running


@pytest.fixture
def run() -> Iterator[Callable]:
    """Runs a coroutine in a loop of its own, within a time that only a hang exceeds."""

    def call(coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, 60))

    yield call
