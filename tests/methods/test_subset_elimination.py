"""Backward elimination by networks that are trained on random subsets of their fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lpfs.data.simulate import simulate
from lpfs.errors import InputError
from lpfs.methods.base import RowFold, SearchCost, SearchTask
from lpfs.methods.registry import make_method
from lpfs.methods.subset_elimination import SubsetNetworks, eliminate, first_rows
from lpfs.methods.target import SelectionTarget
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.step import make_optimizer
from tests.helpers.searches import assert_same_weights


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("subsets") / "log", "small", rows=2000, seed=3)


def task_of(log, **changes):
    torch.manual_seed(0)
    model = make_model("mlp", log.schema, dim=4, hidden=(8,))
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    values = {"target": SelectionTarget(keep=5), "training": Training(quiet=True)} | changes
    valid = log.part(1500, 2000).stream(500)
    return SearchTask(model, optimizer, log.part(0, 1000).stream(32), valid, steps=20, **values)


def test_every_row_is_judged_by_the_network_that_is_blind_to_it(log):
    parts = [(0, 500), (500, 1000)]
    folds = [
        RowFold(log.part(*parts[1 - number]).stream(32), log.part(*parts[number]).stream(100)) for number in (0, 1)
    ]
    task = task_of(log, folds=folds)
    untrained = make_model("mlp", log.schema, dim=4, hidden=(8,))
    untrained.load_state_dict(task.model.state_dict())
    networks = SubsetNetworks(task, task.model, cost := SearchCost(), 600)
    assert_same_weights(task.model, untrained)  # the networks are copies
    subsets = np.ones((3, len(networks.names)), bool)
    subsets[1, 0], subsets[2] = False, False
    losses = networks.losses(subsets)
    assert losses.shape == (3, 600)
    for number, (model, batches) in enumerate(networks._judged):
        first = next(iter(log.part(*parts[number]).stream(100)))
        assert torch.equal(batches[0].ids, first.ids)
        expected = torch.nn.functional.binary_cross_entropy_with_logits(
            model.logits(first, torch.ones(1, len(networks.names)))[0].double(), first.labels[:, 0].double()
        )
        assert losses[0, 300 * number : 300 * number + 100].mean() == pytest.approx(float(expected), rel=1e-9)
    assert cost.backwards == 2 * (500 + 4 * 32)  # 20 steps, the 16th has 20 rows
    assert cost.forwards == cost.backwards + 3 * 600


def test_without_folds_held_out_rows_judge(log):
    networks = SubsetNetworks(task_of(log), task_of(log).model, SearchCost(), 10_000)
    assert sum(len(batch) for _, batches in networks._judged for batch in batches) == 500  # validation rows
    holdout = log.part(1000, 1300).stream(64)
    networks = SubsetNetworks(task_of(log, holdout=holdout), task_of(log).model, SearchCost(), 10_000)
    assert sum(len(batch) for _, batches in networks._judged for batch in batches) == 300


def test_the_position_of_a_stream_is_restored(log):
    stream = log.stream(64)
    before = stream.state_dict()
    assert sum(map(len, first_rows(stream, 100))) == 128
    assert stream.state_dict() == before


def test_fields_are_removed_by_what_they_cost():
    """The loss is the sum of the weights of the absent parts, equal on all rows."""
    weights = np.array([0.3, 0.1, 0.4, 0.2])
    order = eliminate(lambda subsets: np.repeat((~subsets @ weights)[:, None], 5, 1), 4, [[0, 1, 2, 3]])
    assert order == [1, 3, 0, 2]
    forced = eliminate(lambda subsets: np.repeat((~subsets @ weights)[:, None], 5, 1), 4, [[0, 2, 3], [1]])
    assert forced == [3, 0, 2, 1]


def test_scores_follow_the_elimination(log):
    found = make_method("subset_elimination").search(task_of(log, target=SelectionTarget(keep=5, must_keep=("f30",))))
    scores = found.made["scores"]
    assert len(found.kept) == 5
    assert sorted(scores.values()) == pytest.approx([number / 31 for number in range(31)])
    assert max(scores, key=scores.__getitem__) == "f30"
    assert min(scores[name] for name in found.kept) > max(scores[name] for name in found.dropped)
    with pytest.raises(InputError, match="folds"):
        make_method("subset_elimination", {"folds": 1})
