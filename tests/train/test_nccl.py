"""Communication with gloo and, on a GPU, with NCCL: a group of one rank that behaves like several.

One GPU takes one rank, so every message is sent by the rank to itself, and every sum has one term. Needs only
pytest, torch and numpy (no other fixture).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.distributed.group import RankGroup, single_process, use_group
from lpfs.train.distributed.heartbeat import Heartbeat
from lpfs.train.evaluate import evaluate
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer
from tests.helpers.known_truth import SMALL, known_truth

needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
BATCH, ROWS = 51, 1000


class SingleRankGroup(RankGroup):
    """A group of one rank that communicates as if there were others."""

    is_distributed = True


@contextmanager
def single_rank_group(backend: str) -> Iterator[RankGroup]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30))
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        with use_group(SingleRankGroup(0, 1, Heartbeat(store, 0, 1, 30.0))) as ranks:
            yield ranks
    finally:
        torch.distributed.destroy_process_group()


def searched(log, device):
    """Train, search, evaluate; return the weights, the kept fields and the AUC."""
    torch.manual_seed(3)
    model = make_model("mlp", log.schema, **SMALL).to(device)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    early, late = log.part(0, ROWS), log.part(ROWS, 1200)
    fit(model, early.stream(BATCH, shuffle=True, device=device), optimizer, steps=30, clip=1.0, quiet=True)
    selection = search(
        model,
        early.stream(BATCH, shuffle=True, seed=2, device=device),
        "lpfs++",
        keep=3,
        optimizer=optimizer,
        steps=60,
        holdout=late.stream(40, shuffle=True, seed=5, device=device),
        valid=late.stream(64, device=device),
        config=Training(quiet=True),
    )
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    return state, selection.kept, evaluate(model, late.stream(64, device=device)).auc


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "cpu:gloo,cuda:nccl", marks=needs)]
)
def test_communication_of_a_single_rank_changes_nothing(tmp_path, device, backend):
    log = known_truth(tmp_path / "log")
    with single_rank_group(backend) as ranks:
        state, kept, auc = searched(log, device)
        calls = {purpose: stats.calls for purpose, stats in ranks.traffic.items()}
        with single_process():
            plain, plain_kept, plain_auc = searched(log, device)
    assert sum(calls.values()) > 90, calls  # every step of training and of search
    assert kept == plain_kept
    assert len(kept) == 3
    assert auc == pytest.approx(plain_auc, abs=1e-6)
    assert state.keys() == plain.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-5, msg=name)
