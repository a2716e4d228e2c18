from __future__ import annotations

import sys
from dataclasses import make_dataclass
from types import ModuleType

import pytest

import lpfs
from lpfs import cli
from lpfs.methods.registry import METHODS, MethodEntry
from tests.helpers.commands import run  # noqa: F401 (a fixture)
from tests.helpers.comparisons import PLAN, TINY, FakeMethod, FakeOptions


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    """A small simulated log of 31 fields."""
    out = tmp_path_factory.mktemp("log") / "log"
    lpfs.simulate(out, "small", rows=2000, days=4)
    return out


@pytest.fixture(scope="session")
def compared(log, tmp_path_factory):
    """The directory of a complete comparison of two methods, whose models are trained one by one."""
    out = tmp_path_factory.mktemp("compared") / "cmp"
    assert cli.run(["compare", str(log), *PLAN, *TINY, "--no-fleet", "--out", str(out), "-q"]) == 0
    return out


@pytest.fixture
def fakes(monkeypatch):
    """Return a function that registers a method without training, with other defaults of its options."""
    module = ModuleType("fake_method")
    monkeypatch.setitem(sys.modules, "fake_method", module)

    def add(name, trial_options=(), search_per_k=False, **defaults):
        fields = [(field, type(value), value) for field, value in defaults.items()]
        options = make_dataclass("Options", fields, bases=(FakeOptions,), frozen=True)
        flags = {"Options": options, "trial_options": tuple(trial_options), "search_per_k": search_per_k}
        setattr(module, name, type("Fake", (FakeMethod,), flags))
        monkeypatch.setitem(METHODS, name, MethodEntry(f"fake_method:{name}", "a fake", "-"))

    return add
