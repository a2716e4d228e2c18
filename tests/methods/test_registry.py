"""Methods by name, with settings that are checked before anything runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lpfs.errors import FieldError, InputError
from lpfs.methods.registry import METHODS, MethodEntry, make_method, trial_settings
from lpfs.methods.target import Costs, SelectionTarget

NAMES = ("a", "b", "c")


def test_names_of_one_family_have_their_own_defaults():
    assert make_method("lpfs").options.gate == "lpfs"
    assert make_method("lpfs", {"epsilon": 0.2}).options.function.epsilon == 0.2
    assert make_method("lpfs++", {"alpha": 20}).options.function.alpha == 20


def test_only_the_methods_with_gates_share_a_search_among_processes():
    """A method that does not say so searches on one rank: another one may rank a sample or draw random numbers."""
    assert {name for name in METHODS if make_method(name).distributed} == {
        "lpfs",
        "lpfs++",
        "lpfs_paper",
        "lpfs++_paper",
    }


def test_the_registry_imports_neither_torch_nor_numpy():
    code = "import sys, lpfs.methods.registry; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_path_without_a_class_is_an_error(monkeypatch):
    monkeypatch.setitem(METHODS, "mine", MethodEntry("json", "", "-"))
    with pytest.raises(InputError, match="'mine'.*'module:Class', found 'json'"):
        make_method("mine")


def test_whether_another_k_needs_another_search_depends_on_the_options():
    assert not make_method("adafs").search_per_k
    assert make_method("adafs", {"hard": True}).search_per_k  # K is part of the network


@pytest.mark.parametrize("name", list(METHODS))
def test_trial_settings_are_valid_and_different(name):
    settings = trial_settings(name, 9)
    assert settings[0] == {}
    assert len({str(make_method(name, trial).options) for trial in settings}) == len(settings)
    assert trial_settings(name, 1) == [{}]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("lpfs+", {}, "no method 'lpfs\\+' .did you mean 'lpfs"),
        ("lpfs++", {"aplha": 3}, "unknown key 'aplha'"),
        ("lpfs++", {"alpha": "much"}, "alpha must be a number, found 'much'"),
        ("lpfs++", {"alpha": True}, "alpha must be a number"),
        ("lpfs++", {"alpha": -1}, "alpha must be >= 0"),
        ("lpfs++", {"tau": 0}, "tau must be > 0"),
        ("lpfs++", {"epsilon": 0}, "epsilon must be > 0"),
        ("lpfs++", {"momentum": 1.0}, "momentum must be in"),
        ("lpfs++", {"momentum": None}, "momentum must be a number"),
        ("lpfs++", {"lr": -1}, "must be > 0, found -1"),
        ("lpfs++", {"schedule": "slow"}, "unknown schedule 'slow'"),
        ("lpfs++", {"rescale": "no"}, "rescale must be"),
        ("lpfs++", {"prox": "l2"}, "prox must be"),
        ("lpfs++", {"threshold": "big"}, "threshold must be"),
        ("lpfs++", {"gate": "gausian"}, "did you mean 'gaussian'"),
        ("lpfs", {"tau": 2.0}, "has no tau"),
        ("permutation", {"repeats": 0}, "repeats must be an integer >= 1, found 0"),
        ("permutation", {"repeats": 1.5}, "repeats must be"),
        ("permutation", {"alpha": 1}, "unknown key 'alpha'"),
    ],
)
def test_invalid_options(method, options, message):
    with pytest.raises(InputError, match=message):
        make_method(method, options)


@pytest.mark.parametrize(
    ("method", "options", "target", "steps", "message"),
    [
        ("lpfs++", {}, SelectionTarget(keep=2), 49, "at least 50 steps"),
        ("lpfs", {}, SelectionTarget(max_auc_loss=0.1), 20, "at least 50 steps"),
        ("lpfs++", {"prox": "l0"}, SelectionTarget(keep=2), 100, "with prox='l0' give penalty"),
        ("permutation", {}, SelectionTarget(), 100, "permutation .*keep=K"),
        ("lpfs++", {}, SelectionTarget(keep=4), 100, "between 1 and the 3 fields"),
    ],
)
def test_searches_that_cannot_start(method, options, target, steps, message):
    with pytest.raises(InputError, match=message):
        make_method(method, options).check(target, NAMES, steps)


def test_searches_that_can_start():
    make_method("lpfs++", {"prox": "l0"}).check(SelectionTarget(penalty=0.1), NAMES, 10)
    make_method("lpfs++", {}).check(SelectionTarget(keep=3), NAMES, 10)  # nothing is to be dropped
    make_method("permutation", {}).check(SelectionTarget(keep=2), NAMES, 1)
    free = Costs({"a": 0.0, "b": 0.0, "c": 1.0})
    make_method("lpfs++", {}).check(SelectionTarget(budget=0.0, costs=free), NAMES, 100)
    with pytest.raises(FieldError, match="no field 'd'"):
        make_method("lpfs", {}).check(SelectionTarget(keep=2, must_keep=("d",)), NAMES, 100)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "all", "oracle")])
def test_five_trials_are_five_different_option_sets_of_every_method(name):
    """``compare --tune N`` spends the same number of trials on every method, up to five."""
    for count in (2, 5):
        assert len(trial_settings(name, count)) == count
    options = [make_method(name, trial).options for trial in trial_settings(name, 5)]
    assert all(first != second for number, first in enumerate(options) for second in options[:number])
