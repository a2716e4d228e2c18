"""PolarizingSelector is a good scikit-learn citizen, takes any table, and finds the columns that matter."""

from __future__ import annotations

import datetime
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.feature_selection import SelectKBest, f_classif, f_regression
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

from lpfs.errors import DataError, FieldError, InputError, MissingPackageError
from lpfs.schema import Selection
from lpfs.sklearn.selector import PolarizingSelector

# The shortest search with keep=, for tests that do not depend on which columns are kept.
QUICK = {"steps": 60, "pretrain": 10, "hidden": (8,), "random_state": 0}
# Shorter than the default, but long enough to find the true columns.
SHORT = {"steps": 400, "pretrain": 200, "random_state": 0}

TRUE = ("city", "colour", "age")


def planted(task: str, seed: int, rows: int = 1000, columns: int = 20) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return numeric columns, five of which determine y; some only jointly or by their absolute value."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, columns))
    true = rng.permutation(columns)[:5]
    a, b, c, d, e = X[:, true].T
    score = a - b + 0.8 * c + 0.8 * d - 0.6 * e
    if task == "binary":
        y = rng.random(rows) < 1 / (1 + np.exp(-2 * score))
    elif task == "multiclass":
        y = np.digitize(score + 0.5 * rng.normal(size=rows), [-1, 1])
    elif task == "regression":
        y = score + 0.5 * rng.normal(size=rows)
    else:
        y = np.abs(a) + b * c + d - e**2 / 2 + 0.3 * rng.normal(size=rows)
    return X, y, sorted(true.tolist())


def mixed(rows: int = 1000, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Return columns of many kinds with missing values; city, colour and age determine y."""
    rng = np.random.default_rng(seed)
    cities = list("abcdefgh")
    effect = dict(zip(cities, np.linspace(-3, 3, 8), strict=True))
    city = rng.choice(cities, rows)
    colour = rng.choice(["red", "green", "blue"], rows)
    age = rng.normal(40, 10, rows)
    score = np.array([effect[name] for name in city]) + 3 * (colour == "red") + 0.2 * (age - 40)
    y = np.where(rng.random(rows) < 1 / (1 + np.exp(-score)), "yes", "no")
    frame = pd.DataFrame(
        {
            "city": pd.Categorical(city),
            "user": [f"u{n}" for n in rng.integers(0, rows // 3, rows)],
            "colour": colour,
            "code": rng.choice([f"v{n}" for n in range(50)], rows),
            "flag": rng.random(rows) < 0.5,
            "age": np.where(rng.random(rows) < 0.1, np.nan, age),
            "when": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 10**6, rows), unit="s"),
            "count": rng.integers(0, 9, rows),
        }
    )
    frame.loc[::11, "colour"] = None
    return frame, y


# ------------------------------------------------------------------------------ scikit-learn's own checks


@pytest.mark.long
@parametrize_with_checks(
    [
        PolarizingSelector(),
        PolarizingSelector(1.0, task="multiclass"),
        PolarizingSelector(1, method="lpfs", steps=50, pretrain=0, hidden=(), batch_size=7),
    ]
)
def test_estimator_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_at_least_as_many_checks_as_SelectKBest():
    ours = len(list(estimator_checks_generator(PolarizingSelector())))
    assert ours >= len(list(estimator_checks_generator(SelectKBest()))) >= 40


@pytest.mark.long
def test_check_that_needs_an_environment_variable():
    """Scikit-learn skips it, for every estimator, unless scipy was imported with this variable set."""
    code = (
        "from sklearn.utils.estimator_checks import check_array_api_input as check\n"
        "from lpfs.sklearn import PolarizingSelector as Selector\n"
        "check('Selector', Selector(steps=60), array_namespace='numpy', expect_only_array_outputs=False)\n"
        "print('passed')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "SCIPY_ARRAY_API": "1"}, capture_output=True, text=True
    )
    assert process.stdout.strip() == "passed", process.stderr


# ------------------------------------------------------------------------------------------ selection


@pytest.mark.long
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression", "nonlinear"])
def test_the_true_columns_are_found(task):
    """Nine of the ten true columns of two tables are kept; at random it would be two or three."""
    kept_true = 0
    for seed in range(2):
        X, y, true = planted(task, seed)
        selector = PolarizingSelector(keep=5, **{**SHORT, "random_state": seed}).fit(X, y)
        kept_true += len(set(selector.get_support(indices=True).tolist()) & set(true))
        assert selector.task_ == ("regression" if task == "nonlinear" else task)
    assert kept_true >= 9


def test_lpfs_finds_the_true_columns():
    X, y, true = planted("regression", 0)
    selector = PolarizingSelector(5, method="lpfs", **SHORT).fit(X, y)
    assert selector.get_support(indices=True).tolist() == true


@pytest.mark.long
@pytest.mark.parametrize(
    ("load", "keep", "rival", "model"),
    [
        (load_breast_cancer, 6, f_classif, LogisticRegression(max_iter=1000)),
        (load_wine, 4, f_classif, LogisticRegression(max_iter=1000)),
        (load_diabetes, 4, f_regression, Ridge()),
    ],
)
def test_on_toy_sets_the_columns_are_as_good_as_those_of_SelectKBest(load, keep, rival, model):
    """Cross-validated accuracy or R²; three hundredths are less than one deviation over the folds."""
    X, y = load(return_X_y=True)

    def score(selector):
        return cross_val_score(make_pipeline(StandardScaler(), selector, model), X, y, cv=3).mean()

    ours = score(PolarizingSelector(keep, **SHORT))
    assert ours > score(SelectKBest(rival, k=keep)) - 0.03
    assert ours > score(SelectKBest(lambda X, y: -rival(X, y)[0], k=keep)) + 0.03  # the worst columns: it can fail


@pytest.mark.long
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_of_many_kinds_of_columns(library):
    frame, y = mixed()
    if library == "polars":
        frame = pl.from_pandas(frame)
    selector = PolarizingSelector(keep=3, **SHORT).set_output(transform=library).fit(frame, y)
    assert tuple(selector.get_feature_names_out()) == TRUE
    assert list(selector.feature_names_in_) == list(frame.columns)
    after = selector.transform(frame)
    if library == "pandas":
        pd.testing.assert_frame_equal(after, frame[list(TRUE)])
    else:
        assert_frame_equal(after, frame[list(TRUE)])


def test_pandas_and_polars_give_the_same_gates_to_the_bit():
    frame, y = mixed(300)
    ours = PolarizingSelector(3, **QUICK).fit(frame, y)
    theirs = PolarizingSelector(3, **QUICK).fit(pl.from_pandas(frame), pl.Series(y))
    assert np.array_equal(ours.gates_, theirs.gates_)


def test_an_array_and_a_frame_of_the_same_numbers_give_the_same_gates():
    X, y, _ = planted("binary", 0, rows=100)
    frame = pd.DataFrame(X, columns=[f"c{n}" for n in range(20)])
    a, b = PolarizingSelector(5, **QUICK).fit(X, y), PolarizingSelector(5, **QUICK).fit(frame, y)
    assert np.array_equal(a.gates_, b.gates_)


# ------------------------------------------------------------------------------------------ what it gives


def test_exactly_K_columns_are_kept_and_other_gates_are_zero():
    X, y, _ = planted("binary", 0, rows=100)
    for keep, count in [(1, 1), (7, 7), (19, 19), (20, 20), (0.5, 10), (0.01, 1), (1.0, 20)]:
        selector = PolarizingSelector(keep, **QUICK).fit(X, y)
        assert selector.n_features_ == selector.support_.sum() == count
        assert (selector.gates_ == 0.0).sum() == 20 - count
        assert np.abs(selector.gates_[selector.support_]).min() >= 0.2
        assert selector.transform(X).shape == (100, count)
        assert np.array_equal(selector.transform(X), X[:, selector.support_])


def test_selection_records_settings_and_history():
    frame, y = mixed(200)
    selector = PolarizingSelector(3, **QUICK).fit(frame, y)
    selection = selector.selection_
    assert list(selection.kept) == list(selector.get_feature_names_out())
    assert Selection.from_json(selection.to_json()) == selection
    assert selection.made["keep"] == 3
    assert selection.made["task"] == "binary"
    assert [record["step"] for record in selection.history] == list(range(1, 61))
    assert selection.history[0]["alive"] == 8
    assert selection.history[-1]["alive"] == 3
    assert all(np.isfinite(record["loss"]) for record in selection.history)


def test_must_keep_by_number_and_by_name():
    X, y, true = planted("regression", 0, rows=200)
    noise = sorted(set(range(20)) - set(true))[:2]
    by_number = PolarizingSelector(4, must_keep=noise, **QUICK).fit(X, y)
    assert by_number.n_features_ == 4
    assert by_number.support_[noise].all()
    frame = pd.DataFrame(X, columns=[f"c{n}" for n in range(20)])
    by_name = PolarizingSelector(4, must_keep=[f"c{n}" for n in noise], **QUICK).fit(frame, y)
    assert np.array_equal(by_number.gates_, by_name.gates_)


def test_verbose_prints(capsys):
    X, y, _ = planted("binary", 0, rows=50)
    PolarizingSelector(5, **QUICK).fit(X, y)
    assert capsys.readouterr().out == ""
    PolarizingSelector(5, verbose=1, **QUICK).fit(X, y)
    assert re.search(r"^loss 0\.\d+, step 60 of 60: 5 of 20 gates alive", capsys.readouterr().out, re.MULTILINE)


# ------------------------------------------------------------------------------------- repeatability


def test_same_seed_same_gates_and_global_random_state_unchanged():
    X, y, _ = planted("binary", 0, rows=600)
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = PolarizingSelector(5, **QUICK).fit(X, y)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    torch.manual_seed(6)
    assert np.array_equal(PolarizingSelector(5, **QUICK).fit(X, y).gates_, first.gates_)
    other = PolarizingSelector(5, **{**QUICK, "random_state": 1}).fit(X, y)
    assert not np.array_equal(other.gates_, first.gates_)


@pytest.mark.parametrize("rows", [100, 600])
def test_weighted_rows_equal_repeated_rows_in_any_order(rows):
    """With 100 rows every step uses all rows, with 600 they are sampled."""
    frame, y = mixed(rows)
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 4, rows)
    weighted = PolarizingSelector(3, **QUICK).fit(frame, y, sample_weight=weight)
    rows = rng.permutation(np.repeat(np.arange(rows), weight))
    repeated = PolarizingSelector(3, **QUICK).fit(frame.iloc[rows], y[rows])
    assert np.array_equal(weighted.gates_, repeated.gates_)
    unweighted = PolarizingSelector(3, **QUICK).fit(frame, y)
    assert not np.array_equal(weighted.gates_, unweighted.gates_)


def test_weights_change_the_selection():
    """Column 0 decides in the first half of the rows, column 1 in the second."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 4))
    first = np.arange(600) < 300
    y = np.where(first, X[:, 0], X[:, 1]) > 0
    for heavy, column in [(first, 0), (~first, 1)]:
        selector = PolarizingSelector(1, **SHORT).fit(X, y, np.where(heavy, 1.0, 0.01))
        assert selector.get_support(indices=True).tolist() == [column]


def test_clone_and_pickle():
    frame, y = mixed(100)
    selector = PolarizingSelector(3, must_keep=("user",), **QUICK)
    copy = clone(selector)
    assert copy.get_params() == selector.get_params()
    selector.fit(frame, y)
    assert not hasattr(copy, "gates_")
    again = pickle.loads(pickle.dumps(selector))
    assert np.array_equal(again.gates_, selector.gates_)
    assert again.selection_ == selector.selection_
    assert np.array_equal(copy.fit(frame, y).gates_, selector.gates_)


def test_data_are_not_changed():
    frame, y = mixed(100)
    before = frame.copy(deep=True)
    selector = PolarizingSelector(3, **QUICK).set_output(transform="pandas").fit(frame, y)
    after = selector.transform(frame)
    after.iloc[:, :] = after.iloc[::-1].to_numpy()
    pd.testing.assert_frame_equal(frame, before)


# -------------------------------------------------------------------------------- pipelines and containers


@pytest.mark.long
def test_in_a_pipeline_with_a_grid_search():
    X, y, true = planted("regression", 0, rows=300, columns=8)
    pipeline = make_pipeline(StandardScaler(), PolarizingSelector(**SHORT), Ridge())
    grid = GridSearchCV(pipeline, {"polarizingselector__keep": [1, 5]}, cv=2).fit(X, y)
    assert grid.best_params_ == {"polarizingselector__keep": 5}
    assert grid.best_estimator_[1].get_support(indices=True).tolist() == true


def test_weights_are_routed_through_a_pipeline():
    X, y, _ = planted("binary", 0, rows=100)
    weight = np.arange(100) % 3
    pipeline = make_pipeline(PolarizingSelector(5, **QUICK), LogisticRegression())
    pipeline.fit(X, y, polarizingselector__sample_weight=weight)
    alone = PolarizingSelector(5, **QUICK).fit(X, y, weight)
    assert np.array_equal(pipeline[0].gates_, alone.gates_)


@pytest.mark.parametrize("source", ["pandas", "polars"])
@pytest.mark.parametrize("output", ["default", "pandas", "polars"])
def test_set_output_from_any_frame_to_any(source, output):
    frame, y = mixed(100)
    keep = ["city", "colour", "flag", "age"]
    values = frame[keep].astype(object).where(frame[keep].notna(), None).to_numpy()
    table = frame if source == "pandas" else pl.from_pandas(frame)
    selector = PolarizingSelector(4, must_keep=keep, **QUICK).set_output(transform=output).fit(table, y)
    after = selector.transform(table)
    kind = {"default": np.ndarray, "pandas": pd.DataFrame, "polars": pl.DataFrame}[output]
    assert isinstance(after, kind)
    if output != "default":
        assert list(after.columns) == keep
        assert str(after["age"].dtype).lower() == "float64"
        assert str(after["flag"].dtype) in ("bool", "Boolean")
    rows = after.rows() if output == "polars" else np.asarray(after, dtype=object)
    assert [[None if pd.isna(value) else value for value in row] for row in rows] == values.tolist()


def test_dates_as_target_are_refused():
    X = np.random.default_rng(0).normal(size=(60, 3))
    for y in (np.arange(60).astype("datetime64[D]"), pd.to_timedelta(np.arange(60), unit="s")):
        with pytest.raises(DataError, match=r"y has dates or durations \((datetime|timedelta)64.*convert"):
            PolarizingSelector(1, **QUICK).fit(X, y)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_an_array_has_the_common_dtype_of_the_kept_columns_only(library):
    rows = 60
    frame = pd.DataFrame(
        {
            "a": np.linspace(0, 1, rows),
            "id": 2**53 + 1 + np.arange(rows),
            "text": ["x", "y"] * (rows // 2),
            "day": [datetime.date(2020, 1, 1)] * rows,
            "took": pd.to_timedelta(np.arange(rows), unit="s"),
        }
    )
    table = frame if library == "pandas" else pl.from_pandas(frame)
    y = np.arange(rows) % 2

    def kept(*names):
        return PolarizingSelector(len(names), must_keep=names, **QUICK).fit(table, y).transform(table)

    assert np.array_equal(kept("a"), frame[["a"]].to_numpy())
    assert np.array_equal(kept("id"), frame[["id"]].to_numpy())  # int64: no float rounds it
    assert kept("a", "text").tolist() == frame[["a", "text"]].to_numpy().tolist()
    assert [row[0] for row in kept("text", "day", "took")] == frame["text"].tolist()
    assert [row[0] for row in kept("a", "took")] == frame["a"].tolist()
    with pytest.raises(ValueError, match="0 sample"):
        PolarizingSelector(1, must_keep=["a"], **QUICK).fit(table, y).transform(table[:0])


def test_columns_without_text_names_are_numbered():
    frame, y = mixed(100)
    frame.columns = range(frame.shape[1])
    selector = PolarizingSelector(2, must_keep=[0], **QUICK).fit(frame, y)
    assert not hasattr(selector, "feature_names_in_")
    assert selector.selection_.kept[0] == "x0"
    assert selector.get_feature_names_out()[0] == "x0"


def test_unusual_columns():
    """Constant, all missing, huge and tiny numbers, numbers as objects, nullable integers, durations."""
    rows = 60
    y = np.arange(rows) % 2
    frame = pd.DataFrame(
        {
            "constant": np.ones(rows),
            "missing": np.full(rows, np.nan),
            "huge": np.where(y, 1e308, -1e308),
            "tiny": np.where(y, 1e-300, -1e-300),
            "object": pd.Series([0.5 + label if label else None for label in y], dtype=object),
            "nullable": pd.array([None, *range(rows - 1)], dtype="Int64"),
            "took": pd.to_timedelta(np.arange(rows), unit="s"),
            "text": ["a"] * rows,
        }
    )
    selector = PolarizingSelector(3, random_state=0).fit(frame, y)
    assert np.isfinite(selector.gates_).all()
    assert set(selector.get_feature_names_out()) <= {"huge", "tiny", "object"}


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (["b", "a"] * 30, "binary"),
        ([True, False] * 30, "binary"),
        ([0.5, 1.5] * 30, "binary"),
        (["x", "y", "z"] * 20, "multiclass"),
        ([7, 8, 9] * 20, "multiclass"),
        ([7.0, 8.0, 9.0] * 20, "multiclass"),
        (np.linspace(0, 1, 60), "regression"),
        (np.arange(60.0), "regression"),
        (np.arange(60), "regression"),
        (np.linspace(0, 1, 60).astype(object), "regression"),
        (np.array([1, 2, 3] * 20, dtype=object), "multiclass"),
        (pd.Series([1, 2, 3] * 20), "multiclass"),
        (pl.Series(["u", "v"] * 30), "binary"),
    ],
)
def test_task_is_guessed_from_y(y, task):
    X = np.random.default_rng(0).normal(size=(60, 4))
    assert PolarizingSelector(2, **QUICK).fit(X, y).task_ == task


def test_task_can_be_given():
    X = np.random.default_rng(0).normal(size=(60, 4))
    y = np.arange(60) % 5
    assert PolarizingSelector(2, **QUICK).fit(X, y).task_ == "multiclass"
    assert PolarizingSelector(2, task="regression", **QUICK).fit(X, y).task_ == "regression"
    with pytest.raises(DataError, match="task='binary' needs two classes in y, found 5"):
        PolarizingSelector(2, task="binary").fit(X, y)
    with pytest.raises(DataError, match="task='regression' needs numbers in y"):
        PolarizingSelector(2, task="regression").fit(X, y.astype(str) + np.array(["a"]))


# -------------------------------------------------------------------------------------------------- errors

BAD = [
    ({"keep": 0}, InputError, "keep must be an integer >= 1, found 0"),
    ({"keep": 9}, InputError, "keep=9, but X has only 4 column(s)"),
    ({"keep": 1.5}, InputError, "keep as a fraction must be in (0, 1], found 1.5"),
    ({"keep": "all"}, InputError, "keep must be an integer"),
    ({"keep": True}, InputError, "keep must be an integer"),
    ({"method": "lasso"}, InputError, "method must be one of 'lpfs++', 'lpfs', found 'lasso'"),
    ({"steps": 10}, InputError, "at least 50 steps"),
    ({"steps": 1.5}, InputError, "steps must be an integer"),
    ({"pretrain": -1}, InputError, "pretrain must be an integer >= 0"),
    ({"batch_size": 0}, InputError, "batch_size must be"),
    ({"hidden": 64}, InputError, "hidden must be a sequence of widths"),
    ({"hidden": (0,)}, InputError, "a width in hidden must be"),
    ({"lr": 0}, InputError, "lr must be a number above 0"),
    ({"weight_decay": -1}, InputError, "weight_decay must be a number >= 0"),
    ({"task": "ranking"}, InputError, "task must be one of 'auto'"),
    ({"must_keep": "x1"}, InputError, "must_keep must be a list"),
    ({"must_keep": ["age"]}, FieldError, "must_keep names 'age', but X has no such column"),
    ({"must_keep": [0, 1, 2]}, InputError, "keep=2 is less than the 3 fields that must be kept"),
    ({"verbose": -1}, InputError, "verbose must be"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_invalid_arguments(change, error, message):
    X = np.random.default_rng(0).normal(size=(20, 4))
    with pytest.raises(error, match=re.escape(message)):
        PolarizingSelector(**{"keep": 2, **change}).fit(X, X[:, 0] > 0)


def test_invalid_data():
    X = np.random.default_rng(0).normal(size=(20, 4))
    y = X[:, 0] > 0
    selector = PolarizingSelector(2)
    cases = [
        (X, np.ones(20), None, "y has one class only"),
        (X, np.stack([y, y], 1), None, "y has 2 columns, but a selector has one target"),
        (X, np.where(y, np.nan, 1.0), None, "contains NaN"),
        (X, np.array([1, "a"] * 10, dtype=object), None, "Unknown label type"),
        (X.astype(str) + np.array("a"), y, None, "give a DataFrame"),
        (np.where(X > 2, np.inf, X), y, None, "infinity"),
        (pd.DataFrame(np.where(X > 2, np.inf, X)), y, None, "column 3 contains infinity"),
        (pd.DataFrame({"a": [[1]] * 20, "b": X[:, 0]}), y, None, "column 'a' has values of type object"),
        (pl.DataFrame({"a": [[1]] * 20, "b": X[:, 0]}), y, None, "column 'a' has values of type List"),
        (X, y, -np.ones(20), "sample_weight must contain numbers >= 0"),
        (X, y, np.zeros(20), "all sample weights are zero"),
        (X, y, np.where(y, 1, 0), "y has one class only"),
        (X[:10], y, None, "inconsistent numbers of samples"),
        (pd.DataFrame(X)[:0], y[:0], None, "0 sample"),
    ]
    for table, target, weight, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            selector.fit(table, target, weight)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lpfs.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingPackageError, match=re.escape("pip install 'lpfs[sklearn]'")):
        import lpfs.sklearn  # noqa: F401


def test_import_lpfs_does_not_import_scikit_learn():
    code = "import lpfs, sys; lpfs.attach; print('sklearn' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
