from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lpfs
from lpfs._imports import compile_loop
from lpfs.embeddings import _backends, _torch
from lpfs.embeddings._backends import BackendWarning, backend_for, use_backend
from lpfs.embeddings.table import Table
from lpfs.errors import InputError, MissingPackageError
from tests.helpers.embeddings import BACKENDS

needs_numba = pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")


def test_default_and_requested_backend():
    fast = backend_for(torch.zeros(1, 1))
    assert fast.__name__ == f"lpfs.embeddings._{'numba' if 'numba' in BACKENDS else 'torch'}"
    assert backend_for(torch.zeros(1, 1, dtype=torch.float64)) is _torch
    with use_backend("torch"):
        assert backend_for(torch.zeros(1, 1)) is _torch
    assert backend_for(torch.zeros(1, 1)) is fast
    with pytest.raises(InputError, match="'cuda'.*torch, numba, triton"), use_backend("cuda"):
        pass


def test_backend_follows_from_the_device(monkeypatch):
    monkeypatch.setattr(_backends, "_load_or_torch", lambda name: name)
    assert backend_for(torch.zeros(1, 1)) == "numba"
    assert backend_for(torch.zeros(1, 1, device="meta")) == "torch"
    on_gpu = SimpleNamespace(dtype=torch.float32, is_cpu=False, is_cuda=True)
    assert backend_for(on_gpu) == "triton"


def fail_to_import(monkeypatch, error: Exception) -> None:
    original = _backends.import_module

    def import_module(name: str):
        if name.endswith("_torch"):
            return original(name)
        raise error

    monkeypatch.setattr(_backends, "import_module", import_module)
    _backends._load.cache_clear()
    _backends._load_or_torch.cache_clear()


@pytest.fixture
def _clear_caches():
    yield
    _backends._load.cache_clear()
    _backends._load_or_torch.cache_clear()


@pytest.mark.usefixtures("_clear_caches")
def test_without_numba_torch_runs_after_one_notice(monkeypatch):
    fail_to_import(monkeypatch, ModuleNotFoundError("No module named 'numba'"))
    with pytest.warns(BackendWarning, match="pip install numba"):
        assert backend_for(torch.zeros(1, 1)) is _torch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_for(torch.zeros(1, 1)) is _torch
    with pytest.raises(MissingPackageError, match="pip install numba"), use_backend("numba"):
        pass


@pytest.mark.usefixtures("_clear_caches")
def test_a_broken_numba_warns_once_and_torch_runs(monkeypatch):
    fail_to_import(monkeypatch, ImportError("Numba needs NumPy 1.0\nor less"))
    with pytest.warns(BackendWarning, match="numba.*needs NumPy 1.0$"):
        assert backend_for(torch.zeros(1, 1)) is _torch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_for(torch.zeros(1, 1)) is _torch


WITHOUT_NUMBA = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
sys.modules["numba"] = sys.modules["llvmlite"] = None  # an import raises ModuleNotFoundError
import torch, lpfs
from lpfs.data.batch import Batch
from lpfs.models import make_model
schema = lpfs.Schema((lpfs.Field("user", cardinality=50), lpfs.Field("item", cardinality=9)))
model = make_model("dlrm_cross", schema, dim=4, hidden=[8])
ids = torch.stack([torch.arange(64) % 50, torch.arange(64) % 9], 1).int()
batch = Batch(ids, torch.zeros(64, 0), (torch.arange(64.0) % 2)[:, None])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trained = lpfs.fit(model, [batch] * 5, config=lpfs.Training(steps=5))
before = model.inputs.table.weight.detach().clone()
lpfs.fit(model, [batch] * 5, config=lpfs.Training(steps=5))
assert not torch.equal(before, model.inputs.table.weight)
print([str(w.message) for w in caught])
"""


def test_training_works_without_numba():
    (line,) = python(WITHOUT_NUMBA)
    assert line.count("pip install numba") == 1


CACHED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(2)
from lpfs.embeddings.table import Table
assert "numba" not in sys.modules
table = Table((500, 40), 16)
ids = torch.zeros(4000, 2, dtype=torch.int32)
table(ids).sum().backward()
assert "numba" in sys.modules
from lpfs.embeddings import _numba_loops as loops
hits = [loop.stats.cache_hits for loop in (loops.gather_parallel, loops.group_equal_ids_parallel)]
print(*(sum(counts.values()) for counts in hits))
"""


def python(code: str, *arguments: str, **environment: str) -> list[str]:
    run = [sys.executable, "-W", "error", "-c", code, str(Path(lpfs.__file__).parents[1]), *arguments]
    result = subprocess.run(
        run, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.long
@needs_numba
def test_numba_is_imported_late_and_a_second_process_uses_the_disk_cache(tmp_path):
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    assert python(CACHED, **environment)[0] == "0 0"
    assert python(CACHED, **environment)[0] == "1 1"


@needs_numba
def test_without_a_cache_directory_loops_are_compiled_in_every_process(monkeypatch):
    numba = pytest.importorskip("numba")
    compile_it, cached = numba.njit, []

    def njit(cache: bool = False, **options):
        cached.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available for file 'x.py'")
        return compile_it(**options)

    monkeypatch.setattr(numba, "njit", njit)
    assert compile_loop(lambda x: 2 * x)(4) == 8
    assert cached == [True, False]


FORK = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(2)
from lpfs.embeddings.table import Table
table = Table((500, 40), 16)
ids = torch.zeros(4000, 2, dtype=torch.int32)
before = table(ids).detach()
child = os.fork()
if not child:
    torch.set_num_threads(2)
    same = table(ids).detach().numpy() == before.numpy()  # torch's own threads would hang after a fork
    os._exit(0 if same.all() else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_lookup_works_after_a_fork():
    assert python(FORK, NUMBA_NUM_THREADS="2") == ["0"]


THREADS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(2)
from lpfs.embeddings.table import Table
from lpfs.embeddings.optim import SGD
def work(number, out):
    random = torch.Generator().manual_seed(number)
    table = Table((500, 40), 16)
    with torch.no_grad():
        table.weight.copy_(torch.randn(540, 16, generator=random))
    optimizer = SGD(table.parameters())
    for _ in range(30):
        ids = torch.randint(0, 40, (2000, 2), generator=random)
        table(ids).square().sum().backward()
        optimizer.step()
    out[number] = table.weight.detach().clone()
serial, parallel = {}, {}
for number in range(3):
    work(number, serial)
threads = [threading.Thread(target=work, args=(number, parallel)) for number in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print([torch.equal(serial[number], parallel[number]) for number in range(3)])
"""


@pytest.mark.long
@needs_numba
def test_several_python_threads_can_train_at_the_same_time():
    assert python(THREADS, NUMBA_NUM_THREADS="2") == ["[True, True, True]"]


@pytest.mark.usefixtures("_clear_caches")
def test_a_numba_that_imports_but_does_not_work_is_not_used(monkeypatch):
    """The warning names the line that asked for the backend."""
    original = _backends.import_module

    class Broken:
        @staticmethod
        def check_works():
            raise RuntimeError("no compiler")

    monkeypatch.setattr(_backends, "import_module", lambda name: original(name) if name.endswith("_torch") else Broken)
    _backends._load.cache_clear()
    _backends._load_or_torch.cache_clear()
    with pytest.warns(BackendWarning, match="numba.*does not work: RuntimeError: no compiler") as caught:
        assert backend_for(torch.zeros(1, 1)) is _torch
    assert caught[0].filename == __file__


def test_steps_with_plain_torch_are_not_captured():
    """Its tables wait for the device, which a CUDA graph cannot."""
    with use_backend("torch"):
        assert not _backends.supports_cuda_graph(torch.device("cpu"))


@needs_numba
def test_the_number_of_threads_is_that_of_torch(monkeypatch):
    from lpfs.embeddings import _numba

    monkeypatch.setattr(_numba, "MAX_THREADS", 8)
    for safe in (True, False):
        monkeypatch.setattr(_numba, "_threads_safe", [safe])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert _numba.thread_count(1 << 20) == (threads if safe else 1)
            assert _numba.thread_count(100) == 1


@needs_numba
@pytest.mark.parametrize(("available", "used"), [(1, 1), (2, 2), (8, 3)])
def test_no_more_threads_than_fields_reduce_a_batch(monkeypatch, available, used):
    from lpfs.embeddings import _numba

    threads, run = [], _numba._run
    monkeypatch.setattr(_numba, "thread_count", lambda size: available)
    monkeypatch.setattr(_numba, "_run", lambda count, *arguments: threads.append(count) or run(1, *arguments))
    weight, starts, ids = torch.ones(9, 2), torch.tensor([0, 3, 6, 9]), torch.tensor([[0, 1, 2], [0, 2, 2]])
    grad = _numba.reduce(weight, starts, ids, None, torch.ones(2, 3, 2))[0]
    assert threads == [used, used]
    assert dict(zip(grad.rows.tolist(), grad.values[:, 0].tolist(), strict=True)) == {0: 2.0, 4: 1.0, 5: 1.0, 8: 2.0}


@needs_numba
def test_too_few_starts_are_refused():
    from lpfs.embeddings import _numba

    weight, starts, ids = torch.ones(9, 2), torch.tensor([0, 3, 6]), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 fields need 4 starts, found 3"):
        _numba.gather(weight, starts, ids, None)
    with pytest.raises(ValueError, match="3 fields need 4 starts, found 3"):
        _numba.reduce(weight, starts, ids, None, torch.ones(2, 3, 2))


@needs_numba
def test_a_small_batch_of_many_fields_is_reduced_by_one_thread(monkeypatch):
    from lpfs.embeddings import _numba

    table = Table([3] * 70, 2)  # more fields than threads
    monkeypatch.setattr(_numba.numba, "set_num_threads", lambda threads: pytest.fail(f"{threads} threads"))
    with use_backend("numba"):
        table(torch.ones(4, 70, dtype=torch.int32)).sum().backward()
    assert table.weight.row_grads[0].values.tolist() == [[4.0, 4.0]] * 70
