"""Which rows pretrain, search, validate and test, and how many steps each stage takes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.errors import InputError
from lpfs.pipeline import splits as module
from lpfs.pipeline.splits import StagePlan, auc_standard_error, plan_stages, split_all_rows, split_dataset
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


@pytest.fixture
def enough(monkeypatch):
    """Let a small log have enough rows for validation and test."""
    monkeypatch.setattr(module, "ENOUGH_ROWS", 10)
    monkeypatch.setattr(module, "ENOUGH_LABELS", 2)


@pytest.mark.usefixtures("enough")
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


@pytest.mark.usefixtures("enough")
@pytest.mark.parametrize("days", [1, 2])
def test_fewer_than_three_days_are_split_by_rows(logs, days):
    assert spans(split_dataset(logs(days, 1000))) == {
        "early": (0, 700), "search": (700, 880), "valid": (880, 900), "test": (900, 1000), "train": (0, 880),
    }  # fmt: skip
    with pytest.raises(InputError, match="99 rows are too few.*at least 100"):
        split_dataset(logs(days, 99))


@pytest.mark.usefixtures("enough")
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


def positives(log, first, stop):
    return log.part(first, stop).label_counts()[0]


def test_many_small_days_test_and_validate_together(tmp_path):
    """Of 60 days with 100 rows each, a tenth of the rows tests and a tenth validates, with 200 rows of each class."""
    log = known_truth(tmp_path / "log", rows=6000, days=60, label=lambda row: float(row % 2))
    splits = split_dataset(log)
    assert (splits.test.span, splits.test.label_counts()) == ((5400, 6000), (300, 300))
    assert (splits.valid.span, splits.valid.label_counts()) == ((4800, 5400), (300, 300))
    assert splits.search.span == (4800 - 1080, 4800)  # as many rows as without a longer validation period
    rare = known_truth(tmp_path / "rare", rows=6000, days=60, label=lambda row: float(row % 5 == 0))
    splits = split_dataset(rare)
    assert splits.test.span == (5000, 6000)  # whole days until there are 200 positives
    assert 200 <= splits.valid.label_counts()[0] <= 210
    assert splits.valid.rows < 0.2 * 6000


@pytest.mark.parametrize(
    ("rows", "positives", "total", "suffices"),
    [(5000, 200, 10**6, True), (4999, 200, 10**6, False), (5000, 199, 10**6, False), (500, 300, 5000, True)],
)
def test_models_are_compared_on_5000_rows_of_a_large_log(rows, positives, total, suffices):
    period = SimpleNamespace(rows=rows, label_counts=lambda: (positives, rows - positives))
    assert module._can_judge(period, total) is suffices


def test_test_and_validation_period_are_at_most_a_fifth_each(tmp_path):
    log = known_truth(tmp_path / "log", rows=6000, days=60, label=lambda row: float(row % 100 == 0))
    splits = split_dataset(log)
    assert splits.test.span == (4800, 6000)
    assert splits.valid.span == (3600, 4800)
    assert splits.early.rows > 2000
    uneven = known_truth(tmp_path / "uneven", rows=600, days=3, label=lambda row: float(row % 9 == 0))
    assert split_dataset(uneven).test.rows == 200  # never less than the last day


def test_parts_of_a_random_split_grow_to_a_fifth(tmp_path):
    shuffled = {"options": {"shuffle": True}}
    log = known_truth(tmp_path / "log", rows=4000, days=20, settings=shuffled, label=lambda row: float(row % 10 == 0))
    assert spans(split_dataset(log)) == {
        "early": (0, 1600), "search": (1600, 2400), "valid": (2400, 3200), "test": (3200, 4000), "train": (0, 2400),
    }  # fmt: skip
    log = known_truth(tmp_path / "more", rows=4000, days=20, settings=shuffled, label=lambda row: float(row % 2))
    assert spans(split_dataset(log))["test"] == (3600, 4000)
    assert spans(split_dataset(log))["early"] == (0, 2400)


def test_long_log_with_many_positives_keeps_the_days_of_the_paper(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ENOUGH_ROWS", 200)  # the rule in small: 24 days with 400 rows instead of 10,000
    log = known_truth(tmp_path / "log", rows=24 * 400, days=24, label=lambda row: float(row % 3 == 0))
    monkeypatch.setattr(module, "ENOUGH_LABELS", 60)
    assert spans(split_dataset(log)) == {
        "early": (0, 7200), "search": (7200, 9000), "valid": (9000, 9200), "test": (9200, 9600), "train": (0, 9000),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rare", "reason", "refused"), [(12, None, False), (40, "test rows have 30 positives", False), (200, "", True)]
)
def test_few_positives_decide_nothing_and_very_few_are_refused(tmp_path, rare, reason, refused):
    log = known_truth(tmp_path / "log", rows=6000, days=6, label=lambda row: float(row % rare == 0))
    splits = split_dataset(log)
    if refused:
        with pytest.raises(InputError, match=r"rows have [56] positives, and with fewer than 10 .* --force"):
            splits.check_labels()
    else:
        splits.check_labels()
    splits.check_labels(force=True)
    text = splits.few_labels()
    assert text is None if reason is None else (reason in text and "at least 50" in text)


def test_negatives_count_as_positives_do(tmp_path):
    log = known_truth(tmp_path / "log", rows=6000, days=6, label=lambda row: float(row % 200 != 0))
    with pytest.raises(InputError, match=r"rows have [56] negatives"):
        split_dataset(log).check_labels()


def test_splits_are_described_with_their_counts(logs):
    lines = split_dataset(logs(6, 600)).describe()
    assert [line.split(":")[0].strip() for line in lines] == ["pretraining", "search", "validation", "test"]
    assert lines[-1] == f"  test: 120 rows, {positives(logs(6, 600), 480, 600)} positives, days day 4 to day 5"


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
        "early": (0, 190), "search": (190, 280), "valid": (280, 400), "test": (400, 600), "train": (0, 280),
    }  # fmt: skip
    for last in ("test", "valid"):  # without test rows the validation rows test
        roles = {"train": ROLES["train"], last: ["day 4", "day 5"]}
        assert spans(split_dataset(logs(6, 600, {"split": roles}))) == expected


@pytest.mark.parametrize("roles", [{"train": ["day 0"]}, {"test": ["day 0"], "valid": ["day 1"]}])
def test_split_column_needs_training_and_test_rows(logs, roles):
    with pytest.raises(InputError, match="training rows and test rows, found"):
        split_dataset(logs(6, 600, {"split": roles}))


@pytest.mark.usefixtures("enough")
def test_json_has_rows_and_days_of_each_split(logs):
    log = logs(6, 600)
    values = split_dataset(log).to_json()
    assert values["test"] == {"rows": 100, "days": ["day 5", "day 5"], "positives": positives(log, 500, 600)}
    assert values["early"] == {"rows": 400, "days": ["day 0", "day 3"], "positives": positives(log, 0, 400)}
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


@pytest.mark.parametrize(
    ("batch_size", "search", "rows", "expected"),
    [
        (512, 5000, 4_000_000, (512, 5000)),  # as many steps as any other method, in time order
        (128, 2000, 75_000, (64, 1172)),  # one pass, not 2,000 steps
        (64, 2000, 6_000, (8, 750)),
        (64, 2000, 1_164, (8, 146)),  # few rows: never more than one pass
        (64, 2000, 200, (2, 100)),
        (64, 100, 6_000, (32, 100)),  # no smaller batches than the steps of the search need
    ],
)
def test_a_single_pass_has_smaller_batches_rather_than_more_passes(batch_size, search, rows, expected):
    steps = StagePlan(batch_size, 2000, search, 2000, 500, True, True, 512, 3.0)
    once = steps.single_pass(rows)
    assert (once.batch_size, once.search) == expected
    assert once.search * once.batch_size < rows + once.batch_size
    assert (once.separate_gate_rows, once.lr_factor) == (False, 1.0)
    assert once.pretrain == steps.pretrain
