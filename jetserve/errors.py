"""The exception tree. Everything jetserve raises on purpose is one of these.

JetserveError
|-- ConfigError            a setting is unknown, of the wrong type or out of range
|-- CheckpointError        weights are missing, extra, misshapen or unreadable
|-- TokenizerError         a vocabulary cannot be read or used
|-- FetchError             a demo model cannot be fetched
`-- RequestError           one request cannot be served; others are not affected
    |-- InvalidRequest     the request itself is wrong; sending it again cannot help
    |-- Overloaded         the queue is full, or too slow for the request; try again after `retry_after_seconds`
    |-- Unavailable        loading, draining or failed; another replica may answer
    |-- DeadlineExceeded   the request's own deadline passed
    |-- RequestAborted     somebody aborted it
    `-- EngineFailed       the engine thread died under it

Messages say what was wrong, the value, the limit and what to do. How a transport words each kind (gRPC code, HTTP
status) is that transport's table.
"""


class JetserveError(Exception):
    """Root of everything jetserve raises on purpose."""


class ConfigError(JetserveError):
    """A setting is unknown, of the wrong type or out of range."""


class CheckpointError(JetserveError):
    """Weights are missing, extra, misshapen or unreadable."""


class TokenizerError(JetserveError):
    """A vocabulary cannot be read or used."""


class FetchError(JetserveError):
    """A demo model cannot be fetched."""


class RequestError(JetserveError):
    """One request cannot be served; others are not affected."""


class InvalidRequest(RequestError):
    """The request itself is wrong; sending it again cannot help."""


class Overloaded(RequestError):
    """The queue is full, or too slow for the request. `retry_after_seconds` is our estimate of when it will not be."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(RequestError):
    """The server is loading, draining or has failed."""


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before it finished."""


class RequestAborted(RequestError):
    """Somebody aborted the request."""


class EngineFailed(RequestError):
    """The engine thread died while the request was in it."""
