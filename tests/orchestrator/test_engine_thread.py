"""When the engine's books are checked: not while anybody waits for anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from jetserve.engine.engine import Engine, LoadedModel
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.orchestrator.engine_thread import EngineThread, Listener, Stop, Submit
from jetserve.request import FinishReason, ModelLimits, Request, SamplingParams
from tests.orchestrator.conftest import VOCAB, AsciiTokenizer

LIMITS = ModelLimits(vocab_size=VOCAB, max_length=64, eos_token_ids=(), max_prompt_tokens=63)


@dataclass
class Heard:
    """What the thread has said."""

    thread: EngineThread
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: asyncio.Future[BaseException] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def ask(self) -> None:
        self.ended.clear()
        self.thread.put(Submit(Request.create([1, 2, 3], SamplingParams(max_tokens=4), LIMITS, now=0.0)))


@asynccontextmanager
async def running(engine: Engine, idle_seconds: float) -> AsyncIterator[Heard]:
    """A thread with one request, which is there before it looks for the first time."""

    def stepped(updates: list[Any], _status: Any) -> None:
        if any(update.finish_reason is FinishReason.LENGTH for update in updates):
            heard.ended.set()

    stopped = asyncio.Event()
    listener = Listener(
        progress=lambda _text, _fraction: None,
        loaded=lambda _model: None,
        cached=lambda _events: None,
        stepped=stepped,
        failed=lambda error: heard.failure.set_result(error),
        stopped=stopped.set,
    )
    model = LoadedModel(engine, AsciiTokenizer(), LIMITS, "ascii", info=None)
    thread = EngineThread(lambda _report: model, listener, time.monotonic, idle_seconds=idle_seconds)
    heard = Heard(thread)
    heard.ask()
    thread.start(asyncio.get_running_loop())
    try:
        yield heard
    finally:
        thread.put(Stop())
        await asyncio.wait_for(stopped.wait(), 20)


@pytest.fixture
def engine(sizing: Sizing) -> Engine:
    return Engine(Scheduler(sizing), FakeExecutor(sizing, VOCAB))


async def test_answer_does_not_wait_for_the_check(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many cached pages that takes a second."""
    go_on = threading.Event()
    monkeypatch.setattr(engine, "check", lambda: go_on.wait(20))
    async with running(engine, 1e-9) as heard:
        try:
            await asyncio.wait_for(heard.ended.wait(), 10)
        finally:
            go_on.set()


async def test_requests_that_follow_each_other_are_not_held_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[None] = []
    monkeypatch.setattr(engine, "check", lambda: checks.append(None))
    async with running(engine, 600.0) as heard:
        for _ in range(5):
            await asyncio.wait_for(heard.ended.wait(), 10)
            heard.ask()
    assert not checks


async def test_lost_page_is_found_when_nobody_comes(engine: Engine) -> None:
    engine.scheduler.memory.pool.alloc(1)
    async with running(engine, 1e-9) as heard:
        assert isinstance(await asyncio.wait_for(heard.failure, 10), AssertionError)
