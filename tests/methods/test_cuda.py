"""Masks on a GPU; skipped without one. Needs only pytest, torch and numpy, and no fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from lpfs.methods.masks import NAME
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer
from tests.helpers.known_truth import SMALL, STRONG, known_truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

METHODS = [
    "shufflegate",
    "autofield",
    "adafs",
    "optfs",
    "fscd",
    "stg",
    "hard_concrete",
    "variational_dropout",
    "cold_se",
]


CASES = [(method, name) for method in METHODS for name in ("mlp", "wide_deep")]
CASES += [(method, "user_item") for method in METHODS if method not in ("adafs", "cold_se")]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_masks_are_trained_on_a_gpu(tmp_path, method, name):
    log = known_truth(tmp_path / "log", rows=9000)
    torch.manual_seed(0)
    model = make_model(name, log.schema, **SMALL).cuda()
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    rows, valid = log.part(0, 7500), log.part(7500, 9000)
    fit(model, rows.stream(64, device="cuda"), optimizer, steps=20, quiet=True)
    how = {"valid": valid.stream(4096, device="cuda"), "optimizer": optimizer, "config": Training(quiet=True)}
    found = search(model, rows.stream(64, shuffle=True, device="cuda"), method, keep=3, steps=300, **how)
    assert not hasattr(model, NAME)
    assert set(found.made["scores"]) == set(log.schema.names)
    assert method in ("adafs", "cold_se", "optfs") or set(STRONG) <= set(found.kept)
    assert all(parameter.is_cuda for parameter in model.parameters())
