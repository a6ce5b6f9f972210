"""Real models: the whole engine through the orchestrator or through gRPC, next to a bare jitted loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import grpc
import jax
import jax.numpy as jnp

from jetserve import config
from jetserve.config import Config
from jetserve.engine import loading
from jetserve.engine.engine import EngineStatus
from jetserve.models import hugging_face
from jetserve.models.checkpoint import open_checkpoint
from jetserve.models.random_init import random_weights
from jetserve.models.spec import ModelConfig
from jetserve.orchestrator import Orchestrator
from jetserve.request import SamplingParams
from jetserve.server.serving import Server
from tests.bench.bound import decode_tokens_per_second
from tests.bench.host import grpc_stream
from tests.bench.load import Seen, Stream, drive
from tests.bench.report import Figure, Measurement, spread
from tests.bench.workloads import Workload

Announce = Callable[[str], None]


class _Run(NamedTuple):
    """One workload as the engine and its clients saw it."""

    workload: Workload
    seen: Seen
    before: EngineStatus
    after: EngineStatus


def measure(
    model: str, workloads: tuple[Workload, ...], settings: list[str], announce: Announce, *, through_grpc: bool
) -> list[Measurement]:
    """Serves `model` once and runs the workloads, each with the shapes that a server for it would have compiled."""
    longest = max(workload.prompt_tokens + workload.output_tokens for workload in workloads)
    slots = max(2, *(workload.concurrency for workload in workloads))
    own = [f"model.name={model}", f"engine.max_length={longest}", f"engine.slots={slots}"]
    tree = config.load(settings=[*own, "server.grpc_port=0", "server.http_port=0", *settings])
    seconds, dtype, runs = asyncio.run(_serve(tree, workloads, announce, through_grpc=through_grpc))
    face = "gRPC" if through_grpc else "in process"
    announce(f"{model}: bare loops")
    shape = _shape(tree)
    bounds = {run.workload.name: _bound(shape, dtype, run.workload) for run in runs}
    return [
        Measurement(
            f"{tree.model.served_name or model}, {dtype}, {face}, ready after {seconds:.1f} s",
            run.workload.name,
            run.workload.shape,
            _figures(run, bounds[run.workload.name]),
            _limit(run, bounds[run.workload.name]),
        )
        for run in runs
    ]


async def _serve(
    tree: Config, workloads: tuple[Workload, ...], announce: Announce, *, through_grpc: bool
) -> tuple[float, str, list[_Run]]:
    began = time.perf_counter()
    server = Server(tree, lambda report: loading.load(tree, report))
    runs = []
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        await server.wait_until_ready()
        seconds = time.perf_counter() - began
        loaded = server.orchestrator.model
        for workload in workloads:
            announce(f"{loaded.name}: {workload.name}")
            stream = in_process_stream(server.orchestrator, workload.output_tokens)
            if through_grpc:
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc.port}"))
                stream = grpc_stream([channel], workload.output_tokens)
            await drive(stream, replace(workload, concurrency=1, rounds=1), loaded.limits.vocab_size)
            before = loaded.engine.status()
            seen = await drive(stream, workload, loaded.limits.vocab_size)
            runs.append(_Run(workload, seen, before, loaded.engine.status()))
    return seconds, loaded.info.dtype, runs


def in_process_stream(orchestrator: Orchestrator, output_tokens: int) -> Stream:
    """Submits to the orchestrator, without a transport."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)

    async def stream(prompt: list[int]) -> AsyncIterator[int]:
        async for delta in await orchestrator.submit(prompt, params):
            yield len(delta.token_ids)

    return stream


def _shape(tree: Config) -> ModelConfig:
    if tree.model.random_weights:
        text = (Path(tree.model.name) / "config.json").read_text(encoding="utf-8")
        return hugging_face.read_config(json.loads(text))
    return open_checkpoint(tree.model.name).config


def _bound(shape: ModelConfig, dtype: str, workload: Workload) -> float:
    """Weights are random: their values change no time, and the served ones need not be held twice."""
    weights = random_weights(shape, jnp.dtype(dtype), 0, stacked=False)
    jax.block_until_ready(weights)
    return decode_tokens_per_second(
        shape, weights, workload.concurrency, workload.prompt_tokens, workload.output_tokens
    )


def _limit(run: _Run, bound: float) -> str:
    between = spread("", "", run.seen.inter_token).median
    share = f"; decode reaches {run.workload.concurrency / between / bound:.0%} of it" if between else ""
    return f"the bare loop: every weight read and multiplied once a step{share}"


def _figures(run: _Run, bound: float) -> tuple[Figure, ...]:
    seen, before, after = run.seen, run.before, run.after
    steps = after.steps - before.steps
    device_seconds = after.device_seconds - before.device_seconds
    host_seconds = after.host_seconds - before.host_seconds
    figures = [Figure("output tokens, prefill included", "tokens/s", seen.tokens_per_second, count=seen.tokens)]
    if between := spread("", "", seen.inter_token).median:
        typical = run.workload.concurrency / between
        figures.append(Figure("output tokens, at the median gap", "tokens/s", typical, count=len(seen.inter_token)))
    return (
        *figures,
        Figure("bare jitted loop, decode only", "tokens/s", bound),
        spread("time to first token", "ms", seen.first_token, 1e3),
        spread("inter-token", "ms", seen.inter_token, 1e3),
        Figure("engine step, mean", "ms", device_seconds / steps * 1e3, count=steps),
        Figure("host time per step, mean", "ms", host_seconds / steps * 1e3, count=steps),
        Figure("compilations", "", after.compilations_after_warmup),
    )
