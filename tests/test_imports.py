"""Optional packages, lazy exports, callable packages, compiled loops."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from lpfs import _imports
from lpfs._imports import callable_package, compile_loop, import_optional, lazy_exports
from lpfs.errors import MissingPackageError


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    import json

    assert import_optional("json", "x", "this") is json
    with pytest.raises(MissingPackageError, match=r"mlflow=True needs .* no_such .*pip install 'lpfs\[board\]' soon"):
        import_optional("no_such.module", "board", "mlflow=True", "soon")


@pytest.mark.parametrize("error", [OSError("libx.so"), AttributeError("no operator")])
def test_a_broken_package_counts_as_missing(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(_imports.importlib, "import_module", fail)
    with pytest.raises(MissingPackageError, match=str(error)):
        import_optional("torchrec", "torchrec", "the adapter")


@pytest.fixture
def package(monkeypatch):
    module = ModuleType("lpfs_package")
    monkeypatch.setitem(sys.modules, "lpfs_package", module)
    inner = ModuleType("lpfs_package.inner")
    inner.answer, inner.add = 42, lambda a, b=1: a + b
    monkeypatch.setitem(sys.modules, "lpfs_package.inner", inner)
    return module


def test_lazy_exports(package):
    homes = {"answer": "inner", "InputError": "lpfs.errors"}
    package.__getattr__, package.__dir__ = lazy_exports("lpfs_package", homes)
    assert package.answer == 42
    assert package.InputError.__module__ == "lpfs.errors"
    assert {"answer", "InputError"} <= set(dir(package))
    with pytest.raises(AttributeError, match="'lpfs_package' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_a_callable_package(package):
    callable_package("lpfs_package", "lpfs_package.inner:add")
    assert package(2) == 3
    assert package(2, b=5) == 7


def test_a_loop_gives_the_same_result_with_and_without_numba(monkeypatch):
    def total(values):
        result = 0.0
        for value in values:
            result += value
        return result

    pytest.importorskip("numba")
    numpy = pytest.importorskip("numpy")
    assert compile_loop(total)(numpy.arange(4.0)) == 6.0
    monkeypatch.setitem(sys.modules, "numba", None)
    _imports.has_numba.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="numba.*pip install numba") as notices:
            loops = [compile_loop(total), compile_loop(total)]
        assert loops == [total, total]
        assert len(notices) == 1
        assert "\n" not in str(notices[0].message)
    finally:
        _imports.has_numba.cache_clear()


def test_prepare_does_not_import_torch(tmp_path):
    table = tmp_path / "clicks.csv"
    table.write_text("click,user,price\n" + "".join(f"{row % 2},u{row % 7},{row}.5\n" for row in range(200)))
    code = f"""
import subprocess
import sys
from lpfs.cli import run
assert run(["prepare", {str(table)!r}, "--label", "click", "--out", {str(tmp_path / "data")!r}]) == 0
assert "polars" in sys.modules
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data" / "dataset.json").exists()
