"""SubsetModel: random subsets in training, any subset in evaluation, and kill and resume of its training."""

from __future__ import annotations

import copy
from itertools import islice

import numpy as np
import pytest
import torch

from lpfs.errors import InputError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.prune import prune
from lpfs.methods.subset_model import FULL_SHARE, ResidentStream, SubsetModel, random_subsets, subset_matrix
from lpfs.models import MODELS, make_model
from lpfs.train.fit import fit
from tests.helpers.known_truth import SMALL


@pytest.fixture(scope="module")
def rows(log):
    return log.reader(log.schema).read([(0, 600)])


def make(name, log, seed=0):
    torch.manual_seed(seed)
    return make_model(name, log.schema, **{key: value for key, value in SMALL.items() if name != "fm" or key == "dim"})


def test_sizes_of_random_subsets_are_uniform():
    torch.manual_seed(0)
    subsets = random_subsets(40_000, 9)
    assert subsets.unique().tolist() == [0.0, 1.0]
    shares = np.bincount(subsets.sum(1).long().numpy(), minlength=10) / len(subsets)
    expected = np.full(10, (1 - FULL_SHARE) / 10) + FULL_SHARE * (np.arange(10) == 9)
    assert np.abs(shares - expected).max() < 4 * (0.25 / len(subsets)) ** 0.5
    means = subsets.mean(0)
    assert (means.max() - means.min()).item() < 0.02


@pytest.mark.parametrize("name", MODELS)
def test_a_masked_part_is_zero_as_in_a_pruned_model(name, log, rows):
    model, batch = make(name, log), rows.batch()
    network = SubsetModel(copy.deepcopy(model))
    kept = [part for number, part in enumerate(network.names) if number % 3 != 1]
    subsets = subset_matrix([kept, network.names], network.names)
    logits = network.logits(batch, subsets)
    gates = attach(model, steps=1)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([float(part in kept) for part in gates.names]))
    model.eval()
    with torch.no_grad():
        gated = model(batch)
    exact = network._linear is None
    assert torch.equal(logits[0], gated) if exact else torch.allclose(logits[0], gated, atol=1e-5)
    assert logits.shape == (2, 600)
    assert not torch.equal(logits[0], logits[1])


def test_all_fields_are_the_model_itself_and_pruning_agrees(log, rows):
    model, batch = make("deepfm", log), rows.batch()
    kept, pruned = ("user", "ad", "tags"), copy.deepcopy(model)
    gates = attach(pruned, steps=1)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([float(name in kept) for name in gates.names]))
    selection = absorb(pruned, partial=True)
    zeros = prune(pruned, selection, batch=batch).model
    network = SubsetModel(copy.deepcopy(model))
    logits = network.logits(batch, subset_matrix([kept, network.names], network.names))
    with torch.no_grad():
        assert torch.equal(logits[1], model.eval()(batch))
        assert torch.equal(logits[0], zeros.eval()(model.narrow(batch, zeros)))


def test_products_of_the_first_layer_equal_the_plain_evaluation(log, rows):
    """The first Linear is evaluated from the products of every part; masked embeddings give the same."""
    model = make("mlp", log)
    network, plain = SubsetModel(model), SubsetModel(copy.deepcopy(make("mlp", log)))
    plain._hooks.pop().remove()
    plain._linear = None
    subsets = random_subsets(50, len(network.names))
    expected = plain.logits_of_rows(rows, subsets)
    assert torch.allclose(network.logits_of_rows(rows, subsets), expected, atol=1e-5)
    assert network.logits_of_rows(rows, subsets).std(0).min() > 0


def test_training_masks_rows_and_evaluation_does_not(log, rows):
    network = SubsetModel(make("wide_deep", log))
    batch = rows.batch()
    network.train()
    first, second = network(batch), network(batch)
    assert not torch.equal(first, second)
    network.eval()
    assert torch.equal(network(batch), network(batch))
    model = network.remove()
    assert torch.equal(model.train()(batch), model(batch))


def test_a_subset_is_judged_better_than_by_the_plain_model(log, rows):
    """A network that is trained on subsets knows what user alone says; a plain one is off without the other fields."""
    batch, labels = rows.batch(), torch.from_numpy(rows.labels[:, 0])
    losses = {}
    for kind in ("masked", "plain"):
        model = make("mlp", log)
        network = SubsetModel(model) if kind == "masked" else model
        stream = ResidentStream(log.reader(log.schema).read([(600, 1200)]), 64, 0)
        fit(network, stream, "adagrad", lr=0.1, steps=300, quiet=True)
        judge = network if kind == "masked" else SubsetModel(model)
        logits = judge.logits(batch, subset_matrix([["user"]], judge.names))[0]
        losses[kind] = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
    assert losses["masked"] < losses["plain"]
    assert losses["masked"] < 0.66


def test_gates_and_foreign_models_are_refused(log):
    model = make("mlp", log)
    attach(model, steps=1)
    with pytest.raises(InputError, match="this model has gates"):
        SubsetModel(model)
    with pytest.raises(InputError, match="needs a model of lpfs.models"):
        SubsetModel(torch.nn.Linear(2, 1))


def test_resident_stream_covers_every_row_once_a_pass(rows):
    stream = ResidentStream(rows, 128, seed=3)
    passes = [torch.cat([batch.ids for batch in stream]) for _ in range(2)]
    expected = torch.from_numpy(rows.ids)
    for ids in passes:
        assert sorted(ids.tolist()) == sorted(expected.tolist())
    assert not torch.equal(passes[0], passes[1])
    again = ResidentStream(rows, 128, seed=3)
    list(islice(again, 2))
    other = ResidentStream(rows, 128, seed=3)
    other.load_state_dict(again.state_dict())
    assert torch.equal(torch.cat([batch.ids for batch in other]), passes[0][256:])


def test_killed_training_resumes_bit_for_bit(log, rows, tmp_path):
    class KilledError(Exception):
        pass

    class Killing(ResidentStream):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if self._epoch == 1 and number == 2:
                    raise KilledError
                yield batch

    def train(folder, stream_class=ResidentStream, resume=False):
        network = SubsetModel(make("mlp", log))
        stream = stream_class(rows, 64, seed=1)
        options = {"steps": 25, "checkpoint_every": 5, "quiet": True, "lr": 0.05, "seed": 2}
        fit(network, stream, "adagrad", folder=folder, resume=resume, **options)
        return [parameter.detach() for parameter in network.parameters()]

    expected = train(tmp_path / "whole")
    with pytest.raises(KilledError):
        train(tmp_path / "killed", Killing)
    assert all(map(torch.equal, train(tmp_path / "killed", resume=True), expected))
    assert all(map(torch.equal, train(tmp_path / "again"), expected))
