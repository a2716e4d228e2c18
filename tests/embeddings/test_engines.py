from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rowzoo import ENGINES

import lpfs
from lpfs.embeddings import _torch
from lpfs.embeddings import _torch as choice
from lpfs.embeddings._torch import BackendWarning, backend_for, use_backend
from lpfs.errors import InputError, MissingPackageError

numba_here = pytest.mark.skipif("numba" not in ENGINES, reason="needs numba")


def test_which_engine_runs():
    fast = backend_for(torch.zeros(1, 1)).name
    assert fast == ("numba" if "numba" in ENGINES else "torch")
    assert backend_for(torch.zeros(1, 1, dtype=torch.float64)) is _torch
    with use_backend("torch"):
        assert backend_for(torch.zeros(1, 1)) is _torch
    assert backend_for(torch.zeros(1, 1)).name == fast
    with (
        pytest.raises(InputError, match="there is no engine 'cuda'; known are torch, numba, triton"),
        use_backend("cuda"),
    ):
        pass


def loading(monkeypatch, error: Exception) -> None:
    def fails(name: str) -> None:
        raise error

    monkeypatch.setattr(choice, "import_module", fails)
    choice._loaded.cache_clear()
    choice._fastest.cache_clear()


@pytest.fixture
def _forgotten():
    yield
    choice._loaded.cache_clear()
    choice._fastest.cache_clear()


@pytest.mark.usefixtures("_forgotten")
def test_without_numba_torch_runs_in_silence(monkeypatch):
    loading(monkeypatch, ModuleNotFoundError("No module named 'numba'"))
    assert backend_for(torch.zeros(1, 1)) is _torch
    with pytest.raises(MissingPackageError, match="pip install numba"), use_backend("numba"):
        pass


@pytest.mark.usefixtures("_forgotten")
def test_a_broken_numba_warns_once_and_torch_runs(monkeypatch):
    loading(monkeypatch, ImportError("Numba needs NumPy 1.0\nor less"))
    with pytest.warns(BackendWarning, match="numba is installed but does not work here.*needs NumPy 1.0$"):
        assert backend_for(torch.zeros(1, 1)) is _torch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_for(torch.zeros(1, 1)) is _torch


CODE = """
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
from lpfs.tables.engines import kernels
print(sum(kernels.gather_spread.stats.cache_hits.values()), sum(kernels.find_spread.stats.cache_hits.values()))
"""


def python(code: str, *arguments: str, **environment: str) -> list[str]:
    run = [sys.executable, "-W", "error", "-c", code, str(Path(lpfs.__file__).parents[1]), *arguments]
    said = subprocess.run(
        run, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=120
    )
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()


@numba_here
def test_numba_comes_late_and_a_second_process_compiles_nothing(tmp_path):
    how = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    assert python(CODE, **how)[0] == "0 0"
    assert python(CODE, **how)[0] == "1 1"


@numba_here
def test_where_nothing_can_be_written_it_compiles_anew(monkeypatch):
    from lpfs import jit

    compile_it, asked = jit.njit, []

    def njit(cache: bool = False, **how):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available for file 'x.py'")
        return compile_it(**how)

    monkeypatch.setattr(jit, "njit", njit)
    assert jit.compiled(lambda x: 2 * x)(4) == 8
    assert asked == [True, False]


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
    same = table(ids).detach().numpy() == before.numpy()  # not by torch, whose own threads would hang
    os._exit(0 if same.all() else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@numba_here
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_may_look_up():
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
alone, together = {}, {}
for number in range(3):
    work(number, alone)
threads = [threading.Thread(target=work, args=(number, together)) for number in range(3)]
for each in threads: each.start()
for each in threads: each.join()
print([torch.equal(alone[number], together[number]) for number in range(3)])
"""


@numba_here
def test_several_python_threads_may_train_at_once():
    assert python(THREADS, NUMBA_NUM_THREADS="2") == ["[True, True, True]"]
