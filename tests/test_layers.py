"""Which part of the package may import which: data flows forward through the folders."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import lpfs

ROOT = Path(lpfs.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
HELPERS = {"errors", "_validation", "_imports", "_text", "_fileio", "_locks", "_console"}
CORE = {"schema", "data", "embeddings", "models", "gates", "train", "serialization"}
# part of the package -> parts that it may import, anywhere in its files
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "_validation": {"errors"},
    "_imports": {"errors"},
    "_locks": {"errors"},
    "_fileio": {"errors", "_locks", "_validation"},
    "_text": {"errors"},
    "_console": {"errors", "_text"},
    "schema": {"errors", "_validation", "_fileio", "notebook", "plots"},  # the last two are imported on use
    "notebook": {"schema", "_text", "report"},
    "plots": {"errors", "schema", "_text", "report"},
    "data": {"schema"} | HELPERS,
    "embeddings": {"errors", "_imports", "_validation"},
    "gates": {"schema"} | HELPERS,
    "models": {"schema", "data", "embeddings", "gates"} | HELPERS,
    "train": {"schema", "data", "embeddings"} | HELPERS,
    "serialization": {"schema", "models", "train"} | HELPERS,
    "methods": CORE | HELPERS,
    "report": {"schema", "__version__", "errors", "_text", "_fileio", "_imports", "_validation"},
    "pipeline": CORE | HELPERS | {"methods", "report", "notebook", "plots"},
    "compare": CORE | HELPERS | {"methods", "pipeline", "report"},
    "paper": CORE | HELPERS | {"methods", "pipeline", "report", "compare", "plots"},
    "export": CORE | HELPERS | {"pipeline"},
    "online": CORE | HELPERS | {"methods"},
    "serve": {"schema", "data", "models", "serialization", "online", "export", "report", "__version__"} | HELPERS,
    "adapters": {"schema", "data", "gates"} | HELPERS,
    "sklearn": {"schema", "gates"} | HELPERS,
    "cli": CORE
    | HELPERS
    | {"methods", "pipeline", "report", "compare", "paper", "export", "online", "serve", "__version__"},
    "__main__": {"cli"},
}
# the functions of commands, and who may import the modules that they are in
COMMANDS = {
    "lpfs.pipeline.select": {"cli", "__init__"},
    "lpfs.pipeline.single_stage": {"cli"},
    "lpfs.compare.compare": {"cli", "compare", "__init__"},
    "lpfs.paper.reproduce": {"cli", "paper"},
    "lpfs.adapters": {"adapters"},
    "lpfs.sklearn": {"sklearn"},
    "lpfs.serve": {"cli", "serve"},
}
# files that import an optional package at module level; they are imported only if it is there
OPTIONAL = {
    "gates/_triton.py": {"triton"},
    "train/_triton.py": {"triton"},
    "embeddings/_triton.py": {"triton"},
    "models/_kernels/triton_crosses.py": {"triton"},
    "embeddings/_numba.py": {"numba"},
    "embeddings/_numba_loops.py": {"numba", "llvmlite"},
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> set[str]:
    """Return the dotted names that a file or a statement imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def test_every_part_has_a_rule():
    assert {part_of(path) for path in FILES} - {"__init__"} == set(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_part_imports_only_what_it_may(part):
    for path in FILES:
        if part_of(path) == part:
            parts = {name.split(".")[1] for name in imported_modules(parse(path)) if name.startswith("lpfs.")}
            wrong = parts - ALLOWED[part] - {part}
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("module", sorted(COMMANDS))
def test_no_command_imports_another_command(module):
    for path in FILES:
        uses = any(name == module or name.startswith(f"{module}.") for name in imported_modules(parse(path)))
        if uses:
            assert part_of(path) in COMMANDS[module], path.relative_to(ROOT)


def test_the_core_needs_only_torch_and_numpy():
    core = [path for name in ("gates", "models", "embeddings", "train") for path in (ROOT / name).rglob("*.py")]
    for path in [*core, ROOT / "schema.py", ROOT / "errors.py"]:
        allowed = {"torch", "numpy", "lpfs", *OPTIONAL.get(path.relative_to(ROOT).as_posix(), ())}
        for statement in parse(path).body:
            for name in imported_modules(statement):
                package = name.split(".")[0]
                assert package in allowed or package in sys.stdlib_module_names, f"{path.name} imports {name}"


def module_level_imports(path: Path) -> set[str]:
    """Return the modules of lpfs that importing a file imports; not those of functions and type checking."""
    statements = [
        statement
        for statement in parse(path).body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef) and "TYPE_CHECKING" not in ast.unparse(statement)
    ]
    return {name for statement in statements for name in imported_modules(statement) if name.startswith("lpfs.")}


def test_modules_import_each_other_without_a_cycle():
    modules = {
        "lpfs" + "".join(f".{part}" for part in path.relative_to(ROOT).with_suffix("").parts): path for path in FILES
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {name: module_level_imports(path) & set(modules) - {name, "lpfs"} for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, chain: tuple[str, ...]) -> None:
        assert name not in chain, " -> ".join((*chain, name))
        if name not in done:
            for other in sorted(graph[name]):
                if not name.startswith(f"{other}."):  # a package is imported before its modules
                    visit(other, (*chain, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    assert len(done) > 100


def test_no_class_name_is_used_twice():
    names = Counter(node.name for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
