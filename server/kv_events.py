"""Tells routers which KV blocks are cached, in vLLM's format: msgpack over a ZMQ PUB socket. Imports no jax.

A batch is what happened in one step of the engine: three frames, `[topic, number, payload]`. The last ones are kept,
and a ROUTER socket repeats them for who missed some. Numbers are 8 bytes, big-endian. Within a process they have no
gaps, so that a reader sees by the next one that it missed some; they begin at the microseconds since the epoch, so that
a reader who knew a former process on this address does not take ours for ones it has seen (from 0, Dynamo 1.6.1 ignores
a restarted engine until it has published more than the one before). The first batch says that all blocks are gone.

The sockets live in a thread of their own: the event loop only appends to a queue, a reader who is slow misses batches
instead of holding anybody up, and all that is kept has a bound.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import msgspec
import zmq

from jetserve.config import KvEventsSettings
from jetserve.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from jetserve.errors import ConfigError

log = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 10_000  # between the event loop and the thread; there is one per step at most
_END_OF_REPLAY = (b"", (-1).to_bytes(8, "big", signed=True), b"")
_LINGER_MS = 500  # what is still to be sent when the server stops may take so long
_DATA_PARALLEL_RANK = 0
# A reader that vanished without a word is noticed after IDLE + CNT * INTVL seconds, and its queue is freed.
_OPTIONS = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.MAXMSGSIZE: 4096,  # of what readers send: requests and subscriptions
}
_REASONS = {
    errno.EADDRINUSE: "the address is in use",
    errno.ENODEV: "this machine has no such address or interface",
    errno.EADDRNOTAVAIL: "this machine has no such address or interface",
    errno.EINVAL: "it is no address",
    errno.EPROTONOSUPPORT: "it must begin with tcp:// or ipc://",
}


class _StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True, frozen=True, gc=False):
    """Fields with a default are left out while they have it; all others are always there."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class _StoredArray(_StoredMap, tag="BlockStored", array_like=True, omit_defaults=True, frozen=True, gc=False):
    """The same, its values in this order behind the name of the event."""


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False):
    block_hashes: Sequence[int]
    medium: str


class _RemovedArray(_RemovedMap, tag="BlockRemoved", array_like=True, frozen=True, gc=False):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", frozen=True, gc=False):
    pass


class _ClearedArray(_ClearedMap, tag="AllBlocksCleared", array_like=True, frozen=True, gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All three are always written: Dynamo drops a batch of two."""

    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]
    data_parallel_rank: int


class BatchEncoder:
    """Makes payloads.

    Args:
      encoding: "map" names the fields of an event, "array" has them by position.
    """

    def __init__(self, encoding: str) -> None:
        is_map = encoding == "map"
        self._stored = _StoredMap if is_map else _StoredArray
        self._removed = _RemovedMap if is_map else _RemovedArray
        self._cleared = _ClearedMap if is_map else _ClearedArray
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[KvEvent], wall_seconds: float) -> bytes:
        """The payload of a batch that was made at this time since the epoch."""
        return self._encoder.encode(_Batch(wall_seconds, [self._event(e) for e in events], _DATA_PARALLEL_RANK))

    def _event(self, event: KvEvent) -> _StoredMap | _RemovedMap | _ClearedMap:
        if isinstance(event, BlockStored):
            return self._stored(
                block_hashes=event.hashes,
                parent_block_hash=event.parent,
                token_ids=event.token_ids,
                block_size=len(event.token_ids) // len(event.hashes),
                lora_id=None,  # numbers are vLLM's own; routers key on the name
                medium=event.medium.value,
                lora_name=event.adapter,
                extra_keys=_extra_keys(event),
            )
        if isinstance(event, BlockRemoved):
            return self._removed(event.hashes, event.medium.value)
        return self._cleared()


def _extra_keys(event: BlockStored) -> list[list[str] | None] | None:
    """The cache salt, in the first block of a prompt only, as in vLLM: later blocks inherit it through their parent.

    An adapter is in `lora_name` alone. llm-d takes each text here for an image, and would find no block of an adapter.
    """
    if event.cache_salt is None or event.parent is not None:
        return None
    salt = event.cache_salt.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair has no UTF-8
    return [[salt], *[None] * (len(event.hashes) - 1)]


class _Sent(NamedTuple):
    """A batch that may have to be repeated."""

    number: bytes
    payload: bytes


class _Sockets:
    """Sends batches and repeats them. Used by one thread at a time.

    Raises: ConfigError when an address cannot be had.
    """

    def __init__(self, settings: KvEventsSettings, first_number: int) -> None:
        assert settings.endpoint is not None, "made only where there is somewhere to publish"
        self._topic = settings.topic.encode()
        self._encoder = BatchEncoder(settings.encoding)
        self._history: deque[_Sent] = deque(maxlen=settings.buffer_steps)
        self._next_number = first_number
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.set_hwm(settings.high_water_mark)
            self.endpoint = _bind(self._publisher, "kv_events.endpoint", settings.endpoint)
            self.replay: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if settings.replay_endpoint is not None:
                self.replay = self._context.socket(zmq.ROUTER)
                self.replay.set(zmq.ROUTER_MANDATORY, 1)  # a full or lost reader is an error, not a gap in the answer
                # Twice an answer: what a reader took of the one before is known in steps of half the mark.
                self.replay.set_hwm(2 * (settings.buffer_steps + 1))
                self.replay_endpoint = _bind(self.replay, "kv_events.replay_endpoint", settings.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def send(self, events: Sequence[KvEvent], wall_seconds: float) -> None:
        """Publishes a batch. Who does not take it in time does not get it."""
        sent = _Sent(self._next_number.to_bytes(8, "big"), self._encoder.encode(events, wall_seconds))
        self._next_number += 1
        self._history.append(sent)
        self._publisher.send_multipart((self._topic, *sent))

    def answer(self) -> None:
        """Answers one request for batches from a number on. What is no such request is left alone."""
        assert self.replay is not None
        reader, *request = self.replay.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            log.debug("kv event replay: no request frames=%s", [len(frame) for frame in request])
            return
        first = int.from_bytes(request[1], "big")
        kept = len(self._history)
        skipped = min(max(0, first - (self._next_number - kept)), kept)
        try:
            for sent in islice(self._history, skipped, None):
                self.replay.send_multipart((reader, b"", self._topic, *sent), zmq.NOBLOCK)
            self.replay.send_multipart((reader, b"", *_END_OF_REPLAY), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it went away, or asks again and again without reading
            log.debug("kv event replay: not finished first=%d: %s", first, error)

    def close(self) -> None:
        """Gives the addresses back; waits for slow readers for `_LINGER_MS` at most."""
        self._context.destroy(linger=_LINGER_MS)


class KvEventPublisher:
    """Publishes batches from a thread of its own.

    The sockets are bound when it is made, so that a taken port is known at once; `start` begins to serve them.

    Args:
      clock: seconds since the epoch.
    Raises: ConfigError when an address cannot be had.
    """

    def __init__(self, settings: KvEventsSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sockets = _Sockets(settings, first_number=int(clock() * 1e6))
        self.endpoint = self._sockets.endpoint
        self.replay_endpoint = self._sockets.replay_endpoint
        self._queue: deque[Sequence[KvEvent]] = deque()
        self._is_stopping = False
        # A byte wakes the thread: a queue cannot be polled together with a ZMQ socket.
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="jetserve-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Hands over what happened in a step, and returns at once. To be called from one thread only.

        Should the thread get so little time that the queue is full, all of it is dropped for one AllBlocksCleared:
        readers then know of fewer blocks than there are, and never believe in one that is gone.
        """
        if self._is_stopping:
            return  # an engine that had been given up came back
        if len(self._queue) >= MAX_QUEUED_BATCHES:
            self._queue.clear()
            self._queue.append((AllBlocksCleared(),))
            log.warning("kv events dropped batches=%d: the thread that sends them gets no time", MAX_QUEUED_BATCHES)
        self._queue.append(events)
        self._ring()

    def stop(self) -> None:
        """Sends what is queued and gives the addresses back."""
        self._is_stopping = True
        if self._thread.ident is not None:
            self._ring()
            self._thread.join()
        self._sockets.close()
        self._alarm.close()
        self._bell.close()

    def _ring(self) -> None:
        with suppress(OSError):  # full of bytes, so it will wake; or closed
            self._bell.send(b"\0")

    def _next(self) -> Sequence[KvEvent] | None:
        try:
            return self._queue.popleft()
        except IndexError:  # also when `publish` emptied it just now
            return None

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._alarm, zmq.POLLIN)
        if self._sockets.replay is not None:
            poller.register(self._sockets.replay, zmq.POLLIN)
        is_asked = False
        while True:
            is_last = self._is_stopping  # looked at before the queue: what came before `stop` is sent
            while (events := self._next()) is not None:
                self._sockets.send(events, self._clock())
            if is_last:
                return
            if is_asked:
                self._sockets.answer()
            is_asked = False
            for ready, _ in poller.poll():
                if ready is self._sockets.replay:
                    is_asked = True  # after what was queued before
                else:
                    self._alarm.recv(4096)


def _bind(socket_: zmq.Socket[bytes], setting: str, address: str) -> str:
    """Returns the address with the port that was taken."""
    for option, value in {**_OPTIONS, zmq.IPV6: int("[" in address)}.items():
        socket_.set(option, value)
    try:
        socket_.bind(address)
    except zmq.ZMQError as error:
        reason = _REASONS.get(error.errno or 0, str(error))
        raise ConfigError(
            f"cannot publish KV events on {setting}={address}: {reason}; set it to tcp://address:port or ipc://path, "
            f"as in tcp://*:5557"
        ) from None
    return socket_.get_string(zmq.LAST_ENDPOINT)
