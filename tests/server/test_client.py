"""The client for plain Python, and what both clients make of failures."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys

import grpc
import pytest

from jetserve import errors
from jetserve.client import AsyncClient, Client, SamplingParams
from jetserve.server import status_codes
from jetserve.server.replies import Completion


def in_thread(running, work):
    """Runs `work(client)` beside the server's loop."""

    def call():
        with Client(running.address) as client:
            return work(client)

    return asyncio.to_thread(call)


def test_generate_stream_abort_and_questions(serve, run):
    def work(client):
        assert client.wait_until_ready(10).state == "ready"
        assert client.model_info().name == "numbers"
        assert client.status().slots_total == 4
        assert client.flush_cache() == 0
        answers = client.generate("5 6", SamplingParams(max_tokens=3, n=2), timeout_seconds=10)
        assert [(a.index, a.text, a.token_ids, a.finish_reason) for a in answers] == [
            (0, " 7 8 9", (7, 8, 9), "length"),
            (1, " 7 8 9", (7, 8, 9), "length"),
        ]
        assert isinstance(answers[0], Completion)
        (warm,) = client.generate("5 6", SamplingParams(max_tokens=1), cache_salt="")
        (salted,) = client.generate("5 6", SamplingParams(max_tokens=1), cache_salt="mine")
        assert (warm.usage.cached_tokens, salted.usage.cached_tokens) == (2, 0)
        assert client.flush_cache() == 2
        with client.stream([5], SamplingParams(max_tokens=200), request_id="mine") as stream:
            assert stream.prompt_token_ids == ()
            assert next(stream).token_ids[0] == 6
            assert stream.prompt_token_ids == (5,)
            assert client.abort("mine")
            with pytest.raises(errors.RequestAborted):
                list(stream)
        assert not client.abort("mine")
        with pytest.raises(errors.InvalidRequest, match="outside the vocabulary"):
            client.generate([10**6])
        with pytest.raises(errors.DeadlineExceeded):
            client.generate([5], SamplingParams(max_tokens=200), timeout_seconds=0.05)
        return "done"

    async def check():
        async with serve(step_seconds=0.003) as running:
            assert await in_thread(running, work) == "done"

    run(check())


def test_leaving_a_stream_frees_its_slot(serve, run):
    def work(client):
        with client.stream([5], SamplingParams(max_tokens=200)) as stream:
            next(stream)

    async def check():
        async with serve(step_seconds=0.003) as running:
            await in_thread(running, work)
            await running.until_idle()
            assert await running.metric("vllm:request_success_total", finished_reason="abort") == 1

    run(check())


def test_nobody_there_is_unavailable(serve, run):
    with Client("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
            client.generate("5")
        with pytest.raises(errors.Unavailable):
            client.status()
        with pytest.raises(errors.DeadlineExceeded, match=r"was not ready within 0\.2 s"):
            client.wait_until_ready(0.2)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, -math.inf])
def test_wait_that_would_never_end_or_has_ended_before_is_refused(seconds):
    with Client("127.0.0.1:1") as client, pytest.raises(errors.ConfigError, match="give 0 seconds or more"):
        client.wait_until_ready(seconds)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": "\ud83d"},
        {"request_id": "\ud800"},
        {"request_id": 5},
        {"priority": "first"},
        {"priority": 2**70},
        {"cache_salt": 5},
        {"cache_salt": "\ud800"},
        {"timeout_seconds": "soon"},
    ],
    ids=str,
)
def test_what_does_not_fit_the_wire_is_an_invalid_request(arguments):
    with Client("127.0.0.1:1") as client, pytest.raises(errors.InvalidRequest, match="does not fit the wire"):
        client.stream(**{"prompt": "5"} | arguments)


@pytest.mark.parametrize("request_id", ["\ud800", 5])
def test_an_id_that_does_not_fit_the_wire_cannot_be_aborted(request_id):
    with Client("127.0.0.1:1") as client, pytest.raises(errors.InvalidRequest, match="does not fit the wire"):
        client.abort(request_id)


def test_a_closed_client_says_so():
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    for call in (
        lambda: client.generate("5"),
        client.status,
        client.model_info,
        client.flush_cache,
        lambda: client.abort("x"),
    ):
        with pytest.raises(errors.InvalidRequest, match="this client is closed"):
            call()


def test_a_closed_asyncio_client_says_so(run):
    async def check():
        client = AsyncClient("127.0.0.1:1")
        await client.close()
        await client.close()
        for call in (
            lambda: client.generate("5"),
            client.status,
            client.model_info,
            client.flush_cache,
            lambda: client.abort("x"),
        ):
            with pytest.raises(errors.InvalidRequest, match="this client is closed"):
                await call()

    run(check())


@pytest.mark.parametrize("address", ["", None])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(errors.ConfigError, match="must be host:port"):
        Client(address)


def test_certificates_that_are_none_are_refused():
    with pytest.raises(errors.ConfigError, match="no PEM certificate"):
        Client("127.0.0.1:1", root_certificates=b"x")


def test_a_deadline_in_a_million_years_is_not_over_at_once(serve, run):
    def work(client):
        (answer,) = client.generate("5", SamplingParams(max_tokens=1), timeout_seconds=1e14)
        assert answer.token_ids == (6,)
        for seconds in (math.inf, math.nan):
            with pytest.raises(errors.InvalidRequest, match="timeout_seconds must be finite"):
                client.generate("5", timeout_seconds=seconds)

    async def check():
        async with serve() as running:
            await in_thread(running, work)
            async with AsyncClient(running.address) as client:
                with pytest.raises(errors.InvalidRequest, match="timeout_seconds must be finite"):
                    await client.generate("5", timeout_seconds=math.inf)

    run(check())


def test_importing_the_client_imports_neither_jax_nor_the_server():
    program = (
        "import sys, jetserve.client\n"
        "print(*sorted({'jax', 'jaxlib', 'starlette', 'uvicorn', 'pydantic', 'typer', 'rich', 'jetserve.orchestrator',"
        " 'jetserve.engine'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == ("", "")


FAILURES = [
    (errors.InvalidRequest("no"), grpc.StatusCode.INVALID_ARGUMENT),
    (status_codes.MessageTooLarge("no"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Overloaded("no", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable("no"), grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded("no"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.RequestAborted("no"), grpc.StatusCode.CANCELLED),
    (errors.EngineFailed("no"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), FAILURES, ids=lambda value: type(value).__name__)
def test_a_failure_comes_back_as_what_it_was(error, code):
    assert status_codes.code_of(error) is code
    back = status_codes.error_of(code, str(error), status_codes.retry_after(error))
    assert (type(back), str(back)) == (type(error), "no")
    if isinstance(error, errors.Overloaded):
        assert back.retry_after_seconds == 1.5


def test_every_kind_of_request_error_is_in_the_table():
    def kinds(root):
        return {root} | {kind for child in root.__subclasses__() for kind in kinds(child)}

    tested = {type(error) for error, _ in FAILURES}
    assert kinds(errors.RequestError) - {errors.RequestError} == tested


def test_a_message_that_grpc_itself_refuses_names_the_setting():
    words = "SERVER: Received message larger than max (20 vs. 10)"
    error = status_codes.error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, words, ())
    assert "server.max_message_bytes" in str(error)


def test_an_unknown_code_is_the_engines_failure():
    assert isinstance(status_codes.error_of(grpc.StatusCode.DATA_LOSS, None, None), errors.EngineFailed)
