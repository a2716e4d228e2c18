"""What can be asked for, in one way, and what cannot be had."""

from __future__ import annotations

import pytest

from lpfs.errors import FieldError, InputError
from lpfs.methods.costs import Costs
from lpfs.methods.wish import DEFAULT_LOSS, Wish

NAMES = ("user", "ad", "site")
PRICED = Costs({"user": 3.0, "ad": 1.0, "site": 2.0})


def test_nothing_asked_for_allows_a_small_loss():
    assert Wish().max_auc_loss == DEFAULT_LOSS == 0.001
    assert Wish(keep=2).max_auc_loss is None
    assert Wish(must_keep=["ad", "ad"]).must_keep == ("ad",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": 2, "budget": 1.0, "costs": PRICED}, "found keep and budget"),
        ({"penalty": 0.1, "max_auc_loss": 0.1}, "found penalty and max_auc_loss"),
        ({"keep": 2.0}, "whole number"),
        ({"keep": True}, "whole number"),
        ({"penalty": -1.0}, "penalty must be a number >= 0, found -1.0"),
        ({"penalty": "0.1"}, "penalty must be a number"),
        ({"max_auc_loss": float("nan")}, "max_auc_loss must be"),
        ({"max_auc_loss": True}, "max_auc_loss must be"),
        ({"budget": float("inf"), "costs": PRICED}, "budget must be"),
        ({"budget": 3.0}, "give costs="),
    ],
)
def test_wishes_that_make_no_sense(given, message):
    with pytest.raises(InputError, match=message):
        Wish(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"keep": 0}, InputError, "between 1 and the 3 fields, found 0"),
        ({"keep": 4}, InputError, "between 1 and the 3 fields, found 4"),
        ({"keep": 1, "must_keep": ("ad", "user")}, InputError, "but 2 fields must be kept"),
        ({"must_keep": ("usr",)}, FieldError, "no field 'usr'; did you mean 'user'"),
        ({"must_keep": ("xxxx",)}, FieldError, "there are user, ad, site"),
        ({"keep": 1, "costs": Costs({"user": 1.0})}, InputError, r"'ad' \(and 1 others\) has no cost"),
        ({"budget": 0.5, "costs": PRICED}, InputError, "even the cheapest field costs 1"),
        ({"budget": 3.5, "costs": PRICED, "must_keep": NAMES[:2]}, InputError, "must be kept costs 4"),
        (
            {"keep": 1, "costs": Costs({"user": 0, "ad": 0, "site": 1})},
            InputError,
            "2 fields must be kept or cost",
        ),
    ],
)
def test_wishes_that_cannot_be_had(given, error, message):
    with pytest.raises(error, match=message):
        Wish(**given).check(NAMES)


def test_wishes_that_can_be_had():
    Wish(keep=3).check(NAMES)
    Wish(keep=1, costs=Costs(dict.fromkeys(NAMES, 0.0))).check(NAMES)  # nobody is dearer than another
    Wish(keep=2, must_keep=("site",), costs=PRICED).check(NAMES)
    Wish(budget=4.0, costs=PRICED, must_keep=("user", "ad")).check(NAMES)
