"""search: keep, penalty, budget and max_auc_loss, each on a log of which the truth is known."""

from __future__ import annotations

import copy

import pytest
import torch
from known_truth import FIELDS, NOISE, SMALL, STRONG, known_truth

import lpfs
from lpfs.errors import InputError, StateError
from lpfs.methods import lpfs as gated
from lpfs.methods.costs import Costs, Shared
from lpfs.methods.descend import Descend, WithinBudget
from lpfs.methods.polarize import Polarize
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.evaluate import evaluate
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer

NAMES = tuple(each.name for each in FIELDS)
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
    assert budget >= 3.0 or "user" not in found.kept  # alone dearer than all there is


def test_a_budget_that_pays_for_everything_keeps_everything(log, pretrained):
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


def test_a_group_is_paid_until_the_last_of_it_is_gone(large, pretrained_large):
    """One call serves all the noise: the budget has no room for it beside the fields that say something."""
    costs = Costs(dict.fromkeys(NAMES, 0.25), {"call": Shared(1.0, NOISE)})
    model, found = look(large, pretrained_large, budget=1.25, costs=costs)
    check_gates(model, found)
    assert set(found.kept) == {"user", "ad", "tags", "age"}
    assert found.made["cost"] == 1.0


def test_the_weight_of_a_field_grows_as_the_others_of_its_group_go(log, pretrained):
    model, _ = pretrained()
    gates = lpfs.attach(model, steps=100)
    costs = Costs(dict.fromkeys(NAMES, 1.0), {"call": Shared(4.0, ("site", "slot"))})
    prox = gates.optimizer(keep=1, costs=costs.weights(gates.names, gates.names))
    driver = WithinBudget(gates, prox, costs, 3.0, ())
    slot, user = gates.names.index("slot"), gates.names.index("user")
    before = driver.fresh_weights(gates.names)
    assert before[slot] / before[user] == pytest.approx(3.0)
    after = driver.fresh_weights([name for name in gates.names if name != "site"])
    assert after[slot] / after[user] == pytest.approx(5.0)
    assert driver.too_dear == ["site", "slot"]


def test_equal_weights_stay_parted(log, pretrained):
    model, _ = pretrained()
    gates = lpfs.attach(model, steps=100)
    costs = Costs(dict.fromkeys(NAMES, 1.0))
    driver = WithinBudget(gates, gates.optimizer(keep=1, costs=[1.0] * 7), costs, 2.0, ())
    assert driver.look(None, False) is None
    assert len(set(driver.weights.tolist())) == 7
    assert all(1 <= each <= 1.01 for each in driver.weights.tolist())


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
    alive = [each["alive"] for each in curve]
    assert all(each["loss"] <= 0.02 for each in curve if each["alive"] == len(found.kept))
    assert alive[-1] < len(found.kept)  # it went on, to see what further cuts would cost
    assert any(each["loss"] > 0.02 for each in curve if each["alive"] < len(found.kept))
    assert all(0.0 < each["auc"] < 1.0 and each["step"] % 3 == 0 for each in curve)


def test_nothing_asked_for_is_a_small_auc_loss(log, pretrained):
    _, found = look(log, pretrained, must_keep=("site",))
    assert found.made["end"]["allowed"] == 0.001
    assert {"site", *STRONG} <= set(found.kept)


def test_the_history_tells_the_search(log, pretrained):
    _, found = look(log, pretrained, keep=2)
    assert [each["step"] for each in found.history] == list(range(1, 201))
    first, last = found.history[0], found.history[-1]
    assert set(last) == {"step", "loss", "alive", "penalty", "epsilon", "lr", "gates"}
    assert (first["alive"], last["alive"]) == (7, 2)
    assert first["epsilon"] > 0.09 > last["epsilon"] > 0
    assert last["gates"] == pytest.approx([found.gates[name] for name in found.gates], abs=1e-6)
    assert all(each["alive"] == sum(gate != 0 for gate in each["gates"]) for each in found.history)
    assert all(0 < each["loss"] < 5 for each in found.history)


def without_time(selection):
    """A selection as JSON, but for the seconds that it took."""
    values = selection.to_json()
    return {**values, "made": {key: each for key, each in values["made"].items() if key != "seconds"}}


class KilledError(Exception):
    """What ends a search in the middle."""


WISHES = {
    "keep": {"keep": 2},
    "lpfs": {"keep": 2, "method": "lpfs"},
    "penalty": {"penalty": 0.2},
    "budget": {"budget": 3.0, "costs": Costs(LINEAR, {"call": Shared(1.0, ("user", "tags"))})},
    "loss": {"max_auc_loss": 0.02},
}


@pytest.fixture(scope="module")
def unharmed(log, pretrained, tmp_path_factory):
    """Gives model and selection of a search that nobody kills, made once."""
    made = {}

    def get(wish):
        if wish not in made:
            made[wish] = look(log, pretrained, folder=tmp_path_factory.mktemp(wish) / "run", **WISHES[wish])
        return made[wish]

    return get


# before the first checkpoint, on the way down, where it settles, and after
STEPS = [(wish, step) for wish in WISHES for step in (60, 170)]
STEPS += [(wish, step) for wish in ("budget", "loss") for step in (10, 110)]


@pytest.mark.parametrize(("wish", "step"), STEPS)
def test_a_search_that_is_killed_goes_on_bit_by_bit(log, pretrained, unharmed, tmp_path, monkeypatch, wish, step):
    model, whole = unharmed(wish)
    kind, hook = (Descend, "after_step") if wish in ("budget", "loss") else (Polarize, "after_step")
    real = getattr(kind, hook)

    def dies(self, state):
        real(self, state)
        if state.step == step:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(kind, hook, dies)
        with pytest.raises(KilledError):
            look(log, pretrained, folder=tmp_path / "killed", **WISHES[wish])
    again, resumed = look(log, pretrained, folder=tmp_path / "killed", resume=True, **WISHES[wish])
    assert without_time(resumed) == without_time(whole)
    mine, theirs = model.state_dict(), again.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_reference_of_a_loss_goes_on_too(log, pretrained, unharmed, tmp_path, monkeypatch):
    _, whole = unharmed("loss")
    real = gated._Watch.after_step

    def dies(self, state):
        real(self, state)
        if state.step == 130:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(gated._Watch, "after_step", dies)
        with pytest.raises(KilledError):
            look(log, pretrained, folder=tmp_path / "killed", max_auc_loss=0.02)
    _, resumed = look(log, pretrained, folder=tmp_path / "killed", resume=True, max_auc_loss=0.02)
    assert without_time(resumed) == without_time(whole)


def test_the_search_sees_the_batches_of_its_reference(log, pretrained):
    """A search with open gates that never move is the training that it is compared with."""
    model, optimizer = pretrained()
    stream = train(log)
    search(model, stream, max_auc_loss=1.0, valid=valid(log), optimizer=optimizer, steps=60, config=QUIET)
    other = train(log)
    for _ in range(4):
        list(other)  # 60 steps of 16 a pass
    assert stream.state_dict()["epoch"] == 3 < other.state_dict()["epoch"]


def test_the_same_seed_gives_the_same_search(log, pretrained):
    (one, first), (two, second) = (look(log, pretrained, keep=3, seed=4) for _ in range(2))
    assert without_time(first) == without_time(second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_budget_over_crosses_pays_a_field_once(log):
    model, optimizer = started(log, "dlrm_cross")
    costs = dict.fromkeys(NAMES, 1.0)
    found = search(model, train(log), budget=3.0, costs=costs, optimizer=optimizer, steps=150, config=QUIET)
    fields = model.fields_of_parts()
    read = {each for name in found.kept for each in fields[name]}
    assert 0 < len(read) <= 3 or found.made["cost"] <= 3.0
    assert found.made["cost"] == len(read)


def test_models_of_others_with_gates_on_them(log, pretrained):
    model, optimizer = pretrained()
    gates = lpfs.attach(model, ["user", "ad", "slot"], steps=300, gate="lpfs")
    found = search(model, train(log), keep=2, optimizer=optimizer, config=QUIET)
    assert set(found.kept) == set(STRONG)
    assert found.made["method"] == "lpfs"
    assert gates.steps_done == 300
    with pytest.raises(StateError, match="gates already"):
        lpfs.attach(model)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"keep": 9}, "between 1 and the 7 fields"),
        ({"keep": 2, "steps": 0}, "steps must be a whole number >= 1"),
        ({"keep": 2, "steps": 10}, "at least 50 steps"),
        ({"max_auc_loss": 0.1, "valid": None}, "give valid="),
        ({"keep": 2, "method": "permutation", "valid": None}, "give valid="),
        ({"method": "permutation", "penalty": 0.1}, "say keep=K"),
        ({"keep": 2, "gate": "lpfz"}, "did you mean 'lpfs'"),
        ({"keep": 2, "prox": "l0"}, "with prox='l0' give penalty"),
        ({"keep": 2, "method": "lpfs", "alpha": 3.0}, "has no alpha"),
        ({"budget": 1.0, "costs": {"user": 1.0}}, "has no cost"),
        ({"keep": 2, "must_keep": ("usr",)}, "did you mean 'user'"),
    ],
)
def test_searches_that_are_refused(log, pretrained, how, message):
    with pytest.raises(InputError, match=message):
        look(log, pretrained, **how)


@pytest.mark.parametrize("method", ["lpfs++", "lpfs"])
def test_noise_goes_first(large, pretrained_large, method):
    _, found = look(large, pretrained_large, method=method, keep=4)
    assert set(found.dropped) == set(NOISE)
