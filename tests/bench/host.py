"""The host path alone: a device of zero cost, the real server in a process of its own, clients here."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from jetserve.request import Request, SamplingParams
from jetserve.server.protos import inference_pb2 as pb
from tests.bench.fake_engine import fake_model
from tests.bench.load import Seen, Stream, drive
from tests.bench.report import Figure, Measurement, spread
from tests.bench.workloads import Workload
from tests.links import ROOT

GENERATE = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"
_STREAMS_PER_CHANNEL = 64


def measure(workload: Workload) -> Measurement:
    """Streams the workload through gRPC, one client per slot."""
    vocab_size = fake_model(workload.concurrency).limits.vocab_size
    with _server(workload) as server:
        asyncio.run(_through_grpc(server.address, workload, vocab_size))  # warms both sides up
        before = server.usage()
        client_before = time.process_time()
        seen = asyncio.run(_through_grpc(server.address, workload, vocab_size))
        client_seconds = time.process_time() - client_before
        after = server.usage()
    server_seconds = after["cpu_seconds"] - before["cpu_seconds"]
    steps = after["steps"] - before["steps"]
    host_seconds = after["host_seconds"] - before["host_seconds"]
    engine = engine_step_seconds(workload)
    figures = (
        Figure("streamed tokens", "tokens/s", seen.tokens_per_second, count=seen.tokens),
        Figure("server CPU per token", "us", server_seconds / seen.tokens * 1e6, count=seen.tokens),
        Figure("tokens per message", "", seen.tokens / seen.messages, count=seen.messages),
        spread("time to first token", "ms", seen.first_token, 1e3),
        spread("inter-token", "ms", seen.inter_token, 1e3),
        Figure("engine host time per step, serving", "ms", host_seconds / steps * 1e3, count=steps),
        spread("engine host time per step, alone", "ms", engine, 1e3),
        Figure("client CPU per token", "us", client_seconds / seen.tokens * 1e6, count=seen.tokens),
    )
    busy = f"server {server_seconds / seen.wall:.2f} cores, client {client_seconds / seen.wall:.2f} cores busy"
    return Measurement("host", workload.name, workload.shape, figures, f"Python on the host: {busy}")


def engine_step_seconds(workload: Workload) -> list[float]:
    """Host time of each step with every slot decoding, no server around it."""
    model = fake_model(workload.concurrency)
    engine = model.engine
    params = SamplingParams(max_tokens=workload.output_tokens, temperature=0.0)
    for prompt in workload.prompts(model.limits.vocab_size)[: workload.concurrency]:
        engine.add(Request.create(prompt, params, model.limits))
    seconds = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step(time.monotonic())
        if engine.status().running == workload.concurrency:
            seconds.append(time.perf_counter() - start)
    return seconds


class _Server:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._wait_until_ready()

    def usage(self) -> dict[str, Any]:
        """CPU seconds and the engine's totals so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        usage: dict[str, Any] = json.loads(self._line())
        return usage

    def _wait_until_ready(self) -> str:
        address = ""
        while not (line := self._line()).startswith("ready"):
            found = re.match(r"\s*gRPC\s+(\S+)", line)
            address = found[1] if found else address
        while not self._line().startswith("  python"):
            pass
        return address

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server under test ended with exit code {self._process.wait()}")
        return line


@contextmanager
def _server(workload: Workload) -> Iterator[_Server]:
    command = [sys.executable, "-m", "tests.bench.fake_server", f"{workload.concurrency}", f"{workload.step_seconds}"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _Server(process)
        finally:
            process.terminate()


async def _through_grpc(address: str, workload: Workload, vocab_size: int) -> Seen:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(address, options=options)
        for _ in range(-(-workload.concurrency // _STREAMS_PER_CHANNEL))
    ]
    try:
        return await drive(grpc_stream(channels, workload.output_tokens), workload, vocab_size)
    finally:
        for channel in channels:
            await channel.close()


def grpc_stream(channels: list[grpc.aio.Channel], output_tokens: int) -> Stream:
    """Calls `Generate` on the channels in turn. No client of ours: it should cost as little as it can."""
    calls = [
        channel.unary_stream(GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString)
        for channel in channels
    ]
    params = pb.SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    turn = 0

    async def stream(prompt: list[int]) -> AsyncIterator[int]:
        nonlocal turn
        turn += 1
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), params=params)
        async for response in calls[turn % len(calls)](request):
            yield len(response.token_ids)

    return stream
