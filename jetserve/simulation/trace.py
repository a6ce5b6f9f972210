"""What is asked when: the requests of a run, before they meet an engine. Plain data; imports no jax.

A prompt is a row of pieces. A `Span` names its tokens by a key instead of listing them, so that a trace of lengths and
shared beginnings stays small: spans with an equal key hold equal tokens as far as both reach.

Requests of one session are the turns of a conversation: the prompt of a later turn is everything said before, the
answer of the engine included, and then its own pieces; it is sent when the turn before has ended and its
`think_seconds` are over.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jetserve.errors import ConfigError

VOCABULARY = 32_000  # of the ids that are made up
FIRST_ID = 3  # below it vocabularies keep special tokens


class Span(NamedTuple):
    """`tokens` tokens of the endless text `key`, from its beginning."""

    key: str
    tokens: int


Piece = Span | tuple[int, ...]  # a tuple is the token ids themselves


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
      arrival_seconds: since the start of the trace; of the later turns of a session without meaning.
      prompt: of a later turn only what it adds.
      output_tokens: the answer has exactly so many.
      session: requests with an equal name are turns, in their order; None for a request of its own.
      think_seconds: between the end of the turn before and this one.
      timeout_seconds: until it is given up; None for what the configuration says.
      priority: lower runs first.
    """

    arrival_seconds: float
    prompt: tuple[Piece, ...]
    output_tokens: int
    session: str | None = None
    think_seconds: float = 0.0
    timeout_seconds: float | None = None
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(_length(piece) for piece in self.prompt)


class Clipped(NamedTuple):
    """What a configuration's context did not hold."""

    prompts: int = 0
    prompt_tokens: int = 0
    outputs: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests with a name.

    Attributes:
      requests: first turns by arrival; the turns of a session in their order.
    """

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def openings(self) -> list[TraceRequest]:
        """Requests that arrive at a time of their own: all but later turns."""
        seen: set[str] = set()
        found = []
        for request in self.requests:
            if request.session is None or request.session not in seen:
                found.append(request)
            if request.session is not None:
                seen.add(request.session)
        return found

    @property
    def rate_requests_per_second(self) -> float | None:
        """Mean rate, later turns included as if they came with the first ones; None when all come at once."""
        arrivals = [request.arrival_seconds for request in self.openings]
        span = max(arrivals, default=0.0) - min(arrivals, default=0.0)
        return len(self.requests) * (len(arrivals) - 1) / len(arrivals) / span if span > 0 else None

    def at_rate(self, requests_per_second: float) -> Trace:
        """The same requests, arriving faster or slower.

        Raises: ConfigError when they all arrive at once.
        """
        own = self.rate_requests_per_second
        if own is None:
            if len(self.openings) > 1:
                raise ConfigError(f"all requests of {self.name} arrive at the same time, no rate can be given to them")
            return self
        scale = own / requests_per_second
        moved = tuple(replace(one, arrival_seconds=one.arrival_seconds * scale) for one in self.requests)
        return replace(self, requests=moved)

    def clip(self, max_length: int) -> tuple[Trace, Clipped]:
        """Cuts requests to what a context of `max_length` tokens holds: answers to half of it, prompts to the rest.

        Prompts lose their end, so that shared beginnings stay shared. Of later turns only answers are cut here: what
        comes before them is not known yet.
        """
        opening = {id(request) for request in self.openings}
        kept, count = [], Clipped()
        for request in self.requests:
            output = min(request.output_tokens, max(1, max_length // 2))
            room = max_length - output
            tokens = request.prompt_tokens
            prompt = request.prompt
            if id(request) in opening and tokens > room:
                prompt = _cut(prompt, room)
                count = count._replace(prompts=count.prompts + 1, prompt_tokens=count.prompt_tokens + tokens - room)
            if output < request.output_tokens:
                lost = request.output_tokens - output
                count = count._replace(outputs=count.outputs + 1, output_tokens=count.output_tokens + lost)
            kept.append(replace(request, prompt=prompt, output_tokens=output))
        return replace(self, requests=tuple(kept)), count


def token_ids(prompt: tuple[Piece, ...]) -> tuple[int, ...]:
    """The tokens of pieces, one after the other."""
    ids: list[int] = []
    for piece in prompt:
        ids += span_token_ids(piece).tolist() if isinstance(piece, Span) else piece
    return tuple(ids)


def span_token_ids(span: Span) -> NDArray[np.int64]:
    """i64[tokens], made of the key alone."""
    digest = hashlib.blake2b(span.key.encode(), digest_size=8).digest()
    return draw_token_ids(np.uint64(int.from_bytes(digest, "little")), np.arange(span.tokens))


def draw_token_ids(seed: np.uint64 | NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.int64]:
    """A token id for each seed and position, the same every time: splitmix64 (Steele et al., 2014)."""
    x = seed + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return FIRST_ID + (x % np.uint64(VOCABULARY - FIRST_ID)).astype(np.int64)


def _length(piece: Piece) -> int:
    return piece.tokens if isinstance(piece, Span) else len(piece)


def _cut(prompt: tuple[Piece, ...], room: int) -> tuple[Piece, ...]:
    kept: list[Piece] = []
    for piece in prompt:
        length = min(_length(piece), room)
        if length:
            kept.append(Span(piece.key, length) if isinstance(piece, Span) else piece[:length])
        room -= length
    return tuple(kept)
