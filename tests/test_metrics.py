"""Names, labels and kinds against the published lists; values by hand; cost."""

import timeit

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jetserve.metrics import KvRecord, Metrics, ModelRecord, RequestRecord, StepRecord

IDLE = StepRecord(0, 0, 0, 256, 0, 1000, 0, 0, 0, 0.0, 0.0)
KV = KvRecord(
    pages_free=15,
    cached_pages=70,
    evicted_pages=6,
    host_pages_used=5,
    host_pages_total=9,
    host_saved_pages=12,
    host_loaded_pages=7,
    queried_tokens=1000,
    cached_tokens=300,
    host_cached_tokens=100,
)
STEP = StepRecord(3, 2, 4, 8, 25, 100, 40, 3, 1, 0.004, 0.0003, 24, KV)
REQUEST = RequestRecord("stop", 100, 11, 20, 64, 1, 10.0, 10.25, 11.25, 13.25, 2)

# name -> kind and labels beside the universal ones; shared/protocols.md 2.2, from vLLM 0.32.
VLLM = {
    "vllm:num_requests_running": ("gauge", set()),
    "vllm:num_requests_waiting": ("gauge", set()),
    "vllm:num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "vllm:kv_cache_usage_perc": ("gauge", set()),
    "vllm:engine_sleep_state": ("gauge", {"sleep_state"}),
    **{
        f"vllm:{name}": ("counter", set())
        for name in [
            "prefix_cache_queries",
            "prefix_cache_hits",
            "external_prefix_cache_queries",
            "external_prefix_cache_hits",
            "num_preemptions",
            "prompt_tokens",
            "prompt_tokens_cached",
            "generation_tokens",
            "admission_rejections",
        ]
    },
    "vllm:request_success": ("counter", {"finished_reason"}),
    **{
        f"vllm:{name}": ("histogram", {"le"})
        for name in [
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "iteration_tokens_total",
            "request_max_num_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
            "request_num_preemptions",
            "request_prefill_kv_computed_tokens",
        ]
    },
}
# protocols.md 2.7, from JetStream's core/metrics/prometheus.py.
JETSTREAM = {
    **{
        name: ("gauge", set())
        for name in [
            "jetstream_prefill_backlog_size",
            "jetstream_model_load_time",
            "jetstream_server_startup_latency",
            "num_requests_waiting",
            "kv_cache_utilization_perc",
        ]
    },
    **{
        f"jetstream_{name}": ("gauge", {"idx"})
        for name in ("transfer_backlog_size", "generate_backlog_size", "slots_used_percentage")
    },
    "lora_request_info": ("gauge", {"max_lora", "running_lora_adapters"}),
    "jetstream_request_success_count": ("counter", set()),
    **{
        f"jetstream_{name}": ("histogram", {"le"})
        for name in [
            "queue_duration",
            "request_input_length",
            "request_output_length",
            "time_to_first_token",
            "time_per_output_token",
            "time_per_prefill_token",
            "time_per_request",
            "wait_time_per_request",
        ]
    },
}
BOUNDS = {
    "vllm:e2e_request_latency_seconds": ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "vllm:time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 "
    "2560",
    "vllm:inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "vllm:request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 500000 "
    "1000000 2000000",
    "vllm:request_params_n": "1 2 5 10 20",
    "jetstream_queue_duration": ".01 .02 .05 .1 .2 .5 1 2 5 10 20 50 100",
    "jetstream_request_input_length": "16 32 64 128 256 512 1024 2048 4096 8192 16384 32768",
    "jetstream_request_output_length": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 "
    "500000 1000000 2000000",
    "jetstream_time_to_first_token": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10",
    "jetstream_time_per_output_token": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5",
    "jetstream_time_per_prefill_token": ".00001 .00002 .00005 .0001 .0002 .0005 .001 .002 .005 .01 .02 .05 .1",
    "jetstream_time_per_request": "1 2.5 5 10 15 20 30 40 50 60",
}


def scrape(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}


def value(metrics, name, **labels):
    for family in scrape(metrics).values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no sample {name} {labels}")


@pytest.mark.parametrize("name", VLLM)
def test_vllm_family_has_its_kind_and_labels(name):
    kind, labels = VLLM[name]
    family = scrape(Metrics("some-model"))[name]
    assert family.type == kind
    for sample in family.samples:
        assert set(sample.labels) - {"le"} == {"model_name", "engine"} | (labels - {"le"})
        assert (sample.labels["model_name"], sample.labels["engine"]) == ("some-model", "0")


@pytest.mark.parametrize("name", JETSTREAM)
def test_jetstream_family_has_its_kind_and_labels(name):
    kind, labels = JETSTREAM[name]
    family = scrape(Metrics("some-model", instance_id="pod-1"))[name]
    assert family.type == kind
    for sample in family.samples:
        assert set(sample.labels) - {"le"} == {"model_name", "id"} | (labels - {"le"})
        assert (sample.labels["model_name"], sample.labels["id"]) == ("some_model", "pod-1")


def test_no_family_is_there_but_the_listed_ones_and_ours():
    ours = {"jetserve_compilations_after_warmup", "jetserve_slots", "jetserve_kv_pages", "jetserve_step_device_seconds"}
    ours |= {"jetserve_step_host_seconds", "vllm:lora_requests_info", "vllm:cache_config_info"}
    ours |= {"jetserve_prefix_pages", "jetserve_prefix_evicted_pages", "jetserve_prefill_padded_tokens"}
    ours |= {"jetserve_host_kv_pages", "jetserve_host_kv_saved_pages", "jetserve_host_kv_loaded_pages"}
    ours |= {"jetserve_shed_requests"}
    assert set(scrape(Metrics("m"))) == set(VLLM) | set(JETSTREAM) | ours


@pytest.mark.parametrize("name", BOUNDS)
def test_histogram_has_the_published_buckets(name):
    family = scrape(Metrics("m"))[name]
    bounds = [float(s.labels["le"]) for s in family.samples if s.name == f"{name}_bucket"]
    assert bounds == [*map(float, BOUNDS[name].split()), float("inf")]


def test_router_labels_of_cache_and_adapters():
    metrics = Metrics("m")
    metrics.model_loaded(ModelRecord(page_size=16, pages_total=99, slots_total=4, load_seconds=2.5, startup_seconds=9))
    families = scrape(metrics)
    assert families["vllm:cache_config_info"].samples[0].labels == {
        "block_size": "16",
        "num_gpu_blocks": "99",
        "engine": "0",
    }
    assert set(families["vllm:lora_requests_info"].samples[0].labels) == {
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    }
    assert value(metrics, "jetstream_model_load_time") == 2.5
    assert value(metrics, "jetstream_server_startup_latency") == 9


def test_step_shows_under_both_names():
    metrics = Metrics("m")
    metrics.step_finished(STEP)
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == value(metrics, "jetstream_prefill_backlog_size") == 2
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == value(metrics, "kv_cache_utilization_perc") == 0.25
    assert value(metrics, "jetstream_slots_used_percentage") == 0.5
    assert value(metrics, "jetserve_slots", state="free") == 4
    assert value(metrics, "vllm:prompt_tokens_total") == 40 + 300
    assert value(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "vllm:num_preemptions_total") == 1
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 43
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="32.0") == 0
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="64.0") == 1
    assert value(metrics, "jetserve_step_device_seconds_sum") == 0.004
    assert value(metrics, "jetserve_prefill_padded_tokens_total") == 24


def test_kv_pages_are_used_cached_or_free():
    metrics = Metrics("m")
    metrics.model_loaded(
        ModelRecord(page_size=16, pages_total=99, slots_total=4, load_seconds=1.0, startup_seconds=1.0)
    )
    states = ("used", "cached", "free")
    assert [value(metrics, "jetserve_kv_pages", state=state) for state in states] == [0, 0, 99]
    metrics.step_finished(STEP)
    assert [value(metrics, "jetserve_kv_pages", state=state) for state in states] == [25, 60, 15]
    assert value(metrics, "jetserve_prefix_pages") == 70  # 60 to be had, and 10 of those in use
    assert [value(metrics, "jetserve_host_kv_pages", state=state) for state in ("used", "free")] == [5, 4]


def test_cache_counters_are_the_engines_totals_as_vllm_splits_them():
    """1000 tokens asked: the device had 200; the other 800 were asked of host memory, which had 100."""
    metrics = Metrics("m")
    metrics.step_finished(STEP)
    metrics.step_finished(IDLE._replace(kv=KV))
    expected = {
        "vllm:prefix_cache_queries_total": 1000,
        "vllm:prefix_cache_hits_total": 200,
        "vllm:external_prefix_cache_queries_total": 800,
        "vllm:external_prefix_cache_hits_total": 100,
        "vllm:prompt_tokens_cached_total": 300,
        "jetserve_prefix_evicted_pages_total": 6,
        "jetserve_host_kv_saved_pages_total": 12,
        "jetserve_host_kv_loaded_pages_total": 7,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    metrics.step_finished(IDLE._replace(kv=KV._replace(host_pages_total=0, host_cached_tokens=0)))
    assert value(metrics, "vllm:prefix_cache_hits_total") == 300
    assert value(metrics, "vllm:external_prefix_cache_queries_total") == 0


def test_idle_report_zeroes_the_gauges_and_counts_no_step():
    metrics = Metrics("m")
    metrics.step_finished(STEP)
    metrics.step_finished(IDLE)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert value(metrics, name) == 0
    assert value(metrics, "jetstream_slots_used_percentage") == 0
    assert value(metrics, "vllm:iteration_tokens_total_count") == 1


def test_finished_request_is_split_into_its_times():
    metrics = Metrics("m")
    metrics.request_finished(REQUEST)
    expected = {
        "vllm:e2e_request_latency_seconds_sum": 3.25,
        "jetstream_time_per_request_sum": 3.25,
        "vllm:request_queue_time_seconds_sum": 0.25,
        "jetstream_queue_duration_sum": 0.25,
        "vllm:request_inference_time_seconds_sum": 3.0,
        "vllm:request_prefill_time_seconds_sum": 1.0,
        "vllm:request_decode_time_seconds_sum": 2.0,
        "vllm:request_time_per_output_token_seconds_sum": 0.2,
        "jetstream_time_per_prefill_token_sum": 1 / 80,
        "vllm:request_prompt_tokens_sum": 100,
        "jetstream_request_input_length_sum": 100,
        "vllm:request_generation_tokens_sum": 11,
        "vllm:request_params_max_tokens_sum": 64,
        "vllm:request_prefill_kv_computed_tokens_sum": 80,
        "vllm:request_num_preemptions_sum": 2,
        "jetstream_request_success_count_total": 1,
    }
    assert {name: value(metrics, name) for name in expected} == pytest.approx(expected)
    # One observation, each face by its own bounds: 0.25 s is above .2 and at most .3 and .5.
    assert value(metrics, "vllm:request_queue_time_seconds_bucket", le="0.3") == 1
    assert value(metrics, "jetstream_queue_duration_bucket", le="0.2") == 0
    assert value(metrics, "jetstream_queue_duration_bucket", le="0.5") == 1


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "timeout", "error"])
def test_each_reason_is_counted_apart(reason):
    metrics = Metrics("m")
    metrics.request_finished(REQUEST._replace(reason=reason))
    counts = {s.labels["finished_reason"]: s.value for s in scrape(metrics)["vllm:request_success"].samples if s.value}
    assert counts == {reason: 1}
    assert value(metrics, "jetstream_request_success_count_total") == (reason in ("stop", "length"))


def test_request_that_never_got_a_slot_counts_as_waiting_only():
    metrics = Metrics("m")
    metrics.request_finished(REQUEST._replace(reason="timeout", scheduled_seconds=None, first_token_seconds=None))
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 3.25
    assert value(metrics, "vllm:request_inference_time_seconds_count") == 0


def test_value_on_a_bound_is_below_it():
    metrics = Metrics("m")
    metrics.first_token(0.001)
    metrics.inter_token(0.01, 5)
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.001") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.01") == 5
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.05)


def test_rejections_and_compilations_are_counted():
    metrics = Metrics("m")
    metrics.request_rejected()
    metrics.request_shed()
    metrics.request_shed()
    metrics.compiled_after_warmup(2)
    assert value(metrics, "vllm:admission_rejections_total") == 1
    assert value(metrics, "jetserve_shed_requests_total") == 2
    assert value(metrics, "jetserve_compilations_after_warmup_total") == 2


def test_exposition_equals_prometheus_clients_own_rendering():
    metrics = Metrics('quote" back\\slash\nline')
    metrics.step_finished(STEP)
    metrics.request_finished(REQUEST)

    def samples(text):
        return [
            (family.name, family.type, sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    ours = samples(metrics.exposition().decode())
    theirs = samples(prometheus_client.generate_latest(metrics.registry).decode())
    assert sorted(ours, key=str) == sorted(theirs, key=str)


def test_process_wide_registry_is_left_alone():
    Metrics("m")
    assert b"vllm" not in prometheus_client.generate_latest(prometheus_client.REGISTRY)


def test_series_do_not_grow_with_requests():
    metrics = Metrics("m")
    before = metrics.exposition().count(b"\n")
    for i in range(2000):
        metrics.request_finished(REQUEST._replace(prompt_tokens=i, max_tokens=i + 1))
    assert metrics.exposition().count(b"\n") == before


def test_a_step_of_256_slots_and_a_scrape_are_cheap():
    metrics = Metrics("m")

    def step():
        metrics.step_finished(STEP)
        for _ in range(256):
            metrics.inter_token(0.013)

    # 110 us and 0.26 ms where this was written; the limits allow a busy machine ten times that.
    assert min(timeit.repeat(step, number=10, repeat=5)) / 10 < 1.5e-3
    assert min(timeit.repeat(metrics.exposition, number=3, repeat=5)) / 3 < 5e-3
