"""Fixtures of the tests that use an object store."""

import pytest


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Yield an empty store (fsspec's memory://) with a cache of its own; empty it afterwards."""
    monkeypatch.setenv("LPFS_CACHE", str(tmp_path / "cache"))
    system = pytest.importorskip("fsspec").filesystem("memory")
    yield system
    for name in system.ls("/", detail=False):
        system.rm(name, recursive=True)
