"""The client under its short name. Imports no jax."""

from jetserve.request import Delta, FinishReason, SamplingParams, TokenLogprobs, Usage
from jetserve.server.async_client import AsyncClient, AsyncStream
from jetserve.server.client import Client, Stream
from jetserve.server.connection import DEFAULT_ADDRESS
from jetserve.server.replies import Completion, ModelDescription, ServerStatus

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "Delta",
    "FinishReason",
    "ModelDescription",
    "SamplingParams",
    "ServerStatus",
    "Stream",
    "TokenLogprobs",
    "Usage",
]
