"""permutation: the AUC that is lost on held-out rows when a field is shuffled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lpfs.errors import InputError
from lpfs.methods.group_sparsity import first_layer
from lpfs.methods.permutation import PermutationOptions
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.fit import fit
from tests.helpers.known_truth import SMALL, STRONG


@pytest.fixture(scope="module")
def model(log):
    torch.manual_seed(0)
    model = make_model("mlp", log.schema, **SMALL)
    fit(model, log.part(0, 1000).stream(64, shuffle=True), lr=0.05, steps=200, quiet=True)
    return model


def look(log, model, keep=2, **how):
    valid = log.part(1000, 1200).stream(50)
    return search(model, [], "permutation", keep=keep, valid=valid, **how)


def test_the_planted_fields_are_found_and_the_model_is_unchanged(log, model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = look(log, model)
    assert set(found.kept) == set(STRONG)
    assert found.gates == {name: float(name in STRONG) for name in model.names}
    assert min(found.made["scores"][name] for name in STRONG) > 0.05
    assert (found.made["method"], found.made["keep"], found.made["steps"]) == ("permutation", 2, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not hasattr(model, "lpfs_gates")


def test_the_seed_determines_the_scores_and_repeats_average(log, model):
    one, again, other = (look(log, model, seed=seed).made["scores"] for seed in (0, 0, 1))
    assert one == again
    assert one != other
    several = look(log, model, repeats=3).made["scores"]
    assert several["user"] == pytest.approx(one["user"], abs=0.1)
    assert several != one


def test_bags_are_shuffled_as_a_whole(log, model):
    scores = look(log, model, repeats=5).made["scores"]
    assert scores["tags"] > max(scores[name] for name in ("site", "slot", "price"))


def test_fields_that_must_be_kept_come_first(log, model):
    found = look(log, model, must_keep=("slot",))
    assert set(found.kept) == {"slot", max(STRONG, key=found.made["scores"].get)}
    assert look(log, model, keep=7).dropped == ()


def test_every_part_of_a_model_of_crosses_is_shuffled(log):
    torch.manual_seed(0)
    crossed = make_model("dlrm_cross", log.schema, **SMALL)
    found = look(log, crossed, keep=3, repeats=2)
    assert set(found.made["scores"]) == set(crossed.names)
    assert len(found.kept) == 3


def test_a_cross_that_the_model_does_not_use_scores_zero(log):
    """To shuffle its fields would: they are in other parts too."""
    torch.manual_seed(0)
    crossed = make_model("dlrm_cross", log.schema, **SMALL)
    fit(crossed, log.part(0, 1000).stream(64, shuffle=True), lr=0.05, steps=200, quiet=True)
    crosses = [name for name in crossed.names if "*" in name]
    layer = first_layer(crossed, "permutation")
    keep = torch.tensor([float(name not in crosses) for name in crossed.names])
    layer.multiply(keep)
    before = {name: tensor.clone() for name, tensor in crossed.state_dict().items()}
    found = look(log, crossed, keep=2, repeats=3)
    assert all(found.made["scores"][name] == 0.0 for name in crosses)
    assert max(found.made["scores"].values()) > 0.02
    assert not set(found.kept) & set(crosses)
    assert crossed.state_dict().keys() == before.keys()  # nothing of the mask is left


def test_invalid_models_and_rows(log, model):
    valid = log.part(1000, 1200).stream(50)
    with pytest.raises(InputError, match="permutation needs a model of lpfs.models, found Linear"):
        search(nn.Linear(2, 1), [], "permutation", keep=1, valid=valid)
    one_class = [batch for batch in log.part(1000, 1200).stream(1) if not batch.labels.any()]
    with pytest.raises(InputError, match="only one class"):
        search(model, [], "permutation", keep=1, valid=one_class)


def test_few_rows_are_shuffled_several_times(log, model):
    found = look(log, model).made
    assert found["repeats"] == 20
    assert found["forwards"] == 200 * (1 + 20 * 7)
    assert look(log, model).made["scores"] == found["scores"]
    assert PermutationOptions(repeats=2).repeats_for(10) == 2
    assert [PermutationOptions().repeats_for(rows) for rows in (1, 1000, 1001, 19_999, 20_000, 10**9)] == [
        20,
        20,
        20,
        2,
        1,
        1,
    ]


def test_all_rows_that_the_model_was_not_trained_on_are_used(log):
    """The validation rows and the holdout rows; without these, the search rows, which are new at every step."""
    model = make_model("mlp", log.schema, dim=2, hidden=[4])
    valid, holdout, seen = (log.part(*at) for at in ((1000, 1100), (600, 1000), (0, 600)))
    for stream, others, limit, total in (
        ([], None, None, 100),
        (seen.stream(64), None, None, 700),
        (seen.stream(64), holdout.stream(50), None, 500),
        (seen.stream(64), holdout.stream(50), 200, 300),
    ):
        rows = {"valid": valid.stream(50), "holdout": others}
        found = search(model, stream, "permutation", keep=2, repeats=1, steps=1, rows=limit, **rows)
        assert found.made["forwards"] == (1 + len(model.names)) * total
        assert found.made["rows"] == total
