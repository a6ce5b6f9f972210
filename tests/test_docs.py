"""What the documents say works: their links, and README's commands as they stand there.

A fenced block is run when the line before it is `<!-- test -->`, or `<!-- test: with a server -->` for those that call
the server of `make serve`; its addresses are replaced by those of the server under test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from google.protobuf import json_format

from jetserve.server.protos import inference_pb2
from tests.links import ROOT

DOCUMENTS = sorted(ROOT.glob("*.md"))
WITH_SERVER = "with a server"
RUN_SECONDS = 600  # a block may compile a model's programs


class Block(NamedTuple):
    """One fenced block that is to be run."""

    line: int
    language: str
    needs: str
    text: str


def _blocks() -> list[Block]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pattern = re.compile(r"<!-- test(?:: ([\w ]+))? -->\n```(\w+)\n(.*?)```", re.DOTALL)
    return [
        Block(text[: found.start()].count("\n") + 2, found[2], found[1] or "", found[3])
        for found in pattern.finditer(text)
    ]


BLOCKS = _blocks()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses README names -> those of a server with the demo model."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-c", "from jetserve.server.cli import main; main()", "serve"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, "--grpc-port", "0", "--http-port", "0"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield _addresses(process, log)
        finally:
            process.terminate()


def _addresses(process: subprocess.Popen[str], log: Path) -> dict[str, str]:
    """Waits until the server is ready."""
    assert process.stdout is not None
    said = ""
    while "ready after" not in said:
        line = process.stdout.readline()
        assert line, f"the server ended: {said}{log.read_text()}"
        said += line
    grpc, http = re.search(r"gRPC +(\S+)", said), re.search(r"HTTP +http://(\S+)", said)
    assert grpc is not None, said
    assert http is not None, said
    return {"127.0.0.1:9000": grpc[1], "127.0.0.1:8000": http[1]}


def _run(block: Block, addresses: dict[str, str]) -> str:
    text = block.text
    for said, real in addresses.items():
        text = text.replace(said, real)
    if block.language == "python":
        command = [sys.executable, "-c", text]
    else:
        command = ["bash", "-euo", "pipefail", "-c", text.replace(".venv/bin/", f"{Path(sys.executable).parent}/")]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=RUN_SECONDS
    )
    assert ran.returncode == 0, f"README.md:{block.line}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def _missing_tool(block: Block) -> str | None:
    words = {line.split()[0] for line in block.text.splitlines() if block.language == "sh" and line[:1].isalpha()}
    return next((word for word in sorted(words) if shutil.which(word) is None), None)


@pytest.mark.demo
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{block.line}")
def test_the_readme_runs_as_it_stands(block: Block, request: pytest.FixtureRequest) -> None:
    if tool := _missing_tool(block):
        pytest.skip(f"{tool} is not installed")
    addresses = request.getfixturevalue("server") if block.needs == WITH_SERVER else {}
    text = block.text
    if block.needs == WITH_SERVER and ".venv/bin/jetserve client" in text:
        named = f"--server {addresses['127.0.0.1:9000']}"  # it has the default port
        block = block._replace(text=text.replace("jetserve client", f"jetserve client {named}"))

    assert _run(block, addresses).strip()


def test_the_readme_has_commands_to_run() -> None:
    assert {block.needs for block in BLOCKS} == {"", WITH_SERVER}
    assert {block.language for block in BLOCKS} == {"sh", "python"}


@pytest.mark.parametrize("block", [block for block in BLOCKS if "grpcurl" in block.text], ids=lambda b: f"{b.line}")
def test_grpcurl_calls_name_a_method_and_its_message(block: Block) -> None:
    words = shlex.split(block.text)
    service, _, method = words[-1].partition("/")
    called = inference_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name[method]

    message = getattr(inference_pb2, called.input_type.name)()
    json_format.ParseDict(json.loads(words[words.index("-d") + 1]), message)

    assert service == called.containing_service.full_name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))]

    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_paths_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    folders = "jetserve|models|sharding|server|tests|tpu_configs"
    paths = re.findall(rf"`((?:{folders})/[\w./]*\w/?)`", text)

    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_make_target_in_the_documents_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):.*##", makefile, re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for target in re.findall(r"(?:`|\$ )make ([a-z]+)", document.read_text(encoding="utf-8"))
    }

    assert {"serve", "test", "check", "bench"} <= named <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
