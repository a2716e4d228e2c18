"""PolarizingSelector: the search as a scikit-learn transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.feature_selection import SelectorMixin  # type: ignore[import-untyped]
from sklearn.utils import (  # type: ignore[import-untyped]
    assert_all_finite,
    check_array,
    check_consistent_length,
    check_random_state,
    column_or_1d,
)
from sklearn.utils._set_output import _get_output_config  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]

from lpfs.errors import DataError
from lpfs.schema import Selection
from lpfs.sklearn.search import resolve_settings, search
from lpfs.sklearn.tables import (
    dataframe_library,
    encode,
    merge_rows,
    read_frame,
    read_target,
    renumber_codes,
    take_columns,
)

Floats = NDArray[np.float64]


class PolarizingSelector(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """Keep the columns that a small net really needs, found by learnable polarizing gates (LPFS, LPFS++).

    ``fit`` trains a net on all columns, then trains it on with one gate g(x) a column until exactly K gates are
    alive and the others are exactly 0.0; ``transform`` selects those K columns as they are.
    Columns are judged together, by how they help to predict rows that the net was not trained on.

    X may be an array, or a pandas or polars DataFrame with columns of any mixture of numbers, dates, text,
    categories and truth values; missing values are allowed. y may be binary, multi-class or continuous. The order
    of the rows does not matter, and a row of weight 3 is the same as three equal rows.

    Args:
        keep: how many columns to keep; a float in (0, 1] is a share of them, rounded down, but never none.
        method: the gate function: ``"lpfs++"``, whose dropped columns can come back, or ``"lpfs"``.
        steps: training steps of the search; None chooses by the size of the data.
        pretrain: training steps on all columns before it; None for half as many.
        batch_size: rows a step; with no more rows than this, each step sees them all.
        hidden: widths of the layers of the net.
        lr: learning rate of the net (AdamW).
        weight_decay: of the net; it keeps small tables from being learnt by heart.
        must_keep: names or numbers of columns that stay in any case; they count within ``keep``.
        task: ``"binary"``, ``"multiclass"``, ``"regression"``, or ``"auto"``, which looks at y: see
            :func:`lpfs.sklearn.tables.guess_task`.
        random_state: a seed makes the answer repeatable; no random numbers but the selector's own are touched.
        verbose: 1 prints five lines while it searches, 2 prints fifty.

    Attributes:
        support_: which columns stay (N,).
        gates_: the gates (N,), exactly 0.0 where a column was dropped. Sizes of gates are no ranking.
        selection_: the same as :class:`lpfs.Selection`, with the history of the search and how it was made.
        n_features_: how many columns stay.
        task_: what y was taken for.
        n_features_in_: how many columns X had.
        feature_names_in_: their names, where X was a DataFrame with names of text.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(200, 6))
    >>> y = X[:, 1] > X[:, 4]
    >>> PolarizingSelector(keep=2, random_state=0).fit(X, y).get_support(indices=True)
    array([1, 4])

    """

    def __init__(
        self,
        keep: int | float = 0.5,
        *,
        method: str = "lpfs++",
        steps: int | None = None,
        pretrain: int | None = None,
        batch_size: int = 256,
        hidden: Sequence[int] = (64, 32),
        lr: float = 0.003,
        weight_decay: float = 1.0,
        must_keep: Sequence[str | int] = (),
        task: str = "auto",
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.keep = keep
        self.method = method
        self.steps = steps
        self.pretrain = pretrain
        self.batch_size = batch_size
        self.hidden = hidden
        self.lr = lr
        self.weight_decay = weight_decay
        self.must_keep = must_keep
        self.task = task
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PolarizingSelector:  # noqa: N803
        """Find the columns to keep.

        Args:
            X: an array (n, N) of numbers, or a DataFrame; NaN and null are taken as missing.
            y: the target (n,).
            sample_weight: weights of the rows (n,), >= 0; a row of weight 0 is as good as absent.

        """
        validate_data(self, X, y, skip_check_array=True)
        if dataframe_library(X) is None:
            table = self._array(X)
            categorical = np.zeros(table.shape[1], dtype=np.bool_)
        else:
            table, categorical = read_frame(X)
        target = self._target(y)
        check_consistent_length(X, target, sample_weight)
        weight = _weights(sample_weight, len(table))
        there = weight > 0
        table = renumber_codes(table[there], categorical)
        numbers, task, outputs = read_target(target[there], self.task)
        rows, weight = merge_rows(np.column_stack([table, numbers]), weight[there])
        names = [f"x{at}" for at in range(table.shape[1])]
        given = [str(name) for name in getattr(self, "feature_names_in_", ())]
        if len(set(given)) == len(names) and all(given):
            names = given
        how = resolve_settings(self, rows.shape[0], names, check_random_state(self.random_state))
        if how.keep == len(names):
            gates = dict.fromkeys(names, 1.0)
            selection = Selection(tuple(names), (), gates, made={"keep": how.keep, "steps": 0, "task": task})
        else:
            data = encode(rows[:, :-1], categorical, weight)
            selection = search(data, rows[:, -1], weight, task, outputs, names, how)
        self.selection_ = selection
        self.gates_ = np.array([selection.gates[name] for name in names])
        self.support_ = self.gates_ != 0
        self.n_features_ = int(self.support_.sum())
        self.task_ = task
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803
        """Return the kept columns of X: an array, or what ``set_output`` asks for, with the dtypes X has."""
        wanted = _get_output_config("transform", self)["dense"]
        if wanted == "default" or dataframe_library(X) is None:
            return super().transform(X)
        check_is_fitted(self)
        validate_data(self, X, reset=False, skip_check_array=True)
        return take_columns(X, self.get_support(indices=True).tolist(), wanted)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = False
        return tags

    def _get_support_mask(self) -> NDArray[np.bool_]:
        check_is_fitted(self)
        mask: NDArray[np.bool_] = self.support_
        return mask

    def _array(self, X: Any) -> Floats:  # noqa: N803
        """Return an array of numbers, checked."""
        try:
            table: Floats = check_array(
                X, dtype=np.float64, ensure_all_finite="allow-nan", input_name="X", estimator=self
            )
        except ValueError as error:
            if "could not convert string" not in str(error):
                raise
            raise DataError(
                f"X is an array that holds text ({error}); give a DataFrame, whose text columns are categories"
            ) from error
        return table

    def _target(self, y: Any) -> NDArray[Any]:
        """Return y (n,), checked."""
        shape = np.asarray(y).shape
        if len(shape) == 2 and shape[1] > 1:
            raise DataError(
                f"y has {shape[1]} columns, but a selector has one target: y should be a 1d array; fit one "
                "selector for each column of y"
            )
        target: NDArray[Any] = column_or_1d(y, warn=True)
        assert_all_finite(target, input_name="y")
        return target


def _weights(sample_weight: Any, rows: int) -> Floats:
    """Return the weights (n,), checked; ones where none are given."""
    if sample_weight is None:
        return np.ones(rows)
    weight = np.asarray(sample_weight, dtype=np.float64)
    if weight.ndim == 0:
        weight = np.full(rows, float(weight))
    if weight.shape != (rows,):
        raise DataError(f"sample_weight must have one number a row, shape ({rows},), found {weight.shape}")
    if not bool(np.isfinite(weight).all()) or bool((weight < 0).any()):
        raise DataError("sample_weight must hold numbers >= 0; found a negative, infinite or missing one")
    if not bool(weight.any()):
        raise DataError("all sample weights are zero: give at least two rows of different y a positive weight")
    return weight
