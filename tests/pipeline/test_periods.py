"""Which rows pretrain, search, choose and judge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_truth import known_truth

from lpfs.errors import InputError
from lpfs.pipeline.splits import auc_standard_error, clicks, split_dataset

SPLIT = {"train": ["day 0", "day 1", "day 2", "day 3"], "valid": ["day 4"], "test": ["day 5"]}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Gives a log of so many days of 20 rows, made once."""
    made = {}

    def get(days, rows=None, **how):
        key = (days, rows, str(how))
        if key not in made:
            made[key] = known_truth(
                tmp_path_factory.mktemp("log") / "log", rows=rows or 20 * days, days=days, **how
            )
        return made[key]

    return get


def spans(parts):
    return {name: part.span for name, part in vars(parts).items()}


@pytest.mark.parametrize(
    ("days", "early", "searched"), [(24, 18, 5), (9, 6, 2), (10, 7, 2), (3, 1, 1), (4, 2, 1), (5, 3, 1)]
)
def test_the_last_day_judges_and_the_days_before_it_search(logs, days, early, searched):
    parts = split_dataset(logs(days, rows=200 * days))
    stop, held = 200 * (days - 1), 20 * searched
    assert early + searched + 1 == days
    assert spans(parts) == {
        "early": (0, 200 * early),
        "search": (200 * early, stop - held),
        "valid": (stop - held, stop),
        "test": (stop, 200 * days),
        "train": (0, stop - held),
    }


@pytest.mark.parametrize("days", [1, 2])
def test_few_days_are_cut_by_rows(logs, days):
    assert spans(split_dataset(logs(days, rows=1000))) == {
        "early": (0, 700), "search": (700, 880), "valid": (880, 900), "test": (900, 1000), "train": (0, 880),
    }  # fmt: skip
    with pytest.raises(InputError, match="99 rows are too few to select fields on; 100 is the least"):
        split_dataset(logs(days, rows=99))


@given(days=st.integers(3, 40), rows=st.integers(40, 400))
def test_the_parts_follow_one_another_and_nothing_is_in_two_of_them(logs, days, rows):
    parts = spans(split_dataset(logs(days, rows=max(rows, 10 * days))))
    total = max(rows, 10 * days)
    assert parts["early"][0] == 0 < parts["early"][1] == parts["search"][0]
    assert parts["search"][0] < parts["search"][1] == parts["valid"][0] < parts["valid"][1] == parts["test"][0]
    assert parts["test"][1] == total
    assert parts["train"] == (0, parts["search"][1])


def test_rows_to_choose_on_hold_both_classes_where_that_can_be(tmp_path):
    """The last 40 of 200 searched rows are no clicks: 20 are not enough, nor 40; 80 are."""
    log = known_truth(tmp_path / "log", rows=600, days=3, label=lambda row: float(row < 360 and row % 3 == 0))
    parts = split_dataset(log)
    assert spans(parts)["search"] == (200, 320)
    assert spans(parts)["valid"] == (320, 400)
    assert clicks(parts.valid) == (13, 67)
    none = known_truth(tmp_path / "none", rows=600, days=3, label=lambda row: float(row < 100))
    assert spans(split_dataset(none))["valid"] == (320, 400)


def test_the_noise_of_an_auc_is_that_of_hanley_and_mcneil(tmp_path):
    """Against AUCs of rows drawn from two normal distributions 0.954 apart, whose AUC is .75."""
    log = known_truth(tmp_path / "log", rows=600, days=3, label=lambda row: float(row % 4 == 0))
    draw = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        clicked, other = draw.normal(0.954, 1, 150), draw.normal(0, 1, 450)
        found.append((clicked[:, None] > other[None]).mean())
    assert np.mean(found) == pytest.approx(0.75, abs=0.003)
    assert auc_standard_error(log) == pytest.approx(np.std(found), rel=0.1)
    one = known_truth(tmp_path / "one", rows=600, days=3, label=lambda row: 0.0)
    assert auc_standard_error(one) == 0.5


def test_days_of_too_few_rows(logs):
    with pytest.raises(InputError, match="3 rows are too few"):
        split_dataset(logs(3, rows=3))


def test_a_split_is_honoured(logs):
    """Of 400 training rows a quarter is searched on; the rows to choose on are those of the column."""
    log = logs(6, rows=600, settings={"split": SPLIT})
    assert spans(split_dataset(log)) == {
        "early": (0, 300), "search": (300, 400), "valid": (400, 500), "test": (500, 600), "train": (0, 400),
    }  # fmt: skip
    two = {"train": SPLIT["train"], "test": ["day 4", "day 5"]}
    expected = {
        "early": (0, 300), "search": (300, 390), "valid": (390, 400), "test": (400, 600), "train": (0, 390),
    }  # fmt: skip
    assert spans(split_dataset(logs(6, rows=600, settings={"split": two}))) == expected
    named = {"train": SPLIT["train"], "valid": ["day 4", "day 5"]}  # then these judge
    assert spans(split_dataset(logs(6, rows=600, settings={"split": named}))) == expected


@pytest.mark.parametrize("split", [{"train": ["day 0"]}, {"test": ["day 0"], "valid": ["day 1"]}])
def test_a_split_without_rows_to_train_or_to_test_on(logs, split):
    with pytest.raises(InputError, match="rows to train on and rows to test on"):
        split_dataset(logs(6, rows=600, settings={"split": split}))


def test_what_is_written_down(logs):
    told = split_dataset(logs(6, rows=600)).to_json()
    assert told["test"] == {"rows": 100, "days": ["day 5", "day 5"]}
    assert told["early"] == {"rows": 400, "days": ["day 0", "day 3"]}
    assert set(told) == {"early", "search", "valid", "test", "train"}
