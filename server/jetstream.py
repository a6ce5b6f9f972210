"""JetStream's service over an orchestrator, so that its clients keep working. Imports no jax.

It has no sampling parameters: one sample is greedy, as JetStream's engines are by default; several would all be the
same, so they are drawn at temperature 1. Every message has `num_samples` samples, as its clients index them.
"""

from __future__ import annotations

from jetserve.errors import InvalidRequest
from jetserve.orchestrator import Orchestrator
from jetserve.request import SamplingParams
from jetserve.server.calls import Context, Service, time_left
from jetserve.server.messages import parse
from jetserve.server.protos import jetstream_pb2 as pb

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Orchestrator"]


def jetstream_service(orchestrator: Orchestrator) -> Service:
    """The rpcs of `jetstream_proto.Orchestrator`."""

    async def decode(data: bytes, context: Context) -> None:
        await _decode(orchestrator, parse(pb.DecodeRequest, data), context)

    async def health_check(data: bytes, _context: Context) -> bytes:
        parse(pb.HealthCheckRequest, data)
        return pb.HealthCheckResponse(is_live=orchestrator.is_ready).SerializeToString()

    return Service(DESCRIPTOR, {"HealthCheck": health_check}, {"Decode": decode})


async def _decode(orchestrator: Orchestrator, call: pb.DecodeRequest, context: Context) -> None:
    kind = call.WhichOneof("content")
    if kind is None:
        raise InvalidRequest("the request has no content; set text_content or token_content")
    if call.lora_adapter_id:
        raise InvalidRequest(f"lora_adapter_id={call.lora_adapter_id!r}: adapters are not served; leave it empty")
    samples = call.num_samples or 1
    params = SamplingParams(max_tokens=call.max_tokens or None, temperature=0.0 if samples == 1 else 1.0, n=samples)
    is_text = kind == "text_content"
    stream = await orchestrator.submit(
        call.text_content.text if is_text else list(call.token_content.token_ids),
        params,
        timeout_seconds=time_left(context, None),
        add_special_tokens=not call.has_bos,
    )
    try:
        async for delta in stream:
            message = pb.DecodeResponse()
            content = message.stream_content.samples
            for index in range(samples):
                if index == delta.index:
                    content.add(text=delta.text if is_text else "", token_ids=delta.token_ids)
                else:
                    content.add()
            await context.write(message.SerializeToString())
    finally:
        await stream.aclose()
