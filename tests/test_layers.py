"""What may import what, and how large things may grow. Read from the sources, and checked in fresh interpreters."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.links import ROOT, package_folders

# Upper layers first; a module imports from its own layer and those after it. A name is a package or one module, the
# longest that fits decides. `llm` and `client` are faces like the server's, kept at the root for short imports.
LAYERS = (
    ("jetserve.server", "jetserve.llm", "jetserve.client"),
    ("jetserve.orchestrator",),
    ("jetserve.simulation",),
    ("jetserve.engine",),
    ("jetserve.models",),
    ("jetserve.kernels",),
    ("jetserve.sharding", "jetserve.tpu_configs"),
    ("jetserve",),
)
# Modules with no jax, neither of their own nor by what they import. Packages stand for all their modules.
HOST_SIDE = (
    "jetserve.config",
    "jetserve.errors",
    "jetserve.request",
    "jetserve.tokenizer",
    "jetserve.engine.plan",
    "jetserve.engine.sizing",
    "jetserve.engine.scheduler",
    "jetserve.engine.sequence",
    "jetserve.engine.pages",
    "jetserve.engine.block_hash",
    "jetserve.engine.kv_events",
    "jetserve.engine.prefix_node",
    "jetserve.engine.prefix_tree",
    "jetserve.simulation",
    "jetserve.orchestrator",
    "jetserve.server",
    "jetserve.client",
    "jetserve.llm",
)
JAX = {"jax", "jaxlib", "flax", "orbax"}
NEVER = {"torch", "transformers", "tensorflow"}
HOMELESS = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
ENVIRONMENT_HOME = "jetserve.sharding.chips"  # the one place that sets LIBTPU/XLA flags
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 450
MAX_CLASS_ATTRIBUTES = 15


class Module(NamedTuple):
    """One source file of the package."""

    name: str
    path: Path
    tree: ast.Module


def _modules() -> list[Module]:
    found = []
    for package, folder in package_folders().items():
        for path in sorted(folder.glob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return found


MODULES = _modules()
NAMES = {module.name for module in MODULES}
every_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


def _layer(name: str) -> int:
    fits = [(len(root), rank) for rank, roots in enumerate(LAYERS) for root in roots if _within(name, root)]
    return max(fits)[1]


def _within(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def _imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything imported; `from a import b` is a.b when that is a module, else a."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the package in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in NAMES else str(node.module)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when the module is imported: no function bodies, nothing for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (inner for part in child.orelse for inner in ast.walk(part))
            continue
        yield child
        yield from _at_import(child)


def _is_host_side(module: Module) -> bool:
    said = "imports no jax" in (ast.get_docstring(module.tree) or "").lower()
    return said or any(_within(module.name, root) for root in HOST_SIDE)


@every_module
def test_imports_point_down(module: Module) -> None:
    own = _layer(module.name)
    wrong = [
        f"line {line}: {name}"
        for line, name in _imports(ast.walk(module.tree))
        if _within(name, "jetserve") and _layer(name) < own
    ]

    assert module.name == "jetserve" or wrong == []  # jetserve/__init__ names the faces for type checkers only


@every_module
def test_host_side_modules_import_no_jax(module: Module) -> None:
    if not _is_host_side(module):
        return

    found = [f"line {line}: {name}" for line, name in _imports(_at_import(module.tree)) if name.split(".")[0] in JAX]

    assert found == []


def test_host_side_modules_load_without_jax() -> None:
    names = [module.name for module in MODULES if _is_host_side(module)]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = sorted({JAX | NEVER!r} & set(sys.modules))\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert ran.stderr == ""
    assert ran.returncode == 0


@pytest.mark.parametrize(
    ("name", "heavy"),
    [
        ("jetserve", ["jax", "grpc", "pydantic", "numpy", "rich", "typer"]),
        ("jetserve.client", ["jax", "starlette", "uvicorn", "pydantic", "tokenizers", "sentencepiece", "typer"]),
    ],
)
def test_light_modules_stay_light(name: str, heavy: list[str]) -> None:
    program = f"import sys, {name}; print(*sorted(set({heavy!r}) & set(sys.modules)))"

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert (ran.stdout.strip(), ran.stderr) == ("", "")


def test_dependencies_are_those_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["plot"]]
    declared = {re.split(r"[><=\[ ]", requirement)[0] for requirement in wanted}
    homes = importlib.metadata.packages_distributions() | {"google": ["protobuf"]}  # others share that name
    imported = {name.partition(".")[0] for module in MODULES for _, name in _imports(ast.walk(module.tree))}
    needed = {_normal(home) for name in imported - sys.stdlib_module_names - {"jetserve"} for home in homes[name]}

    assert needed == {_normal(name) for name in declared}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_the_public_names_exist() -> None:
    jetserve = importlib.import_module("jetserve")

    assert sorted(jetserve.__all__) == ["Completion", "LLM", "SamplingParams"]
    assert all(getattr(jetserve, name).__name__ == name for name in jetserve.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jetserve.nothing


@every_module
def test_no_module_needs_torch_or_transformers(module: Module) -> None:
    found = [f"line {line}: {name}" for line, name in _imports(ast.walk(module.tree)) if name.split(".")[0] in NEVER]

    assert found == []


@every_module
def test_the_environment_is_read_in_one_place(module: Module) -> None:
    found = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv")
    ]
    found += [f"line {line}: {name}" for line, name in _imports(ast.walk(module.tree)) if name == "dotenv"]

    assert module.name == ENVIRONMENT_HOME or found == []


@every_module
def test_every_module_has_a_name_and_says_what_it_is(module: Module) -> None:
    assert module.name.rpartition(".")[2] not in HOMELESS
    assert ast.get_docstring(module.tree)


@every_module
def test_functions_fit_a_screen(module: Module) -> None:
    long = [
        f"{node.name}: {lines} lines"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := _end(node) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]

    assert _within(module.name, "jetserve.kernels") or long == []


@every_module
def test_files_fit_a_head(module: Module) -> None:
    lines = len(module.path.read_text(encoding="utf-8").splitlines())

    assert _within(module.name, "jetserve.kernels") or lines <= MAX_FILE_LINES


@every_module
def test_classes_own_little_state(module: Module) -> None:
    """Counts what methods set on `self`; records that never change are data, not state."""
    wide = {
        node.name: sorted(names)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and len(names := _attributes(node)) > MAX_CLASS_ATTRIBUTES
    }

    assert wide == {}


def _attributes(node: ast.ClassDef) -> set[str]:
    own = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    decorated = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    if "dataclass" in decorated and "frozen=True" not in decorated and "struct." not in decorated:
        own |= {
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
    return own


def _end(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno
