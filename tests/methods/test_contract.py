"""The contract of every method: one suite over all names of the registry.

A new method is tested as soon as it is registered. Exceptions are listed in one place, below.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lpfs.data.dataset import Dataset
from lpfs.data.store.format import day_folder
from lpfs.data.store.writer import DatasetWriter
from lpfs.errors import DataError, InputError, SearchError
from lpfs.gates.hooks import hooks_on
from lpfs.gates.module import ATTRIBUTE as GATES
from lpfs.methods import permutation
from lpfs.methods.base import Method
from lpfs.methods.registry import METHODS, make_method, method_class
from lpfs.methods.search import search
from lpfs.methods.target import TARGET_KINDS, Costs, SelectionTarget
from lpfs.models import make_model
from lpfs.pipeline.stages import set_gates_from_selection
from lpfs.schema import Field, Schema
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import Stepper, make_optimizer
from tests.helpers.searches import assert_same_weights, without_time

FIELDS, TRUE, VALUES, DAY, BATCH = 40, 10, 6, 8000, 128
NAMES = tuple(f"f{number:02}" for number in range(FIELDS))
LONG, SHORT, EVERY, KILLED = 300, 60, 20, 50  # steps of a search, of a short one, a checkpoint, a kill


@dataclass(frozen=True)
class Facts:
    """Exceptions of a method: its required recall, and options for searches as short as these."""

    recall: float = 0.9
    options: tuple[tuple[str, object], ...] = ()


PARTICULAR = {
    "autofield": Facts(options=(("every", 2),)),  # an update every ten steps needs thousands of steps
    "gbdt": Facts(options=(("rows", 4000), ("trees", 50))),  # trees are slow
    "random_forest": Facts(options=(("rows", 4000), ("trees", 50))),
    "lpfs_paper": Facts(recall=0.5),  # without centering, in a short search
    "lpfs++_paper": Facts(recall=0.5),
    "random": Facts(recall=0.0),
    "all": Facts(recall=0.0),
}
ELSEWHERE = ("oracle", "autofis")  # need a simulated log, and a model of crosses
EVERYTHING = ("all",)  # keeps more than K
LEARNED = [name for name in METHODS if name not in ELSEWHERE]
# one for each way to search: these are tested in CI, all in make test-campaigns
TYPICAL = ("lpfs++", "shufflegate", "hard_concrete", "group_lasso", "lassonet", "fairfs", "subset_elimination", "gbdt")


def typical(names):
    """Return the names as parameters; the others than typical ones are left to campaigns."""
    return [pytest.param(name, marks=[] if name in TYPICAL else [pytest.mark.campaign]) for name in names]


# methods with a mask that selects fields by its penalty
MASKED = ("shufflegate", "optfs", "stg", "hard_concrete")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Clicks that ten of forty fields decide; the files of the last of six days, the test, are gone."""
    draw = np.random.default_rng(0)
    schema = Schema(tuple(Field(name, cardinality=VALUES) for name in NAMES), label="click")
    true = sorted(draw.choice(FIELDS, TRUE, replace=False).tolist())
    effects = [draw.permutation(np.linspace(-1, 1, VALUES)) for _ in true]
    out = tmp_path_factory.mktemp("planted") / "log"
    with DatasetWriter(out, schema, fingerprint="planted", settings={}) as writer:
        for day in range(6):
            ids = draw.integers(VALUES, size=(DAY, FIELDS))
            logit = sum(effect[ids[:, field]] for effect, field in zip(effects, true, strict=True))
            click = (draw.random(DAY) < 1 / (1 + np.exp(-logit))).astype(np.float32)
            columns = dict(zip(NAMES, ids.T, strict=True))
            writer.day(f"day {day}").append(ids=columns, bags={}, dense={}, labels={"click": click})
    log = Dataset(out)
    shutil.rmtree(out / day_folder(5))
    return log, {NAMES[number] for number in true}


@pytest.fixture(scope="module")
def start(planted):
    """Makes a model that knows a little, always the same, and its optimizer."""
    log, _ = planted

    def fresh():
        torch.manual_seed(0)
        model = make_model("mlp", log.schema, dim=4, hidden=(16,))
        return model, make_optimizer(Training(lr=0.01), model.parameters())

    model, optimizer = fresh()
    fit(model, log.part(0, DAY).stream(BATCH), optimizer, steps=30, quiet=True)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def make():
        model, optimizer = fresh()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        return model, optimizer

    return make


@pytest.fixture(scope="module")
def look(planted, start):
    """Searches with a method; the model and the selection."""
    log, _ = planted

    def run(method, steps=SHORT, **how):
        model, optimizer = start()
        how = {"keep": TRUE} | how
        options = dict(PARTICULAR.get(method, Facts()).options)
        config = Training(quiet=True, checkpoint_every=EVERY)
        rows = {"stream": log.part(0, 4 * DAY).stream(BATCH), "valid": log.part(4 * DAY, 5 * DAY).stream(4096)}
        found = search(model, method=method, optimizer=optimizer, steps=steps, config=config, **rows, **options, **how)
        return model, found

    return run


@pytest.fixture(scope="module")
def long(look):
    """A long search of each method, made once."""
    made = {}

    def get(method):
        if method not in made:
            made[method] = look(method, LONG)
        return made[method]

    return get


def scores_of(found):
    return found.made.get("scores", found.gates)


def test_the_test_rows_cannot_be_read(planted):
    log, _ = planted
    with pytest.raises(DataError):
        next(iter(log.part(5 * DAY, 6 * DAY).stream(BATCH)))


@pytest.mark.long
@pytest.mark.parametrize("method", LEARNED)
def test_the_planted_fields_are_found(planted, long, method):
    _, true = planted
    _, found = long(method)
    assert method in EVERYTHING or len(found.kept) == TRUE
    assert len(true & set(found.kept)) / TRUE >= PARTICULAR.get(method, Facts()).recall


@pytest.mark.parametrize("method", LEARNED)
def test_every_field_has_a_score_and_the_search_its_cost(long, method):
    _, found = long(method)
    assert found.made["method"] == method
    assert set(scores_of(found)) == set(found.gates) == set(NAMES)
    assert all(math.isfinite(value) for value in scores_of(found).values())
    assert (*found.kept, *found.dropped) != ()
    assert set(found.kept) | set(found.dropped) == set(NAMES)
    assert found.made["seconds"] >= 0
    steps = found.made["steps"]
    least = steps * BATCH if found.history else 0
    for name in ("forwards", "backwards"):
        assert isinstance(found.made[name], int)
        assert found.made[name] >= least


@pytest.mark.parametrize("method", LEARNED)
def test_nothing_is_left_on_the_model(start, long, method):
    model, found = copy.deepcopy(long(method))
    if hasattr(model, GATES):
        assert model.lpfs_gates.kept == [name for name in model.lpfs_gates.names if name in found.kept]
        return
    untouched, _ = start()
    assert [(name, type(module)) for name, module in model.named_modules()] == [
        (name, type(module)) for name, module in untouched.named_modules()
    ]
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for module in model.modules():
        assert not hooks_on(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert getattr(module, "gate", None) is None
    set_gates_from_selection(model, found)
    assert set(model.lpfs_gates.kept) == set(found.kept)


@pytest.mark.long
@pytest.mark.parametrize("method", typical(LEARNED))
def test_the_seed_determines_the_search_and_a_killed_one_resumes(look, tmp_path, monkeypatch, method):
    monkeypatch.setattr(permutation, "MAX_REPEATS", 1)
    model, whole = look(method, folder=tmp_path / "whole", seed=3)
    torch.manual_seed(99)  # the global generator does not matter
    again, same = look(method, seed=3)
    assert without_time(same) == without_time(whole)
    real = Stepper.count_step

    def dies(self, rows):
        real(self, rows)
        if self.state.step == KILLED:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "count_step", dies)
        try:
            look(method, folder=tmp_path / "killed", seed=3)
            trained = False
        except KeyboardInterrupt:
            trained = True
    assert trained or not whole.history  # a search with a history trains
    resumed, found = look(method, folder=tmp_path / "killed", seed=3, resume=True)
    assert without_time(found) == without_time(whole)
    for other in (again, resumed):
        assert_same_weights(model, other)


@pytest.mark.parametrize("method", [name for name in LEARNED if name not in EVERYTHING])
def test_must_keep(planted, look, method):
    _, true = planted
    spare = next(name for name in NAMES if name not in true)
    _, found = look(method, keep=3, must_keep=(spare,))
    assert spare in found.kept
    assert len(found.kept) == 3


@pytest.mark.parametrize("method", MASKED)
def test_a_penalty_selects_without_a_k(look, method):
    _, all_of_them = look(method, keep=None, penalty=0.0, steps=10)
    assert all_of_them.dropped == ()
    assert all_of_them.made["own_count"] == FIELDS
    _, found = look(method, keep=TRUE, steps=10)
    assert found.made["own_count"] == FIELDS
    assert len(found.kept) == TRUE
    much = {"keep": None, "penalty": 100.0, "lr": 0.3, "steps": 60}
    with pytest.raises(SearchError, match=f"{method} keeps no field at penalty=100"):
        look(method, **much)
    _, found = look(method, must_keep=("f03",), **much)
    assert found.kept == ("f03",)
    assert (found.made["penalty"], found.made["own_count"]) == (100.0, 0)


@pytest.mark.parametrize("method", list(METHODS))
def test_targets_that_a_method_does_not_support_are_refused(method):
    costs = Costs(dict.fromkeys(NAMES, 1.0))
    targets = {
        "keep": SelectionTarget(keep=2),
        "penalty": SelectionTarget(penalty=0.1),
        "budget": SelectionTarget(budget=3.0, costs=costs),
        "max_auc_loss": SelectionTarget(max_auc_loss=0.1),
    }
    assert tuple(targets) == TARGET_KINDS
    made = make_method(method)
    assert "keep" in made.targets
    for kind, target in targets.items():
        if kind in made.targets:
            made.check(target, NAMES, 1000)
        else:
            with pytest.raises(InputError, match=f"{re.escape(method)}.*{kind}=.*keep=K"):
                made.check(target, NAMES, 1000)
    with pytest.raises(InputError, match=f"the {FIELDS} fields, found 99"):
        made.check(SelectionTarget(keep=99), NAMES, 1000)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "all"])
def test_a_search_checks_its_target_before_training(start, method):
    """A failed check leaves the model unchanged."""
    model, optimizer = start()
    kinds = {"max_auc_loss": 0.1} if "max_auc_loss" not in make_method(method).targets else {"keep": 99}
    with pytest.raises(InputError):
        search(model, [], method, optimizer=optimizer, steps=SHORT, **kinds)
    assert_same_weights(model, start()[0])


@pytest.mark.long
@pytest.mark.parametrize("method", typical(name for name in LEARNED if not make_method(name).search_per_k))
def test_one_ranking_serves_every_k(look, monkeypatch, method):
    monkeypatch.setattr(permutation, "MAX_REPEATS", 1)
    (_, few), (_, many) = look(method, keep=3), look(method, keep=6)
    assert few.made["scores"] == many.made["scores"], f"{method} depends on K: it needs search_per_k = True"
    assert set(few.kept) < set(many.kept)


@pytest.mark.parametrize("method", list(METHODS))
def test_classes_and_options_are_described(method):
    cls = method_class(method)
    assert issubclass(cls, Method)
    assert cls.__doc__
    assert cls.Options.__doc__
    assert dataclasses.is_dataclass(cls.Options)
    assert cls.Options.__dataclass_params__.frozen
    with pytest.raises(InputError, match="unknown key 'no_such_option'"):
        make_method(method, {"no_such_option": 1})
