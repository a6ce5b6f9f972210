"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from jetserve.errors import ConfigError
from jetserve.server import cli

runner = CliRunner()


def jetserve(*arguments):
    """As a process, through the entry point."""
    program = "from jetserve.server.cli import main; main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


def test_help_names_every_command_and_imports_no_jax():
    program = (
        "import sys\nfrom jetserve.server.cli import main\nsys.argv = ['jetserve', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('LOADED', *sorted({'jax', 'grpc', 'starlette', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert all(name in ran.stdout for name in ("serve", "generate", "client", "convert", "fetch", "version"))
    assert ran.stdout.splitlines()[-1] == "LOADED"


@pytest.mark.parametrize("command", ["serve", "generate", "client", "convert", "fetch", "version"])
def test_each_command_explains_itself(command):
    answer = runner.invoke(cli.app, [command, "--help"])
    assert answer.exit_code == 0
    assert "Usage" in answer.output


def test_version_is_the_packages():
    assert runner.invoke(cli.app, ["version"]).output.strip() == version("jetserve")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("serve", "--set", "engine.slotz=3"), 2, "did you mean engine.slots?"),
        (("serve", "--set", "engine.slots"), 2, "not of the form path=value"),
        (("serve", "--slots", "0"), 2, "engine.slots"),
        (("serve", "--config", "/no/such.yaml"), 2, "cannot read the configuration /no/such.yaml"),
        (("generate", "--prompt", "x", "--temperature", "-1"), 2, "temperature=-1.0 is out of range"),
        (("client",), 2, "give a prompt, --status, --model-info or --flush-cache"),
        (("client", "hi", "--server", "127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("fetch", "no-such-demo"), 1, "no demo model 'no-such-demo'"),
        pytest.param(
            ("convert", "/no/such/model", "/tmp/out"), 1, "/no/such/model", marks=pytest.mark.slow
        ),  # imports jax
    ],
)
def test_a_known_failure_is_one_line_on_stderr(arguments, code, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jetserve", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (code, "")
    assert words in err
    assert err.startswith("jetserve: ")
    assert len(err.splitlines()) == 1


def test_flags_of_serve_become_settings(monkeypatch):
    seen = []
    monkeypatch.setattr("jetserve.server.serving.run", lambda tree, load, announce: seen.append(tree) or 0)
    arguments = "serve --model m --host ::1 --grpc-port 1 --http-port 2 --dtype float32 --max-length 64 --slots 3"
    arguments += " --strict-compile --log-level error --served-name s --set scheduler.max_waiting_requests=5"
    assert runner.invoke(cli.app, arguments.split()).exit_code == 0
    (tree,) = seen
    assert (tree.model.name, tree.model.dtype, tree.model.served_name) == ("m", "float32", "s")
    assert (tree.server.host, tree.server.grpc_port, tree.server.http_port) == ("::1", 1, 2)
    assert (tree.engine.slots, tree.engine.max_length, tree.engine.strict_compile) == (3, 64, True)
    assert (tree.server.log_level, tree.scheduler.max_waiting_requests) == ("error", 5)


def test_flags_that_are_not_given_leave_the_file_alone(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("jetserve.server.serving.run", lambda tree, load, announce: seen.append(tree) or 0)
    file = tmp_path / "c.yaml"
    file.write_text("engine: {slots: 7, strict_compile: true}\nserver: {grpc_port: 5}\n")
    assert runner.invoke(cli.app, ["serve", "--config", str(file)]).exit_code == 0
    assert (seen[0].engine.slots, seen[0].engine.strict_compile, seen[0].server.grpc_port) == (7, True, 5)


def test_an_unexpected_setting_is_refused_before_anything_is_imported():
    answer = runner.invoke(cli.app, ["serve", "--set", "x.y=1"])
    assert isinstance(answer.exception, ConfigError)


def test_client_streams_text_and_answers_questions(serve, run):
    import asyncio

    async def check():
        async with serve() as running:

            async def ask(*arguments):
                return await asyncio.to_thread(jetserve, "client", "--server", running.address, *arguments)

            streamed = await ask("5 6", "--max-tokens", "3", "--wait", "5")
            assert (streamed.stdout, streamed.stderr) == (" 7 8 9\n", "")
            answer = json.loads((await ask("5 6", "--max-tokens", "3", "--temperature", "0", "--json")).stdout)
            assert answer == {
                "text": " 7 8 9",
                "token_ids": [7, 8, 9],
                "prompt_token_ids": [900, 5, 6],
                "finish_reason": "length",
                "usage": {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2},
            }
            status = json.loads((await ask("--status", "--model-info")).stdout)
            assert (status["state"], status["name"], status["eos_token_ids"]) == ("ready", "numbers", [999])
            assert (status["queried_tokens"], status["cached_tokens"], status["cached_pages"]) == (6, 2, 1)

    run(check())


def test_client_counts_tokens_by_salt_and_flushes(serve, run):
    import asyncio

    async def check():
        async with serve() as running:

            async def ask(*arguments):
                arguments = ("client", "--server", running.address, *arguments)
                ran = await asyncio.to_thread(jetserve, *arguments)
                return ran.stdout, ran.stderr

            prompt = ("5 6", "--max-tokens", "3", "--usage")
            line = "3 prompt tokens ({} cached), 3 generated; ended by length\n"
            assert await ask(*prompt) == (" 7 8 9\n", line.format(0))
            assert await ask(*prompt, "--priority", "-3") == (" 7 8 9\n", line.format(2))
            out, counts = await ask(*prompt, "--cache-salt", "mine", "--flush-cache", "--status")
            said, _, text = out.rpartition("}\n")
            said = json.loads(said + "}")
            assert (said["pages_freed"], said["cached_pages"]) == (1, 0)
            assert (text, counts) == (" 7 8 9\n", line.format(0))

    run(check())
