"""What is asked and what is answered. Host side; imports no jax.

A `Request` that exists is valid: `SamplingParams` checks ranges when it is made, and `Request.create` checks it against
the model (vocabulary, context length) and fills in what was left open.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jetserve.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 16  # eos ids of the model included: they are compared on the device
MAX_BIASED_TOKENS = 300  # ids in logit_bias and allowed_token_ids together
MAX_LOGPROBS = 20
MAX_SAMPLES = 64
MAX_REQUEST_ID_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
_SEED_BITS = 63


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends.

    Filters apply in this order: penalties, logit_bias, allowed_token_ids, min_tokens, temperature, top_k, top_p over
    what top_k left, min_p against the largest probability.

    Attributes:
      max_tokens: most tokens to generate; None means what is left of the context, and a larger number is cut to that.
      min_tokens: end-of-sequence and stop tokens cannot be sampled before this many tokens.
      temperature: 0 is greedy (ties go to the lowest id).
      top_k: 0 or -1 keeps every token.
      seed: None draws a fresh one; with a seed the tokens depend on the prompt and these parameters alone.
      stop: strings that end the text; not part of it unless `include_stop`.
      stop_token_ids: ids that end the sequence, besides the model's own. The id is in `token_ids`, not in the text.
      ignore_eos: the model's own end ids do not end the sequence (`stop_token_ids` still do).
      logprobs: None for none, 0 for the chosen token's, n for the n most likely too. Of the raw distribution.
      allowed_token_ids: when not None only these can be sampled.
      n: samples per prompt; sample i of a seeded request has its own fixed seed.
    Raises: InvalidRequest naming the field, its value and the limit.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _items("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _items("allowed_token_ids", self.allowed_token_ids))
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, None)
        _number("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _whole("n", self.n, 1, MAX_SAMPLES)
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._check_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}")

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop must hold non-empty strings, got {text!r}")
            if len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"a stop string has {len(text)} characters, at most {MAX_STOP_STRING_CHARS} are allowed"
                )
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, None)
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not allowed:
                raise InvalidRequest("allowed_token_ids is empty: no token could be sampled; leave it out to allow all")
            for token in allowed:
                _whole("allowed_token_ids", token, 0, None)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, None)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        biased = len(set(self.logit_bias) | set(allowed or ()))
        if biased > MAX_BIASED_TOKENS:
            raise InvalidRequest(
                f"logit_bias and allowed_token_ids name {biased} tokens, at most {MAX_BIASED_TOKENS} are allowed"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether sampling needs the counts of tokens seen so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class ModelLimits(NamedTuple):
    """What a model and its configuration allow a request."""

    vocab_size: int
    max_length: int  # tokens of prompt and answer together
    eos_token_ids: tuple[int, ...]
    max_prompt_tokens: int  # at most max_length - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One valid prompt with its parameters. `params.max_tokens` and `params.seed` are always set.

    Attributes:
      prompt_token_ids: at least one id, all below the vocabulary size.
      stop_token_ids: every id that ends the sequence: the model's (unless ignore_eos) and the request's.
      arrival_seconds, deadline_seconds: `time.monotonic` clock.
      priority: lower runs first.
      cache_salt: cached prefixes are shared only among requests with an equal one.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    arrival_seconds: float
    deadline_seconds: float | None = None
    priority: int = 0
    cache_salt: str | None = None

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    def sample_seed(self, index: int) -> int:
        """The 64-bit seed of sample `index`; sample 0 has the request's own."""
        assert self.params.seed is not None
        # Odd constant of splitmix64 (Steele et al., 2014): distinct indices give distinct seeds.
        return (self.params.seed + index * 0x9E3779B97F4A7C15) % 2**64

    @staticmethod
    def create(
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        limits: ModelLimits,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        now: float | None = None,
    ) -> Request:
        """Makes a valid request or says what is wrong with it.

        Args:
          prompt_token_ids: the tokenised prompt.
          limits: of the model it will run on.
          request_id: None draws a fresh one.
          timeout_seconds: from now until the request is given up; None for never.
          cache_salt: whom to share cached prefixes with; None and "" for all that bring none.
          now: `time.monotonic()` unless given.
        Raises: InvalidRequest.
        """
        now = time.monotonic() if now is None else now
        prompt = _prompt(prompt_token_ids, limits)
        if timeout_seconds is not None:
            _number("timeout_seconds", timeout_seconds, 0.0, None, above=True)
        _whole("priority", priority, -(2**31), 2**31 - 1)
        stop_ids = dict.fromkeys(() if params.ignore_eos else limits.eos_token_ids)
        stop_ids.update(dict.fromkeys(params.stop_token_ids))
        if len(stop_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids and the model's own end ids are {len(stop_ids)}, at most {MAX_STOP_TOKEN_IDS} fit"
            )
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", params.logit_bias),
        ):
            for token in ids:
                _in_vocabulary(name, token, limits.vocab_size)
        if params.min_tokens and params.allowed_token_ids and set(params.allowed_token_ids) <= set(stop_ids):
            raise InvalidRequest(
                "allowed_token_ids holds only tokens that end the sequence, but min_tokens forbids them"
            )
        room = limits.max_length - len(prompt)
        if params.min_tokens > room:
            raise InvalidRequest(f"min_tokens={params.min_tokens} exceeds the {room} tokens left after the prompt")
        seed = params.seed if params.seed is not None else secrets.randbits(_SEED_BITS)
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        return Request(
            request_id=_request_id(request_id),
            prompt_token_ids=prompt,
            params=dataclasses.replace(params, max_tokens=wanted, seed=seed % 2**64),
            stop_token_ids=tuple(stop_ids),
            arrival_seconds=now,
            deadline_seconds=None if timeout_seconds is None else now + timeout_seconds,
            priority=priority,
            cache_salt=_cache_salt(cache_salt),
        )


class TokenLogprobs(NamedTuple):
    """Log probabilities of one generated token, natural log, of the model's raw distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # most likely first


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one sample.

    Attributes:
      completion_tokens: with the end token, as `token_ids` holds it.
      cached_tokens: of the prompt, that were not computed because the prefix cache had them when the sample first ran.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one sample of a stream. Concatenated texts and ids are the whole answer.

    Attributes:
      index: which of the n samples.
      text: may be empty while a character or a stop string is still open.
      finish_reason: set in the last delta of a sample only.
      stop_reason: the stop string or stop token id that ended it, None for the model's own end token.
      usage: so far, of this sample.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None


def _whole(name: str, value: object, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidRequest(f"{name}={value} is out of range, must be {_range(low, high)}")


def _number(name: str, value: object, low: float, high: float | None, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{name} must be finite, got {value!r}")
    if value < low or (above and value == low) or (high is not None and value > high):
        raise InvalidRequest(f"{name}={value} is out of range, must be {_range(low, high, above=above)}")


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list, got {value!r}")
    return tuple(value)


def _range(low: float | None, high: float | None, *, above: bool = False) -> str:
    parts = [] if low is None else [f"above {low}" if above else f"at least {low}"]
    return " and ".join([*parts, *([] if high is None else [f"at most {high}"])])


def _prompt(token_ids: Sequence[int], limits: ModelLimits) -> tuple[int, ...]:
    if isinstance(token_ids, str | bytes):
        raise InvalidRequest("prompt_token_ids must be a list of token ids, got text")
    prompt = _items("prompt_token_ids", token_ids)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; send at least one")
    if len(prompt) > limits.max_prompt_tokens:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, at most {limits.max_prompt_tokens} fit "
            f"(context {limits.max_length}); shorten it or raise engine.max_length"
        )
    for token in prompt:
        _in_vocabulary("prompt_token_ids", token, limits.vocab_size)
    return prompt


def _in_vocabulary(name: str, token: object, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int):
        raise InvalidRequest(f"{name} must hold whole numbers, got {token!r}")
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} holds {token}, outside the vocabulary [0, {vocab_size})")


def _request_id(request_id: str | None) -> str:
    if request_id is None or request_id == "":
        return f"req-{secrets.token_hex(12)}"
    if not isinstance(request_id, str) or len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequest(
            f"request_id must be printable text of at most {MAX_REQUEST_ID_CHARS} characters, got {request_id!r:.80}"
        )
    return request_id


def _cache_salt(salt: str | None) -> str | None:
    if salt is None or salt == "":
        return None
    if not isinstance(salt, str) or len(salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(f"cache_salt must be text of at most {MAX_CACHE_SALT_CHARS} characters, got {salt!r:.80}")
    return salt
