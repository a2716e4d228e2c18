"""The target: what y asks the net to predict, and as which numbers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lpfs.errors import DataError, InputError

Task = Literal["binary", "multiclass", "regression"]
TASKS = ("auto", "binary", "multiclass", "regression")
# Up to this many distinct numbers are taken for classes.
FEW = 20


def read_target(y: NDArray[Any], task: str = "auto") -> tuple[NDArray[np.float64], Task, int]:
    """Return y as numbers (n,), the task, and how many logits it needs.

    Classes become 0, 1, … in sorted order; a continuous y stays as it is.

    >>> read_target(np.array(["no", "yes", "no"]))
    (array([0., 1., 0.]), 'binary', 1)
    """
    if task not in TASKS:
        raise InputError(f"task must be one of {', '.join(map(repr, TASKS))}, found {task!r}")
    try:
        values, codes = np.unique(y, return_inverse=True)
    except TypeError as error:
        raise DataError(
            f"Unknown label type: y mixes values that cannot be sorted ({error}); make them all text or numbers"
        ) from error
    if len(values) < 2:
        raise DataError(
            f"y has one class only, {values[0]!r}, in {len(y)} sample(s) of positive weight (1 sample is never "
            "enough): there is nothing to tell apart; give rows of at least two classes, or two values of y"
        )
    chosen = guess_task(values, len(y)) if task == "auto" else task
    if chosen == "regression":
        try:
            return y.astype(np.float64), "regression", 1
        except (TypeError, ValueError) as error:
            raise DataError(
                f"task='regression' needs numbers in y ({error}); encode them, or say a task"
            ) from error
    if chosen == "binary":
        if len(values) > 2:
            raise DataError(
                f"task='binary' needs two classes in y, found {len(values)}; say task='multiclass' or 'regression'"
            )
        return codes.astype(np.float64), "binary", 1
    return codes.astype(np.float64), "multiclass", len(values)


def guess_task(values: NDArray[Any], rows: int) -> Task:
    """Return the task that these distinct values of y, in this many rows, stand for.

    Two values: ``binary``. Text: ``multiclass``. Numbers with a fraction: ``regression``. Whole numbers:
    ``regression`` if there are more than 20 of them and they are stored as floats or are more than a quarter
    of the rows; else ``multiclass``.

    >>> guess_task(np.array([0, 1, 2]), 100), guess_task(np.array([0.5, 1.0, 2.0]), 100)
    ('multiclass', 'regression')
    """
    if len(values) == 2:
        return "binary"
    if values.dtype.kind not in "fiu":
        return "multiclass"
    if values.dtype.kind == "f" and bool((values != np.floor(values)).any()):
        return "regression"
    many = len(values) > FEW and (values.dtype.kind == "f" or len(values) > rows / 4)
    return "regression" if many else "multiclass"
