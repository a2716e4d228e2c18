"""Checks of names, numbers and keys: what they accept, and what their messages name."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from lpfs._validation import check_int, check_keys, check_name, check_options, did_you_mean, is_number
from lpfs.errors import FieldError, InputError


def test_the_nearest_name_is_suggested_in_its_own_spelling():
    assert "'User'" in did_you_mean("usr", ["Site", "User"])
    assert did_you_mean("xyz", ["user"]) == did_you_mean(3, ["user"]) == did_you_mean("a", []) == ""


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    check_name("user", ("user", "ad"), "field")
    with pytest.raises(FieldError, match="must_keep: .*field 'usr'.*'user'.*user, ad"):
        check_name("usr", ("user", "ad"), "field", "must_keep", FieldError)
    with pytest.raises(InputError, match="method 'x'.*n0, n1") as error:
        check_name("x", {f"n{number}": 0 for number in range(100)}, "method")
    assert "n99" not in str(error.value)


@dataclass
class Point:
    x: int
    y: int = 0
    tags: list[str] = field(default_factory=list)


def test_keys_of_a_dataclass():
    assert check_keys(Point, {"x": 1}) == {"x": 1}
    with pytest.raises(InputError, match="'tag' for Point.*'tags'.*tags, x, y"):
        check_keys(Point, {"x": 1, "tag": 2})
    with pytest.raises(InputError, match="Point needs the key 'x'.*'y'"):
        check_keys(Point, {"y": 1})


def test_numbers():
    assert is_number(1)
    assert is_number(1.5)
    assert not is_number(True)
    assert not is_number("1")
    assert type(check_int("n", np.int64(3), 1)) is int
    for value in (True, 2.0, "2", None, 0):
        with pytest.raises(InputError, match=f"n must be an integer >= 1, found {value!r}"):
            check_int("n", value, 1)
    assert check_int("n", -5) == -5


@dataclass
class Numbers:
    lr: float = 0.1
    decay: float = 0.0
    share: float = 0.5
    rows: int = 1

    def __post_init__(self):
        check_options(self, positive=("lr",), non_negative=("decay",), fraction=("share",), count=("rows",))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lr", 0, "> 0"),
        ("lr", True, "> 0"),
        ("lr", float("nan"), "> 0"),
        ("lr", float("inf"), "> 0"),
        ("decay", -0.1, ">= 0"),
        ("share", 0, "between 0 and 1"),
        ("share", 1.0, "between 0 and 1"),
        ("rows", 0, ">= 1"),
        ("rows", 1.0, ">= 1"),
        ("rows", "3", ">= 1"),
    ],
)
def test_options_out_of_range(name, value, text):
    Numbers()
    with pytest.raises(InputError, match=f"{name} must be .*{text}, found {value!r}"):
        Numbers(**{name: value})
