"""The simulator beside reality: one trace through the real engine thread, and through a simulation of it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable

from jetserve import config
from jetserve.config import Config
from jetserve.engine import loading
from jetserve.engine.calibration import Calibration, Watch, calibrate, fit
from jetserve.engine.cost import LinearCost
from jetserve.engine.engine import LoadedModel
from jetserve.orchestrator import Orchestrator
from jetserve.request import SamplingParams
from jetserve.simulation import report as reports
from jetserve.simulation.report import Limits, Report, tpot_ms, ttft_ms
from jetserve.simulation.run import Outcome, Record, Setup, run
from jetserve.simulation.trace import Trace, token_ids
from jetserve.simulation.workloads import named
from tests.bench.report import Figure, Measurement
from tests.bench.workloads import FIRST_ID, SimulatedTrace

Announce = Callable[[str], None]

LIMITS = Limits(ttft_ms=2000.0, tpot_ms=200.0)  # MLPerf's for Llama 2 70B; a CPU with a small model is about as fast
_SATURATED_SHARE = 0.6  # of the rate that the simulation says is the most
_MAX_LENGTH = 512


def measure(
    model: str, traces: tuple[SimulatedTrace, ...], settings: list[str], announce: Announce
) -> list[Measurement]:
    """Measures step times of `model`, then plays and simulates each trace."""
    tree = config.load(settings=[f"model.name={model}", f"engine.max_length={_MAX_LENGTH}", *settings])
    announce(f"{model}: loading")
    loaded = loading.load(tree)
    calibration = calibrate(loaded.engine, loaded.limits, lambda what, done: announce(f"{model}: {what}, {done:.0%}"))
    return asyncio.run(_compare(tree, loaded, calibration, traces, announce))


async def _compare(
    tree: Config,
    loaded: LoadedModel,
    calibration: Calibration,
    traces: tuple[SimulatedTrace, ...],
    announce: Announce,
) -> list[Measurement]:
    engine = loaded.engine
    before_all = Setup(engine.scheduler.sizing, tree.scheduler, calibration.times, calibration.host_seconds)
    orchestrator = Orchestrator(lambda _report: loaded, tree.scheduler)
    await orchestrator.start()
    await orchestrator.wait_until_ready()
    found = []
    for wanted in traces:
        # The simulated engine begins with the same times.
        watch = engine.scheduler.pacer.cost = Watch(LinearCost(calibration.times))
        trace = _at_load(wanted, before_all)
        predicted = _simulated(trace, before_all)
        announce(f"{loaded.name}: {wanted.name}, {predicted.duration_seconds:.0f} s")
        await orchestrator.flush_cache()
        busy, before = os.getloadavg()[0], engine.status()
        played = await Player(orchestrator, trace.clip(before_all.max_tokens)[0]).play()
        after = engine.status()
        host_seconds = (after.host_seconds - before.host_seconds) / (after.steps - before.steps)
        own = fit(calibration.times, watch.seen, host_seconds)
        afterwards = _simulated(trace, dataclasses.replace(before_all, times=own.times, host_seconds=host_seconds))
        shape = f"{len(trace.requests)} requests, one in {predicted.duration_seconds / len(trace.requests):.1f} s"
        bound = (
            f"{_SATURATED_SHARE:.0%} of what the simulated engine can take; {os.cpu_count()} cores with a load of "
            f"{busy:.1f} before; step times are off by {calibration.error:.1%}, median of "
            f"{calibration.steps - calibration.fitted} steps"
        )
        found.append(
            Measurement(
                f"simulate, {loaded.name}", wanted.name, shape, figures_of(played, predicted, afterwards), bound
            )
        )
    await orchestrator.stop()
    return found


def figures_of(played: list[Record], predicted: Report, afterwards: Report) -> tuple[Figure, ...]:
    """Means over the requests that finished, and how many of them were good in a second.

    Args:
      afterwards: predicted with step times fitted to the steps of the run itself. What it is off by lies in the
        simulation; the rest in step times that have changed since they were measured.
    """
    done = [record for record in played if record.outcome is Outcome.FINISHED]
    ttft, tpot = [ttft_ms(record) for record in done], [tpot_ms(record) for record in done]
    good = sum(LIMITS.are_met(*times) for times in zip(ttft, tpot, strict=True))
    seconds = max(record.end_seconds for record in done) - min(record.arrival_seconds for record in done)
    figures = []
    for name, unit, measured, of in (
        ("TTFT, mean", "ms", statistics.fmean(ttft), lambda one: one.ttft_ms.mean),
        ("TPOT, mean", "ms", statistics.fmean(tpot), lambda one: one.tpot_ms.mean),
        ("goodput", "requests/s", good / seconds, lambda one: one.goodput),
    ):
        figures += [
            Figure(f"{name}, measured", unit, measured, count=len(done)),
            Figure("  predicted", unit, of(predicted), count=predicted.finished),
            Figure("  predicted / measured", "", _ratio(of(predicted), measured)),
            Figure("  by the run's own step times", "", _ratio(of(afterwards), measured)),
        ]
    return tuple(figures)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _simulated(trace: Trace, setup: Setup) -> Report:
    return reports.report(run(trace, setup), LIMITS, config="", cost="")


def _at_load(wanted: SimulatedTrace, setup: Setup) -> Trace:
    """The trace at a share of the rate at which the simulated engine takes it when all comes at once."""
    drawn = named(wanted.workload).generate(wanted.requests, seed=wanted.seed)
    together = Trace(drawn.name, tuple(dataclasses.replace(one, arrival_seconds=0.0) for one in drawn.requests))
    ran = run(together, setup)
    return drawn.at_rate(_SATURATED_SHARE * len(ran.records) / ran.seconds)


class Player:
    """Sends a trace to an orchestrator in real time.

    Args:
      trace: cut to the context.
    """

    def __init__(self, orchestrator: Orchestrator, trace: Trace) -> None:
        self._orchestrator = orchestrator
        self._limits = orchestrator.model.limits
        self._records = [Record(request) for request in trace.requests]
        self._start = 0.0

    async def play(self) -> list[Record]:
        """Returns what became of each request, times since the start."""
        sessions: dict[str, list[Record]] = {}
        for at, record in enumerate(self._records):
            sessions.setdefault(record.request.session or f"/{at}", []).append(record)
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for turns in sessions.values():
                tasks.create_task(self._session(turns))
        return self._records

    async def _session(self, turns: list[Record]) -> None:
        said: tuple[int, ...] = ()
        for turn, record in enumerate(turns):
            request = record.request
            await asyncio.sleep(request.think_seconds if turn else request.arrival_seconds)
            prompt = (*said, *self._known(token_ids(request.prompt)))
            if len(prompt) + request.output_tokens > self._limits.max_length:
                return
            await self._send(record, prompt)
            said = (*prompt, *record.token_ids)

    async def _send(self, record: Record, prompt: tuple[int, ...]) -> None:
        params = SamplingParams(max_tokens=record.request.output_tokens, temperature=0.0, ignore_eos=True)
        record.prompt_token_ids, record.arrival_seconds = prompt, self._now()
        async for delta in await self._orchestrator.submit(prompt, params):
            if delta.token_ids:
                record.token_ids += delta.token_ids
                record.message_seconds.append(self._now())
            if delta.usage is not None:
                record.cached_tokens = delta.usage.cached_tokens
        record.end_seconds, record.outcome = record.message_seconds[-1], Outcome.FINISHED

    def _known(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that the vocabulary has; equal ones stay equal."""
        return tuple(FIRST_ID + one % (self._limits.vocab_size - FIRST_ID) for one in ids)

    def _now(self) -> float:
        return time.perf_counter() - self._start
