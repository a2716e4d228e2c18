"""Trees and the sparse linear model: fields as columns, and what is found in them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.errors import InputError, MissingPackageError
from lpfs.methods import trees
from lpfs.methods.lasso_logistic import one_hot, standardize
from lpfs.methods.registry import make_method
from lpfs.methods.sampling import batch_columns
from lpfs.methods.target import SelectionTarget
from lpfs.methods.trees import FOLDS, PRIOR_ROWS, feature_matrix, out_of_fold_rates
from tests.helpers.clicks import MIXED, batch_of
from tests.helpers.known_truth import NOISE, STRONG

sparse = pytest.importorskip("scipy.sparse")
pytest.importorskip("sklearn")
METHODS = ("gbdt", "random_forest", "lasso_logistic")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=40))
def test_a_rate_is_that_of_the_other_folds(rows):
    ids, labels = np.array([value[0] for value in rows]), np.array([float(value[1]) for value in rows])
    fold = np.arange(len(rows)) % FOLDS
    found = out_of_fold_rates(ids, labels, fold, 0.3)
    for row in range(len(rows)):
        others = [labels[n] for n in range(len(rows)) if ids[n] == ids[row] and fold[n] != fold[row]]
        assert found[row] == pytest.approx((sum(others) + PRIOR_ROWS * 0.3) / (len(others) + PRIOR_ROWS))


def test_rates_do_not_contain_the_label_of_the_row():
    draw = np.random.default_rng(0)
    labels = (draw.random(5000) < 0.5).astype(float)
    rates = out_of_fold_rates(draw.integers(1000, size=5000), labels, np.arange(5000) % FOLDS, 0.5)
    assert np.corrcoef(rates, labels)[0, 1] < 0.03


def test_the_columns_of_every_kind():
    batch = batch_of(MIXED)
    rows = batch_columns(batch, MIXED)
    found, owners = feature_matrix(rows, MIXED)
    expected = [field.name for field in MIXED for _ in range(field.dim if field.kind == "numeric" else 1)]
    assert owners == expected
    assert found.shape == (12, 11)
    assert np.isfinite(found).all()
    three = found[:, owners.index("three")]
    missing = batch.missing[:, 1].numpy()
    assert three[missing].max() < three[~missing].min()
    bag = found[:, owners.index("a bag")]
    assert bag[0] == pytest.approx(rows.labels.mean())  # its bag is empty
    values, sizes = rows.bags["a bag"]
    owner = np.repeat(np.arange(12), sizes)
    rates = out_of_fold_rates(values, rows.labels[owner], owner % FOLDS, rows.labels.mean())
    assert bag[1] == pytest.approx(rates[:3].mean())


def test_columns_of_the_linear_model():
    batch = batch_of(MIXED)
    rows = batch_columns(batch, MIXED)
    ids = one_hot(sparse, rows, MIXED["c*d"], 100).toarray()
    assert ids.shape == (12, 6)
    assert ids.argmax(1).tolist() == batch.ids[:, 3].tolist()
    assert one_hot(sparse, rows, MIXED["c*d"], 4).toarray().argmax(1).tolist() == (batch.ids[:, 3] % 4).tolist()
    bags = one_hot(sparse, rows, MIXED["a bag"], 100).toarray()
    assert bags.sum(1) == pytest.approx([0, 1, 1, 1] * 3)
    assert bags[3] == pytest.approx(np.bincount(rows.bags["a bag"][0][4:9], minlength=7) / 5)
    numbers = one_hot(sparse, rows, MIXED["three"], 100).toarray()
    assert numbers.shape == (12, 6)
    assert numbers[:, 3:].tolist() == batch.missing[:, 1:4].numpy().astype(float).tolist()


def test_numbers_are_standardized():
    numbers = np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 5.0]])
    assert standardize(numbers).tolist() == [[-1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("method", METHODS)
def test_the_planted_fields_are_found(run_search, method):
    model, found = run_search(method, keep=2)
    scores = found.made["scores"]
    assert set(found.kept) == set(STRONG)
    assert set(scores) == set(model.names)
    assert min(scores[name] for name in STRONG) > 1.5 * max(scores[name] for name in NOISE)
    assert found.made["rows"] == 1000
    assert run_search(method, keep=2)[1].made["scores"] == scores


def test_trees_of_many_rows_use_all_of_them(run_search, monkeypatch):
    """Above a number of rows the gains are those of histogram trees, whose order is that of exact ones."""
    exact = run_search("gbdt", keep=2)[1].made["scores"]
    monkeypatch.setattr(trees, "EXACT_ROWS", 500)
    _, found = run_search("gbdt", keep=2)
    scores = found.made["scores"]
    assert found.made["rows"] == 1000
    assert scores != exact
    assert set(found.kept) == set(STRONG)
    assert sum(scores.values()) == pytest.approx(1.0)
    assert min(scores[name] for name in STRONG) > 1.5 * max(scores[name] for name in NOISE)
    assert make_method("gbdt").options.rows is None


def test_a_token_has_the_sum_of_its_fields(run_search):
    fields = run_search("gbdt", keep=2)[1].made["scores"]
    tokens = run_search("gbdt", "dlrm", keep=2)[1].made["scores"]
    assert tokens["dense"] == pytest.approx(fields["age"] + fields["price"])


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(monkeypatch, method):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(MissingPackageError, match=rf"{method} needs .*sklearn.*pip install 'lpfs\[sklearn\]'"):
        make_method(method).check(SelectionTarget(keep=1), ("a", "b"), 100)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gbdt", {"subsample": 1.5}, "subsample must be a number between 0 and 1, found 1.5"),
        ("gbdt", {"lr": 0}, "lr must be a number > 0"),
        ("random_forest", {"leaf": 0}, "leaf must be an integer >= 1, found 0"),
        ("lasso_logistic", {"strength": True}, "strength must be a number > 0, found True"),
    ],
)
def test_invalid_options(method, options, message):
    with pytest.raises(InputError, match=message):
        make_method(method, options)
