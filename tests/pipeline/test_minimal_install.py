"""A simulated log is searched where polars is not installed: it needs torch and numpy, and click for the command."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"polars", "safetensors", "zstandard", "pyarrow"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from pathlib import Path
from lpfs.cli import main

def lpfs(*words):
    try:
        main(list(map(str, words)))
    except SystemExit as end:
        assert not end.code, end.code

folder = Path(sys.argv[1])
lpfs("simulate", "--out", folder / "log", "--preset", "small", "--rows", 1500)
steps = ["--pretrain-steps", 30, "--search-steps", 60, "--keep", 8, "--model-option", "dim=4"]
lpfs("select", folder / "log", "--out", folder / "run", *steps)
assert "polars" not in sys.modules
"""


def test_select_works_without_polars(tmp_path):
    """Only the history of the search is left out, with a warning."""
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "history.parquet is left out: it needs the package polars" in result.stderr
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"selection.json", "kept_fields.txt", "report.html", "model"} <= names
    assert "history.parquet" not in names
    assert len((tmp_path / "run" / "kept_fields.txt").read_text().split()) == 8
