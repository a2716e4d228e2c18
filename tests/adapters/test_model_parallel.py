"""A search whose tables TorchRec shards over two processes equals the search in one process.

Needs torchrec; each process runs ``model_parallel.py``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.adapter_contract import require_package

HERE = Path(__file__).parent


def run_search(folder: Path, sharding: str, world: int) -> list[dict]:
    """Run the search in ``world`` processes and return the results of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    shared |= {"LOCAL_WORLD_SIZE": str(world), "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "model_parallel.py"), str(folder), sharding]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [torch.load(folder / f"{sharding}-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    require_package("torchrec")
    return run_search(tmp_path_factory.mktemp("plain"), "plain", 1)[0]


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_search_on_sharded_tables_equals_one_process(plain, sharding, tmp_path):
    first, second = run_search(tmp_path, sharding, 2)
    assert torch.equal(first["trajectory"], second["trajectory"])
    # halves of a batch and shards of a table are summed in another order, over 120 steps of float32
    difference = float((first["trajectory"] - plain["trajectory"]).abs().max())
    assert difference < 1e-4, difference
    assert first["kept"] == plain["kept"] == ["a", "b"]


def test_attach_and_absorb_raise_on_a_wrapped_model(plain, tmp_path):
    messages = run_search(tmp_path, "table_wise", 2)[0]["errors"]
    assert [message.split()[0] for message in messages] == ["attach", "absorb"]
    assert all("DistributedModelParallel" in message for message in messages)
