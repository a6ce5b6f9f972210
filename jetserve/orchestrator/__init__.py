"""The engine thread and its async face: submit, stream, abort, drain, health."""

from jetserve.orchestrator.orchestrator import Orchestrator
from jetserve.orchestrator.status import State, Status
from jetserve.orchestrator.stream import RequestStream

__all__ = ["Orchestrator", "RequestStream", "State", "Status"]
