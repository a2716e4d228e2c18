"""Steps of searches that are captured and replayed, imitated on a CPU; ``test_cuda.py`` captures them on a GPU."""

from __future__ import annotations

import pytest
import torch

from lpfs.data.batch import Batch
from lpfs.embeddings.table import Table
from lpfs.errors import InputError
from lpfs.methods.base import SearchCost
from lpfs.methods.registry import METHODS, make_method
from lpfs.methods.search import search
from lpfs.methods.stochastic_gates import STG
from lpfs.models import make_model
from lpfs.schema import Field, Schema
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import GraphStepper, make_optimizer
from tests.helpers import recorded_graph
from tests.helpers.known_truth import SMALL
from tests.helpers.searches import killed_after

GATES = ("lpfs", "lpfs++", "lpfs_paper", "lpfs++_paper")  # numba takes their steps on a CPU
CAPTURED = sorted({name for name in METHODS if make_method(name).cuda_graph} - {*GATES})
STEPS = 20


def run(log, method, *, graph, holdout=True, **settings):
    names = [field.name for field in log.schema]
    torch.manual_seed(0)
    name = "dlrm_cross" if method == "autofis" else "mlp"
    model = make_model(name, log.schema.subset(names), **SMALL)
    optimizer = make_optimizer(Training(lr=0.05, optimizer="sgd"), model.parameters())
    fit(model, log.part(0, 600).stream(50, fields=names), optimizer, steps=5, quiet=True)
    if holdout:
        settings["holdout"] = log.part(600, 990).stream(50, shuffle=True, fields=names)  # its last batch is smaller
    settings["valid"] = log.part(1000, 1200).stream(4096, fields=names)
    stream = log.part(0, 600).stream(50, shuffle=True, fields=names)
    config = Training(quiet=True, graph=graph, checkpoint_every=5)
    options = {"optimizer": optimizer, "keep": 2, "steps": STEPS, "config": config, **settings}
    return model, search(model, stream, method, **options)


@pytest.fixture
def replays(monkeypatch):
    """Imitate CUDA graphs; the numbers of operations of the graphs that were replayed, one entry per replay."""
    recorded_graph.install(monkeypatch)
    counted = []
    replay = recorded_graph.RecordedGraph.replay

    def count(self):
        counted.append(len(self.calls))
        replay(self)

    monkeypatch.setattr(recorded_graph.RecordedGraph, "replay", count)
    return counted


@pytest.mark.parametrize("method", CAPTURED)
def test_captured_search_is_the_eager_one(log, replays, method):
    holdout = method not in ("stg", "optfs", "fscd")  # these train their masks on the rows of the step
    options = {"every": 3} if method == "autofield" else {}
    eager_model, eager = run(log, method, graph=False, holdout=holdout, **options)
    assert not replays
    model, captured = run(log, method, graph=True, holdout=holdout, **options)
    assert len(replays) > STEPS // 2
    for weight, expected in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
    assert captured.made["scores"] == pytest.approx(eager.made["scores"], rel=1e-4, abs=1e-6)
    assert captured.made["forwards"] == eager.made["forwards"]
    for record, expected in zip(captured.history, eager.history, strict=True):
        assert record == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in expected.items()}


def test_steps_with_and_without_an_update_of_the_mask_have_graphs_of_their_own(log, replays):
    run(log, "autofield", graph=True, every=2)
    assert len(set(replays)) == 2


def test_captured_search_resumes(log, replays, tmp_path):
    def search_in(name, **settings):
        return run(log, "shufflegate", graph=True, folder=tmp_path / name, **settings)

    model, whole = search_in("whole")
    with killed_after(SearchCost, 13):
        search_in("killed")
    resumed_model, resumed = search_in("killed", resume=True)
    assert resumed.made["scores"] == whole.made["scores"]
    for weight, expected in zip(resumed_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_reading_a_value_in_a_captured_step_is_noticed(log, replays, monkeypatch):
    monkeypatch.setattr(STG, "penalty", lambda self, rows: self.mu.sum() * float(self.mu.detach().max() > 0))
    with pytest.raises(InputError, match="cannot be captured"):
        run(log, "stg", graph=True, holdout=False)


def test_a_search_is_not_resumed_on_another_kind_of_device(log, tmp_path, monkeypatch):
    with killed_after(SearchCost, 13):
        run(log, "stg", graph=False, folder=tmp_path)
    monkeypatch.setattr(STG, "move_generator", lambda self, device: setattr(self, "draw", OtherGenerator()))
    with pytest.raises(InputError, match="another kind of device"):
        run(log, "stg", graph=False, folder=tmp_path, resume=True)


class OtherGenerator:
    """The state of a generator on a GPU is shorter."""

    def get_state(self):
        return torch.zeros(16, dtype=torch.uint8)


def bag_batches(sizes):
    """Batches of eight rows, with the number of values in the bag of each."""
    batches = []
    for size in sizes:
        starts = torch.randint(0, size + 1, (8,)).sort().values.int()
        starts[0] = 0
        bags = {"tags": (torch.randint(0, 9, (size,)).int(), starts)}
        labels = torch.randint(0, 2, (8, 1)).float()
        batches.append(Batch(torch.randint(0, 5, (8, 1)).int(), torch.zeros(8, 0), labels, None, bags))
    return batches


def test_bags_with_more_values_are_captured_again_and_bags_without_values_are_not_captured(replays, monkeypatch):
    schema = Schema((Field("user", cardinality=5), Field("tags", "multi", cardinality=9)))
    batches = bag_batches([10, 12, 9, 11, 64, 65, 0, 60, 70])  # there is room for 64 values, later for 128
    captures = []
    capture = GraphStepper._capture
    monkeypatch.setattr(
        GraphStepper, "_capture", lambda self, *rest: captures.append(self.state.step) or capture(self, *rest)
    )
    trained = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = make_model("mlp", schema, **SMALL)
        fit(
            model,
            batches,
            make_optimizer(Training(lr=0.1, optimizer="sgd"), model.parameters()),
            graph=graph,
            quiet=True,
        )
        trained.append(list(model.parameters()))
    assert captures == [3, 5]
    assert len(replays) == 5
    for weight, expected in zip(trained[1], trained[0], strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_models_that_read_bags_themselves_are_not_captured(replays):
    class OwnBags(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = Table((9,), 4, bags=1)

        def forward(self, batch):
            return self.table.bag(0, *batch.bags["tags"]).sum(1)

    model = OwnBags()
    fit(
        model,
        bag_batches([10] * 6),
        make_optimizer(Training(optimizer="sgd"), model.parameters()),
        graph=True,
        quiet=True,
    )
    assert not replays
