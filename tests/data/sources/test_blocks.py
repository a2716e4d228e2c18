"""Files in blocks."""

import pytest

from lpfs.data.prepare import prepare
from lpfs.data.sources import blocks
from lpfs.errors import DataError


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
