"""Protobuf messages of jetserve.v1 to and from our own types, for the server and the client. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jetserve.errors import InvalidRequest
from jetserve.request import Delta, FinishReason, SamplingParams, TokenLogprobs, Usage
from jetserve.server.protos import inference_pb2 as pb

_M = TypeVar("_M", bound=Message)
_DEFAULTS = SamplingParams()
_PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}


def parse(kind: type[_M], data: bytes) -> _M:
    """Reads one message from the wire.

    Raises: InvalidRequest when the bytes are not one, a text is not UTF-8, or it has a field that we do not know: a
      parameter is never ignored.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            f"the {len(data)} bytes are not a {kind.DESCRIPTOR.full_name} (texts must be UTF-8): {error}"
        ) from None
    _refuse_unknown(message)
    return message


def _refuse_unknown(message: Message) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        numbers = sorted({unknown[i].field_number for i in range(len(unknown))})
        raise InvalidRequest(
            f"{message.DESCRIPTOR.full_name} has fields this server does not know: {numbers}; "
            f"leave them out or use a newer server"
        )
    for field, value in message.ListFields():
        if isinstance(value, Message):
            _refuse_unknown(value)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for item in value:
                _refuse_unknown(item)


def read_params(message: pb.SamplingParams) -> SamplingParams:
    """Takes what is set and leaves the rest to SamplingParams' defaults. Raises InvalidRequest."""
    given: dict[str, object] = {field.name: value for field, value in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = tuple(getattr(message, name))
    if "logit_bias" in given:
        given["logit_bias"] = dict(message.logit_bias)
    if "allowed_token_ids" in given:
        given["allowed_token_ids"] = tuple(message.allowed_token_ids.ids)
    return SamplingParams(**given)  # type: ignore[arg-type]  # names and types are the message's


def write_params(params: SamplingParams) -> pb.SamplingParams:
    """Sets what differs from the defaults. Raises InvalidRequest for a number that does not fit the wire."""
    given = {name: value for name in _PARAMS if (value := getattr(params, name)) != getattr(_DEFAULTS, name)}
    if params.allowed_token_ids is not None:
        given["allowed_token_ids"] = write_token_ids(params.allowed_token_ids)
    if params.seed is not None:
        given["seed"] = (params.seed + 2**63) % 2**64 - 2**63  # the same seed modulo 2**64
    try:
        return pb.SamplingParams(**given)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"sampling parameters do not fit the wire: {error}") from None


def write_token_ids(token_ids: Sequence[int]) -> pb.TokenIds:
    """Raises InvalidRequest for what is not a whole number of 64 bits."""
    try:
        return pb.TokenIds(ids=token_ids)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"token ids must be whole numbers of at most 64 bits: {error}") from None


def compose(delta: Delta) -> pb.GenerateResponse:
    """One message of a stream. Called for every step of every stream, so it sets what is there and nothing else."""
    message = pb.GenerateResponse(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(_compose_logprobs(item) for item in delta.logprobs)
    if delta.finish_reason is not None:
        message.finish_reason = _REASONS[delta.finish_reason]
        if isinstance(delta.stop_reason, str):
            message.stop_string = delta.stop_reason
        elif delta.stop_reason is not None:
            message.stop_token_id = delta.stop_reason
        if delta.usage is not None:
            usage = delta.usage
            message.usage.prompt_tokens = usage.prompt_tokens
            message.usage.completion_tokens = usage.completion_tokens
            message.usage.cached_tokens = usage.cached_tokens
    return message


def _compose_logprobs(item: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in item.top]
    return pb.TokenLogprobs(token_id=item.token_id, logprob=item.logprob, top=top)


def decompose(message: pb.GenerateResponse) -> Delta:
    """What `compose` was given, logprobs rounded to float32."""
    stop = message.WhichOneof("stop_reason")
    usage = None
    if message.HasField("usage"):
        usage = Usage(message.usage.prompt_tokens, message.usage.completion_tokens, message.usage.cached_tokens)
    return Delta(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            TokenLogprobs(item.token_id, item.logprob, tuple((top.token_id, top.logprob) for top in item.top))
            for item in message.logprobs
        ),
        finish_reason=_REASONS_BACK.get(message.finish_reason),
        stop_reason=None if stop is None else getattr(message, stop),
        usage=usage,
    )
