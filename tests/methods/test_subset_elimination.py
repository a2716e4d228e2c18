"""Backward elimination by networks that are trained on random subsets of their fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lpfs.data.simulate import simulate
from lpfs.errors import InputError
from lpfs.methods import subset_elimination
from lpfs.methods.base import RowFold, SearchCost, SearchTask
from lpfs.methods.registry import make_method
from lpfs.methods.subset_elimination import SubsetNetworks, eliminate, exchange, first_rows
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
    values = {"target": SelectionTarget(keep=5), "training": Training(quiet=True), "steps": 20} | changes
    valid = log.part(1500, 2000).stream(500)
    return SearchTask(model, optimizer, log.part(0, 1000).stream(32), valid, **values)


def networks_of(task):
    return SubsetNetworks(task, task.model, task.optimizer, task.folds, SearchCost(), 10_000)


def test_every_row_is_judged_by_the_network_that_is_blind_to_it(log, monkeypatch):
    monkeypatch.setattr(subset_elimination, "MIN_JUDGED_ROWS", 100)
    parts = [(0, 500), (500, 1000)]
    folds = [
        RowFold(log.part(*parts[1 - number]).stream(32), log.part(*parts[number]).stream(100)) for number in (0, 1)
    ]
    task = task_of(log, folds=folds)
    untrained = make_model("mlp", log.schema, dim=4, hidden=(8,))
    untrained.load_state_dict(task.model.state_dict())
    networks = SubsetNetworks(task, task.model, task.optimizer, folds, cost := SearchCost(), 1800)
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
    assert networks.losses(subsets[:2]).shape == (2, 1000)  # more rows for fewer subsets, here all
    assert networks.losses(np.repeat(subsets, 5, 0)).shape == (15, 200)


def test_without_folds_held_out_rows_judge(log):
    networks = networks_of(task_of(log))
    assert sum(len(batch) for _, batches in networks._judged for batch in batches) == 500  # validation rows
    holdout = log.part(1000, 1300).stream(64)
    networks = networks_of(task_of(log, holdout=holdout))
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


def additive(worth):
    """Return losses of subsets in which every part lowers the loss of all rows by its worth."""
    return lambda subsets: np.repeat((1 - subsets @ np.asarray(worth))[:, None], 7, 1)


def test_fields_are_exchanged_while_the_loss_falls():
    worth = [0.5, 0.01, 0.3, 0.2, 0.02]
    pairs = exchange(additive(worth), [1, 4], 5)
    assert pairs == [(1, 0), (4, 2)]
    assert exchange(additive(worth), [0, 2], 5) == []  # the best two
    assert exchange(additive(worth), [1, 4], 5, fixed=[0, 1]) == [(4, 2)]
    assert exchange(additive(worth), [], 5) == []
    assert exchange(additive(worth), range(5), 5) == []


def test_an_exchange_must_gain_more_than_its_errors():
    """Part 1 lowers the loss of half of the rows by 1.1 and raises that of the others by 1: .05, error .35."""
    gains = np.stack([np.zeros(8), np.array([1.1, -1.0] * 4), np.full(8, 0.5)])  # part 2 lowers that of all rows

    def losses(subsets):
        return 3.0 - subsets @ gains[: subsets.shape[1]]

    assert exchange(losses, [0], 2) == [(0, 1)]
    assert exchange(losses, [0], 2, errors=1.0) == []
    assert exchange(losses, [0], 3, errors=1.0) == [(0, 2)]


def test_exchanges_of_a_search_open_and_close_gates(log):
    parts = [(0, 500), (500, 1000)]
    judges = [
        RowFold(log.part(*parts[1 - number]).stream(32), log.part(*parts[number]).stream(100)) for number in (0, 1)
    ]
    task = task_of(log, steps=60, holdout=log.part(1000, 1500).stream(100), judges=judges)
    found = make_method("lpfs++", {"judges": 2}).search(task)
    pairs = found.made["exchanged"]
    assert len(found.kept) == 5
    assert {pair["kept"] for pair in pairs} - {pair["dropped"] for pair in pairs} <= set(found.kept)
    assert not {pair["dropped"] for pair in pairs[-1:]} & set(found.kept)
    assert pairs  # 60 steps from random weights do not end with the best set of these networks
    alone = make_method("lpfs++", {}).search(task_of(log, steps=60, holdout=log.part(1000, 1500).stream(100)))
    changed = set(found.kept) ^ set(alone.kept)
    assert changed == {name for name in changed if any(name in pair.values() for pair in pairs)}
    with pytest.raises(InputError, match="judges must be 0, for none, or at least 2, found 1"):
        make_method("lpfs++", {"judges": 1})


def test_searches_of_a_seed_share_the_networks_that_judge_them(log, tmp_path, monkeypatch):
    parts, trained = [(0, 500), (500, 1000)], []
    after_step = SearchCost.after_step

    def count(self, state):
        after_step(self, state)
        trained.append(isinstance(state.model, subset_elimination.SubsetModel))

    def search(keep, must_keep=(), **changes):
        judges = [
            RowFold(log.part(*parts[1 - number]).stream(32), log.part(*parts[number]).stream(100)) for number in (0, 1)
        ]
        holdout = log.part(1000, 1500).stream(100)
        task = task_of(
            log,
            steps=60,
            holdout=holdout,
            judges=judges,
            target=SelectionTarget(keep=keep, must_keep=must_keep),
            **changes,
        )
        return make_method("lpfs++", {"judges": 2}).search(task)

    alone = [search(keep) for keep in (5, 8)]
    monkeypatch.setattr(SearchCost, "after_step", count)
    every = tuple(log.schema.names)
    for keep, must_keep in ((len(every), ()), (3, every[:3])):  # no field can be exchanged
        assert search(keep, must_keep).made["exchanged"] == []
        assert not any(trained)
    trained.clear()
    shared = [search(keep, judges_folder=tmp_path / "seed" / "judges") for keep in (5, 8)]
    assert sum(trained) == 2 * 60  # steps of networks in the first search, none in the second
    assert not (tmp_path / "seed" / "judges.lock").exists()
    assert "shared_seconds" not in shared[0].made
    assert shared[1].made["shared_seconds"] > 0  # what the networks have cost the first search
    for ours, theirs in zip(shared, alone, strict=True):
        assert (ours.kept, ours.gates) == (theirs.kept, theirs.gates)
        assert all(ours.made[name] == theirs.made[name] for name in ("exchanged", "forwards", "backwards"))
