"""Functions written in torch that numba compiles: what is cached on disk."""

from __future__ import annotations

import numpy
import pytest
import torch

from lpfs.gates import host

pytest.importorskip("numba")


def scaled_sign(values):
    return 2 * torch.sign(values)


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def compile_again():
    return host.compiled.__wrapped__(scaled_sign)


def test_compiled_code_is_read_from_disk(cache_dir):
    values = numpy.array([-3.0, 0.0, 5.0], numpy.float32)
    first, second = compile_again(), compile_again()
    assert first(values).tolist() == [-2.0, 0.0, 2.0]
    assert second(values).tolist() == [-2.0, 0.0, 2.0]
    assert sum(second.stats.cache_hits.values()) == 1


def test_a_change_of_the_torch_functions_compiles_again(cache_dir, monkeypatch):
    values = numpy.array([-3.0, 0.0, 5.0], numpy.float32)
    compile_again()(values)
    monkeypatch.setattr(host, "_source_digest", lambda: "changed")
    changed = compile_again()
    assert changed(values).tolist() == [-2.0, 0.0, 2.0]
    assert not changed.stats.cache_hits
    assert any("changed" in path.name for path in cache_dir.rglob("*.nbi"))
