"""Makes `build/links/jetserve/`: the package tree as it is imported, for tools that cannot read `package-dir`.

Symlinks only, made from pyproject.toml's own table, so nothing is said twice. Run as `python -m tests.links` from the
root; safe to run again after files came or went.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "build" / "links"


def package_folders(root: Path = ROOT) -> dict[str, Path]:
    """Every import package of the project, and the folder it is in."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    mapped: dict[str, str] = settings["package-dir"]
    folders = {}
    for package in settings["packages"]:
        inner: list[str] = []
        outer = package
        while outer not in mapped:
            outer, _, last = outer.rpartition(".")
            inner.insert(0, last)
        folders[package] = root.joinpath(mapped[outer], *inner)
    return folders


def make_links(root: Path = ROOT, links: Path = LINKS) -> int:
    """Makes the tree what the table says and returns how many links it has.

    A package that holds others becomes a real folder of links; one that holds none is one link to its folder. Links
    that are right stay as they are, so that a checker running meanwhile sees nothing.
    """
    wanted = _wanted(package_folders(root), links)
    for found in sorted((links / "jetserve").rglob("*"), reverse=True):
        if found.is_symlink() and found not in wanted:
            found.unlink()
        elif found.is_dir() and not found.is_symlink() and not any(found in link.parents for link in wanted):
            found.rmdir()
    for link, target in wanted.items():
        if not (link.is_symlink() and link.readlink() == target):
            link.unlink(missing_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target, target_is_directory=target.is_dir())
    return len(wanted)


def _wanted(folders: dict[str, Path], links: Path) -> dict[Path, Path]:
    """Link -> target. Links lie in `links` alone: no link is below another."""
    wanted = {}
    for package, folder in folders.items():
        place = links.joinpath(*package.split("."))
        if not any(other.startswith(f"{package}.") for other in folders):
            wanted[place] = folder
            continue
        for entry in folder.iterdir():
            if entry.name != "__pycache__" and f"{package}.{entry.name}" not in folders:
                wanted[place / entry.name] = entry
    return wanted


if __name__ == "__main__":
    sys.stdout.write(f"{LINKS.relative_to(ROOT)}: {make_links()} links\n")
