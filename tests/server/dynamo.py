"""NVIDIA Dynamo's standalone KV indexer, from the package registry, as a router that reads our events."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.links import ROOT

REQUIREMENT = "ai-dynamo-runtime==1.6.1"
MODEL = "demo"
_PATIENCE_SECONDS = 30.0
T = TypeVar("T")


def installed() -> Path:
    """A folder with the package, below build/; made the first time. Skips where there is no wheel for the platform."""
    glibc = tuple(int(part) for part in (platform.libc_ver()[1] or "0").split(".")[:2])
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or glibc < (2, 28):
        pytest.skip(
            f"{REQUIREMENT} has wheels for Linux with glibc 2.28 or newer on x86_64 and aarch64, this is "
            f"{sys.platform} on {platform.machine()} with glibc {glibc}: KV events are NOT verified against Dynamo here"
        )
    folder = ROOT / "build" / "oracle" / REQUIREMENT.replace("==", "-")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as empty:
            made = Path(empty) / "made"
            pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
            # Of what it asks for, the indexer needs only pydantic, and takes ours.
            ran = subprocess.run(
                [*pip, "--no-deps", "--target", str(made), REQUIREMENT], capture_output=True, text=True, timeout=600
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            with contextlib.suppress(OSError):  # another run was quicker
                made.rename(folder)
            shutil.rmtree(made, ignore_errors=True)
    return folder


@dataclass(frozen=True)
class Indexer:
    """One that runs."""

    url: str
    log: Path

    def register(
        self, instance: int, endpoint: str, replay_endpoint: str | None, block_size: int, model: str = MODEL
    ) -> None:
        fields = {
            "instance_id": instance,
            "endpoint": endpoint,
            "model_name": model,
            "block_size": block_size,
            "dp_rank": 0,
        }
        if replay_endpoint is not None:
            fields["replay_endpoint"] = replay_endpoint
        self._ask("/register", fields)

    def matched(self, token_ids: Sequence[int], model: str = MODEL, **fields: str) -> dict[int, int]:
        """Instance -> tokens of this prompt that it has on its device; those that have some."""
        answer = self._ask("/query", {"token_ids": list(token_ids), "model_name": model, **fields})
        return {int(instance): tokens["0"] for instance, tokens in answer["scores"].items()}

    def tiers(self, token_ids: Sequence[int], instance: int, model: str = MODEL) -> dict[str, int]:
        """Tokens of this prompt on the device, and there or in host memory."""
        answer = self._ask("/query", {"token_ids": list(token_ids), "model_name": model})
        found = answer["instances"].get(str(instance), {"gpu": 0, "cpu": 0})
        return {"gpu": found["gpu"], "cpu": found["cpu"]}

    def wait_for(self, wanted: dict[int, int], token_ids: Sequence[int], model: str = MODEL, **fields: str) -> None:
        """Waits until `matched` gives this."""
        self.until(lambda: self.matched(token_ids, model, **fields), wanted)

    def until(self, ask: Callable[[], T], wanted: T) -> None:
        """Asks until this is the answer: events take their time."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while (found := ask()) != wanted:
            assert time.monotonic() < end, f"it says {found}, should say {wanted}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.01)

    def _ask(self, path: str, fields: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Indexer]:
    """The indexer as a process of its own."""
    packages = installed()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    indexer = Indexer(f"http://127.0.0.1:{port}", folder / "dynamo.log")
    with indexer.log.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "2"],
            env={**os.environ, "PYTHONPATH": str(packages)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{indexer.url}/health", timeout=10):
                break
            assert process.poll() is None, indexer.log.read_text()
            assert time.monotonic() < until, indexer.log.read_text()
            time.sleep(0.05)
        yield indexer
    finally:
        process.terminate()
        process.wait(10)
