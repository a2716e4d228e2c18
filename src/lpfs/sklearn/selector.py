"""PolarizingSelector: the search as a scikit-learn transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import utils  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.feature_selection import SelectorMixin  # type: ignore[import-untyped]
from sklearn.utils._set_output import _get_output_config  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]

from lpfs.errors import DataError
from lpfs.schema import Selection
from lpfs.sklearn import tables
from lpfs.sklearn.search import resolve_settings, search


class PolarizingSelector(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """Select the columns that a small network needs, by learnable polarizing gates (LPFS, LPFS++).

    ``fit`` trains a network on all columns, then continues with one gate g(x) per column until exactly K gates are
    non-zero and the others are exactly 0.0; ``transform`` returns those K columns. Columns are evaluated together, by
    how much they help to predict rows that the network was not trained on.

    ``transform`` does not change values. An array has one dtype, though: columns of a DataFrame are converted to their
    common one, float64 for integers beside floats, which rounds integers above 2**53. To keep the dtype of each column,
    call ``set_output(transform="pandas")`` or ``"polars"``.

    X may be an array, or a pandas or polars DataFrame with columns of numbers, dates, text, categories and
    booleans; missing values are allowed. y may be binary, multi-class or continuous. The order of the rows does
    not matter, and a row of weight 3 is the same as three equal rows.

    Args:
        keep: number of columns to keep; a float in (0, 1] is a fraction of them, rounded down to at least one.
        method: the gate function: ``"lpfs++"``, whose dropped columns can come back, or ``"lpfs"``.
        steps: training steps of the search; None chooses by the size of the data.
        pretrain: training steps on all columns before the search; None for half of ``steps``.
        batch_size: rows per step; if there are at most this many rows, each step uses all of them.
        hidden: widths of the hidden layers of the network.
        lr: learning rate of the network (AdamW).
        weight_decay: weight decay of the network; it prevents the network from memorizing small tables.
        must_keep: names or numbers of columns that are always kept; they count towards ``keep``.
        task: ``"binary"``, ``"multiclass"``, ``"regression"``, or ``"auto"``, which depends on y: see
            :func:`lpfs.sklearn.tables.guess_task`.
        random_state: a seed makes the result repeatable; the global random state is never changed.
        verbose: 1 prints five lines during the search, 2 prints fifty.

    Attributes:
        support_: mask of the kept columns (N,).
        gates_: the gates (N,), exactly 0.0 where a column was dropped. The size of a gate is not a ranking.
        selection_: the result as a :class:`lpfs.Selection`, with the history and the settings of the search.
        n_features_: number of kept columns.
        task_: the task, resolved if it was ``"auto"``.
        n_features_in_: number of columns of X in ``fit``.
        feature_names_in_: their names, if X was a DataFrame whose column names are all text.

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
            X: an array (n, N) of numbers, or a DataFrame; NaN and null mean missing.
            y: the target (n,).
            sample_weight: weights of the rows (n,), >= 0; a row of weight 0 is ignored.
        """
        validate_data(self, X, y, skip_check_array=True)
        if tables.dataframe_library(X) is None:
            table = self._check_array(X)
            categorical = np.zeros(table.shape[1], dtype=np.bool_)
        else:
            table, categorical = tables.read_frame(X)
        target = self._check_target(y)
        utils.check_consistent_length(X, target, sample_weight)
        weight = _check_weights(sample_weight, len(table))
        used = weight > 0
        table = tables.renumber_codes(table[used], categorical)
        target, task = tables.read_target(target[used], self.task)
        rows, weight = tables.merge_rows(np.column_stack([table, target]), weight[used])
        names = [f"x{number}" for number in range(table.shape[1])]
        column_names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        if len(set(column_names)) == len(names) and all(column_names):
            names = column_names
        settings = resolve_settings(self, rows.shape[0], names, utils.check_random_state(self.random_state))
        if settings.keep == len(names):
            gates = dict.fromkeys(names, 1.0)
            selection = Selection(tuple(names), (), gates, made={"keep": settings.keep, "steps": 0, "task": task})
        else:
            encoded = tables.encode(rows[:, :-1], categorical, weight)
            selection = search(encoded, rows[:, -1], weight, task, names, settings)
        self.selection_ = selection
        self.gates_ = np.array([selection.gates[name] for name in names])
        self.support_ = self.gates_ != 0
        self.n_features_ = int(self.support_.sum())
        self.task_ = task
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803
        """Return the kept columns of X: an array, or the container of ``set_output`` with the dtypes of X."""
        library = tables.dataframe_library(X)
        if library is None:
            return super().transform(X)
        check_is_fitted(self)
        validate_data(self, X, reset=False, skip_check_array=True)
        container = _get_output_config("transform", self)["dense"]
        columns = self.get_support(indices=True).tolist()
        if container == "default":
            return tables.to_array(tables.take_columns(X, columns, library))
        return tables.take_columns(X, columns, container)

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

    def _check_array(self, X: Any) -> tables.Floats:  # noqa: N803
        """Return X as an array of numbers."""
        try:
            table: tables.Floats = utils.check_array(
                X, dtype=np.float64, ensure_all_finite="allow-nan", input_name="X", estimator=self
            )
        except ValueError as error:
            if "could not convert string" not in str(error):
                raise
            raise DataError(
                f"X is an array that contains text ({error}); give a DataFrame, whose text columns are categories"
            ) from error
        return table

    def _check_target(self, y: Any) -> NDArray[Any]:
        """Return y as an array (n,)."""
        shape = np.asarray(y).shape
        if len(shape) == 2 and shape[1] > 1:
            raise DataError(
                f"y has {shape[1]} columns, but a selector has one target: y should be a 1d array. Fit one "
                "selector for each column of y"
            )
        target: NDArray[Any] = utils.column_or_1d(y, warn=True)
        utils.assert_all_finite(target, input_name="y")
        return target


def _check_weights(sample_weight: Any, rows: int) -> tables.Floats:
    """Return the weights (n,); ones if None."""
    if sample_weight is None:
        return np.ones(rows)
    weight = np.asarray(sample_weight, dtype=np.float64)
    if weight.ndim == 0:
        weight = np.full(rows, float(weight))
    if weight.shape != (rows,):
        raise DataError(f"sample_weight must have one number per row, shape ({rows},), found {weight.shape}")
    if not bool(np.isfinite(weight).all()) or bool((weight < 0).any()):
        raise DataError("sample_weight must contain numbers >= 0; found a negative, infinite or missing one")
    if not bool(weight.any()):
        raise DataError("all sample weights are zero: give at least two rows of different y a positive weight")
    return weight
