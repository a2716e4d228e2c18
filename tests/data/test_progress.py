"""What prepare says while it works."""

import io
import sys

import polars as pl

from lpfs.data import progress
from lpfs.data.progress import Reporter
from lpfs.data.sources.base import Chunk


class Terminal(io.StringIO):
    def isatty(self):
        return True


def chunks():
    for _ in range(3):
        yield Chunk(pl.DataFrame({"x": [1, 2]}), 0, str, 10)


def test_plain_lines_a_bar_or_nothing(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(progress, "QUICK", 0.0)
    plain, terminal, quiet = io.StringIO(), Terminal(), io.StringIO()
    assert len(list(Reporter(stream=plain).track(chunks(), "counting", 30))) == 3
    assert "counting: 2 rows" in plain.getvalue()
    assert "s left" in plain.getvalue()
    assert "counting: 6 rows in" in plain.getvalue()
    assert len(list(Reporter(stream=terminal).track(chunks(), "counting", 30))) == 3
    assert "100 %" in terminal.getvalue()
    assert "rows/s" in terminal.getvalue()
    silent = Reporter(quiet=True, stream=quiet)
    assert len(list(silent.track(chunks(), "counting", 30))) == 3
    silent.table("t", ["a"], [["b"]])
    assert quiet.getvalue() == ""
    for stream in (plain, terminal):
        with Reporter(stream=stream).counting("simulating") as told:
            told(5, 10)
            told(10, 10)
        assert "simulating" in stream.getvalue()


def test_nothing_moves_the_cursor(monkeypatch):
    stream = io.StringIO()
    Reporter(stream=stream).table("Fields", ["column"], [["\x1b[31mred\r[bold]x[/bold]"]])
    assert "\x1b" not in stream.getvalue()
    assert "[bold]x[/bold]" in stream.getvalue()
    monkeypatch.setitem(sys.modules, "rich.table", None)
    Reporter(stream=stream).table("Fields", ["column"], [["plain"]])
    assert stream.getvalue().endswith("column\nplain\n")


def test_what_is_quick_is_not_told():
    for stream in (io.StringIO(), Terminal()):
        with Reporter(stream=stream).counting("identifying", "MB") as told:
            told(1, 1)
        assert stream.getvalue() == ""
    plain = io.StringIO()
    assert len(list(Reporter(stream=plain).track(chunks(), "counting", 30))) == 3
    assert plain.getvalue() == ""


def test_other_things_than_rows_are_counted(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(progress, "QUICK", 0.0)
    for stream in (io.StringIO(), Terminal()):
        with Reporter(stream=stream).counting("identifying", "MB") as told:
            told(5, 10)
        assert "5 MB" in stream.getvalue()
        assert "rows" not in stream.getvalue()
