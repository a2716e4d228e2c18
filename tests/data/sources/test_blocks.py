"""Files in blocks, and missing packages."""

import subprocess
import sys

import pytest

from lpfs.data.prepare import prepare
from lpfs.data.sources import blocks
from lpfs.errors import DataError, MissingPackageError


def test_a_line_that_is_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_RECORD", 100)
    monkeypatch.setattr("lpfs.data.sources.csv.HEAD", 100)
    path = tmp_path / "log.csv"
    path.write_text("click,ad\n1," + "x" * 500)
    original = blocks.LineBlocks.__init__
    monkeypatch.setattr(blocks.LineBlocks, "__init__", lambda self, *a, **k: original(self, *a, **{**k, "size": 64}))
    with pytest.raises(DataError, match="a line is longer than"):
        prepare(path, tmp_path / "out", label="click", quiet=True)
    path.write_text("x" * 500)
    with pytest.raises(DataError, match="a line is longer than"):
        prepare(path, tmp_path / "out", label="click", quiet=True)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = tmp_path / "log.csv.zst"
    path.write_bytes(blocks.ZSTD + b"rest")
    if sys.version_info < (3, 14):
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(MissingPackageError, match="pip install zstandard"):
            prepare(path, tmp_path / "out", label="click", quiet=True)
    script = (
        "import sys; sys.modules['polars'] = None\n"
        "from lpfs.cli import run; sys.exit(run(['prepare', 'x', '--label', 'y', '--out', 'z']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install polars" in done.stderr
