"""An orchestrator over a fake device that the test lets go step by step."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from jetserve.config import SchedulerSettings
from jetserve.engine.cost import StepCost
from jetserve.engine.engine import Engine, LoadedModel, ModelInfo
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.metrics import Metrics, RequestRecord, StepRecord
from jetserve.orchestrator import Orchestrator, RequestStream, State
from jetserve.request import Delta, ModelLimits, SamplingParams
from jetserve.tokenizer.pieces import Pieces

EOS = 0
VOCAB = 128
_PATIENCE_SECONDS = 20.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs coroutine tests, each in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class AsciiTokenizer:
    """An id is an ASCII character; 0 ends."""

    vocab_size = VOCAB
    bos_token_id = None
    eos_token_ids = (EOS,)
    chat_template = None
    pieces = Pieces([b"", *(bytes([i]) for i in range(1, VOCAB))], special=frozenset({EOS}))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("ascii"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.pieces.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces.texts[token_id] or b""


class Gate:
    """What the device waits for before each result."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._permits.release()

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    def wait(self, seconds: float) -> None:
        if not self._is_open:
            assert self._permits.acquire(timeout=_PATIENCE_SECONDS), "the test never let the device go on"


class RecordingMetrics(Metrics):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("test")
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []
        self.first_tokens: list[float] = []
        self.gaps: list[tuple[float, int]] = []
        self.rejected = 0
        self.shed = 0

    def step_finished(self, record: StepRecord) -> None:
        super().step_finished(record)
        self.steps.append(record)

    def request_finished(self, record: RequestRecord) -> None:
        super().request_finished(record)
        self.requests.append(record)

    def first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def inter_token(self, seconds: float, tokens: int = 1) -> None:
        self.gaps.append((seconds, tokens))

    def request_rejected(self) -> None:
        self.rejected += 1

    def request_shed(self) -> None:
        self.shed += 1


@dataclass
class Served:
    """An orchestrator that is ready, and what is below it."""

    orchestrator: Orchestrator
    fake: FakeExecutor
    gate: Gate
    metrics: RecordingMetrics
    failures: list[BaseException] = field(default_factory=list)

    @property
    def slots_used(self) -> int:
        return self.orchestrator.status().slots_used

    async def submit(self, prompt: str | Sequence[int] = "a", max_tokens: int = 5, **changes: Any) -> RequestStream:
        outer = {k: changes.pop(k) for k in ("request_id", "timeout_seconds", "priority", "cache_salt") if k in changes}
        params = SamplingParams(max_tokens=max_tokens, temperature=0, **changes)
        return await self.orchestrator.submit(prompt, params, **outer)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """The engine hears of everything that happens inside at once, at the end. Needs a gated device."""
        plug = await self.submit("~", 99, ignore_eos=True)
        await self.until(lambda: len(self.fake.plans) == 2)  # it waits for the result of the first
        yield
        self.orchestrator.abort(plug.request.request_id)
        self.gate.let(2)

    async def until(self, fact: Callable[[], bool]) -> None:
        """Waits for something that must come."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not fact():
                await asyncio.sleep(0.001)

    async def until_idle(self) -> None:
        def is_idle() -> bool:
            status = self.orchestrator.status()
            return not (status.running or status.pages_used or status.waiting_requests or status.waiting_tokens)

        await self.until(is_idle)


SIZING = Sizing(
    slots=4,
    max_length=256,
    page_size=4,
    pages=257,
    prefill_sizes=(8, 32),
    prefill_rows=4,
    prefill_tokens=32,
    generate_rows=(1, 2, 4),
    generate_steps=(1,),
)
Serve = Callable[..., AbstractAsyncContextManager[Served]]


@asynccontextmanager
async def _serve(
    *,
    sizing: Sizing = SIZING,
    settings: SchedulerSettings | None = None,
    cost: StepCost | None = None,
    gated: bool = False,
    step_timeout_seconds: float = 60.0,
    clock: Callable[[], float] | None = None,
    **fake_arguments: Any,
) -> AsyncIterator[Served]:
    gate = Gate()
    if gated:
        fake_arguments |= {"step_seconds": 1.0, "clock": lambda: 0.0, "sleep": gate.wait}
    fake = FakeExecutor(sizing, VOCAB, **fake_arguments)
    engine = Engine(Scheduler(sizing, settings, cost), fake)
    limits = ModelLimits(VOCAB, sizing.max_length, (EOS,), sizing.max_length - 1)
    info = ModelInfo("fake", 0, "float32", VOCAB, sizing.max_length, "fake x1")
    model = LoadedModel(engine, AsciiTokenizer(), limits, "fake", info)
    metrics = RecordingMetrics()
    failures: list[BaseException] = []
    timing = {} if clock is None else {"clock": clock}
    orchestrator = Orchestrator(
        lambda report: model,
        settings,
        metrics,
        step_timeout_seconds=step_timeout_seconds,
        on_failure=failures.append,
        **timing,
    )
    await orchestrator.start()
    await orchestrator.wait_until_ready()
    served = Served(orchestrator, fake, gate, metrics, failures)
    await served.until(lambda: orchestrator.status().slots_total > 0)
    try:
        yield served
        gate.open()
        if orchestrator.state not in (State.FAILED, State.STOPPED):
            await served.until_idle()
            engine.check()
    finally:
        gate.open()
        await orchestrator.stop()


@pytest.fixture
def serve() -> Serve:
    """Makes a context with an orchestrator that is ready; at its end nothing may be left in slots or pages."""
    return _serve


Collect = Callable[[RequestStream], Any]


@pytest.fixture
def collect() -> Collect:
    """Reads a stream to its end."""

    async def read(stream: RequestStream) -> list[Delta]:
        return [delta async for delta in stream]

    return read


@pytest.fixture
def sizing() -> Sizing:
    """Shapes of the fake device unless a test brings its own."""
    return SIZING
