from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

import lpfs
from lpfs import cli
from lpfs.errors import AllGatesZeroError, InputError
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.registry import METHODS, Entry
from lpfs.schema import known_keys

SHAPE = ["--model-option", "dim=2", "--model-option", "hidden=4"]
TINY = ["--pretrain-steps", "50", "--search-steps", "120", "--batch-size", "64", *SHAPE]
ASKED = ["--methods", "lpfs++,permutation", "--keep", "4,8", "--seeds", "2"]


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    """A simulated log of 31 fields, in small."""
    out = tmp_path_factory.mktemp("log") / "log"
    lpfs.simulate(out, "small", rows=2000, days=4)
    return out


@pytest.fixture(scope="session")
def compared(log, tmp_path_factory):
    """The folder of a whole comparison of two methods."""
    out = tmp_path_factory.mktemp("compared") / "cmp"
    assert cli.run(["compare", str(log), *ASKED, *TINY, "--out", str(out), "-q"]) == 0
    return out


@pytest.fixture
def run(capsys):
    """Runs a command; gives its exit code and what it printed."""

    def call(*arguments):
        capsys.readouterr()
        code = cli.run([str(each) for each in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@dataclass(frozen=True)
class Options:
    """``first`` is the number of the field that is ranked first; ``how`` it goes wrong, if it does."""

    first: int = 0
    penalty: float = 0.5
    how: str = ""


def check(options, wish, names, steps):
    need_number("fake", wish)
    if options.how == "refused":
        raise InputError("fake is not defined on this model")


def search(task):
    options = Options(**known_keys(Options, task.options))
    if options.how == "dead":
        raise AllGatesZeroError("every gate is at zero\nin step 7")
    if options.how == "broken":
        raise KeyError("=SUM(A1)|<b>")
    names = task.model.names
    order = [*names[options.first :], *names[: options.first]]
    scores = {name: -float(order.index(name)) for name in names}
    found = ranked(task, "fake", scores, steps=0)
    return replace(found, kept=found.dropped, dropped=found.kept) if options.how == "odd" else found


@pytest.fixture
def fakes(monkeypatch):
    """Methods that need no training: they rank the fields as they come, from some field on, or fail."""
    module = ModuleType("fake_method")
    module.Options, module.check, module.search = Options, check, search
    monkeypatch.setitem(sys.modules, "fake_method", module)

    def add(name, tried=(), each_keep=False, **preset):
        entry = Entry("fake_method", "a fake", "nobody", tuple(preset.items()), tuple(tried), each_keep)
        monkeypatch.setitem(METHODS, name, entry)

    return add
