"""The HTTP port."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from jetserve.request import SamplingParams


def test_metrics_are_prometheus_text_and_count_what_was_served(serve, run):
    async def check():
        async with serve(step_seconds=0.002) as running:
            await running.client.generate([5, 6], SamplingParams(max_tokens=10))
            await running.until_idle()
            answer = await running.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=")
            samples = {
                (sample.name, *sorted(sample.labels.values())): sample.value
                for family in text_string_to_metric_families(answer.text)
                for sample in family.samples
            }
        assert samples["vllm:prompt_tokens_total", "0", "num-bers"] == 2
        assert samples["vllm:generation_tokens_total", "0", "num-bers"] == 10
        assert samples["vllm:request_success_total", "0", "length", "num-bers"] == 1
        assert samples["vllm:time_to_first_token_seconds_count", "0", "num-bers"] == 1
        assert samples["vllm:inter_token_latency_seconds_count", "0", "num-bers"] == 9
        assert samples["jetserve_compilations_after_warmup_total", "0", "num-bers"] == 0
        assert samples["vllm:cache_config_info", "0", "16", "64"] == 1
        (started,) = [value for key, value in samples.items() if key[0] == "jetstream_server_startup_latency"]
        assert 0 < started < 60

    run(check())


def test_user_text_is_never_a_label(serve, run):
    async def check():
        async with serve() as running:
            before = (await running.get("/metrics")).text.count("\n")
            for i in range(20):
                await running.client.generate([5], SamplingParams(max_tokens=1), request_id=f"secret-{i}")
            after = (await running.get("/metrics")).text
            assert (after.count("\n"), "secret" in after) == (before, False)

    run(check())


def test_unknown_paths_and_methods(serve, run):
    async def check():
        async with serve() as running:
            assert (await running.get("/nothing")).status == 404
            answers = await asyncio.gather(*(running.get("/metrics") for _ in range(20)))
            assert {answer.status for answer in answers} == {200}

    run(check())
