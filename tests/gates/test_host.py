"""What a step on the CPU reads as arrays, and the torch functions that numba compiles."""

from __future__ import annotations

import pickle
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lpfs.gates import host
from lpfs.gates.controller import effective_count
from lpfs.gates.host import active


@pytest.fixture
def defined(monkeypatch):
    """Return the functions that are defined for numba, by torch function: types of the arguments -> function."""
    functions = {}
    extending = SimpleNamespace(
        overload=lambda function: lambda define: functions.setdefault(function, define),
        overload_method=lambda kind, name: lambda define: None,
        register_jitable=lambda function: function,
    )
    types = SimpleNamespace(Array=np.ndarray, Integer=np.int64, Float=np.float64, float64=np.float64)
    modules = {"numba.core.types": types, "numba.extending": extending}
    monkeypatch.setattr(host.importlib, "import_module", modules.__getitem__)
    host._define_torch_functions.__wrapped__()
    return functions


def test_functions_of_numbers_for_numba_are_those_of_torch(defined):
    kind, numbers = np.float64, (-1.5, 0.0, 0.25, 2.0)
    for name in ("abs", "arctan", "exp", "floor", "isfinite", "sign", "sqrt", "tanh"):
        function, values = getattr(torch, name), [value for value in numbers if name != "sqrt" or value >= 0]
        expected = [function(torch.tensor(value).double()).item() for value in values]
        assert [defined[function](kind)(value) for value in values] == pytest.approx(expected, rel=1e-15)
    for name in ("minimum", "maximum"):
        function = getattr(torch, name)
        for pair in product(numbers, repeat=2):
            assert defined[function](kind, kind)(*pair) == function(*map(torch.tensor, pair)).item()
    for value in numbers:
        assert defined[torch.clamp](kind, kind, kind)(value, -1.0, 1.0) == min(1.0, max(-1.0, value))
        assert defined[torch.where](kind, kind, kind)(value > 0, 1.0, 2.0) == (1.0 if value > 0 else 2.0)
        assert type(defined[torch.full_like](np.float32, kind)(np.float32(1), value)) is np.float32


def test_functions_of_arrays_for_numba_are_those_of_torch(defined):
    x = np.array([0.5, 0.0, -1.0, 0.0], np.float32)
    vector = torch.from_numpy(x)
    assert defined[torch.count_nonzero](x)(x) == 2
    assert defined[torch.argsort](x)(x, True).tolist() == torch.argsort(vector, stable=True).tolist()
    for value, other in ((x, -x), (1.0, x), (x, np.inf)):
        chosen = defined[torch.where](x, value, other)(x != 0, value, other)
        tensors = [torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in (value, other)]
        expected = torch.where(vector != 0, *tensors)
        assert chosen.tolist() == expected.tolist()
        assert chosen.dtype == expected.numpy().dtype


def test_only_float32_vectors_on_the_cpu_are_read_as_arrays():
    class Subclass(torch.Tensor):
        pass

    x = torch.ones(3)
    assert host.is_plain(x)
    assert host.is_plain(torch.nn.Parameter(x))
    others = (x.double(), x[:, None], x.sum(), torch.empty(3, device="meta"), x.as_subclass(Subclass))
    assert not any(host.is_plain(other) for other in others)


@pytest.mark.parametrize(
    ("owner", "name", "value"), [(torch.compiler, "is_compiling", True), (torch._C, "_get_tracing_state", object())]
)
def test_nothing_is_read_as_an_array_while_torch_is_tracing(monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, lambda: value)
    assert not host.is_plain(torch.ones(3))


def test_arrays_follow_their_tensors():
    arrays, first, second = host.Arrays(), torch.arange(4.0), torch.zeros(2)
    made = arrays(first, second)
    assert [array.tolist() for array in made] == [[0.0, 1.0, 2.0, 3.0], [0.0, 0.0]]
    first[0] = 5.0
    assert made[0][0] == 5.0
    assert arrays(first, second) is made  # made once
    assert arrays(first[:2], second)[0].tolist() == [5.0, 1.0]  # other tensor at the same address
    moved = arrays(first, torch.ones(2))
    assert moved[1].tolist() == [1.0, 1.0]
    copied = pickle.loads(pickle.dumps(arrays))
    assert np.array_equal(copied(first)[0], first.numpy())


def scaled_sign(values):
    return 2 * torch.sign(values)


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def compile_again():
    return host.compiled.__wrapped__(scaled_sign)


def test_compiled_code_is_read_from_disk(cache_dir):
    values = np.array([-3.0, 0.0, 5.0], np.float32)
    first, second = compile_again(), compile_again()
    assert first(values).tolist() == [-2.0, 0.0, 2.0]
    assert second(values).tolist() == [-2.0, 0.0, 2.0]
    assert sum(second.stats.cache_hits.values()) == 1


def test_a_change_of_the_torch_functions_compiles_again(cache_dir, monkeypatch):
    values = np.array([-3.0, 0.0, 5.0], np.float32)
    compile_again()(values)
    monkeypatch.setattr(host, "_source_digest", lambda *files: "changed")
    changed = compile_again()
    assert changed(values).tolist() == [-2.0, 0.0, 2.0]
    assert not changed.stats.cache_hits
    assert any("changed" in path.name for path in cache_dir.rglob("*.nbi"))


def test_callees_in_other_modules_of_gates_are_compiled_too_and_their_files_are_in_the_name(monkeypatch):
    def step(x):
        return active(effective_count(x))

    files = []
    monkeypatch.setattr(host, "_source_digest", lambda *paths: files.extend(paths) or "digest")
    assert host._callees(step) == [effective_count]  # ``active`` has a definition of its own for numba
    assert host._named_by_source(step).__qualname__.endswith("_digest")
    assert sorted(Path(file).name for file in files) == ["controller.py", "host.py"]
