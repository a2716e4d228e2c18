"""--help, methods, completion and doctor."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from lpfs.cli import info as info_module
from lpfs.cli.app import ORDER, cli
from lpfs.methods.registry import METHODS


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_help_text_has_sections_and_examples(run, name):
    code, out, err = run(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: lpfs {name}")
    assert f"Examples:\n  lpfs {name}" in out
    assert "\nOutput:\n" in out
    assert "\nOptions:\n" not in out


@pytest.mark.parametrize("arguments", [["--help"], ["select", "--help"], ["methods"], ["select", "--kep", "2"]])
def test_help_imports_no_heavy_package(arguments):
    script = (
        f"import sys; from lpfs.cli import run; run({arguments!r}); "
        "sys.exit(bool({'torch', 'polars', 'numpy', 'rich', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_commands_and_options_get_a_suggestion(run):
    code, _, err = run("selct")
    assert code == 2
    assert "did you mean 'select'?" in err
    code, _, err = run("evaluate", "--jsn")
    assert code == 2
    assert "--json" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["selct"],
        ["select"],
        ["select", "--kep", "2"],
        ["select", "x", "--keep", "many"],
        ["prune"],
        ["completion", "tcsh"],
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(r"^lpfs: error: .+ See: lpfs( \w+)? --help$", err.strip())


def test_help_lists_every_command_once(run):
    out = run("--help")[1]
    assert sorted(re.findall(r"^  ([a-z]+) {2,}[A-Z]", out, re.MULTILINE)) == sorted(cli.commands)
    assert sorted(ORDER) == sorted(cli.commands)
    assert "Exit codes: 0" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(run, shell):
    code, out, _ = run("completion", shell)
    assert code == 0
    assert f"_LPFS_COMPLETE={shell}_complete" in out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("lpfs sel", ["plain,select"]),
        ("lpfs select --method shu", ["plain,shufflegate"]),
        ("lpfs select --max-a", ["plain,--max-auc-loss"]),
        ("lpfs select cli", ["file,cli"]),
    ],
)
def test_completion_of_words(run, monkeypatch, capsys, words, offered):
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setenv("_LPFS_COMPLETE", "bash_complete")
    with pytest.raises(SystemExit):
        run()
    assert capsys.readouterr().out.splitlines() == offered


def test_methods(run):
    code, out, _ = run("methods", "--json")
    assert code == 0
    assert [method["name"] for method in json.loads(out)] == list(METHODS)
    assert all(method["summary"] and method["reference"] for method in json.loads(out))
    lines = run("methods")[1].splitlines()
    assert set(METHODS) <= set(lines)


def test_doctor(run):
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    info = json.loads(out)
    assert {backend["name"] for backend in info["backends"]} == {"torch", "numba", "triton"}
    assert next(backend for backend in info["backends"] if backend["name"] == "torch")["state"] == "works"
    assert info["packages"]["click"] is not None
    code, out, _ = run("doctor")
    assert code == 0
    assert "torch        any device: works" in out
    assert all(len(line) < 200 for line in out.splitlines())


def test_doctor_reports_missing_packages_and_broken_backends(run, monkeypatch):
    monkeypatch.setitem(info_module.OPTIONAL, "no_such_package", "nothing at all")
    monkeypatch.setattr("lpfs.embeddings._torch.gather", lambda *_: 1 / 0)
    out = run("doctor")[1]
    assert "missing      no_such_package, for nothing at all" in out
    assert "pip install no_such_package" in out
    assert "torch        any device: does not work" in out
    assert "ZeroDivisionError" in out


def test_errors_are_red_only_on_a_terminal_without_no_color(run, monkeypatch, capsys):
    def printed():
        from lpfs import cli as package

        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        package.run(["evaluate", "nowhere", "nothing.csv"])
        return capsys.readouterr().err

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[31mlpfs: error:" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in printed()
    assert "\033" not in run("evaluate", "nowhere", "nothing.csv")[2]
