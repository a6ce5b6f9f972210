"""Loading, readiness, drain, failure; deadlines and clients that go away."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jetserve.errors import DeadlineExceeded, EngineFailed, Unavailable
from jetserve.request import SamplingParams
from jetserve.server.async_client import AsyncClient
from jetserve.server.protos import inference_pb2 as pb
from jetserve.server.protos import jetstream_pb2
from tests.server.numbers import SLOTS

SERVICES = ("", "jetserve.v1.Inference", "jetstream_proto.Orchestrator")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(running, service=""):
    stub = health_pb2_grpc.HealthStub(running.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def jetstream_is_live(running):
    data = await running.channel.unary_unary("/jetstream_proto.Orchestrator/HealthCheck")(b"")
    return jetstream_pb2.HealthCheckResponse.FromString(data).is_live


async def until(condition):
    while not await condition():
        await asyncio.sleep(0.005)


def test_ports_are_open_while_the_model_loads(serve, run):
    async def check():
        gate = threading.Event()
        async with serve(gate=gate) as running:
            status = await running.client.status()
            while "counting" not in status.progress:
                status = await running.client.status()
            assert (status.state, status.ready, status.progress) == ("loading", False, "counting to ten 50%")
            assert [await health(running, name) for name in SERVICES] == [NOT_SERVING] * 3
            assert not await jetstream_is_live(running)
            assert (await running.get("/healthz")).status == 200
            ready = await running.get("/readyz")
            assert (ready.status, ready.text) == (503, "not ready: loading: counting to ten 50%\n")
            assert int(ready.headers["retry-after"]) >= 1
            assert (await running.get("/metrics")).status == 200
            with pytest.raises(Unavailable, match="counting to ten 50%"):
                await running.client.generate([1])
            with pytest.raises(Unavailable, match="loading"):
                await running.client.model_info()

            gate.set()
            assert (await running.client.wait_until_ready(10)).state == "ready"
            (answer,) = await running.client.generate([1], SamplingParams(max_tokens=1))
            assert answer.token_ids == (2,)
            await until(lambda: _is(health(running), SERVING))
            assert [await health(running, name) for name in SERVICES] == [SERVING] * 3
            assert await jetstream_is_live(running)
            assert (await running.get("/readyz")).text == "ready\n"

    run(check())


async def _is(question, answer):
    return await question == answer


def test_unavailable_says_when_to_try_again(serve, run):
    async def check():
        async with serve(gate=threading.Event()) as running:
            rpc = running.channel.unary_stream("/jetserve.v1.Inference/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc(pb.GenerateRequest(text="5").SerializeToString()).read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(caught.value.trailing_metadata())["retry-after-ms"] == "2000"

    run(check())


def test_health_of_an_unknown_service_is_not_found(serve, run):
    async def check():
        async with serve() as running:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health(running, "some.Other")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(check())


def test_health_watch_sees_loading_serving_and_draining(serve, run):
    async def check():
        gate = threading.Event()
        async with serve(gate=gate, step_seconds=0.005) as running:
            stub = health_pb2_grpc.HealthStub(running.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="jetserve.v1.Inference"))
            assert (await watch.read()).status == NOT_SERVING
            gate.set()
            assert (await watch.read()).status == SERVING
            stream = running.client.stream([1], SamplingParams(max_tokens=60))
            tokens = len((await anext(stream)).token_ids)
            drain = asyncio.create_task(running.server.drain(20))
            assert (await watch.read()).status == NOT_SERVING
            assert not drain.done()
            async for delta in stream:
                tokens += len(delta.token_ids)
            assert tokens == 60
            assert await asyncio.wait_for(drain, 10)  # and not 20: an open watch holds nobody up
            assert await watch.read() is grpc.aio.EOF

    run(check())


def test_a_health_watch_that_ends_leaves_the_others_of_its_service_alone(serve, run):
    async def check():
        async with serve() as running:
            stub = health_pb2_grpc.HealthStub(running.channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
            assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
            watches[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await watches[0].read()
            assert await health(running) == SERVING  # after the server has heard of it
            assert await running.server.drain(20)
            assert (await watches[1].read()).status == NOT_SERVING

    run(check())


def test_a_health_watch_of_another_service_hears_that_it_is_unknown(serve, run):
    async def check():
        async with serve() as running:
            stub = health_pb2_grpc.HealthStub(running.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="some.Other"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            await running.server.drain(5)
            assert await watch.read() is grpc.aio.EOF

    run(check())


def test_running_streams_finish_during_a_drain_and_new_requests_are_refused(serve, run):
    async def check():
        async with serve(step_seconds=0.004) as running:
            params = SamplingParams(max_tokens=100)
            streams = [running.client.stream([10 * i], params) for i in range(SLOTS * 2)]  # half of them wait
            first = [await anext(stream) for stream in streams[:SLOTS]]
            drain = asyncio.create_task(running.server.drain(30))
            await until(lambda: _is(health(running), NOT_SERVING))
            with pytest.raises(Unavailable, match="draining"):
                await running.client.generate([1])
            ready, live = await running.get("/readyz"), await running.get("/healthz")
            assert (ready.status, ready.text, live.status) == (503, "not ready: draining\n", 200)

            async def rest(index, stream):
                got = list(first[index].token_ids) if index < SLOTS else []
                async for delta in stream:
                    got += delta.token_ids
                return got

            answers = await asyncio.gather(*(rest(i, stream) for i, stream in enumerate(streams)))
            assert answers == [list(range(10 * i + 1, 10 * i + 101)) for i in range(SLOTS * 2)]
            assert await drain

    run(check())


def test_a_drain_that_takes_too_long_ends_the_rest_with_unavailable(serve, run):
    async def check():
        async with serve(step_seconds=0.01) as running:
            stream = running.client.stream([1], SamplingParams(max_tokens=250))
            await anext(stream)
            drain = asyncio.create_task(running.server.drain(0.1))
            with pytest.raises(Unavailable):
                async for _ in stream:
                    pass
            assert not await drain

    run(check())


def test_an_engine_that_dies_fails_its_streams_and_readiness(serve, run, caplog):
    async def check():
        async with serve(step_seconds=0.002, fail_at=20) as running:
            with pytest.raises(EngineFailed, match="the fake device failed at plan 20"):
                await running.client.generate([1], SamplingParams(max_tokens=200))
            await asyncio.wait_for(running.server.failed.wait(), 5)
            await until(lambda: _is(health(running), NOT_SERVING))
            assert not await jetstream_is_live(running)
            assert (await running.get("/healthz")).status == 503
            assert (await running.get("/readyz")).text == "not ready: failed\n"
            assert (await running.client.status()).state == "failed"
            with pytest.raises(Unavailable, match="failed"):
                await running.client.generate([1])
            with pytest.raises(EngineFailed):
                await running.client.wait_until_ready(5)
            assert await running.metric("vllm:request_success_total", finished_reason="error") == 1

    run(check())


def test_a_step_that_hangs_turns_readiness_off_and_then_liveness(serve, run):
    async def check():
        async with serve(step_seconds=1.0, settings=["server.step_timeout_seconds=0.05"]) as running:
            task = asyncio.create_task(running.client.generate([1], SamplingParams(max_tokens=3)))
            await until(lambda: _is(_status_of(running, "/readyz"), 503))
            assert (await running.get("/readyz")).text == "not ready: a device step takes too long\n"
            await until(lambda: _is(health(running), NOT_SERVING))
            await until(lambda: _is(_status_of(running, "/healthz"), 503))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(check())


async def _status_of(running, path):
    return (await running.get(path)).status


@pytest.mark.parametrize("is_queued", [False, True], ids=["running", "queued"])
def test_a_timeout_is_deadline_exceeded_and_frees_the_slot(serve, run, is_queued):
    async def check():
        async with serve(step_seconds=0.01, slots=1) as running:
            blocker = None
            if is_queued:
                blocker = running.client.stream([1], SamplingParams(max_tokens=250))
                await anext(blocker)
            with pytest.raises(DeadlineExceeded, match=r"ran out of time after 0\.\d+ s"):
                await running.client.generate([1], SamplingParams(max_tokens=250), timeout_seconds=0.2)
            if blocker is not None:
                blocker.close()
            await running.until_idle()
            assert await running.metric("vllm:request_success_total", finished_reason="timeout") == 1
            assert len((await running.client.generate([1], SamplingParams(max_tokens=2)))[0].token_ids) == 2

    run(check())


def test_the_calls_own_deadline_counts_as_a_timeout_too(serve, run):
    async def check():
        async with serve(step_seconds=0.01) as running:
            rpc = running.channel.unary_stream("/jetserve.v1.Inference/Generate")
            call = rpc(pb.GenerateRequest(text="1").SerializeToString(), timeout=0.25)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await running.until_idle()
            assert await running.metric("vllm:request_success_total", finished_reason="timeout") == 1
            assert await running.metric("vllm:request_success_total", finished_reason="abort") == 0

    run(check())


def test_a_client_that_goes_away_frees_its_slot_within_two_steps(serve, run, caplog):
    async def check():
        step_seconds = 0.05
        async with serve(step_seconds=step_seconds, max_length=1024) as running:
            with caplog.at_level(logging.INFO):
                async with AsyncClient(running.address) as leaving:
                    stream = leaving.stream([1], SamplingParams(max_tokens=1000), request_id="the-leaver")
                    for _ in range(5):
                        await anext(stream)
                while running.server.orchestrator._channels:  # the server has not noticed yet
                    await asyncio.sleep(0)
                plans = len(running.executor.plans)
                await running.until_idle()
                assert len(running.executor.plans) - plans <= 2
            before = await running.metric("vllm:generation_tokens_total")
            await asyncio.sleep(3 * step_seconds)
            assert await running.metric("vllm:generation_tokens_total") == before
            assert await running.metric("vllm:num_requests_running") == 0
            assert await running.metric("jetstream_slots_used_percentage", idx="0") == 0

    run(check())
    assert any("the-leaver" in record.getMessage() and "abort" in record.getMessage() for record in caplog.records)


def test_fifty_cancelled_streams_leave_nothing_behind(serve, run):
    """R65"""

    async def check():
        async with serve(step_seconds=0.002) as running:
            await running.client.generate([1], SamplingParams(max_tokens=1))
            threads, tasks = threading.active_count(), len(asyncio.all_tasks())
            for _ in range(5):
                streams = [running.client.stream([1], SamplingParams(max_tokens=200)) for _ in range(10)]
                await anext(streams[0])
                for stream in streams:
                    stream.close()
            assert (await running.client.generate([1], SamplingParams(max_tokens=2)))[0].token_ids == (2, 3)
            await running.until_idle()
            del streams
            gc.collect()
            while len(asyncio.all_tasks()) > tasks:
                await asyncio.sleep(0.005)
            assert threading.active_count() <= threads

    run(check())


def test_cancelling_while_a_request_starts_never_loses_a_slot(serve, run):
    async def check():
        async with serve() as running:
            for round_number in range(100):
                stream = running.client.stream([1], SamplingParams(max_tokens=100))
                reading = asyncio.create_task(anext(stream))
                await asyncio.sleep(0.00005 * (round_number % 100))
                stream.close()
                await asyncio.gather(reading, return_exceptions=True)
            await running.until_idle()
            answers = await asyncio.gather(
                *(running.client.generate([1], SamplingParams(max_tokens=3)) for _ in range(SLOTS))
            )
            assert {answer.token_ids for (answer,) in answers} == {(2, 3, 4)}

    run(check())


def test_gauges_fall_to_zero_when_everything_was_aborted(serve, run):
    async def check():
        async with serve(step_seconds=0.005) as running:
            params = SamplingParams(max_tokens=200)
            streams = [running.client.stream([1], params, request_id=f"request-{i}") for i in range(SLOTS * 3)]
            reads = [asyncio.create_task(anext(stream)) for stream in streams]
            await until(lambda: _is(running.metric("vllm:num_requests_waiting"), SLOTS * 2))
            assert await running.metric("vllm:num_requests_running") == SLOTS
            for i in range(SLOTS * 3):
                await running.client.abort(f"request-{i}")
            await asyncio.gather(*reads, return_exceptions=True)
            await running.until_idle()
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
                await until(lambda name=name: _is(running.metric(name), 0))
            assert await running.metric("jetstream_prefill_backlog_size") == 0
            for stream in streams:
                stream.close()

    run(check())
