"""What a user installs: wheel, sdist and editable, each in an environment of its own, away from the sources."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.links import ROOT, package_folders

pytestmark = pytest.mark.slow

# jetserve comes from the environment under test, its dependencies from the one that runs the tests.
PROBE = """
import importlib, pathlib, sys
sys.path += {dependencies!r}
import jetserve
homes = sorted(importlib.import_module(name).__file__ for name in {packages!r})
import jetserve.config, jetserve.request, jetserve.tpu_configs
file = pathlib.Path(jetserve.tpu_configs.__file__).parent / "cpu.yaml"
print(jetserve.config.load(file).engine.slots)
print(pathlib.Path(jetserve.__file__).with_name("py.typed").is_file())
print(pathlib.Path(jetserve.__file__).parent)
"""


def _run(*command: str | Path, cwd: Path) -> str:
    ran = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would hold, so that builds leave nothing behind and see nothing untracked."""
    copy = tmp_path_factory.mktemp("sources") / "jetserve"
    names = _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def archives(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), the wheel built from the sdist."""
    out = tmp_path_factory.mktemp("archives")
    _run(sys.executable, "-m", "build", "--outdir", out, cwd=sources)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist


def _expected_files() -> set[str]:
    """The wheel's name of every source and data file on disk."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(folder)}"
        for package, folder in package_folders().items()
        for pattern in ("*.py", "*.pyi", "py.typed", "*.yaml", "*.proto", "protos/*.proto")
        for path in folder.glob(pattern)
    }


def test_the_wheel_holds_every_file_below_one_name(archives: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(archives[0]).namelist()
    package = {name for name in names if ".dist-info/" not in name}

    assert {name.partition("/")[0] for name in package} == {"jetserve"}
    assert package == _expected_files()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_holds_every_source(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    sources = {
        str(path.relative_to(ROOT))
        for folder in package_folders().values()
        for pattern in ("*.py", "py.typed", "*.yaml", "*.proto")
        for path in folder.glob(pattern)
    }
    assert sources <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.parametrize("form", ["wheel", "sdist", "editable"])
def test_it_installs_and_imports(form: str, archives: tuple[Path, Path], sources: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    what = {"wheel": [archives[0]], "sdist": [archives[1]], "editable": ["--editable", sources]}[form]
    tools = [path for path in sys.path if path.endswith("site-packages")]
    pip = [python, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--quiet", "--quiet"]

    _run(*pip, *what, cwd=tmp_path)

    program = PROBE.format(dependencies=tools, packages=sorted(package_folders()))
    slots, typed, folder = _run(python, "-c", program, cwd=tmp_path).split("\n")[:3]
    assert (slots, typed) == ("32", "True")
    assert Path(folder).is_relative_to(sources if form == "editable" else home)
    assert (home / "bin" / "jetserve").is_file()
