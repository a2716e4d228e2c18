"""Two processes on half a batch each against one on the whole batch."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, multiprocessing
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import lpfs
from lpfs.embeddings.table import Table
from lpfs.errors import StateError
from tests.helpers.zoo import B, Plain, batch

STEPS = 60
LIMIT = 60  # seconds that one process waits for the other


def refuse_what_cannot_be() -> None:
    """Attach before wrapping, unwrap before absorb, and no table inside."""
    model = Plain()
    wrapped = DistributedDataParallel(model)
    lpfs.attach(model, model.fields, steps=STEPS)
    with pytest.raises(StateError, match="attached after.*DistributedDataParallel"):
        wrapped(*batch())
    part = Plain()
    part.top = DistributedDataParallel(part.top)
    with pytest.raises(StateError, match="'top'.*DistributedDataParallel"):
        lpfs.attach(part, part.fields, steps=STEPS)
    table = DistributedDataParallel(Table([4, 3], 2))
    with pytest.raises(StateError, match="the gradient of a Table is stored by rows"):
        table(torch.zeros(2, 2, dtype=torch.int64))


def run(rank: int, world: int, folder: str) -> None:
    """Search on this rank's part of every batch and write what came out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Plain().double()
    gates = lpfs.attach(model, model.fields, steps=STEPS)
    optimizer, prox = torch.optim.Adagrad(gates.model_parameters(), lr=0.05), gates.optimizer(keep=3)
    trained: torch.nn.Module = model
    if world > 1:
        meet = f"file://{folder}/meet"  # a file, so that no other test can take a port away
        wait = timedelta(seconds=LIMIT)
        distributed.init_process_group("gloo", meet, rank=rank, world_size=world, timeout=wait)
        refuse_what_cannot_be()
        trained = DistributedDataParallel(model)
        for verb in (lpfs.attach, lpfs.absorb):
            with pytest.raises(StateError, match="DistributedDataParallel"):
                verb(trained)
    part = slice(rank * B // world, (rank + 1) * B // world)
    for step in range(STEPS):
        torch.manual_seed(step)
        data = [each[torch.randperm(B)] for each in batch(torch.float64)]
        target = (data[0][:, 0] > 4).double()
        trained.zero_grad()
        logits = trained(*[each[part] for each in data])
        functional.binary_cross_entropy_with_logits(logits, target[part]).backward()
        optimizer.step()
        prox.step()
        gates.step()
    torch.save({"x": gates.x.detach(), "top": model.top[0].weight.detach()}, Path(folder) / f"{world}-{rank}.pt")
    if world > 1:
        distributed.barrier()
        os._exit(0)  # threads of gloo can hold up a process that ends in the ordinary way


@pytest.mark.long
def test_two_processes_agree_to_the_bit_and_with_the_plain_run(tmp_path):
    processes = multiprocessing.spawn(run, (2, str(tmp_path)), nprocs=2, join=False)
    latest = time.monotonic() + 3 * LIMIT
    while not processes.join(timeout=1):
        if time.monotonic() > latest:
            for each in processes.processes:
                each.kill()
            pytest.fail("the two processes did not come to an end")
    run(0, 1, str(tmp_path))
    files = [tmp_path / name for name in ("2-0.pt", "2-1.pt", "1-0.pt")]
    first, second, plain = (torch.load(each, weights_only=True) for each in files)
    assert torch.equal(first["x"], second["x"])
    assert torch.equal(first["top"], second["top"])
    assert int((first["x"] != 0).sum()) == 3
    # float64 sums in another order, float32 gates: a few roundings of the gates' own type over 60 steps
    torch.testing.assert_close(first["x"], plain["x"], rtol=1e-3, atol=1e-4)
    assert torch.equal(first["x"] != 0, plain["x"] != 0)


def test_the_gates_must_be_known_to_the_wrapper(monkeypatch):
    """The check of the first forward pass, without a process group."""
    for known, refused in (("gates", False), ("others", True), (None, False)):
        model = Plain()
        gates = lpfs.attach(model, model.fields, steps=STEPS)
        parameters = {"gates": [gates.x], "others": [*model.top.parameters()], None: None}[known]
        wrapper = SimpleNamespace(_module_parameters=parameters)
        monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", wrapper)
        if refused:
            with pytest.raises(StateError, match="attached after.*DistributedDataParallel"):
                model(*batch())
        else:
            assert model(*batch()).shape == (B,)
