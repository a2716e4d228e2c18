"""What ranks say to each other, by gloo and, where there is a GPU, by NCCL: one rank that speaks as several would.

One GPU takes one rank. So this one meets with itself: every message is sent, and every sum has one summand. Needs
pytest, torch and numpy alone (no other fixture).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from known_truth import SMALL, known_truth

from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.distributed.group import RankGroup, single_process, use_group
from lpfs.train.distributed.heartbeat import Heartbeat
from lpfs.train.evaluate import evaluate
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer

needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
BATCH, ROWS = 51, 1000


class Talking(RankGroup):
    """One rank that does as if there were others."""

    several = True


@contextmanager
def talking(backend: str) -> Iterator[RankGroup]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30))
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        with use_group(Talking(0, 1, Heartbeat(store, 0, 1, 30.0))) as ranks:  # there is nobody to watch
            yield ranks
    finally:
        torch.distributed.destroy_process_group()


def searched(log, device):
    """Train a little, search, judge; the weights, the gates and the AUC."""
    torch.manual_seed(3)
    model = make_model("mlp", log.schema, **SMALL).to(device)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    early, late = log.part(0, ROWS), log.part(ROWS, 1200)
    fit(model, early.stream(BATCH, shuffle=True, device=device), optimizer, steps=30, clip=1.0, quiet=True)
    found = search(
        model,
        early.stream(BATCH, shuffle=True, seed=2, device=device),
        "lpfs++",
        keep=3,
        optimizer=optimizer,
        steps=60,
        held=late.stream(40, shuffle=True, seed=5, device=device),
        valid=late.stream(64, device=device),
        config=Training(quiet=True),
    )
    state = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
    return state, found.kept, evaluate(model, late.stream(64, device=device)).auc


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "cpu:gloo,cuda:nccl", marks=needs)]
)
def test_messages_change_nothing_where_there_is_nobody_else(tmp_path, device, backend):
    log = known_truth(tmp_path / "log")
    with talking(backend) as ranks:
        state, kept, auc = searched(log, device)
        said = {what: each.calls for what, each in ranks.traffic.items()}
        with single_process():
            plain, as_kept, as_auc = searched(log, device)
    assert sum(said.values()) > 90, said  # every step of training and of search
    assert kept == as_kept
    assert len(kept) == 3
    assert auc == pytest.approx(as_auc, abs=1e-6)
    assert state.keys() == plain.keys()
    for name, each in state.items():
        torch.testing.assert_close(each, plain[name], rtol=1e-4, atol=1e-5, msg=name)
