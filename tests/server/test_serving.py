"""The whole process: signals, exit codes, taken ports, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jetserve import config
from jetserve.client import AsyncClient, Client, SamplingParams
from jetserve.engine.fake import FakeExecutor
from jetserve.errors import CheckpointError, ConfigError, EngineFailed, Unavailable
from jetserve.server import serving
from tests.links import ROOT
from tests.server.numbers import VOCAB_SIZE, loaded_model, sizing


@contextlib.contextmanager
def process(*arguments):
    """`tests.server.numbers` as a process of its own."""
    command = [sys.executable, "-m", "tests.server.numbers", *arguments]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def address_in(text):
    """From the announcement."""
    found = re.search(r"^  gRPC  (\S+)", text, re.MULTILINE)
    assert found is not None, text
    return found[1]


@contextlib.asynccontextmanager
async def serving_here(*, step_seconds=0.0, fail_at=None, settings=()):
    """`serve` in this process. Yields its task and a client; both see this process's signals."""
    said: list[str] = []

    def load(report):
        return loaded_model(
            lambda shapes: FakeExecutor(shapes, VOCAB_SIZE, step_seconds=step_seconds, fail_at=fail_at), sizing()
        )

    tree = config.load(None, ["server.grpc_port=0", "server.http_port=0", *settings])
    task = asyncio.create_task(serving.serve(tree, load, said.append))
    while len(said) < 2:
        await asyncio.sleep(0.005)
    async with AsyncClient(address_in(said[0])) as client:
        yield task, client


async def until_draining(client):
    while (await client.status()).state != "draining":
        await asyncio.sleep(0.005)


def test_sigterm_lets_running_requests_finish_and_exits_0(run):
    async def check():
        async with serving_here(step_seconds=0.01) as (server, client):
            stream = client.stream([1], SamplingParams(max_tokens=60))
            count = len((await anext(stream)).token_ids)
            signal.raise_signal(signal.SIGTERM)
            await until_draining(client)
            with pytest.raises(Unavailable, match="draining"):
                await client.generate([1])
            async for delta in stream:
                count += len(delta.token_ids)
            assert count == 60
            assert await server == 0

    run(check())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_at_once(run, number):
    async def check():
        async with serving_here() as (server, _):
            signal.raise_signal(number)
            assert await asyncio.wait_for(server, 5) == 0

    run(check())


def test_a_second_signal_cuts_the_rest_off_and_exits_1(run):
    async def check():
        async with serving_here(step_seconds=0.05) as (server, client):
            stream = client.stream([1], SamplingParams(max_tokens=250))
            await anext(stream)
            signal.raise_signal(signal.SIGTERM)
            await until_draining(client)
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Unavailable):
                _ = [delta async for delta in stream]
            assert await server == 1

    run(check())


def test_the_drain_timeout_cuts_the_rest_off_and_exits_1(run):
    async def check():
        async with serving_here(step_seconds=0.05, settings=["server.drain_timeout_seconds=0.3"]) as (server, client):
            stream = client.stream([1], SamplingParams(max_tokens=250))
            await anext(stream)
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Unavailable):
                _ = [delta async for delta in stream]
            assert await server == 1

    run(check())


def test_a_failed_engine_exits_1(run):
    async def check():
        async with serving_here(fail_at=3) as (server, client):
            with pytest.raises(EngineFailed, match="the fake device failed"):
                await client.generate([1])
            assert await server == 1

    run(check())


def test_what_loading_raises_is_what_serve_raises_and_is_not_logged_too(run, caplog):
    def load(report):
        raise CheckpointError("tensor 5 is missing")

    async def check():
        tree = config.load(None, ["server.grpc_port=0", "server.http_port=0"])
        with pytest.raises(CheckpointError, match="tensor 5 is missing"):
            await serving.serve(tree, load, lambda text: None)

    run(check())
    assert "tensor 5 is missing" not in caplog.text


@pytest.mark.slow
def test_a_signal_while_loading_ends_the_process_although_the_thread_cannot_be_ended():
    with process("--load-seconds", "60") as running:
        address = address_in("".join(running.stdout.readline() for _ in range(3)))
        with Client(address) as client:
            while "counting" not in client.status().progress:
                time.sleep(0.01)
            running.send_signal(signal.SIGTERM)
            assert running.wait(15) == 0


def test_a_signal_while_loading_leaves_no_trace():
    with process("--load-seconds", "1") as running:
        for _ in range(3):
            running.stdout.readline()
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=15)
        assert running.returncode == 0
        assert "Traceback" not in said
        assert "never retrieved" not in said


def test_the_announcement_has_addresses_and_an_example_that_works():
    with process() as running:
        text = "".join(running.stdout.readline() for _ in range(8))
        address = address_in(text)
        assert re.search(r"HTTP  http://127\.0\.0\.1:\d+  /metrics /healthz /readyz", text)
        assert re.search(r"ready after \d+\.\d s", text)
        assert f"--server {address}" in text
        example = re.search(r"  python -c '(.*)'$", text, re.MULTILINE)
        assert example is not None, text
        ran = subprocess.run([sys.executable, "-c", example[1]], capture_output=True, text=True)
        assert ran.stdout.split()[:2] == ["3", "4"], ran.stderr  # "is" has the id 2
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0


@pytest.mark.parametrize("on_path", [True, False])
def test_the_announcement_names_the_command_as_it_can_be_typed(on_path, monkeypatch, tmp_path):
    command = tmp_path / "jetserve"
    command.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(command), "serve"])
    monkeypatch.setenv("PATH", str(tmp_path) if on_path else "")
    assert serving.as_typed() == (("jetserve", "python") if on_path else (str(command), sys.executable))
    (tmp_path / "python").touch()
    assert on_path or serving.as_typed() == (str(command), str(tmp_path / "python"))


@pytest.mark.parametrize("setting", ["server.grpc_port", "server.http_port"])
def test_a_taken_port_is_one_clear_line(setting, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ["server.grpc_port=0", "server.http_port=0", f"{setting}={port}"]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use.*{setting}") as caught:
            serving.run(config.load(None, settings), lambda report: None, print)
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # gRPC has nothing to add


def test_tls_files_that_are_not_there_are_one_clear_line(tmp_path: Path):
    settings = [
        "server.grpc_port=0",
        "server.http_port=0",
        f"server.tls_certificate={tmp_path / 'no.pem'}",
        f"server.tls_key={tmp_path / 'no.key'}",
    ]
    with pytest.raises(ConfigError, match=r"no\.key: No such file"):
        serving.run(config.load(None, settings), lambda report: None, print)


def test_tls_files_that_hold_none_are_one_clear_line(tmp_path: Path, capfd):
    for name in ("a.pem", "a.key"):
        (tmp_path / name).write_text("hello\n")
    settings = [
        "server.grpc_port=0",
        "server.http_port=0",
        f"server.tls_certificate={tmp_path / 'a.pem'}",
        f"server.tls_key={tmp_path / 'a.key'}",
    ]
    with pytest.raises(ConfigError, match=r"a\.pem and server\.tls_key=.*a\.key are no PEM certificate"):
        serving.run(config.load(None, settings), lambda report: None, print)
    assert capfd.readouterr().err == ""  # gRPC has nothing to add


def test_tls_serves_those_who_trust_the_certificate(tmp_path: Path):
    key, certificate = tmp_path / "server.key", tmp_path / "server.pem"
    made = subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {key} -out {certificate}",
        shell=True,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    settings = ("--set", f"server.tls_certificate={certificate}", "--set", f"server.tls_key={key}")
    with process(*settings) as running:
        address = address_in("".join(running.stdout.readline() for _ in range(3)))
        with Client(address, root_certificates=certificate.read_bytes()) as client:
            client.wait_until_ready(20)
            assert client.generate([1], SamplingParams(max_tokens=1))[0].token_ids == (2,)
        with Client(address) as client, pytest.raises(Unavailable):
            client.status()
