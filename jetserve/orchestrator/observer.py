"""What the orchestrator sees, told to the metrics. Event loop only; imports no jax."""

from __future__ import annotations

from jetserve.engine.engine import EngineStatus
from jetserve.metrics import FinishedReason, KvRecord, Metrics, RequestRecord, StepRecord
from jetserve.orchestrator.stream import Channel, Sample


class Observer:
    """Feeds the metrics of one engine; with None it keeps what it sees to itself."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        self.shed_requests = 0
        self._gaps: dict[float, int] = {}  # of the step under way: when the tokens before came -> how many come now
        self._now = 0.0
        self._last: EngineStatus | None = None  # the last one whose step had a result

    def rejected(self) -> None:
        """A request was turned away by the full queue."""
        if self._metrics is not None:
            self._metrics.request_rejected()

    def shed(self) -> None:
        """A request was given up because it could not have met its limits."""
        self.shed_requests += 1
        if self._metrics is not None:
            self._metrics.request_shed()

    def tokens(self, channel: Channel, sample: Sample, count: int, now: float) -> None:
        """Tokens of a sample arrived. Rows that ran together are told as one, when the step is over."""
        last, sample.last_token_seconds = sample.last_token_seconds, now
        if last is not None:
            self._now = now
            self._gaps[last] = self._gaps.get(last, 0) + count
        elif channel.first_token_seconds is None:
            channel.first_token_seconds = now
            if self._metrics is not None:
                self._metrics.first_token(now - channel.request.arrival_seconds)

    def step(self, status: EngineStatus) -> None:
        """A step is over and all its tokens were told."""
        metrics, gaps, last = self._metrics, self._gaps, self._last
        self._gaps = {}
        if last is None:
            last = self._last = status
        if metrics is None:
            return
        for since, count in gaps.items():
            metrics.inter_token(self._now - since, count)
        base = last if status.steps > last.steps else status  # what a step without result cost counts with the next one
        metrics.step_finished(
            StepRecord(
                running=status.running,
                waiting=status.waiting,
                slots_used=status.running,
                slots_total=status.slots_total,
                pages_used=status.pages_used,
                pages_total=status.pages_total,
                prefill_tokens=status.prefill_tokens - base.prefill_tokens,
                generated_tokens=status.generated_tokens - base.generated_tokens,
                preemptions=status.preemptions - base.preemptions,
                device_seconds=status.device_seconds - base.device_seconds,
                host_seconds=status.host_seconds - base.host_seconds,
                padded_tokens=status.padded_tokens - base.padded_tokens,
                kv=_kv_record(status),
            )
        )
        if base is last:
            compilations = status.compilations_after_warmup - last.compilations_after_warmup
            if compilations:
                metrics.compiled_after_warmup(compilations)
            self._last = status

    def finished(self, channel: Channel, reason: FinishedReason, now: float) -> None:
        """A request is over."""
        if self._metrics is None:
            return
        request = channel.request
        self._metrics.request_finished(
            RequestRecord(
                reason=reason,
                prompt_tokens=len(request.prompt_token_ids),
                generated_tokens=channel.generated_tokens,
                cached_tokens=channel.cached_tokens,
                max_tokens=request.max_tokens,
                n=request.params.n,
                arrival_seconds=request.arrival_seconds,
                scheduled_seconds=channel.scheduled_seconds,
                first_token_seconds=channel.first_token_seconds,
                finished_seconds=now,
                preemptions=channel.preemptions,
            )
        )


def _kv_record(status: EngineStatus) -> KvRecord:
    return KvRecord(
        pages_free=status.pages_free,
        cached_pages=status.cached_pages,
        evicted_pages=status.evicted_pages,
        host_pages_used=status.host_pages_used,
        host_pages_total=status.host_pages_total,
        host_saved_pages=status.host_saved_pages,
        host_loaded_pages=status.host_loaded_pages,
        queried_tokens=status.queried_tokens,
        cached_tokens=status.cached_tokens,
        host_cached_tokens=status.host_cached_tokens,
    )
