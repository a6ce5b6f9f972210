"""The prefix cache as users see it: cached tokens, salts, flushing, and what the gauges say when nobody is left."""

from __future__ import annotations

import asyncio
import json
import threading

import grpc
import pytest

from jetserve.errors import Unavailable
from jetserve.request import SamplingParams, Usage
from jetserve.server.protos import inference_pb2 as pb

PROMPT = list(range(1, 41))  # two pages of 16 and half a page
FOUR = SamplingParams(max_tokens=4)


async def cached(running, prompt, **options):
    (answer,) = await running.client.generate(prompt, FOUR, **options)
    assert answer.token_ids == tuple(range(prompt[-1] + 1, prompt[-1] + 5))
    return answer.usage.cached_tokens


def test_cached_tokens_are_exact_to_the_token(serve, run):
    """A prompt's last token is always computed; of an answer all tokens but the last were written."""

    async def check():
        async with serve() as running:
            (cold,) = await running.client.generate(PROMPT, FOUR)
            (warm,) = await running.client.generate(PROMPT, FOUR)
            (turn,) = await running.client.generate([*PROMPT, *cold.token_ids, 7], FOUR)
            (other,) = await running.client.generate([*PROMPT[:21], 500], FOUR)
        assert cold.usage == Usage(40, 4, cached_tokens=0)
        assert warm.usage == Usage(40, 4, cached_tokens=39)
        assert turn.usage == Usage(45, 4, cached_tokens=43)
        assert other.usage == Usage(22, 4, cached_tokens=21)
        assert (cold.token_ids, turn.token_ids) == ((41, 42, 43, 44), (8, 9, 10, 11))
        assert warm.token_ids == cold.token_ids

    run(check())


def test_metrics_and_status_count_the_tokens_of_the_cache(serve, run):
    async def check():
        async with serve() as running:
            for _ in range(3):
                await running.client.generate(PROMPT, FOUR)
            await running.until_idle()
            assert await running.metric("vllm:prefix_cache_queries_total") == 120
            assert await running.metric("vllm:prefix_cache_hits_total") == 78
            assert await running.metric("vllm:prompt_tokens_cached_total") == 78
            assert await running.metric("vllm:prompt_tokens_total") == 120
            assert await running.metric("vllm:external_prefix_cache_queries_total") == 0
            assert await running.metric("vllm:request_prefill_kv_computed_tokens_sum") == 42
            assert await running.metric("jetserve_prefill_padded_tokens_total") == 24 + 2 * 31  # 32 + 8, 1, 1
            status = await running.client.status()
            assert (status.queried_tokens, status.cached_tokens) == (120, 78)
            assert status.cached_pages == await running.metric("jetserve_prefix_pages") == 3

    run(check())


def test_a_salt_shares_with_its_own_kind_only(serve, run):
    """R58, as far as the faces go: no other salt, no text that names a model, and none at all is the same."""

    async def check():
        async with serve() as running:
            assert await cached(running, PROMPT, cache_salt="tenant") == 0
            for salt in ("numbers", "tenant ", "Tenant", "\0tenant", None):
                assert await cached(running, PROMPT, cache_salt=salt) == 0
            assert await cached(running, PROMPT, cache_salt="tenant") == 39
            assert await cached(running, PROMPT, cache_salt="") == 39  # "" is none

    run(check())


def test_a_salt_that_is_too_long_is_refused(serve, run):
    async def check():
        async with serve() as running:
            rpc = running.channel.unary_stream("/jetserve.v1.Inference/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc(pb.GenerateRequest(text="5", cache_salt="x" * 257).SerializeToString()).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "cache_salt must be text of at most 256 characters" in caught.value.details()

    run(check())


def test_nothing_is_shared_when_the_cache_is_off(serve, run):
    async def check():
        async with serve(prefix_cache=False) as running:
            assert [await cached(running, PROMPT) for _ in range(2)] == [0, 0]
            await running.until_idle()
            assert await running.metric("jetserve_prefix_pages") == 0
            assert await running.client.flush_cache() == 0

    run(check())


def test_gauges_are_zero_when_nobody_is_left_although_pages_are_cached(serve, run):
    """R86: load, abort everything, look."""

    async def check():
        async with serve(step_seconds=0.03) as running:
            prompts = [[100 + 20 * at + i for i in range(17)] for at in range(8)]
            streams = [
                running.client.stream(prompt, SamplingParams(max_tokens=200), request_id=f"{at}")
                for at, prompt in enumerate(prompts)
            ]
            status = running.server.orchestrator.status
            while (status().running, status().waiting_requests) != (4, 4) or status().generated_tokens < 4:
                await asyncio.sleep(0.002)
            assert await running.metric("vllm:kv_cache_usage_perc") > 0
            for stream in streams:
                assert await running.client.abort(stream.request_id)
            await running.until_idle()
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
                assert await running.metric(name) == 0
            for name in ("num_requests_waiting", "kv_cache_utilization_perc", "jetstream_slots_used_percentage"):
                assert await running.metric(name) == 0
            assert await running.metric("jetserve_kv_pages", state="used") == 0
            pages = await running.metric("jetserve_prefix_pages")
            assert pages == await running.metric("jetserve_kv_pages", state="cached") >= 4
            assert await running.metric("jetserve_kv_pages", state="free") == 64 - pages

    run(check())


def test_flush_frees_the_pages_and_the_next_prompt_is_cold(serve, run):
    async def check():
        async with serve() as running:
            assert [await cached(running, PROMPT) for _ in range(2)] == [0, 39]
            assert await running.client.flush_cache() == 3
            assert (await running.client.status()).cached_pages == 0
            assert await running.client.flush_cache() == 0
            assert [await cached(running, PROMPT) for _ in range(2)] == [0, 39]

    run(check())


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_http_flushes_by_both_names(serve, run, path):
    async def check():
        async with serve() as running:
            assert await cached(running, PROMPT) == 0
            answer = await running.post(path)
            assert (answer.status, json.loads(answer.text)) == (200, {"success": True, "pages_freed": 3})
            assert await cached(running, PROMPT) == 0
            refused = await running.get(path)
            assert (refused.status, refused.headers["allow"]) == (405, "POST")
            assert await cached(running, PROMPT) == 39

    run(check())


def test_flush_leaves_running_requests_alone(serve, run):
    async def check():
        async with serve(step_seconds=0.002) as running:
            assert await cached(running, PROMPT) == 0
            stream = running.client.stream(PROMPT, SamplingParams(max_tokens=100))
            seen = [*(await anext(stream)).token_ids]
            freed = [await running.client.flush_cache() for _ in range(3)]
            assert freed[1:] == [0, 0]
            assert await running.metric("jetserve_kv_pages", state="used") > 0
            async for delta in stream:
                seen += delta.token_ids
            assert seen == list(range(41, 141))
            assert delta.usage.cached_tokens == 39
            await running.until_idle()
            assert (await running.client.status()).pages_used == 0

    run(check())


def test_flush_is_unavailable_while_nothing_is_served(serve, run):
    async def check():
        gate = threading.Event()
        async with serve(gate=gate) as running:
            with pytest.raises(Unavailable, match="loading"):
                await running.client.flush_cache()
            answer = await running.post("/flush_cache")
            assert (answer.status, answer.headers["retry-after"]) == (503, "2")
            assert not json.loads(answer.text)["success"]
            assert "loading" in json.loads(answer.text)["error"]
            gate.set()
            await running.server.wait_until_ready()
            assert (await running.post("/flush_cache")).status == 200
            await running.server.orchestrator.drain(1)
            assert (await running.post("/flush_cache")).status == 503

    run(check())


def test_flush_on_a_failed_engine_is_unavailable(serve, run):
    async def check():
        async with serve(fail_at=0) as running:
            with pytest.raises(Exception, match="failed"):
                await running.client.generate([1], FOUR)
            answer = await running.post("/flush_cache")
            assert answer.status == 503
            assert "the engine has failed" in json.loads(answer.text)["error"]

    run(check())
