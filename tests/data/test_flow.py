"""The folders of the data stage import only upstream: raw -> plan -> encode -> store, and store -> batches."""

import ast
from pathlib import Path

import lpfs.data

ROOT = Path(lpfs.data.__file__).parent
ABOVE = {
    "raw": {"raw"},
    "plan": {"raw", "plan"},
    "store": {"store"},
    "encode": {"raw", "plan", "store", "encode"},
    "engines": {"raw", "plan", "encode", "engines", "prefetch"},
    "batches": {"store", "batches"},
    "simulation": {"store", "simulation"},
}


def test_folders_import_only_upstream():
    for folder, allowed in ABOVE.items():
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lpfs.data."):
                    found = str(node.module).split(".")[2]
                    assert found in allowed | {"progress", "urls"}, f"{folder}/{path.name} imports {node.module}"


def test_every_folder_says_what_it_is():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ABOVE)
    for path in ROOT.glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text("utf-8")))
