"""Who may import whom: the flow is the folders (see the design in docs/)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import lpfs

ROOT = Path(lpfs.__file__).parent
# folder or file -> what it must never import
FORBIDDEN = {
    "schema": {"data", "models", "train", "gates", "methods", "select", "compare", "report", "adapters", "cli"},
    "tables": {"data", "models", "gates", "train", "methods", "select", "compare", "report", "adapters", "cli"},
    "gates": {
        "data",
        "models",
        "tables",
        "train",
        "methods",
        "select",
        "compare",
        "report",
        "adapters",
        "cli",
        "sklearn",
    },
    "train": {"gates", "models", "saved", "methods", "select", "compare", "report", "adapters", "cli"},
    "models": {"train", "saved", "methods", "select", "compare", "report", "adapters", "cli"},
    "data": {"gates", "models", "train", "saved", "methods", "select", "compare", "report", "adapters", "cli"},
    "saved": {"methods", "select", "compare", "report", "adapters", "cli"},
    "methods": {"select", "compare", "report", "adapters", "cli"},
}


def imports_of(path: Path) -> set[str]:
    """Names of the parts of lpfs that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{each.name}" for each in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("lpfs.")}
    return found


def test_the_folders_import_only_downwards():
    seen = 0
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        wrong = imports_of(path) & FORBIDDEN.get(part, set())
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"
        seen += part in FORBIDDEN
    assert seen > 5


def test_nobody_imports_the_adapters():
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0]
        assert part == "adapters" or "adapters" not in imports_of(path), path.relative_to(ROOT)


def test_the_core_needs_torch_and_numpy_alone():
    allowed = {"torch", "numpy", "lpfs"}
    # kernels, imported only where their package is there
    kernels = {
        "gates/fused.py": "triton",
        "gates/loops.py": "numba",
        "tables/engines/cuda.py": "triton",
        "models/kernels/triton_crosses.py": "triton",
        "tables/engines/cpu.py": "numba",
        "tables/engines/kernels.py": "numba",
        "models/kernels/numba_crosses.py": "numba",
    }
    folders = [path for name in ("gates", "models", "tables") for path in (ROOT / name).rglob("*.py")]
    for path in [*folders, ROOT / "schema.py", ROOT / "errors.py"]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                own = kernels.get(path.relative_to(ROOT).as_posix())
                fine = (
                    top in allowed
                    or top in sys.stdlib_module_names
                    or top == own
                    or (own == "numba" and top == "llvmlite")
                )
                assert fine, f"{path.name} imports {name}"
