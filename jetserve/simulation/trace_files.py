"""Traces on disk: our own JSON lines, Azure's CSV and Mooncake's JSON lines. Imports no jax.

One line of ours is one request; `session` makes lines turns of a conversation (see trace.py):

    {"arrival_seconds": 1.5, "prompt_tokens": 700, "output_tokens": 80}
    {"arrival_seconds": 2.0, "prompt": [["system", 200], ["question-1", 30]], "output_tokens": 90, "session": "a"}
    {"think_seconds": 4.0, "prompt_token_ids": [17, 29, 5], "output_tokens": 60, "session": "a"}

The prompt is given in one of three ways: `prompt_tokens`, so many that nobody else has; `prompt`, a list of
[key, tokens] and of lists of ids, where an equal key is an equal text; `prompt_token_ids`. `timeout_seconds` and
`priority` may be given.

Azure's: TIMESTAMP,ContextTokens,GeneratedTokens. Mooncake's: timestamp (ms), input_length, output_length, hash_ids,
one id for each block of 512 tokens; equal ids are equal tokens. Where these say that nothing was generated, it is one
token here: a request whose first token never came cannot be timed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from jetserve.errors import ConfigError
from jetserve.simulation.trace import Piece, Span, Trace, TraceRequest

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MOONCAKE_BLOCK = 512
_MOONCAKE_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}
_KEYS = {
    "arrival_seconds", "prompt_tokens", "prompt", "prompt_token_ids", "output_tokens", "session", "think_seconds",
    "timeout_seconds", "priority",
}  # fmt: skip
_PROMPTS = ("prompt_tokens", "prompt", "prompt_token_ids")
_MAX_TOKEN_ID = 2**31 - 1
_MAX_TOKENS = 2**24  # of one prompt or answer: more is a mistake
_SHOWN_CHARACTERS = 60


def read_trace(file: Path) -> Trace:
    """Reads any of the three, told by its first line.

    Returns: the trace, the first arrival at second 0.
    Raises: ConfigError with file, line and value of what is wrong.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the trace {file} is not UTF-8 text: byte {error.start}; unpack it if it is compressed"
        ) from error
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    requests = _azure(file, lines) if not first.lstrip().startswith("{") else _json_lines(file, lines)
    if not requests:
        raise ConfigError(f"the trace {file} has no requests")
    trace = Trace(file.name, _in_order(requests))
    start = min(request.arrival_seconds for request in trace.openings)
    return Trace(file.name, tuple(_shifted(request, start) for request in trace.requests))


def write_trace(trace: Trace, file: Path) -> None:
    """Writes our format; reading it gives an equal trace but for the name.

    Raises: ConfigError when the file cannot be written.
    """
    lines = "".join(json.dumps(line) + "\n" for line in _lines(trace))
    try:
        file.write_text(lines, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def _lines(trace: Trace) -> Iterator[dict[str, object]]:
    opening = {id(request) for request in trace.openings}
    for request in trace.requests:
        line: dict[str, object] = {}
        if id(request) in opening:
            line["arrival_seconds"] = request.arrival_seconds
        line["prompt"] = [list(piece) for piece in request.prompt]
        line["output_tokens"] = request.output_tokens
        if request.session is not None:
            line["session"] = request.session
        if request.think_seconds:
            line["think_seconds"] = request.think_seconds
        if request.timeout_seconds is not None:
            line["timeout_seconds"] = request.timeout_seconds
        if request.priority:
            line["priority"] = request.priority
        yield line


class _Line:
    """One object of a JSON lines file, and what to say when it is wrong."""

    def __init__(self, where: str, content: Mapping[str, object]) -> None:
        self.where = where
        self._content = content

    def __contains__(self, key: str) -> bool:
        return self._content.get(key) is not None

    def require_known(self, keys: set[str]) -> None:
        for key in self._content:
            if key not in keys:
                raise ConfigError(f"{self.where}: unknown key {key!r}; there are {', '.join(sorted(keys))}")

    def number(self, key: str, low: float = 0.0) -> float:
        value = self._content.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < float("inf"):
            raise self.wrong(key, f"a number of at least {low:g}")
        return float(value)

    def whole(self, key: str, low: int = 0, high: int = _MAX_TOKENS) -> int:
        value = self._content.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def text(self, key: str) -> str:
        value = self._content.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def items(self, key: str) -> list[object]:
        value = self._content.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list that is not empty")
        return value

    def wrong(self, key: str, wanted: str) -> ConfigError:
        if key not in self._content:
            return ConfigError(f"{self.where}: {key} is missing; it must be {wanted}")
        value = repr(self._content[key])
        shown = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + ".."
        return ConfigError(f"{self.where}: {key}={shown} must be {wanted}")


def _json_lines(file: Path, lines: list[str]) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    sessions: set[str] = set()
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        where = f"{file}, line {number}"
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{where} must be a JSON object, is {text.strip()[:_SHOWN_CHARACTERS]}")
        line = _Line(where, content)
        if "hash_ids" in line or "input_length" in line:
            requests.append(_mooncake(line, number))
        else:
            requests.append(_own(line, number, sessions))
    return requests


def _own(line: _Line, number: int, sessions: set[str]) -> TraceRequest:
    line.require_known(_KEYS)
    session = line.text("session") if "session" in line else None
    is_later = session is not None and session in sessions
    if session is not None:
        sessions.add(session)
    return TraceRequest(
        arrival_seconds=0.0 if is_later else line.number("arrival_seconds"),
        prompt=_prompt(line, number),
        output_tokens=line.whole("output_tokens", low=1),
        session=session,
        think_seconds=line.number("think_seconds") if "think_seconds" in line else 0.0,
        timeout_seconds=line.number("timeout_seconds", low=1e-3) if "timeout_seconds" in line else None,
        priority=line.whole("priority", -(2**31), 2**31 - 1) if "priority" in line else 0,
    )


def _prompt(line: _Line, number: int) -> tuple[Piece, ...]:
    given = [key for key in _PROMPTS if key in line]
    if len(given) != 1:
        raise ConfigError(f"{line.where}: give one of {', '.join(_PROMPTS)}; there are {len(given)}")
    if given[0] == "prompt_tokens":
        return (Span(f"line/{number}", line.whole("prompt_tokens", low=1)),)
    if given[0] == "prompt_token_ids":
        ids = line.items("prompt_token_ids")
        return (_ids(line, "prompt_token_ids", ids),)
    return tuple(_piece(line, item) for item in line.items("prompt"))


def _piece(line: _Line, item: object) -> Piece:
    match item:
        case [str(key), int(tokens)] if key and not isinstance(tokens, bool) and 1 <= tokens <= _MAX_TOKENS:
            return Span(key, tokens)
        case [int(), *_]:
            return _ids(line, "prompt", item)
        case _:
            raise line.wrong("prompt", f"pairs of a key and a number of tokens, or lists of ids; {item!r} is neither")


def _ids(line: _Line, key: str, items: Sequence[object]) -> tuple[int, ...]:
    ids = tuple(
        one for one in items if isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= _MAX_TOKEN_ID
    )
    if len(ids) != len(items):
        raise line.wrong(key, f"token ids from 0 to {_MAX_TOKEN_ID}")
    return ids


def _mooncake(line: _Line, number: int) -> TraceRequest:
    line.require_known(_MOONCAKE_KEYS)
    length = line.whole("input_length", low=1)
    ids = line.items("hash_ids") if "hash_ids" in line else []
    if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise line.wrong("hash_ids", "whole numbers")
    most = -(-length // MOONCAKE_BLOCK)
    if len(ids) > most:
        raise line.wrong("hash_ids", f"at most {most} ids for {length} tokens in blocks of {MOONCAKE_BLOCK}")
    spans: list[Piece] = []
    for at, one in enumerate(ids):
        spans.append(Span(f"block/{one}", min(MOONCAKE_BLOCK, length - at * MOONCAKE_BLOCK)))
    rest = length - MOONCAKE_BLOCK * len(ids)
    if rest > 0:
        spans.append(Span(f"line/{number}", rest))
    output = max(1, line.whole("output_length"))
    return TraceRequest(line.number("timestamp") / 1e3, tuple(spans), output)


def _azure(file: Path, lines: list[str]) -> list[TraceRequest]:
    rows = csv.reader(lines)
    header = next(rows, [])
    if header[: len(AZURE_COLUMNS)] != AZURE_COLUMNS:
        raise ConfigError(
            f"{file}, line 1: {','.join(header)[:_SHOWN_CHARACTERS]!r} is neither a JSON object nor the columns "
            f"{','.join(AZURE_COLUMNS)}"
        )
    requests = []
    for row in rows:
        if not row:
            continue
        where = f"{file}, line {rows.line_num}"
        if len(row) < len(AZURE_COLUMNS):
            raise ConfigError(f"{where}: has {len(row)} columns, must have {','.join(AZURE_COLUMNS)}")
        content = {name: _whole_or_text(value) for name, value in zip(AZURE_COLUMNS, row, strict=False)}
        line = _Line(where, content)
        seconds = _timestamp(line, row[0])
        prompt = Span(f"line/{rows.line_num}", line.whole("ContextTokens", low=1))
        requests.append(TraceRequest(seconds, (prompt,), max(1, line.whole("GeneratedTokens"))))
    return requests


def _timestamp(line: _Line, text: str) -> float:
    """Seconds on no particular clock. The published files have seven digits of a second, Python reads six."""
    whole, _, fraction = text.strip().removesuffix("Z").removesuffix("+00:00").partition(".")
    try:
        moment = datetime.fromisoformat(whole + "+00:00")
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        raise line.wrong("TIMESTAMP", "a time such as 2023-11-16 18:17:03.9799600") from None


def _whole_or_text(value: str) -> int | str:
    return int(value) if value.strip().isdecimal() else value


def _in_order(requests: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Sorted by arrival; later turns right behind the turn before, as their own time says nothing."""
    turns: dict[str, list[TraceRequest]] = {}
    openings = []
    for request in requests:
        if request.session is None:
            openings.append([request])
        elif request.session in turns:
            turns[request.session].append(request)
        else:
            turns[request.session] = [request]
            openings.append(turns[request.session])
    openings.sort(key=lambda group: group[0].arrival_seconds)
    return tuple(request for group in openings for request in group)


def _shifted(request: TraceRequest, start: float) -> TraceRequest:
    return replace(request, arrival_seconds=max(0.0, request.arrival_seconds - start))
