"""Names from data and from files cannot control a terminal, in any command and mode; SIGTERM ends in one line."""

from __future__ import annotations

import ast
import csv
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lpfs
from lpfs.cli import info

LPFS = [sys.executable, "-m", "lpfs"]
# several commands in one process, because importing torch takes longer than most of them
SEVERAL = (
    "import json, sys; from lpfs import cli; from lpfs._console import escape_all_output\n"
    "escape_all_output(); sys.exit(max(cli.run(command) for command in json.loads(sys.argv[1])))"
)
COLUMNS = (
    *("title\x1b]0;owned\x07", "magenta\x1b[35;5m", "[bold]x[/bold]", "[link=http://e.x]y[/link]", "csi\x9b35m\x85"),
    *("delete\x7f\x08", "bidi\u202e\u2066\u200f", "zero\u200b\ufeffwidth", "line\u2028\u2029", "tab\tnew\nlpfs: fake"),
)
# what rich and click write on a terminal: styles, the cursor, cleared lines
OWN_STYLING = re.compile(r"\x1b\[(?:[01]|3[0-79]|38;5;\d+|1;3\d)?(?:;\d+)*m(?<!35;5m)|\x1b\[(?:\?25[lh]|2K|\d*A)|\r")
TINY = ["--pretrain-steps", "60", "--search-steps", "60", "--model-option", "dim=2", "--model-option", "hidden=4"]


def run_process(*arguments, tty=False, **environment):
    """Run a command in a new process; return its exit code, standard output and standard error as text."""
    return run_command([*LPFS, *map(str, arguments)], tty, **environment)


def run_command(command, tty=False, **environment):
    settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
    if not tty:
        done = subprocess.run(command, capture_output=True, check=False, env=settings)
        return done.returncode, done.stdout.decode(), done.stderr.decode()
    main, terminal = pty.openpty()
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=settings)
    os.close(terminal)
    text = b""
    while True:
        try:
            text += os.read(main, 65536)
        except OSError:  # the end of a terminal
            break
    os.close(main)
    return process.wait(), OWN_STYLING.sub("", text.decode()), ""


def assert_printable(*texts):
    for text in texts:
        raw = {char for char in text if not char.isprintable() and char != "\n"}
        assert not raw, (raw, text)
        assert "\nlpfs: fake" not in text  # a line break in a name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory of five day files; its name, theirs, the columns and the values hold control sequences."""
    path = tmp_path_factory.mktemp("output") / "in\x1b]2;dir\x07\x9b\u202e $(x)"
    path.mkdir()
    generator = random.Random(0)
    for day in range(5):
        with open(path / f"day{day}\x1b[35;5m\x7f\u2066\n.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["click", *COLUMNS])
            for _ in range(60):
                values = [generator.randrange(4) for _ in COLUMNS]
                click = generator.random() < 0.1 + 0.8 * (values[0] % 2)
                writer.writerow([int(click), *(f"v\x1b[35;5m\x9b{value}" for value in values)])
    return path


SELECT = ["--label", "click", "--parts", "files", "--keep", "8", *TINY]


@pytest.fixture(scope="module")
def selected(folder):
    """The directory of a run, which was made on a terminal; also what was printed."""
    out = folder / "run"
    code, text, _ = run_process("select", folder, *SELECT, "--tensorboard", "--out", out, tty=True)
    return out, code, text


def test_prepare(folder):
    arguments = ["prepare", folder, "--label", "click", "--parts", "files", "--out", folder.parent / "data"]
    for options in ([], ["--replace", "--json"]):
        code, out, err = run_process(*arguments, *options)
        assert code == 0, err
        assert_printable(out, err)
        assert r"magenta\x1b[35;5m" in err
        assert "[bold]x[/bold]" in err
    record = json.loads(out)
    assert {field["name"] for field in record["fields"]} <= set(COLUMNS)
    assert r"csi\u009b35m\u0085" in out
    assert r"delete\u007f\b" in out


def test_errors_with_names(folder):
    code, out, err = run_process("prepare", folder, "--label", "magenta\x1b[35;5", "--out", folder.parent / "no")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert_printable(err)
    for arguments in (
        ["report", folder / "none\x1b[35;5m\nlpfs: fake"],
        ["evaluate", folder, folder],
        ["prepare", f"{folder}/*.parquet", "--label", "click", "--dry-run"],
        ["selct\x1b[35;5m"],
        ["select", "--method", "lpfs\x9b", "x"],
    ):
        code, out, err = run_process(*arguments)
        assert code in (1, 2)
        assert (out, err.count("\n")) == ("", 1)
        assert_printable(err)


def test_file_name_that_is_not_utf8(tmp_path):
    code, out, err = run_process("report", os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b"))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert r"\udcff\x1b" in err


def test_output_that_lpfs_does_not_write_itself(tmp_path):
    script = (
        "import logging, os, sys, warnings; from lpfs import cli\n"
        "def run(_):\n"
        "    warnings.warn('column \\x1b[35;5m \\x9b\\nlpfs: fake'); logging.warning('log \\x1b[35;5m\\x85')\n"
        "    print('a\\x7f\\u202e'); raise ValueError('bug \\x1b[35;5m')\n"
        "cli.run = run; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert_printable(out, err)
    assert out == "a\\x7f\\u202e\n"
    for text in (r"column \x1b[35;5m \x9b", r"log \x1b[35;5m\x85", r"ValueError: bug \x1b[35;5m"):
        assert text in err


def test_json_in_any_encoding(tmp_path):
    path = tmp_path / "日\x7f\U000e0001"
    code, out, err = run_process("simulate", "--rows", "50", "--days", "2", "--format", "csv", "--json", "--out", path,
                                 PYTHONIOENCODING="ascii")  # fmt: skip
    assert code == 0, err
    assert_printable(out, err)
    assert json.loads(out)["path"] == str(path)


@pytest.mark.long
def test_select_on_a_terminal(selected):
    _, code, text = selected
    assert code == 0, text
    assert_printable(text)
    assert r"tab\tnew\nlpfs: fake" in text


@pytest.mark.long
@pytest.mark.parametrize(("options", "tty"), [([], False), ([], True), (["--json"], False), (["--quiet"], True)])
def test_commands_after_select(selected, folder, options, tty):
    run = selected[0]
    commands = [
        ["evaluate", run, run / "data"],
        ["evaluate", run, folder / "day0\x1b[35;5m\x7f\u2066\n.csv"],
        ["report", run, "--out", folder / "r\x9b.html"],
        ["search", run, run / "data", "--keep", "2", "--search-steps", "50", "--replace", "--out", folder / "found"],
        ["prune", folder / "found", run / "data", "--replace", "--out", folder / "small"],
        ["compare", run / "data", "--methods", "permutation", "--keep", "2", "--seeds", "1", *TINY,
         "--out", folder / "compared"],
        ["evaluate", run, run / "data", "--days", "day9\x1b"],
    ]  # fmt: skip
    if options == ["--json"]:
        commands.insert(0, ["select", folder, *SELECT, "--finish", "none", "--out", folder / "again"])
    texts = [[str(word) for word in (*command, *options)] for command in commands]
    code, out, err = run_command([sys.executable, "-c", SEVERAL, json.dumps(texts)], tty)
    assert code == 2, out + err  # of the last one
    assert_printable(out, err)
    assert (out + err).count("lpfs: error:") == 1
    if options == ["--json"]:
        joined = out.replace("}\n{", "},{")
        assert len(json.loads(f"[{joined}]")) == len(commands) - 1
    if options == ["--quiet"]:
        assert (out + err).count("\n") == 1


def test_doctor(run, monkeypatch):
    directory = "/nowhere\x1b[35;5m\x9b\n"
    monkeypatch.setenv("NUMBA_CACHE_DIR", directory)
    code, out, err = run("doctor")
    assert code == 0
    assert_printable(out, err)
    assert "kernel cache /nowhere\\x1b[35;5m\\x9b\\n" in out
    code, out, err = run("doctor", "--json")
    assert_printable(out, err)
    assert json.loads(out)["kernel_cache"]["directory"] == directory


def test_only_the_console_prints():
    """Commands cannot forget to escape: printing is in one module."""
    root = Path(lpfs.__file__).parent
    allowed = {"_console.py", "sklearn/search.py", "train/distributed/heartbeat.py"}  # the last two: our own words
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and path.relative_to(root).as_posix() not in allowed:
                name = ast.unparse(node.func)
                assert name not in ("print", "click.echo", "click.secho", "echo"), f"{path}:{node.lineno}"
                assert not name.startswith(("sys.stdout.write", "sys.stderr.write")), f"{path}:{node.lineno}"


# ------------------------------------------------------------------------------------------------ SIGTERM


def wait_and_terminate(process, is_ready):
    for _ in range(600):
        if is_ready() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("blocking", ["time.sleep(60)", "os.read(os.pipe()[0], 1)", "block_without_python()"])
def test_sigterm_while_something_blocks(tmp_path, blocking):
    ready = tmp_path / "ready"
    script = (
        "import ctypes, os, sys, time; from lpfs import cli\n"
        "def block_without_python():\n"  # no signal interrupts a mutex, so the main thread does not return to Python
        "    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)\n"
        "    libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)\n"
        "def command(*_, **__):\n"
        f"    open({str(ready)!r}, 'w').close(); {blocking}\n"
        "cli.cli.main = command; cli.main(['doctor'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    code, err = wait_and_terminate(process, ready.exists)
    assert code == 143
    assert err.startswith("lpfs: error: interrupted")
    assert len(err.splitlines()) == 1


def test_sigterm_that_becomes_another_error(tmp_path):
    ready = tmp_path / "ready"
    script = (
        "import time; from lpfs import cli\n"
        "def command(*_, **__):\n"
        "    try:\n"
        f"        open({str(ready)!r}, 'w').close(); time.sleep(60)\n"
        "    except KeyboardInterrupt as error: raise ImportError('numpy failed') from error\n"
        "cli.cli.main = command; cli.main(['doctor'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    code, err = wait_and_terminate(process, ready.exists)
    assert code == 143
    assert err.startswith("lpfs: error: interrupted")
    assert len(err.splitlines()) == 1


def test_versions_of_packages_whose_extra_has_another_name(monkeypatch):
    monkeypatch.setattr(info.util, "find_spec", lambda name: object())
    names = []
    monkeypatch.setattr("importlib.metadata.version", lambda name: names.append(name) or "9.9")
    assert {info._installed_version(name) for name in info.NEEDED | info.OPTIONAL} == {"9.9"}
    assert {"mlflow", "scikit-learn"} <= set(names)
    assert not any("[" in name or "'" in name for name in names)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_an_interrupt_that_a_destructor_swallows_is_repeated(is_ignored):
    """Also in a background job of a shell, where SIGINT is ignored."""
    program = f"""
import os, signal, time
if {is_ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
import lpfs.cli as cli

class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

def wait(*_, **__):
    value = Slow()
    del value
    for _ in range(600):
        time.sleep(0.05)

cli.cli.main = wait
cli.main(["methods"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 143
    assert done.stderr.startswith("lpfs: error: interrupted")
    assert "Traceback" not in done.stderr
