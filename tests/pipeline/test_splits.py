"""Which rows pretrain, search, validate and test, and how many steps each stage takes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.errors import InputError
from lpfs.pipeline.splits import auc_standard_error, plan_stages, split_all_rows, split_dataset
from tests.helpers.known_truth import known_truth

ROLES = {"train": ["day 0", "day 1", "day 2", "day 3"], "valid": ["day 4"], "test": ["day 5"]}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return a function that writes a log, or returns the one already written."""
    written = {}

    def get(days, rows, settings=None):
        key = (days, rows, str(settings))
        if key not in written:
            out = tmp_path_factory.mktemp("log") / "log"
            written[key] = known_truth(out, rows=rows, days=days, settings=settings)
        return written[key]

    return get


def spans(splits):
    return {name: rows.span for name, rows in vars(splits).items()}


@pytest.mark.parametrize(
    ("days", "early", "searched"), [(24, 18, 5), (9, 6, 2), (10, 7, 2), (3, 1, 1), (4, 2, 1), (5, 3, 1)]
)
def test_last_day_tests_and_the_days_before_it_search(logs, days, early, searched):
    splits = split_dataset(logs(days, 200 * days))
    stop, holdout = 200 * (days - 1), 20 * searched
    assert early + searched + 1 == days
    assert spans(splits) == {
        "early": (0, 200 * early),
        "search": (200 * early, stop - holdout),
        "valid": (stop - holdout, stop),
        "test": (stop, 200 * days),
        "train": (0, stop - holdout),
    }


@pytest.mark.parametrize("days", [1, 2])
def test_fewer_than_three_days_are_split_by_rows(logs, days):
    assert spans(split_dataset(logs(days, 1000))) == {
        "early": (0, 700), "search": (700, 880), "valid": (880, 900), "test": (900, 1000), "train": (0, 880),
    }  # fmt: skip
    with pytest.raises(InputError, match="99 rows are too few.*at least 100"):
        split_dataset(logs(days, 99))


def test_parts_of_a_random_split_stay_whole(logs):
    log = logs(20, 400, {"options": {"shuffle": True}})
    assert split_dataset(log).shuffled
    assert spans(split_dataset(log)) == {
        "early": (0, 240), "search": (240, 320), "valid": (320, 360), "test": (360, 400), "train": (0, 320),
    }  # fmt: skip
    with pytest.raises(InputError, match="80 rows are too few.*at least 100"):
        split_dataset(logs(20, 80, {"options": {"shuffle": True}}))


@given(days=st.integers(3, 40), rows=st.integers(40, 400))
def test_splits_are_consecutive_and_disjoint(logs, days, rows):
    total = max(rows, 10 * days)
    splits = spans(split_dataset(logs(days, total)))
    assert splits["early"][0] == 0 < splits["early"][1] == splits["search"][0]
    assert splits["search"][0] < splits["search"][1] == splits["valid"][0]
    assert splits["valid"][0] < splits["valid"][1] == splits["test"][0]
    assert splits["test"][1] == total
    assert splits["train"] == (0, splits["search"][1])


def test_holdout_grows_until_it_has_both_classes(tmp_path):
    """The last 40 of 200 search rows are negative: 20 and 40 rows are not enough, 80 are."""
    log = known_truth(tmp_path / "log", rows=600, days=3, label=lambda row: float(row < 360 and row % 3 == 0))
    splits = split_dataset(log)
    assert spans(splits)["search"] == (200, 320)
    assert spans(splits)["valid"] == (320, 400)
    assert splits.valid.label_counts() == (13, 67)
    negative = known_truth(tmp_path / "negative", rows=600, days=3, label=lambda row: float(row < 100))
    assert spans(split_dataset(negative))["valid"] == (320, 400)


def test_standard_error_of_the_auc_agrees_with_a_simulation(tmp_path):
    """Scores of two normal distributions 0.954 apart have an AUC of 0.75."""
    log = known_truth(tmp_path / "log", rows=600, days=3, label=lambda row: float(row % 4 == 0))
    rng = np.random.default_rng(0)
    aucs = []
    for _ in range(2000):
        positive, negative = rng.normal(0.954, 1, 150), rng.normal(0, 1, 450)
        aucs.append((positive[:, None] > negative[None]).mean())
    assert np.mean(aucs) == pytest.approx(0.75, abs=0.003)
    assert auc_standard_error(log) == pytest.approx(np.std(aucs), rel=0.1)
    one_class = known_truth(tmp_path / "one", rows=600, days=3, label=lambda row: 0.0)
    assert auc_standard_error(one_class) == 0.5


def test_too_few_rows_per_day_raise_an_error(logs):
    with pytest.raises(InputError, match="3 rows are too few"):
        split_dataset(logs(3, 3))


def test_split_column_is_respected(logs):
    """A quarter of the 400 training rows is searched on; validation rows are those of the column."""
    log = logs(6, 600, {"split": ROLES})
    assert spans(split_dataset(log)) == {
        "early": (0, 300), "search": (300, 400), "valid": (400, 500), "test": (500, 600), "train": (0, 400),
    }  # fmt: skip
    expected = {
        "early": (0, 300), "search": (300, 390), "valid": (390, 400), "test": (400, 600), "train": (0, 390),
    }  # fmt: skip
    for last in ("test", "valid"):  # without test rows the validation rows test
        roles = {"train": ROLES["train"], last: ["day 4", "day 5"]}
        assert spans(split_dataset(logs(6, 600, {"split": roles}))) == expected


@pytest.mark.parametrize("roles", [{"train": ["day 0"]}, {"test": ["day 0"], "valid": ["day 1"]}])
def test_split_column_needs_training_and_test_rows(logs, roles):
    with pytest.raises(InputError, match="training rows and test rows, found"):
        split_dataset(logs(6, 600, {"split": roles}))


def test_json_has_rows_and_days_of_each_split(logs):
    values = split_dataset(logs(6, 600)).to_json()
    assert values["test"] == {"rows": 100, "days": ["day 5", "day 5"]}
    assert values["early"] == {"rows": 400, "days": ["day 0", "day 3"]}
    assert set(values) == {"early", "search", "valid", "test", "train"}


def test_search_on_all_rows_holds_out_the_last_tenth(logs):
    assert spans(split_all_rows(logs(6, 600))) == {
        "early": (0, 405), "search": (405, 540), "valid": (540, 600), "test": (540, 600), "train": (0, 540),
    }  # fmt: skip
    with pytest.raises(InputError, match="1 rows are too few"):
        split_all_rows(logs(6, 600).part(0, 1))


def split_sizes(early, train, shuffled=False):
    rows = {"early": early, "search": train - early, "train": train}
    parts = {name: SimpleNamespace(rows=count) for name, count in rows.items()}
    return SimpleNamespace(shuffled=shuffled, **parts)


def test_large_log_is_read_once():
    """As in the paper, the search takes a quarter of the steps of pretraining."""
    steps = plan_stages(split_sizes(18_000_000, 22_500_000))
    assert (steps.batch_size, steps.pretrain, steps.search, steps.shuffle) == (512, 35_157, 8789, False)
    assert (steps.train, steps.hot_start) == (43_946, 10_986)
    assert (steps.separate_gate_rows, steps.lr_factor) == (False, 1.0)
    assert plan_stages(split_sizes(18_000_000, 22_500_000, shuffled=True)).shuffle


@pytest.mark.parametrize(
    ("rows", "batch_size", "pretrain", "shuffle"),
    [
        (512_000, 512, 2000, True),
        (1_024_000, 512, 2000, False),
        (511_999, 256, 2000, False),
        (100_000, 64, 2000, True),
        (1000, 64, 2000, True),
    ],
)
def test_small_table_is_repeated_in_smaller_batches(rows, batch_size, pretrain, shuffle):
    steps = plan_stages(split_sizes(rows, rows * 5 // 4))
    assert (steps.batch_size, steps.pretrain, steps.search) == (batch_size, pretrain, 2000)
    assert steps.shuffle == shuffle
    assert (steps.separate_gate_rows, steps.gate_batch_size) == (True, 512)
    assert steps.lr_factor == 3.0 * min(1.0, 2 * rows / (2000 * batch_size))


@given(rows=st.integers(1, 10**9), more=st.integers(0, 10**9))
def test_rules_that_hold_for_any_number_of_rows(rows, more):
    steps = plan_stages(split_sizes(rows, rows + more))
    assert steps.batch_size in (64, 128, 256, 512)
    assert steps.pretrain >= 2000
    assert steps.search == max(2000, round(steps.pretrain / 4))
    assert steps.separate_gate_rows == (steps.search * steps.batch_size > 1.2 * more)
    assert steps.pretrain * steps.batch_size >= rows  # every row is read
    assert steps.shuffle == (steps.pretrain > -(-rows // steps.batch_size))
    assert steps.train >= steps.pretrain
    assert steps.hot_start == max(1, round(steps.train / 4))


def test_given_steps_override_the_defaults():
    steps = plan_stages(split_sizes(1000, 1250), batch_size=100, pretrain_steps=10, search_steps=7)
    assert steps.to_json() == {
        "batch_size": 100, "pretrain": 10, "search": 7, "train": 12, "hot_start": 3, "shuffle": False,
        "separate_gate_rows": True, "gate_batch_size": 512, "lr_factor": 3.0,
    }  # fmt: skip
    assert plan_stages(split_sizes(1000, 1250), batch_size=100, pretrain_steps=11).shuffle
    assert plan_stages(split_sizes(1000, 1250), pretrain_steps=12000).search == 3000


@pytest.mark.parametrize("name", ["batch_size", "pretrain_steps", "search_steps"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "3"])
def test_invalid_steps_raise_an_error(name, value):
    with pytest.raises(InputError, match=f"{name} must be .*>= 1, found {value!r}"):
        plan_stages(split_sizes(1000, 1250), **{name: value})
