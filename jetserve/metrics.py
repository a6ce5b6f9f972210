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
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

import prometheus_client
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

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


class StepRecord(NamedTuple):
    """One step of the engine, and how things stand after it. An idle engine reports its last step with zeros.

    Attributes:
      running, waiting: requests in slots, and queued.
      prefill_tokens, generated_tokens, preemptions: of this step alone.
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


_NOTHING = StepRecord(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)


class RequestRecord(NamedTuple):
    """One request that ended, however it did. Times are of one clock.

    Attributes:
      generated_tokens: of all n samples together.
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


class _Histogram:
    """Counts by bucket. Bounds are the union of what the faces show, so that one observation feeds them all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, *faces: Sequence[float]) -> None:
        self.bounds = sorted({bound for face in faces for bound in face})
        self.counts = [0] * (len(self.bounds) + 1)  # the last one is above all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class _Steps:
    """Engine thread only."""

    tokens: _Histogram = field(default_factory=lambda: _Histogram(_STEP_TOKENS))
    device_seconds: _Histogram = field(default_factory=lambda: _Histogram(_STEP_SECONDS))
    host_seconds: _Histogram = field(default_factory=lambda: _Histogram(_STEP_SECONDS))
    first_token_seconds: _Histogram = field(default_factory=lambda: _Histogram(_FIRST_TOKEN_SECONDS))
    inter_token_seconds: _Histogram = field(default_factory=lambda: _Histogram(_TOKEN_SECONDS))
    last: StepRecord = _NOTHING
    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    compilations: int = 0


@dataclass
class _RequestSeconds:
    """How long the parts of finished requests took."""

    total: _Histogram = field(default_factory=lambda: _Histogram(_REQUEST_SECONDS, _JETSTREAM_REQUEST_SECONDS))
    queue: _Histogram = field(default_factory=lambda: _Histogram(_REQUEST_SECONDS, _JETSTREAM_WAIT_SECONDS))
    inference: _Histogram = field(default_factory=lambda: _Histogram(_REQUEST_SECONDS))
    prefill: _Histogram = field(default_factory=lambda: _Histogram(_REQUEST_SECONDS))
    decode: _Histogram = field(default_factory=lambda: _Histogram(_REQUEST_SECONDS))
    per_output_token: _Histogram = field(default_factory=lambda: _Histogram(_TOKEN_SECONDS))
    per_prefill_token: _Histogram = field(default_factory=lambda: _Histogram(_JETSTREAM_PREFILL_SECONDS))


@dataclass
class _Requests:
    """What finished requests were."""

    prompt: _Histogram = field(default_factory=lambda: _Histogram(_TOKENS, _JETSTREAM_INPUT_TOKENS))
    generated: _Histogram = field(default_factory=lambda: _Histogram(_TOKENS))
    max_tokens: _Histogram = field(default_factory=lambda: _Histogram(_TOKENS))
    computed: _Histogram = field(default_factory=lambda: _Histogram(_TOKENS))
    samples: _Histogram = field(default_factory=lambda: _Histogram(_SAMPLES))
    preemptions: _Histogram = field(default_factory=lambda: _Histogram(_PREEMPTIONS))
    by_reason: dict[FinishedReason, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))
    queried_tokens: int = 0
    cached_tokens: int = 0
    rejected: int = 0


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

    def request_finished(self, record: RequestRecord) -> None:
        """Counts a request that was admitted to the queue and has ended."""
        requests, seconds = self._requests, self._seconds
        requests.by_reason[record.reason] += 1
        requests.prompt.observe(record.prompt_tokens)
        requests.generated.observe(record.generated_tokens)
        requests.max_tokens.observe(record.max_tokens)
        requests.samples.observe(record.n)
        requests.preemptions.observe(record.preemptions)
        requests.queried_tokens += record.prompt_tokens
        requests.cached_tokens += record.cached_tokens
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

    def _faces(self) -> list[_Family]:
        return [*self._gauges(), *self._counters(), *self._histograms()]

    def _gauges(self) -> Iterator[_Family]:
        vllm, jetstream, idx = self._vllm, self._jetstream, {**self._jetstream, "idx": "0"}
        steps = self._steps

        def last(read: Callable[[StepRecord], float]) -> Callable[[], float]:
            return lambda: read(steps.last)

        running, waiting = last(lambda r: r.running), last(lambda r: r.waiting)
        slots = last(lambda r: r.slots_used / r.slots_total if r.slots_total else 0.0)
        pages = last(lambda r: r.pages_used / r.pages_total if r.pages_total else 0.0)
        yield _gauge("vllm:num_requests_running", "Requests in slots.", vllm, running)
        yield _gauge("vllm:num_requests_waiting", "Requests in the queue.", vllm, waiting)
        yield _Family(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "Requests in the queue, by why they wait.",
            [("", {**vllm, "reason": "capacity"}), ("", {**vllm, "reason": "deferred"})],
            lambda: [steps.last.waiting, 0],
        )
        yield _gauge("vllm:kv_cache_usage_perc", "Part of the KV pages in use, 0 to 1.", vllm, pages)
        yield _gauge("vllm:engine_sleep_state", "1 for the state the engine is in.", {**vllm, "sleep_state": "awake"},
                     lambda: 1)  # fmt: skip
        adapters = {"max_lora": "0", "running_lora_adapters": ""}
        yield _gauge("vllm:lora_requests_info", "Adapters in use; the value is a Unix time.",
                     {**adapters, "waiting_lora_adapters": ""}, lambda: self._started_seconds)  # fmt: skip
        shape = {"block_size": str(self._model.page_size), "num_gpu_blocks": str(self._model.pages_total)}
        yield _gauge("vllm:cache_config_info", "Shape of the KV cache.", {**shape, "engine": "0"}, lambda: 1)
        yield _gauge("jetstream_prefill_backlog_size", "Requests waiting for their prefill.", jetstream, waiting)
        yield _gauge("jetstream_transfer_backlog_size", "Prefilled requests to be moved: none, prefill is in place.",
                     idx, lambda: 0)  # fmt: skip
        yield _gauge("jetstream_generate_backlog_size", "Prefilled requests without a slot: none, a slot comes first.",
                     idx, lambda: 0)  # fmt: skip
        yield _gauge("jetstream_slots_used_percentage", "Part of the slots in use, 0 to 1.", idx, slots)
        yield _gauge("jetstream_model_load_time", "Seconds that loading took, compilation included.", jetstream,
                     lambda: self._model.load_seconds)  # fmt: skip
        yield _gauge("jetstream_server_startup_latency", "Seconds from start to readiness.", jetstream,
                     lambda: self._model.startup_seconds)  # fmt: skip
        yield _gauge("num_requests_waiting", "Requests in the queue (JetStream's name).", jetstream, waiting)
        yield _gauge("kv_cache_utilization_perc", "Part of the KV pages in use (JetStream's name).", jetstream, pages)
        yield _gauge("lora_request_info", "Adapters loaded (JetStream's name).", {**jetstream, **adapters},
                     lambda: self._started_seconds)  # fmt: skip
        yield _Family("jetserve_slots", "gauge", "Slots, by state.", _states(vllm), self._slots)
        yield _Family("jetserve_kv_pages", "gauge", "KV pages, by state.", _states(vllm), self._pages)

    def _slots(self) -> list[float]:
        used = self._steps.last.slots_used
        return [used, (self._steps.last.slots_total or self._model.slots_total) - used]

    def _pages(self) -> list[float]:
        used = self._steps.last.pages_used
        return [used, (self._steps.last.pages_total or self._model.pages_total) - used]

    def _counters(self) -> Iterator[_Family]:
        vllm, steps, requests = self._vllm, self._steps, self._requests
        by_reason = requests.by_reason
        yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", vllm,
                       lambda: requests.queried_tokens)  # fmt: skip
        yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", vllm,
                       lambda: requests.cached_tokens)  # fmt: skip
        yield _counter("vllm:external_prefix_cache_queries", "Always 0: there is no outside cache.", vllm, lambda: 0)
        yield _counter("vllm:external_prefix_cache_hits", "Always 0: there is no outside cache.", vllm, lambda: 0)
        yield _counter("vllm:num_preemptions", "Sequences preempted.", vllm, lambda: steps.preemptions)
        yield _counter("vllm:prompt_tokens", "Tokens prefilled.", vllm, lambda: steps.prefill_tokens)
        yield _counter("vllm:prompt_tokens_cached", "Prompt tokens that need no prefill.", vllm,
                       lambda: requests.cached_tokens)  # fmt: skip
        yield _counter("vllm:generation_tokens", "Tokens generated.", vllm, lambda: steps.generated_tokens)
        yield _Family(
            "vllm:request_success",
            "counter",
            "Requests that ended, by how.",
            [("_total", {**vllm, "finished_reason": reason}) for reason in _REASONS],
            lambda: [by_reason[reason] for reason in _REASONS],
        )
        yield _counter("vllm:admission_rejections", "Requests a full queue refused.", vllm, lambda: requests.rejected)
        yield _counter("jetstream_request_success_count", "Requests completed.", self._jetstream,
                       lambda: by_reason["stop"] + by_reason["length"])  # fmt: skip
        yield _counter("jetserve_compilations_after_warmup", "Programs compiled after warm-up: should stay 0.", vllm,
                       lambda: steps.compilations)  # fmt: skip

    def _histograms(self) -> Iterator[_Family]:
        steps, seconds, requests = self._steps, self._seconds, self._requests
        for name, text, histogram, bounds in (
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
            yield _histogram(name, text, self._vllm, histogram, bounds)
        for name, text, histogram, bounds in (
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
            yield _histogram(f"jetstream_{name}", text, self._jetstream, histogram, bounds)


class _Family:
    """One metric family: fixed series, and a function that reads their values in the same order."""

    __slots__ = ("header", "help", "kind", "name", "rendered", "series", "values")

    def __init__(
        self,
        name: str,
        kind: Literal["gauge", "counter", "histogram"],
        text: str,
        series: Sequence[tuple[str, dict[str, str]]],
        values: Callable[[], list[float]],
    ) -> None:
        """Takes series as (suffix of the sample's name, labels)."""
        self.name, self.kind, self.help, self.values = name, kind, text, values
        self.series = [(name + suffix, labels) for suffix, labels in series]
        exposed = f"{name}_total" if kind == "counter" else name
        self.header = f"# HELP {exposed} {text}\n# TYPE {exposed} {kind}\n"
        self.rendered = [_render(sample, labels) for sample, labels in self.series]


def _gauge(name: str, text: str, labels: dict[str, str], read: Callable[[], float]) -> _Family:
    return _Family(name, "gauge", text, [("", labels)], lambda: [read()])


def _counter(name: str, text: str, labels: dict[str, str], read: Callable[[], float]) -> _Family:
    return _Family(name, "counter", text, [("_total", labels)], lambda: [read()])


def _histogram(
    name: str, text: str, labels: dict[str, str], histogram: _Histogram, bounds: Sequence[float] | None
) -> _Family:
    """Shows a histogram under some of its bounds; all of them when None."""
    shown = histogram.bounds if bounds is None else bounds
    places = [histogram.bounds.index(bound) for bound in shown]
    bounds_text = [str(floatToGoString(bound)) for bound in (*shown, float("inf"))]  # type: ignore[no-untyped-call]
    series = [("_bucket", {**labels, "le": text}) for text in bounds_text]

    def values() -> list[float]:
        cumulative = list(accumulate(histogram.counts))
        count = cumulative[-1]
        return [*[cumulative[place] for place in places], count, count, histogram.total]

    return _Family(name, "histogram", text, [*series, ("_count", labels), ("_sum", labels)], values)


def _states(labels: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    return [("", {**labels, "state": state}) for state in ("used", "free")]


def _render(name: str, labels: dict[str, str]) -> str:
    escaped = (
        (key, text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")) for key, text in labels.items()
    )
    pairs = ",".join(f'{key}="{text}"' for key, text in sorted(escaped))
    return f"{name}{{{pairs}}}"
