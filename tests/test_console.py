"""The console: plain lines, bars on a terminal, nothing when quiet; user text cannot control the terminal."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from lpfs import _console
from lpfs._console import Console, EscapedStream, encodable, fit_to_width, sparkline


class Terminal(io.StringIO):
    def isatty(self):
        return True


class EncodedTerminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def immediate(monkeypatch):
    """Show every update."""
    for name in ("LINE_SECONDS", "REFRESH_SECONDS", "QUICK_SECONDS"):
        monkeypatch.setattr(_console, name, 0.0)


def count_rows(console):
    with console.progress("counting") as update:
        for chunk in range(1, 4):
            yield chunk
            update(10 * chunk, 30, 2 * chunk)


def test_headings_messages_and_warnings():
    stream = io.StringIO()
    console = Console(stream=stream, stages=2)
    console.heading("prepare")
    console.message("two", "lines")
    console.warning("column 'id'")
    console.heading("search")
    Console(stream=stream).heading("without a number")
    assert stream.getvalue().splitlines() == [
        "[1/2] prepare",
        "two",
        "lines",
        "warning: column 'id'",
        "[2/2] search",
        "without a number",
    ]


def test_every_argument_is_one_line(immediate):
    name = "a\nb\t\x1b[35m\x85\x7f\u202e\u200b\u2028\ud800[bold]"
    shown = r"a\nb\t\x1b[35m\x85\x7f\u202e\u200b\u2028\ud800[bold]"
    for stream in (io.StringIO(), Terminal()):
        console = Console(stream=stream, stages=9)
        for show in (console.heading, console.message, console.warning):
            show(name)
        console.table(name, [name], [[name]])
        bar = console.step_bar(9, description=name)
        bar.update(1, lambda: name)
        bar.close()
        with console.progress(name) as update:
            update(1, 2)
        assert stream.getvalue().count(shown) >= 8
        assert not set(name) & set(stream.getvalue()) - set("ab[bold]35m\n\x1b")
        assert "\x1b[35m" not in stream.getvalue()
        assert "a\nb" not in stream.getvalue()


def test_what_other_code_prints_is_escaped():
    terminal = Terminal()
    stream = EscapedStream(terminal)
    print("a\x1b[35m\x9b\r", "b", file=stream)
    stream.writelines(["c\x7f\n", "d"])
    assert terminal.getvalue() == "a\\x1b[35m\\x9b\\r b\nc\\x7f\nd"
    assert not stream.isatty()
    Console(stream=stream).heading("bold")
    assert "\x1b[1m" in terminal.getvalue()


def test_terminals_have_styles_unless_the_user_wants_none(monkeypatch):
    def heading():
        stream = Terminal()
        Console(stream=stream, stages=3).heading("train")
        return stream.getvalue()

    assert "\x1b[1m" in heading()
    assert "[1/3] train" in heading()
    monkeypatch.setenv("NO_COLOR", "1")
    assert heading() == "[1/3] train\n"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert heading() == "[1/3] train\n"


def test_long_messages_are_not_wrapped():
    for stream in (io.StringIO(), Terminal()):
        console = Console(stream=stream)
        console.message("x" * 300)
        console.heading("y" * 300)
        assert "x" * 300 in stream.getvalue()
        assert "y" * 300 in stream.getvalue()


def test_a_table_of_numbers():
    stream = io.StringIO()
    rows = [["all fields", "0.80000", "0.4"], ["kept", "0.79", "0.41"], ["long " * 40, "1", "日本"]]
    Console(stream=stream).table("2 of 9 fields kept", ["on the test rows", "AUC", "logloss"], rows)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "2 of 9 fields kept"
    assert lines[1].split() == ["on", "the", "test", "rows", "AUC", "logloss"]
    assert lines[2].startswith("  all fields ")
    assert len(lines) == 5
    assert lines[2].endswith("  0.80000      0.4")
    assert lines[3].endswith("     0.79     0.41")
    assert lines[4].endswith("       1     日本")  # as wide as four letters
    assert not any(line.endswith(" ") for line in lines)


def test_a_table_of_text():
    rows = [["\x1b[31mred\r[bold]x[/bold]", "numeric"], ["b", "word " * 60]]
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        Console(stream=stream).table("Fields", ["column", "why"], rows, numeric=False)
        assert r"\x1b[31mred\r[bold]x[/bold]" in stream.getvalue()
        assert stream.getvalue().count("word") == 60
        assert "\r" not in stream.getvalue()
    assert "\x1b" not in plain.getvalue()
    assert max(map(len, plain.getvalue().splitlines())) <= _console.PLAIN_WIDTH
    assert "┃" in terminal.getvalue()


def test_quiet(immediate):
    stream = Terminal()
    console = Console(quiet=True, stream=stream, stages=2)
    console.heading("a")
    console.message("b")
    console.warning("c")
    console.table("t", ["a"], [["b"]])
    list(count_rows(console))
    with console.progress("simulating") as update:
        update(5, 10)
    bar = console.step_bar(10)
    bar.update(1, lambda: pytest.fail("the text is not needed"))
    bar.close()
    assert stream.getvalue() == ""


def test_progress_shows_a_count_of_its_own(immediate):
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        list(count_rows(Console(stream=stream)))
        assert "rows/s" in stream.getvalue()
    assert "counting: 2 rows, " in plain.getvalue()
    assert "s left" in plain.getvalue()
    assert "counting: 6 rows in " in plain.getvalue()
    assert "100 %" in terminal.getvalue()


def test_progress_in_other_units(immediate):
    for stream in (io.StringIO(), Terminal()):
        with Console(stream=stream).progress("identifying", "MB") as update:
            update(5, 10)
        assert "identifying" in stream.getvalue()
        assert "5 MB" in stream.getvalue()
        assert "rows" not in stream.getvalue()


def test_the_remaining_time(monkeypatch):
    times = iter([0.0, 6.0, 8.0])
    monkeypatch.setattr(_console.time, "monotonic", lambda: next(times))
    stream = io.StringIO()
    with Console(stream=stream).progress("simulating") as update:
        update(300, 1200)
    assert stream.getvalue().splitlines() == [
        "simulating: 300 rows, 50 rows/s, 18 s left",
        "simulating: 300 rows in 8.0 s, 38 rows/s",
    ]


def test_quick_tasks_show_nothing():
    for stream in (io.StringIO(), Terminal()):
        with Console(stream=stream).progress("identifying", "MB") as update:
            update(1, 1)
        list(count_rows(Console(stream=stream)))
        assert stream.getvalue() == ""


def test_an_error_in_a_task_removes_the_bar(immediate):
    console = Console(stream=Terminal())

    def fail_after_an_update():
        with console.progress("simulating") as update:
            update(1, 2)
            assert console._active is not None
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail_after_an_update()
    assert console._active is None
    iterator = count_rows(console)
    next(iterator)
    next(iterator)
    iterator.close()
    assert console._active is None


def test_steps_are_plain_lines_without_a_terminal(immediate):
    stream = io.StringIO()
    bar = Console(stream=stream).step_bar(10)
    bar.update(1, lambda: "loss 0.25")
    bar.update(2, lambda: "")
    bar.close()
    unknown = Console(stream=stream).step_bar()
    unknown.update(1200, lambda: "loss 0.5")
    assert stream.getvalue().splitlines() == ["step 1 of 10: loss 0.25", "step 2 of 10", "step 1,200: loss 0.5"]


def test_steps_are_shown_every_few_seconds():
    stream = io.StringIO()
    bar = Console(stream=stream).step_bar(10)
    bar.update(1, lambda: pytest.fail("the text is not needed yet"))
    assert stream.getvalue() == ""


def test_messages_appear_above_the_bar(immediate):
    stream = Terminal()
    console = Console(stream=stream)
    bar = console.step_bar(10, completed=3)
    bar.update(4, lambda: "[red]loss 0.25, auc 1.0, " + ", ".join(f"part {number}" for number in range(40)))
    console.message("resumed [bold]")
    console.table("t", ["name", "AUC"], [["a", "0.5"]])
    with console.progress("evaluating") as update:  # one bar at a time
        update(1, 2)
    bar.update(10, lambda: "")
    bar.close()
    text = stream.getvalue()
    for part in ("4/10", "10/10", "[red]loss 0.25, auc 1.0, part 0", "resumed [bold]", "AUC"):
        assert part in text
    assert "part 39" not in text
    assert "evaluating" not in text
    console.message("after")
    assert stream.getvalue().endswith("after\n")


def test_a_line_of_blocks():
    assert sparkline([31, 31, 20, 15, 0], 31) == "██▅▄▁"
    assert sparkline([], 3) == ""
    assert len(sparkline(range(1000), 1000)) == 16
    assert sparkline(range(1000), 1000)[-1] == "█"
    assert sparkline([1, 2], 0) == "██"


@pytest.mark.parametrize(("encoding", "blocks"), [("utf-8", "█▅▁"), ("ascii", "#-_")])
def test_characters_that_the_terminal_cannot_encode(immediate, encoding, blocks):
    raw = io.BytesIO()
    stream = EncodedTerminal(raw, encoding=encoding)
    console = Console(stream=stream)
    bar = console.step_bar(10)
    bar.update(1, lambda: "2 of 3 gates alive █▅▁")
    bar.close()
    console.message("field 日")
    console.table("Tabelle …", ["ä", "b"], [["日", "1"]], numeric=False)
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert f"2 of 3 gates alive {blocks}" in text
    assert ("field 日" if encoding == "utf-8" else r"field \u65e5") in text


def test_encodable_and_fit_to_width():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert encodable("ä … – λ", stream) == r"ä ... - \u03bb"
    assert encodable("λ", io.StringIO()) == "λ"
    assert fit_to_width("one, two, three", 8) == "one, two"
    assert fit_to_width("a long part", 3) == "a long part"


def test_rich_is_imported_on_first_use():
    code = (
        "import sys; from lpfs._console import Console; console = Console(stages=1); console.heading('a')\n"
        "with console.progress('b') as update: update(1, 2)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('rich', 'torch', 'polars', 'jinja2')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("[]\n", "[1/1] a\n")
