"""What Prometheus sees. One state, shown under vLLM's names and JetStream's, and ours where neither has one.

Writers call the verbs of `Metrics`; each verb has one calling thread at a time, and none of them takes a lock or makes
a string. A scrape reads the state as it is, so the sum of a histogram may lead its counts by one observation. Names,
labels and buckets are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`) and JetStream (`core/metrics/prometheus.py`),
so that dashboards, autoscalers and routers made for them work. Text from users is never a label. Imports no jax.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import prometheus_client
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from jetserve.exposition import Family, Histogram, counter, gauge, histogram

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
FinishedReason = Literal["stop", "length", "abort", "timeout", "error"]
_REASONS: tuple[FinishedReason, ...] = ("stop", "length", "abort", "timeout", "error")

_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                    480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                  80.0)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5) if m * 10**e <= 2_000_000)
_STEP_TOKENS = (1.0, 8.0, *(float(2**e) for e in range(4, 15)))
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# JetStream's own lists, where they differ.
_JETSTREAM_WAIT_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_JETSTREAM_REQUEST_SECONDS = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_JETSTREAM_PREFILL_SECONDS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
                              0.1)  # fmt: skip
_JETSTREAM_INPUT_TOKENS = tuple(float(2**e) for e in range(4, 16))
_JETSTREAM_FIRST_TOKEN_SECONDS = _FIRST_TOKEN_SECONDS[:16]
_JETSTREAM_TOKEN_SECONDS = _TOKEN_SECONDS[:13]


class KvRecord(NamedTuple):
    """The prefix cache and its host memory after a step. What happened is counted since the start.

    Attributes:
      pages_free: of the pool, that nobody holds.
      cached_pages: of the pool, that the cache holds, in use or not.
      evicted_pages: that left the pool's part of the cache, to host memory or for good.
      queried_tokens, cached_tokens: of prompts that were looked up, and found; once for each sample, when it first got
        a slot, so that a resumed one does not count again. `host_cached_tokens` of them came from host memory.
    """

    pages_free: int = 0
    cached_pages: int = 0
    evicted_pages: int = 0
    host_pages_used: int = 0
    host_pages_total: int = 0
    host_saved_pages: int = 0
    host_loaded_pages: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0


class StepRecord(NamedTuple):
    """One step of the engine, and how things stand after it. An idle engine reports its last step with zeros.

    Attributes:
      running, waiting: requests in slots, and queued.
      pages_used: that cannot be had: running requests have them or share them.
      prefill_tokens, generated_tokens, preemptions, padded_tokens: of this step alone.
      device_seconds: from the step's dispatch to its result; host_seconds: what the engine thread computed for it.
    """

    running: int
    waiting: int
    slots_used: int
    slots_total: int
    pages_used: int
    pages_total: int
    prefill_tokens: int
    generated_tokens: int
    preemptions: int
    device_seconds: float
    host_seconds: float
    padded_tokens: int = 0
    kv: KvRecord = KvRecord()


_NOTHING = StepRecord(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)


class RequestRecord(NamedTuple):
    """One request that ended, however it did. Times are of one clock.

    Attributes:
      generated_tokens: of all n samples together.
      cached_tokens: of the prompt, that the first of its samples found cached.
      scheduled_seconds, first_token_seconds: None when it never came so far.
    """

    reason: FinishedReason
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    max_tokens: int
    n: int
    arrival_seconds: float
    scheduled_seconds: float | None
    first_token_seconds: float | None
    finished_seconds: float
    preemptions: int


class ModelRecord(NamedTuple):
    """What is known once the model serves."""

    page_size: int
    pages_total: int
    slots_total: int
    load_seconds: float
    startup_seconds: float


@dataclass
class _Steps:
    """Engine thread only."""

    tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    device_seconds: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))
    host_seconds: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_SECONDS))
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(_TOKEN_SECONDS))
    last: StepRecord = _NOTHING
    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    padded_tokens: int = 0
    compilations: int = 0


@dataclass
class _RequestSeconds:
    """How long the parts of finished requests took."""

    total: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS, _JETSTREAM_REQUEST_SECONDS))
    queue: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS, _JETSTREAM_WAIT_SECONDS))
    inference: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS))
    decode: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN_SECONDS))
    per_prefill_token: Histogram = field(default_factory=lambda: Histogram(_JETSTREAM_PREFILL_SECONDS))


@dataclass
class _Requests:
    """What finished requests were."""

    prompt: Histogram = field(default_factory=lambda: Histogram(_TOKENS, _JETSTREAM_INPUT_TOKENS))
    generated: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    max_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    computed: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    samples: Histogram = field(default_factory=lambda: Histogram(_SAMPLES))
    preemptions: Histogram = field(default_factory=lambda: Histogram(_PREEMPTIONS))
    by_reason: dict[FinishedReason, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))
    rejected: int = 0
    shed: int = 0


class Metrics(Collector):
    """The state of one engine's metrics, and its faces.

    Args:
      model_name: what clients call the model.
      registry: where it registers itself; a private one when None, never the process-wide one.
      instance_id: JetStream's `id` label; the host's name (on Kubernetes the pod's) when None.
    """

    def __init__(
        self, model_name: str, registry: CollectorRegistry | None = None, *, instance_id: str | None = None
    ) -> None:
        self._steps = _Steps()
        self._seconds = _RequestSeconds()
        self._requests = _Requests()
        self._model = ModelRecord(0, 0, 0, 0.0, 0.0)
        self._started_seconds = time.time()
        self._vllm = {"model_name": model_name, "engine": "0"}
        # JetStream replaces "-"; what else Prometheus would not take as a name is replaced as well.
        self._jetstream = {
            "id": socket.gethostname() if instance_id is None else instance_id,
            "model_name": re.sub(r"[^a-zA-Z0-9_:]", "_", model_name),
        }
        self._families = self._faces()
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)

    def model_loaded(self, record: ModelRecord) -> None:
        """Sets what is constant while the model serves."""
        self._model = record
        self._families = self._faces()  # some of it is labels

    def step_finished(self, record: StepRecord) -> None:
        """Counts one step; the gauges show its record until the next."""
        steps = self._steps
        steps.last = record
        tokens = record.prefill_tokens + record.generated_tokens
        if not tokens and not record.device_seconds:
            return  # the report of an idle engine
        steps.prefill_tokens += record.prefill_tokens
        steps.generated_tokens += record.generated_tokens
        steps.preemptions += record.preemptions
        steps.padded_tokens += record.padded_tokens
        steps.tokens.observe(tokens)
        steps.device_seconds.observe(record.device_seconds)
        steps.host_seconds.observe(record.host_seconds)

    def first_token(self, seconds: float) -> None:
        """Observes the time from a request's arrival to its first token."""
        self._steps.first_token_seconds.observe(seconds)

    def inter_token(self, seconds: float, tokens: int = 1) -> None:
        """Observes `tokens` tokens that each came `seconds` after the one before."""
        self._steps.inter_token_seconds.observe(seconds, tokens)

    def compiled_after_warmup(self, count: int = 1) -> None:
        """Counts compilations that should not have happened."""
        self._steps.compilations += count

    def request_rejected(self) -> None:
        """Counts a request that the full queue turned away."""
        self._requests.rejected += 1

    def request_shed(self) -> None:
        """Counts a request that was given up because it could not have met its limits; it has ended as well."""
        self._requests.shed += 1

    def request_finished(self, record: RequestRecord) -> None:
        """Counts a request that was admitted to the queue and has ended."""
        requests, seconds = self._requests, self._seconds
        requests.by_reason[record.reason] += 1
        requests.prompt.observe(record.prompt_tokens)
        requests.generated.observe(record.generated_tokens)
        requests.max_tokens.observe(record.max_tokens)
        requests.samples.observe(record.n)
        requests.preemptions.observe(record.preemptions)
        seconds.total.observe(record.finished_seconds - record.arrival_seconds)
        scheduled, first = record.scheduled_seconds, record.first_token_seconds
        if scheduled is None:
            seconds.queue.observe(record.finished_seconds - record.arrival_seconds)
            return
        seconds.queue.observe(scheduled - record.arrival_seconds)
        seconds.inference.observe(record.finished_seconds - scheduled)
        if first is None:
            return
        computed = record.prompt_tokens - record.cached_tokens
        requests.computed.observe(computed)
        seconds.prefill.observe(first - scheduled)
        seconds.per_prefill_token.observe((first - scheduled) / max(computed, 1))
        seconds.decode.observe(record.finished_seconds - first)
        each = record.generated_tokens / record.n
        if each > 1:
            seconds.per_output_token.observe((record.finished_seconds - first) / (each - 1))

    def collect(self) -> Iterator[Metric]:
        """The state as prometheus_client's families, for registries that hold more than ours."""
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for (name, labels), value in zip(family.series, family.values(), strict=True):
                metric.add_sample(name, labels, value)
            yield metric

    def exposition(self) -> bytes:
        """The state in Prometheus' text format. About ten times cheaper than rendering `collect()`."""
        lines: list[str] = []
        for family in self._families:
            lines.append(family.header)
            lines.extend([f"{name} {value!r}\n" for name, value in zip(family.rendered, family.values(), strict=True)])
        return "".join(lines).encode()

    def _faces(self) -> list[Family]:
        return [*self._gauges(), *self._counters(), *self._histograms()]

    def _gauges(self) -> Iterator[Family]:
        vllm, jetstream, idx = self._vllm, self._jetstream, {**self._jetstream, "idx": "0"}
        steps = self._steps

        def last(read: Callable[[StepRecord], float]) -> Callable[[], float]:
            return lambda: read(steps.last)

        running, waiting = last(lambda r: r.running), last(lambda r: r.waiting)
        slots = last(lambda r: r.slots_used / r.slots_total if r.slots_total else 0.0)
        pages = last(lambda r: r.pages_used / r.pages_total if r.pages_total else 0.0)
        yield gauge("vllm:num_requests_running", "Requests in slots.", vllm, running)
        yield gauge("vllm:num_requests_waiting", "Requests in the queue.", vllm, waiting)
        yield Family(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "Requests in the queue, by why they wait.",
            [("", {**vllm, "reason": "capacity"}), ("", {**vllm, "reason": "deferred"})],
            lambda: [steps.last.waiting, 0],
        )
        yield gauge("vllm:kv_cache_usage_perc", "Part of the KV pages in use, 0 to 1; cached ones are free to take.",
                    vllm, pages)  # fmt: skip
        yield gauge("vllm:engine_sleep_state", "1 for the state the engine is in.", {**vllm, "sleep_state": "awake"},
                     lambda: 1)  # fmt: skip
        adapters = {"max_lora": "0", "running_lora_adapters": ""}
        yield gauge("vllm:lora_requests_info", "Adapters in use; the value is a Unix time.",
                     {**adapters, "waiting_lora_adapters": ""}, lambda: self._started_seconds)  # fmt: skip
        shape = {"block_size": str(self._model.page_size), "num_gpu_blocks": str(self._model.pages_total)}
        yield gauge("vllm:cache_config_info", "Shape of the KV cache.", {**shape, "engine": "0"}, lambda: 1)
        yield gauge("jetstream_prefill_backlog_size", "Requests waiting for their prefill.", jetstream, waiting)
        yield gauge("jetstream_transfer_backlog_size", "Prefilled requests to be moved: none, prefill is in place.",
                     idx, lambda: 0)  # fmt: skip
        yield gauge("jetstream_generate_backlog_size", "Prefilled requests without a slot: none, a slot comes first.",
                     idx, lambda: 0)  # fmt: skip
        yield gauge("jetstream_slots_used_percentage", "Part of the slots in use, 0 to 1.", idx, slots)
        yield gauge("jetstream_model_load_time", "Seconds that loading took, compilation included.", jetstream,
                     lambda: self._model.load_seconds)  # fmt: skip
        yield gauge("jetstream_server_startup_latency", "Seconds from start to readiness.", jetstream,
                     lambda: self._model.startup_seconds)  # fmt: skip
        yield gauge("num_requests_waiting", "Requests in the queue (JetStream's name).", jetstream, waiting)
        yield gauge("kv_cache_utilization_perc", "Part of the KV pages in use (JetStream's name).", jetstream, pages)
        yield gauge("lora_request_info", "Adapters loaded (JetStream's name).", {**jetstream, **adapters},
                     lambda: self._started_seconds)  # fmt: skip
        yield Family("jetserve_slots", "gauge", "Slots, by state.", _states(vllm, "used", "free"), self._slots)
        yield Family("jetserve_kv_pages", "gauge", "KV pages: used by requests, cached for the next ones, free.",
                     _states(vllm, "used", "cached", "free"), self._pages)  # fmt: skip
        yield gauge("jetserve_prefix_pages", "KV pages that the prefix cache holds, those in use too.", vllm,
                    last(lambda r: r.kv.cached_pages))  # fmt: skip
        yield Family("jetserve_host_kv_pages", "gauge", "KV pages of host memory, by state.",
                     _states(vllm, "used", "free"), self._host_pages)  # fmt: skip

    def _slots(self) -> list[float]:
        used = self._steps.last.slots_used
        return [used, (self._steps.last.slots_total or self._model.slots_total) - used]

    def _pages(self) -> list[float]:
        last = self._steps.last
        if not last.pages_total:
            return [0, 0, self._model.pages_total]
        return [last.pages_used, last.pages_total - last.pages_used - last.kv.pages_free, last.kv.pages_free]

    def _host_pages(self) -> list[float]:
        kv = self._steps.last.kv
        return [kv.host_pages_used, kv.host_pages_total - kv.host_pages_used]

    def _counters(self) -> Iterator[Family]:
        vllm, steps, requests = self._vllm, self._steps, self._requests
        by_reason = requests.by_reason
        yield from self._cache_counters()
        yield counter("vllm:num_preemptions", "Sequences preempted.", vllm, lambda: steps.preemptions)
        yield counter("vllm:prompt_tokens", "Prompt tokens prefilled, or found cached.", vllm,
                      lambda: steps.prefill_tokens + steps.last.kv.cached_tokens)  # fmt: skip
        yield counter("vllm:generation_tokens", "Tokens generated.", vllm, lambda: steps.generated_tokens)
        yield Family(
            "vllm:request_success",
            "counter",
            "Requests that ended, by how.",
            [("_total", {**vllm, "finished_reason": reason}) for reason in _REASONS],
            lambda: [by_reason[reason] for reason in _REASONS],
        )
        yield counter("vllm:admission_rejections", "Requests a full queue refused.", vllm, lambda: requests.rejected)
        yield counter("jetserve_shed_requests", "Requests given up: they could not meet their limits.", vllm,
                      lambda: requests.shed)  # fmt: skip
        yield counter("jetserve_prefill_padded_tokens", "Padding that was prefilled beside prompt tokens.", vllm,
                      lambda: steps.padded_tokens)  # fmt: skip
        yield counter("jetstream_request_success_count", "Requests completed.", self._jetstream,
                      lambda: by_reason["stop"] + by_reason["length"])  # fmt: skip
        yield counter("jetserve_compilations_after_warmup", "Programs compiled after warm-up: should stay 0.", vllm,
                      lambda: steps.compilations)  # fmt: skip

    def _cache_counters(self) -> Iterator[Family]:
        """As vLLM counts: what the cache on the device does not have is asked of the one outside, here host memory."""
        steps = self._steps

        def last(read: Callable[[KvRecord], int]) -> Callable[[], float]:
            return lambda: read(steps.last.kv)

        def missed(kv: KvRecord) -> int:
            return kv.queried_tokens - (kv.cached_tokens - kv.host_cached_tokens) if kv.host_pages_total else 0

        reads: tuple[tuple[str, str, Callable[[KvRecord], int]], ...] = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda kv: kv.queried_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache on the device.",
             lambda kv: kv.cached_tokens - kv.host_cached_tokens),
            ("vllm:external_prefix_cache_queries", "Prompt tokens looked up in host memory.", missed),
            ("vllm:external_prefix_cache_hits", "Prompt tokens found in host memory.",
             lambda kv: kv.host_cached_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens that needed no prefill.", lambda kv: kv.cached_tokens),
            ("jetserve_prefix_evicted_pages", "Cached pages that made room.", lambda kv: kv.evicted_pages),
            ("jetserve_host_kv_saved_pages", "Pages moved to host memory.", lambda kv: kv.host_saved_pages),
            ("jetserve_host_kv_loaded_pages", "Pages brought back from host memory.", lambda kv: kv.host_loaded_pages),
        )  # fmt: skip
        for name, text, read in reads:
            yield counter(name, text, self._vllm, last(read))

    def _histograms(self) -> Iterator[Family]:
        steps, seconds, requests = self._steps, self._seconds, self._requests
        for name, text, observed, bounds in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", steps.first_token_seconds, None),
            ("vllm:inter_token_latency_seconds", "Token to token.", steps.inter_token_seconds, None),
            ("vllm:request_time_per_output_token_seconds", "Mean of a request.", seconds.per_output_token, None),
            ("vllm:e2e_request_latency_seconds", "Arrival to end.", seconds.total, _REQUEST_SECONDS),
            ("vllm:request_queue_time_seconds", "Arrival to slot.", seconds.queue, _REQUEST_SECONDS),
            ("vllm:request_inference_time_seconds", "Slot to end.", seconds.inference, None),
            ("vllm:request_prefill_time_seconds", "Slot to first token.", seconds.prefill, None),
            ("vllm:request_decode_time_seconds", "First token to end.", seconds.decode, None),
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", requests.prompt, _TOKENS),
            ("vllm:request_generation_tokens", "Tokens generated for a request.", requests.generated, None),
            ("vllm:iteration_tokens_total", "Tokens of a step.", steps.tokens, None),
            ("vllm:request_max_num_generation_tokens", "Most tokens of a request.", requests.generated, None),
            ("vllm:request_params_n", "Samples asked for.", requests.samples, None),
            ("vllm:request_params_max_tokens", "max_tokens asked for.", requests.max_tokens, None),
            ("vllm:request_num_preemptions", "Preemptions of a request.", requests.preemptions, None),
            ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not cached.", requests.computed, None),
            ("jetserve_step_device_seconds", "Dispatch to result of a step.", steps.device_seconds, None),
            ("jetserve_step_host_seconds", "Host work of a step.", steps.host_seconds, None),
        ):
            yield histogram(name, text, self._vllm, observed, bounds)
        for name, text, observed, bounds in (
            ("queue_duration", "Seconds a request waits.", seconds.queue, _JETSTREAM_WAIT_SECONDS),
            ("request_input_length", "Prompt tokens of a request.", requests.prompt, _JETSTREAM_INPUT_TOKENS),
            ("request_output_length", "Tokens generated for a request.", requests.generated, None),
            ("time_to_first_token", "Seconds to first token.", steps.first_token_seconds,
             _JETSTREAM_FIRST_TOKEN_SECONDS),
            ("time_per_output_token", "Mean of a request.", seconds.per_output_token, _JETSTREAM_TOKEN_SECONDS),
            ("time_per_prefill_token", "Mean of a request.", seconds.per_prefill_token, None),
            ("time_per_request", "Arrival to end.", seconds.total, _JETSTREAM_REQUEST_SECONDS),
            ("wait_time_per_request", "Seconds in no slot.", seconds.queue, _JETSTREAM_WAIT_SECONDS),
        ):  # fmt: skip
            yield histogram(f"jetstream_{name}", text, self._jetstream, observed, bounds)


def _states(labels: dict[str, str], *states: str) -> list[tuple[str, dict[str, str]]]:
    return [("", {**labels, "state": state}) for state in states]
