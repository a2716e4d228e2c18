"""The learner and its additive probe."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lpfs.data.batch import Batch
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.data.simulate_stream import simulate_events
from lpfs.errors import InputError
from lpfs.online.gates import GateSettings
from lpfs.online.learner import LearnerSettings, OnlineLearner
from lpfs.online.probe import MAX_SCALE, AdditiveProbe
from lpfs.schema import Field, Schema
from lpfs.train.metrics import row_losses
from lpfs.train.tensor_io import states_equal
from tests.online.conftest import SPEC

SETTINGS = LearnerSettings(
    options={"dim": 4, "hidden": (8,)}, warmup=3, probe_every=4, gates=GateSettings(penalty=0.05)
)


@pytest.fixture(scope="module")
def batches(stream_folder: Path) -> list[Batch]:
    encoder = RawRowEncoder(stream_folder / "like")
    return [encoder.encode(simulate_events(SPEC, 256 * n, 256), labelled=True).batch for n in range(24)]


@pytest.fixture
def schema(stream_folder: Path) -> Schema:
    return RawRowEncoder(stream_folder / "like").schema


def test_predictions_are_made_before_learning(schema: Schema, batches: list[Batch]) -> None:
    learner = OnlineLearner(schema, SETTINGS)
    for batch in batches:  # main and probe batches
        with torch.no_grad():
            learner._factors = None if learner.gates is None else learner.gates.applied()
            expected = learner.model(batch).double().numpy()
        assert np.array_equal(learner.learn(batch).logits, expected)


def test_learning_is_deterministic_and_its_state_complete(schema: Schema, batches: list[Batch]) -> None:
    first, second = OnlineLearner(schema, SETTINGS), OnlineLearner(schema, SETTINGS)
    for batch in batches[:13]:
        first.learn(batch)
    second.load(copy.deepcopy(first.state()))  # torch does not copy what it loads
    for batch in batches[13:]:
        one, other = first.learn(batch), second.learn(batch)
        assert np.array_equal(one.logits, other.logits)
    assert states_equal(first.state(), second.state())


def test_the_pruned_model_predicts_as_the_trainer(schema: Schema, batches: list[Batch]) -> None:
    learner = OnlineLearner(schema, SETTINGS)
    for batch in batches:
        learner.learn(batch)
    gates = learner.gates
    assert gates is not None
    for name in ("noise_00", "noise_01"):
        gates.set_open(gates.names.index(name), False)
    learner._factors = gates.applied()
    with torch.no_grad():
        expected = learner.model(batches[0])
    pruned = learner.pruned(batches[0])
    kept = learner.kept
    assert set(schema.names) - set(kept) == {"noise_00", "noise_01"}
    assert pruned.model.reads.names == kept  # type: ignore[union-attr]
    with torch.no_grad():
        actual = pruned.model(batches[0].select(schema, kept))
    assert torch.allclose(actual, expected, atol=1e-5)
    assert pruned.certificate.certified


def test_gates_do_not_touch_the_weights(schema: Schema, batches: list[Batch]) -> None:
    gated = OnlineLearner(schema, replace(SETTINGS, warmup=0, gate_every=1, gates=GateSettings(penalty=0.001)))
    plain = OnlineLearner(schema, replace(SETTINGS, warmup=100))
    for batch in batches:
        gated.learn(batch)
        plain.learn(batch)
    assert gated.gates is not None
    assert 0 < float(gated.gates.x.detach().min()) < 1  # they have moved, and none is zero
    assert all(map(torch.equal, gated.model.parameters(), plain.model.parameters()))


def test_closed_fields_learn_in_probe_batches_only(schema: Schema, batches: list[Batch]) -> None:
    opened = [name for name in schema.names if name != "wakes"]
    learner = OnlineLearner(schema, SETTINGS, opened)
    table = learner.inputs.table
    assert table is not None
    at = learner.inputs.names.index("wakes")
    rows = slice(sum(table.sizes[:at]), sum(table.sizes[: at + 1]))
    before = table.weight[rows].clone()
    for batch in batches[:3]:
        learner.learn(batch)
    assert torch.equal(table.weight[rows], before)
    for batch in batches[3:]:
        learner.learn(batch)
    assert not torch.equal(table.weight[rows], before)


def test_a_model_without_an_embedding_per_field_is_refused(schema: Schema) -> None:
    with pytest.raises(InputError, match="does not embed every field"):
        OnlineLearner(schema, LearnerSettings(model="dlrm", options={}))


def test_gains_of_the_probe_are_differences_of_losses() -> None:
    schema, rng = (
        Schema((Field("a", cardinality=5), Field("b", cardinality=9000), Field("n", "numeric"))),
        np.random.default_rng(0),
    )
    probe, fields = AdditiveProbe(schema), np.arange(3)
    effects = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    total = np.zeros(3)
    for _ in range(60):
        ids = np.stack([rng.integers(0, 5, 500), rng.integers(0, 9000, 500)], 1)
        logits = np.full(500, -1.0)
        labels = (rng.random(500) < 1 / (1 + np.exp(1.0 - effects[ids[:, 0]]))).astype(float)
        batch = Batch(torch.from_numpy(ids).int(), torch.randn(500, 1), torch.zeros(500, 1))
        values = probe.values(batch, fields)
        gains = probe.gains(values, logits, labels)
        steps = probe.sums[0][values] / (10.0 * probe.sums[0, -1] + probe.sums[1][values])
        exact = row_losses(logits, labels)[:, None] - row_losses(logits[:, None] + steps, labels[:, None])
        assert np.allclose(gains, exact, atol=1e-5)
        probe.add(values, logits, labels)
        total += gains.mean(0)
    assert total[0] > 10 * abs(total[2]) > 0  # only the first field predicts clicks
    assert total[1] < 0.01 * total[0]
    assert np.isfinite(probe.sums).all()
    for _ in range(2000):
        probe.add(values, logits, labels)
    assert probe.sums[0, -1] <= MAX_SCALE * np.e
