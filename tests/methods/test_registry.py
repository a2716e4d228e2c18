"""Methods by name, with settings that are checked before anything runs."""

from __future__ import annotations

import pytest

from lpfs.errors import FieldError, InputError
from lpfs.methods.costs import Costs
from lpfs.methods.registry import METHODS, check_method, check_search, options_of
from lpfs.methods.wish import Wish

NAMES = ("a", "b", "c")


def test_a_name_stands_for_settings():
    assert options_of("lpfs", {}).gate == "lpfs"
    assert options_of("lpfs", {"epsilon": 0.2}).function.epsilon == 0.2
    assert options_of("lpfs++", {"alpha": 20}).function.alpha == 20
    for name in METHODS:
        check_method(name, {})
        check_search(name, {}, Wish(keep=2), NAMES, 100)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("lpfs+", {}, "no method 'lpfs\\+'; did you mean 'lpfs"),
        ("lpfs++", {"aplha": 3}, "unknown key 'aplha'"),
        ("lpfs++", {"alpha": "much"}, "alpha must be a number, found 'much'"),
        ("lpfs++", {"alpha": True}, "alpha must be a number"),
        ("lpfs++", {"alpha": -1}, "alpha must be >= 0"),
        ("lpfs++", {"tau": 0}, "tau must be > 0"),
        ("lpfs++", {"epsilon": 0}, "epsilon must be > 0"),
        ("lpfs++", {"momentum": 1.0}, "momentum must be in"),
        ("lpfs++", {"momentum": None}, "momentum must be a number"),
        ("lpfs++", {"lr": -1}, "must start above 0"),
        ("lpfs++", {"schedule": "slow"}, "no schedule 'slow'"),
        ("lpfs++", {"rescale": "no"}, "rescale must be"),
        ("lpfs++", {"prox": "l2"}, "prox must be"),
        ("lpfs++", {"threshold": "big"}, "threshold must be"),
        ("lpfs++", {"gate": "gausian"}, "did you mean 'gaussian'"),
        ("lpfs", {"tau": 2.0}, "has no tau"),
        ("permutation", {"repeats": 0}, "repeats must be a whole number >= 1, found 0"),
        ("permutation", {"repeats": 1.5}, "repeats must be"),
        ("permutation", {"alpha": 1}, "unknown key 'alpha'"),
    ],
)
def test_settings_that_are_refused(method, options, message):
    with pytest.raises(InputError, match=message):
        check_method(method, options)


@pytest.mark.parametrize(
    ("method", "options", "wish", "steps", "message"),
    [
        ("lpfs++", {}, Wish(keep=2), 49, "at least 50 steps"),
        ("lpfs", {}, Wish(max_auc_loss=0.1), 20, "at least 50 steps"),
        ("lpfs++", {"prox": "l0"}, Wish(keep=2), 100, "with prox='l0' give penalty"),
        ("permutation", {}, Wish(), 100, "say keep=K"),
        ("lpfs++", {}, Wish(keep=4), 100, "between 1 and the 3 fields"),
    ],
)
def test_searches_that_could_not_be_begun(method, options, wish, steps, message):
    with pytest.raises(InputError, match=message):
        check_search(method, options, wish, NAMES, steps)


def test_searches_that_can_be_begun():
    check_search("lpfs++", {"prox": "l0"}, Wish(penalty=0.1), NAMES, 10)
    check_search("lpfs++", {}, Wish(keep=3), NAMES, 10)  # nothing is to be dropped
    check_search("permutation", {}, Wish(keep=2), NAMES, 1)
    free = Costs({"a": 0.0, "b": 0.0, "c": 1.0})
    check_search("lpfs++", {}, Wish(budget=0.0, costs=free), NAMES, 100)
    with pytest.raises(FieldError, match="no field 'd'"):
        check_search("lpfs", {}, Wish(keep=2, must_keep=("d",)), NAMES, 100)
