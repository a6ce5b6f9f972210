"""Where things lie: the fixed top level, and a package table that equals the disk."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

from tests.links import ROOT, make_links, package_folders

FOLDERS = {"jetserve", "models", "sharding", "server", "tests", "tpu_configs"}
DOCUMENTS = {"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml"}
MAPPED = {"models", "sharding", "server", "tpu_configs"}  # imported as jetserve.<name>
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)


def _tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.split("\0") if name}


def test_the_top_level_is_fixed() -> None:
    top = {name.partition("/")[0] for name in _tracked()}

    assert {name for name in top if not name.startswith(".")} == FOLDERS | DOCUMENTS


def test_nothing_ignored_is_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )

    assert listed.stdout == ""


def test_the_package_table_equals_the_disk() -> None:
    declared = package_folders()
    on_disk = {
        Path(folder)
        for name in FOLDERS - {"tests"}
        for folder, _, files in os.walk(ROOT / name)
        if any(file.endswith(".py") for file in files)
    }

    assert set(declared.values()) == on_disk
    assert all(package == "jetserve" or package.startswith("jetserve.") for package in declared)


def test_every_package_folder_has_an_init() -> None:
    assert [str(folder) for folder in package_folders().values() if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_top_level_folders_are_imported_below_jetserve_only(path: Path) -> None:
    bare = [
        f"line {node.lineno}: {name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _imported(node)
        if name.partition(".")[0] in MAPPED
    ]

    assert bare == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


def test_the_link_tree_holds_every_source_once(tmp_path: Path) -> None:
    make_links(links=tmp_path)
    again = make_links(links=tmp_path)

    seen = {
        path.resolve() for folder, _, files in os.walk(tmp_path, followlinks=True) for path in _python(folder, files)
    }
    expected = {path for folder in FOLDERS - {"tests"} for path in (ROOT / folder).rglob("*.py")}
    assert seen == expected
    assert again == sum(path.is_symlink() for path in tmp_path.rglob("*"))


def _python(folder: str, files: list[str]) -> list[Path]:
    return [Path(folder) / file for file in files if file.endswith(".py")]


def test_stale_links_go_away(tmp_path: Path) -> None:
    make_links(links=tmp_path)
    stale = tmp_path / "jetserve" / "gone.py"
    stale.symlink_to(ROOT / "gone.py")

    make_links(links=tmp_path)

    assert not stale.is_symlink()
