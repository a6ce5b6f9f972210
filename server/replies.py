"""What the client hands out: plain data made from jetserve.v1 messages. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from jetserve.request import Delta, FinishReason, TokenLogprobs, Usage
from jetserve.server.protos import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole sample.

    Attributes:
      finish_reason: None when the stream ended without one, which is the server's fault.
      stop_reason: the stop string or stop token id that ended it, None for the model's own end token.
      logprobs: one for each of `token_ids` when asked for, else empty.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...]
    usage: Usage | None
    request_id: str


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model a server has. `max_length` is of prompt and answer together."""

    name: str
    vocab_size: int
    max_length: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None
    family: str
    parameters: int
    dtype: str
    devices: str

    @staticmethod
    def read(message: pb.GetModelInfoResponse) -> ModelDescription:
        return ModelDescription(
            name=message.name,
            vocab_size=message.vocab_size,
            max_length=message.max_length,
            max_prompt_tokens=message.max_prompt_tokens,
            eos_token_ids=tuple(message.eos_token_ids),
            bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
            chat_template=message.chat_template or None,
            family=message.family,
            parameters=message.parameters,
            dtype=message.dtype,
            devices=message.devices,
        )


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """How a server is doing. Fields are those of `GetServerStatusResponse`.

    Attributes:
      state: loading, ready, draining, failed or stopped.
      ready: whether a request sent now would be answered.
    """

    state: str
    ready: bool
    progress: str
    version: str
    uptime_seconds: float
    running_requests: int
    waiting_requests: int
    waiting_tokens: int
    slots_used: int
    slots_total: int
    pages_used: int
    pages_total: int
    generated_tokens: int
    preemptions: int
    compilations_after_warmup: int
    queried_tokens: int
    cached_tokens: int
    evicted_pages: int
    shed_requests: int
    cached_pages: int
    host_pages_used: int
    host_pages_total: int

    @staticmethod
    def read(message: pb.GetServerStatusResponse) -> ServerStatus:
        return ServerStatus(
            state=pb.ServerState.Name(message.state).removeprefix("SERVER_STATE_").lower(),
            ready=message.ready,
            progress=message.progress,
            version=message.version,
            uptime_seconds=message.uptime_seconds,
            running_requests=message.running_requests,
            waiting_requests=message.waiting_requests,
            waiting_tokens=message.waiting_tokens,
            slots_used=message.slots_used,
            slots_total=message.slots_total,
            pages_used=message.pages_used,
            pages_total=message.pages_total,
            generated_tokens=message.generated_tokens,
            preemptions=message.preemptions,
            compilations_after_warmup=message.compilations_after_warmup,
            queried_tokens=message.queried_tokens,
            cached_tokens=message.cached_tokens,
            evicted_pages=message.evicted_pages,
            shed_requests=message.shed_requests,
            cached_pages=message.cached_pages,
            host_pages_used=message.host_pages_used,
            host_pages_total=message.host_pages_total,
        )


class Collector:
    """Adds the deltas of one request up to whole samples."""

    def __init__(self) -> None:
        self._deltas: dict[int, list[Delta]] = {}

    def add(self, delta: Delta) -> None:
        self._deltas.setdefault(delta.index, []).append(delta)

    def completions(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> list[Completion]:
        """The samples, by index."""
        return [
            Completion(
                index=index,
                text="".join(delta.text for delta in deltas),
                token_ids=tuple(token for delta in deltas for token in delta.token_ids),
                prompt_token_ids=prompt_token_ids,
                finish_reason=deltas[-1].finish_reason,
                stop_reason=deltas[-1].stop_reason,
                logprobs=tuple(item for delta in deltas for item in delta.logprobs),
                usage=deltas[-1].usage,
                request_id=request_id,
            )
            for index, deltas in sorted(self._deltas.items())
        ]
