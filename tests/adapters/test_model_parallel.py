"""Gates on a model whose tables TorchRec spreads over two processes (DistributedModelParallel), against one.

Runs where torchrec is installed; ``model_parallel.py`` is what each process does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def searched(folder: Path, how: str, world: int) -> list[dict]:
    """Do the search in some processes and return what each saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    shared |= {"LOCAL_WORLD_SIZE": str(world), "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "model_parallel.py"), str(folder), how]
    several = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [each.communicate(timeout=200)[1] for each in several]
    assert all(each.returncode == 0 for each in several), "\n".join(said)
    return [torch.load(folder / f"{how}-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    pytest.importorskip("torchrec", exc_type=ImportError)
    return searched(tmp_path_factory.mktemp("plain"), "plain", 1)[0]


@pytest.mark.parametrize("how", ["table_wise", "row_wise"])
def test_a_search_on_spread_tables_is_that_of_one_process(plain, how, tmp_path):
    first, second = searched(tmp_path, how, 2)
    assert torch.equal(first["course"], second["course"])
    # both halves of a batch, and both shards of a table, are summed in another order: 120 steps of float32
    far = float((first["course"] - plain["course"]).abs().max())
    assert far < 1e-4, far
    assert first["kept"] == plain["kept"] == ["a", "b"]


def test_attach_before_wrapping_unwrap_before_absorb(plain, tmp_path):
    found = searched(tmp_path, "table_wise", 2)[0]["refused"]
    assert [each.split(" works")[0] for each in found] == ["attach", "absorb"]
    assert all("inside DistributedModelParallel" in each for each in found)
