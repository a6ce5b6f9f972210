"""The jetserve.v1 service over an orchestrator. Imports no jax."""

from __future__ import annotations

import logging
import time
from importlib.metadata import version

from jetserve.errors import InvalidRequest
from jetserve.orchestrator import Orchestrator, State
from jetserve.server.calls import Context, Service, time_left
from jetserve.server.messages import compose, parse, read_params
from jetserve.server.protos import inference_pb2 as pb

log = logging.getLogger(__name__)

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Inference"]
_STATES = {
    State.LOADING: pb.SERVER_STATE_LOADING,
    State.READY: pb.SERVER_STATE_READY,
    State.DRAINING: pb.SERVER_STATE_DRAINING,
    State.FAILED: pb.SERVER_STATE_FAILED,
    State.STOPPED: pb.SERVER_STATE_STOPPED,
}


def inference_service(orchestrator: Orchestrator) -> Service:
    """The rpcs of `jetserve.v1.Inference`."""
    rpcs = _Inference(orchestrator)
    unary = {
        "Abort": rpcs.abort,
        "FlushCache": rpcs.flush_cache,
        "GetModelInfo": rpcs.get_model_info,
        "GetServerStatus": rpcs.get_server_status,
    }
    return Service(DESCRIPTOR, unary, {"Generate": rpcs.generate})


class _Inference:
    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._version = version("jetserve")
        self._started_seconds = time.monotonic()

    async def generate(self, data: bytes, context: Context) -> None:
        call = parse(pb.GenerateRequest, data)
        kind = call.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequest("the request has no prompt; set text or token_ids")
        stream = await self._orchestrator.submit(
            call.text if kind == "text" else list(call.token_ids.ids),
            read_params(call.params),
            request_id=call.request_id or None,
            timeout_seconds=time_left(context, call.timeout_seconds if call.HasField("timeout_seconds") else None),
            priority=call.priority,
            cache_salt=call.cache_salt or None,
            add_special_tokens=call.add_special_tokens if call.HasField("add_special_tokens") else True,
        )
        request = stream.request
        try:
            is_first = True
            async for delta in stream:
                message = compose(delta)
                if is_first:
                    is_first = False
                    message.request_id = request.request_id
                    message.prompt_token_ids.extend(request.prompt_token_ids)
                await context.write(message.SerializeToString())
        finally:
            await stream.aclose()

    async def abort(self, data: bytes, context: Context) -> bytes:
        request_id = parse(pb.AbortRequest, data).request_id
        if not request_id:
            raise InvalidRequest("request_id is empty; name the request to abort")
        found = self._orchestrator.abort(request_id)
        log.info("abort asked request=%s found=%s peer=%s", request_id, found, context.peer())
        return pb.AbortResponse(found=found).SerializeToString()

    async def flush_cache(self, data: bytes, _context: Context) -> bytes:
        parse(pb.FlushCacheRequest, data)
        pages = await self._orchestrator.flush_cache()
        return pb.FlushCacheResponse(pages_freed=pages).SerializeToString()

    async def get_model_info(self, data: bytes, _context: Context) -> bytes:
        parse(pb.GetModelInfoRequest, data)
        model = self._orchestrator.model
        return pb.GetModelInfoResponse(
            name=model.name,
            vocab_size=model.limits.vocab_size,
            max_length=model.limits.max_length,
            max_prompt_tokens=model.limits.max_prompt_tokens,
            eos_token_ids=model.limits.eos_token_ids,
            bos_token_id=model.tokenizer.bos_token_id,
            chat_template=model.tokenizer.chat_template or "",
            family=model.info.family,
            parameters=model.info.parameters,
            dtype=model.info.dtype,
            devices=model.info.devices,
        ).SerializeToString()

    async def get_server_status(self, data: bytes, _context: Context) -> bytes:
        parse(pb.GetServerStatusRequest, data)
        orchestrator = self._orchestrator
        status = orchestrator.status()
        return pb.GetServerStatusResponse(
            state=_STATES[status.state],
            ready=orchestrator.is_ready,
            progress=orchestrator.progress,
            version=self._version,
            uptime_seconds=time.monotonic() - self._started_seconds,
            running_requests=status.running,
            waiting_requests=status.waiting_requests,
            waiting_tokens=status.waiting_tokens,
            slots_used=status.slots_used,
            slots_total=status.slots_total,
            pages_used=status.pages_used,
            pages_total=status.pages_total,
            generated_tokens=status.generated_tokens,
            preemptions=status.preemptions,
            compilations_after_warmup=status.compilations_after_warmup,
            queried_tokens=status.queried_tokens,
            cached_tokens=status.cached_tokens,
            evicted_pages=status.evicted_pages,
            shed_requests=status.shed_requests,
            cached_pages=status.cached_pages,
            host_pages_used=status.host_pages_used,
            host_pages_total=status.host_pages_total,
        ).SerializeToString()
