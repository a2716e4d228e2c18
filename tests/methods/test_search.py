"""search: keep, penalty, budget and max_auc_loss, each on a log of which the truth is known."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader

import lpfs
from lpfs.errors import InputError, StateError
from lpfs.methods.base import SearchCost, SearchTask
from lpfs.methods.gate_search import BudgetSearch, DescendingSearch, GateSearch
from lpfs.methods.lpfs import _AucRecorder
from lpfs.methods.search import _check_batches, search
from lpfs.methods.target import Costs, SelectionTarget, SharedCost
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.evaluate import evaluate
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer
from tests.helpers.known_truth import FIELDS, NOISE, SMALL, STRONG, known_truth
from tests.helpers.searches import assert_same_weights, killed_after, without_time

NAMES = tuple(field.name for field in FIELDS)
LINEAR = {"user": 3.0, "ad": 1.0, "tags": 1.0, "age": 1.0, "price": 1.0, "site": 1.0, "slot": 2.0}
QUIET = Training(quiet=True, checkpoint_every=25)


@pytest.fixture(scope="module")
def pretrained(log):
    return maker(log)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A log of enough rows for a loss of AUC to be measured."""
    return known_truth(tmp_path_factory.mktemp("large") / "log", rows=9000)


@pytest.fixture(scope="module")
def pretrained_large(large):
    return maker(large)


def maker(log):
    """Return what makes a model that was trained a little, always the same."""
    model, optimizer = started(log, "mlp")
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def make():
        model, optimizer = fresh(log, "mlp")
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # it takes the tensors themselves
        return model, optimizer

    return make


def fresh(log, name):
    torch.manual_seed(0)
    model = make_model(name, log.schema, **SMALL)
    return model, make_optimizer(Training(lr=0.05), model.parameters())


def started(log, name):
    model, optimizer = fresh(log, name)
    fit(model, train(log), optimizer, steps=200, quiet=True)
    return model, optimizer


def train(log):
    return log.part(0, log.rows * 5 // 6).stream(64, shuffle=True)


def valid(log):
    return log.part(log.rows * 5 // 6, log.rows).stream(4096)


def look(log, made, steps=200, **how):
    model, optimizer = made()
    how = {"config": QUIET, "valid": valid(log), "optimizer": optimizer, **how}
    return model, search(model, train(log), steps=steps, **how)


def check_gates(model, selection):
    """Dropped gates are exactly 0.0, kept ones clear of it, and the model has them."""
    assert set(selection.kept) | set(selection.dropped) == set(selection.gates)
    assert all(selection.gates[name] == 0.0 for name in selection.dropped)
    assert all(abs(selection.gates[name]) > 0.1 for name in selection.kept)
    assert model.lpfs_gates.kept == list(selection.kept)


@pytest.mark.parametrize("method", ["lpfs++", "lpfs"])
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_keep_is_exact_and_finds_the_strong(log, pretrained, method, keep):
    model, found = look(log, pretrained, method=method, keep=keep)
    check_gates(model, found)
    assert len(found.kept) == keep
    assert set(found.kept) <= set(STRONG) if keep <= 2 else set(STRONG) < set(found.kept)
    assert (found.made["method"], found.made["gate"], found.made["keep"]) == (method, method, keep)
    assert found.made["step"] == found.made["steps"] == 200


@pytest.mark.parametrize("method", ["lpfs++", "lpfs"])
def test_fields_that_must_be_kept_count_within_keep(log, pretrained, method):
    model, found = look(log, pretrained, method=method, keep=2, must_keep=("slot",))
    check_gates(model, found)
    assert "slot" in found.kept
    assert len(set(found.kept) & set(STRONG)) == 1


def test_a_fixed_penalty_drops_what_it_outweighs(log, pretrained):
    _, none = look(log, pretrained, penalty=0.0)
    assert none.dropped == ()
    _, found = look(log, pretrained, penalty=0.2, must_keep=("price",))
    assert found.dropped
    assert set(found.dropped) <= {"site", "slot", "tags", "age"}
    assert {"price", *STRONG} <= set(found.kept)
    assert all(found.gates[name] == 0.0 for name in found.dropped)
    assert found.made["penalty"] == pytest.approx(0.2)


@pytest.mark.long
@pytest.mark.parametrize("method", ["lpfs++", "lpfs"])
@pytest.mark.parametrize("budget", [1.0, 2.5, 5.0])
def test_a_budget_is_never_exceeded(log, pretrained, method, budget):
    costs = Costs(LINEAR, unit="ms")
    model, found = look(log, pretrained, steps=400, method=method, budget=budget, costs=costs)
    check_gates(model, found)
    assert found.kept
    assert costs.total(found.kept) == found.made["cost"] <= budget
    assert (found.made["budget"], found.made["unit"]) == (budget, "ms")
    assert budget < 3.0 or set(STRONG) <= set(found.kept)
    assert budget >= 3.0 or "user" not in found.kept  # it exceeds the budget alone


def test_a_budget_for_all_fields_keeps_all_fields(log, pretrained):
    _, found = look(log, pretrained, budget=10.0, costs=LINEAR)
    assert found.dropped == ()
    _, found = look(log, pretrained, budget=0.0, costs=dict.fromkeys(NAMES, 0.0))
    assert found.dropped == ()


def test_a_budget_with_fields_that_must_be_kept_and_fields_that_cost_nothing(log, pretrained):
    costs = Costs({**LINEAR, "price": 0.0, "site": 0.0})
    model, found = look(log, pretrained, budget=3.0, costs=costs, must_keep=("slot",))
    check_gates(model, found)
    assert {"slot", "price", "site"} <= set(found.kept)
    assert costs.total(found.kept) <= 3.0
    assert "user" not in found.kept


def test_a_shared_cost_counts_until_its_last_field_is_dropped(large, pretrained_large):
    """One shared cost serves all noise fields: it exceeds the budget together with the informative fields."""
    costs = Costs(dict.fromkeys(NAMES, 0.25), {"call": SharedCost(1.0, NOISE)})
    model, found = look(large, pretrained_large, budget=1.25, costs=costs)
    check_gates(model, found)
    assert set(found.kept) == {"user", "ad", "tags", "age"}
    assert found.made["cost"] == 1.0


def budget_task(model, costs, budget):
    return SearchTask(model, None, [], None, SelectionTarget(budget=budget, costs=costs), 100)


def test_the_weight_of_a_field_grows_as_others_of_its_group_are_dropped(log, pretrained):
    model, _ = pretrained()
    gates = lpfs.attach(model, steps=100)
    costs = Costs(dict.fromkeys(NAMES, 1.0), {"call": SharedCost(4.0, ("site", "slot"))})
    prox = gates.optimizer(keep=1, costs=costs.weights(gates.names, gates.names))
    driver = BudgetSearch(gates, prox, budget_task(model, costs, 3.0), SearchCost())
    slot, user = gates.names.index("slot"), gates.names.index("user")
    before = driver.cost_weights(gates.names)
    assert before[slot] / before[user] == pytest.approx(3.0)
    after = driver.cost_weights([name for name in gates.names if name != "site"])
    assert after[slot] / after[user] == pytest.approx(5.0)
    assert driver.unaffordable == ["site", "slot"]


def test_equal_costs_get_slightly_different_weights(log, pretrained):
    model, _ = pretrained()
    gates = lpfs.attach(model, steps=100)
    costs = Costs(dict.fromkeys(NAMES, 1.0))
    driver = BudgetSearch(gates, gates.optimizer(keep=1, costs=[1.0] * 7), budget_task(model, costs, 2.0), SearchCost())
    assert driver.decide(None, False) is None
    assert len(set(driver.weights.tolist())) == 7
    assert all(1 <= value <= 1.01 for value in driver.weights.tolist())


def test_max_auc_loss_keeps_few_fields_and_the_auc(large, pretrained_large):
    model, found = look(large, pretrained_large, steps=300, max_auc_loss=0.02)
    check_gates(model, found)
    assert set(STRONG) <= set(found.kept)
    assert len(found.kept) <= 5
    end, reference = found.made["end"], found.made["reference"]
    assert end["auc"] == evaluate(model, valid(large)).auc
    assert end["alive"] == len(found.kept)
    assert [step for step, _ in reference] == [0, *range(30, 301, 30)]
    assert end["loss"] == reference[-1][1] - end["auc"] <= 0.02 == end["allowed"]
    curve = found.made["curve"]
    alive = [point["alive"] for point in curve]
    assert all(point["loss"] <= 0.02 for point in curve if point["alive"] == len(found.kept))
    assert alive[-1] < len(found.kept)  # it continued below the result
    assert any(point["loss"] > 0.02 for point in curve if point["alive"] < len(found.kept))
    assert all(0.0 < point["auc"] < 1.0 and point["step"] % 3 == 0 for point in curve)


def test_the_default_target_is_a_small_auc_loss(log, pretrained):
    _, found = look(log, pretrained, must_keep=("site",))
    assert found.made["end"]["allowed"] == 0.001
    assert {"site", *STRONG} <= set(found.kept)


def test_the_history_records_the_search(log, pretrained):
    _, found = look(log, pretrained, keep=2)
    assert [record["step"] for record in found.history] == list(range(1, 201))
    first, last = found.history[0], found.history[-1]
    assert set(last) == {"step", "loss", "alive", "penalty", "epsilon", "lr", "gates"}
    assert (first["alive"], last["alive"]) == (7, 2)
    assert first["epsilon"] > 0.09 > last["epsilon"] > 0
    assert last["gates"] == pytest.approx([found.gates[name] for name in found.gates], abs=1e-6)
    assert all(record["alive"] == sum(gate != 0 for gate in record["gates"]) for record in found.history)
    assert all(0 < record["loss"] < 5 for record in found.history)


TARGETS = {
    "keep": {"keep": 2},
    "lpfs": {"keep": 2, "method": "lpfs"},
    "penalty": {"penalty": 0.2},
    "budget": {"budget": 3.0, "costs": Costs(LINEAR, {"call": SharedCost(1.0, ("user", "tags"))})},
    "loss": {"max_auc_loss": 0.02},
}


@pytest.fixture(scope="module")
def uninterrupted(log, pretrained, tmp_path_factory):
    """Returns model and selection of an uninterrupted search, made once for each target."""
    cached = {}

    def get(target):
        if target not in cached:
            folder = tmp_path_factory.mktemp(target) / "run"
            cached[target] = look(log, pretrained, folder=folder, **TARGETS[target])
        return cached[target]

    return get


# before the first checkpoint, during the descent, at the freeze, and after it
STEPS = [(target, step) for target in TARGETS for step in (60, 170)]
STEPS += [(target, step) for target in ("budget", "loss") for step in (10, 110)]


@pytest.mark.long
@pytest.mark.parametrize(("target", "step"), STEPS)
def test_a_killed_search_resumes_bit_for_bit(log, pretrained, uninterrupted, tmp_path, target, step):
    model, whole = uninterrupted(target)
    with killed_after(DescendingSearch if target in ("budget", "loss") else GateSearch, step):
        look(log, pretrained, folder=tmp_path / "killed", **TARGETS[target])
    resumed, selection = look(log, pretrained, folder=tmp_path / "killed", resume=True, **TARGETS[target])
    assert without_time(selection) == without_time(whole)
    assert_same_weights(resumed, model)


def test_the_reference_of_a_loss_resumes_too(log, pretrained, uninterrupted, tmp_path):
    _, whole = uninterrupted("loss")
    with killed_after(_AucRecorder, 130):
        look(log, pretrained, folder=tmp_path / "killed", max_auc_loss=0.02)
    _, selection = look(log, pretrained, folder=tmp_path / "killed", resume=True, max_auc_loss=0.02)
    assert without_time(selection) == without_time(whole)


def test_the_search_sees_the_batches_of_its_reference(log, pretrained):
    """A search with open gates that never move is the training that it is compared with."""
    model, optimizer = pretrained()
    stream = train(log)
    search(model, stream, max_auc_loss=0.49, valid=valid(log), optimizer=optimizer, steps=60, config=QUIET)
    other = train(log)
    for _ in range(4):
        list(other)  # 60 steps of 16 a pass
    assert stream.state_dict()["epoch"] == 3 < other.state_dict()["epoch"]


def test_the_same_seed_gives_the_same_search(log, pretrained):
    (one, first), (two, second) = (look(log, pretrained, keep=3, seed=4) for _ in range(2))
    assert without_time(first) == without_time(second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_budget_over_crosses_counts_a_field_once(log):
    model, optimizer = started(log, "dlrm_cross")
    costs = dict.fromkeys(NAMES, 1.0)
    found = search(model, train(log), budget=3.0, costs=costs, optimizer=optimizer, steps=150, config=QUIET)
    fields = model.fields_of_parts()
    read = {field for name in found.kept for field in fields[name]}
    assert 0 < len(read) <= 3 or found.made["cost"] <= 3.0
    assert found.made["cost"] == len(read)


def test_a_model_with_gates_attached(log, pretrained):
    model, optimizer = pretrained()
    gates = lpfs.attach(model, ["user", "ad", "slot"], steps=300, gate="lpfs")
    found = search(model, train(log), keep=2, optimizer=optimizer, config=QUIET)
    assert set(found.kept) == set(STRONG)
    assert found.made["method"] == "lpfs"
    assert gates.steps_done == 300
    with pytest.raises(StateError, match="already has gates"):
        lpfs.attach(model)


@pytest.mark.parametrize("name", ["stream", "valid", "holdout"])
@pytest.mark.parametrize("kind", [list, iter, DataLoader])
def test_batches_of_another_type_are_refused_before_gates_are_attached(log, name, kind):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2))
    pairs = kind([(torch.zeros(2, 1), torch.zeros(2))] * 3)
    random = torch.get_rng_state()
    with pytest.raises(InputError, match=rf"{name}: .*found (tuple|list)\. .*gates\.search\(.*Plain\(…\)\.search"):
        search(model, **{"stream": train(log), name: pairs}, keep=1, steps=60)
    assert not hasattr(model, "lpfs_gates")
    assert torch.equal(torch.get_rng_state(), random)


def test_no_batch_of_an_iterator_is_lost(log):
    batches = list(train(log))[:3]
    assert list(_check_batches("stream", iter(batches))) == batches
    assert _check_batches("stream", batches) is batches
    assert list(_check_batches("stream", iter([]))) == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"keep": 9}, "between 1 and the 7 fields"),
        ({"keep": 2, "steps": 0}, "steps must be an integer >= 1, found 0"),
        ({"keep": 2, "steps": 10}, "at least 50 steps"),
        ({"max_auc_loss": 0.1, "valid": None}, "give valid="),
        ({"keep": 2, "method": "permutation", "valid": None}, "give valid="),
        ({"method": "permutation", "penalty": 0.1}, "permutation .*penalty=0.1.*keep=K"),
        ({"keep": 2, "gate": "lpfz"}, "did you mean 'lpfs'"),
        ({"keep": 2, "prox": "l0"}, "with prox='l0' give penalty"),
        ({"keep": 2, "method": "lpfs", "alpha": 3.0}, "has no alpha"),
        ({"budget": 1.0, "costs": {"user": 1.0}}, "has no cost"),
        ({"keep": 2, "must_keep": ("usr",)}, "did you mean 'user'"),
    ],
)
def test_invalid_searches(log, pretrained, how, message):
    with pytest.raises(InputError, match=message):
        look(log, pretrained, **how)


@pytest.mark.parametrize("method", ["lpfs++", "lpfs"])
def test_noise_is_dropped_first(large, pretrained_large, method):
    _, found = look(large, pretrained_large, method=method, keep=4)
    assert set(found.dropped) == set(NOISE)
