"""The public names are a list that is tested, and ``import lpfs`` is free."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from importlib import resources

import pytest

import lpfs
from lpfs import errors

MODULES = [
    module.name for module in pkgutil.walk_packages(lpfs.__path__, "lpfs.") if not module.name.endswith("__main__")
]

NEED_TRITON = (
    "lpfs.gates._triton",
    "lpfs.train._triton",
    "lpfs.models._kernels.triton_crosses",
    "lpfs.embeddings._triton",
)


def test_every_public_name_can_be_imported_and_comes_from_where_it_says():
    for name in lpfs._HOME:
        assert getattr(lpfs, name) is getattr(importlib.import_module(lpfs._HOME[name]), name)
    assert set(lpfs.__all__) <= set(dir(lpfs))


def test_select_is_a_plain_function():
    assert lpfs.select is importlib.import_module("lpfs.pipeline.select").select
    with pytest.raises(lpfs.errors.InputError, match="unknown key 'kep' for Settings"):
        lpfs.select("nowhere", kep=3)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'attach_all'"):
        _ = lpfs.attach_all


def test_import_lpfs_does_not_import_torch():
    code = "import lpfs, sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_the_package_is_typed():
    assert resources.files("lpfs").joinpath("py.typed").is_file()


def test_every_error_is_an_lpfs_error():
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(cls, errors.LpfsError) for cls in classes)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_exist_and_their_examples_run(name):
    if name in NEED_TRITON:
        pytest.importorskip("triton")
    if name == "lpfs.data.engines.spark":
        pytest.importorskip("ibis")
    try:
        module = importlib.import_module(name)
    except errors.MissingPackageError as error:
        assert name.startswith("lpfs.adapters.")
        pytest.skip(str(error))
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    undocumented = [
        f"{name}.{cls.__name__}.{method}"
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == name and not cls.__name__.startswith("_")
        for method, function in vars(cls).items()
        if inspect.isfunction(function) and not method.startswith("_") and not inspect.getdoc(function)
    ]
    assert not undocumented


def test_names_of_the_gates_are_imported_on_first_use(monkeypatch):
    gates = importlib.import_module("lpfs.gates")
    for name, module in gates._HOME.items():
        monkeypatch.delitem(vars(gates), name, raising=False)
        assert getattr(gates, name) is getattr(importlib.import_module(f"lpfs.gates.{module}"), name)
        assert name in dir(gates)
    with pytest.raises(AttributeError, match="'lpfs.gates'.*'Gate'"):
        _ = gates.Gate
