"""Parity: a file that is kept predicts what the model predicts; one that does not is refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lpfs.data.batches.batch import Batch
from lpfs.data.store.format import AnyArray
from lpfs.errors import ExactnessError, NonFiniteError
from lpfs.export.onnx_graph import need_onnx
from lpfs.gates.logits import logits_of, max_change
from lpfs.models.base import Model
from lpfs.train.predict import device_of

UNITS = 16  # in the last place, by which any order of sums may move a logit
OWN = 8  # how many times the model's own rounding another order of sums may move a logit
Run = Callable[[dict[str, AnyArray]], dict[str, AnyArray]]


@dataclass(frozen=True)
class Parity:
    """How far the logits of a file are from those of the model, on how many rows, and how far they may be."""

    rows: int
    max_logit_change: float
    bound: float


def compare(model: Model, batch: Batch, found: Tensor) -> Parity:
    """Return the parity of logits with those of the model for a batch, or raise ExactnessError.

    Both sum the same float32 products in different orders. That moves a logit by some units in its last place, and
    by more where many or large terms cancel. Up to ``UNITS`` units of the largest logit (at least 1) are rounding;
    beyond, the model's own distance from itself in float64 says what is: the file may be ``OWN`` times as far.
    """
    batch = batch.to(device_of(model))
    [expected] = logits_of(model, batch)
    if not bool(torch.isfinite(expected).all()):
        row = int((~torch.isfinite(expected)).reshape(len(batch), -1).any(1).nonzero()[0])
        raise NonFiniteError(f"the model's logit of row {row} of those checked is not finite; nothing was written")
    found = found.to(expected.device)
    worst = max_change([expected], [found])
    bound = UNITS * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max()))
    if bound < worst < float("inf"):
        [exact] = logits_of(copy.deepcopy(model).double(), batch)
        bound = max(bound, OWN * max_change([exact], [expected]))
    if not worst <= bound:
        raise ExactnessError(
            f"the file predicts something else than the model: a logit of {len(batch):,} rows moves by "
            f"{worst:.3g}, rounding explains {bound:.3g}; nothing was written; report it, please"
        )
    return Parity(len(batch), worst, bound)


def same_ids(name: str, expected: AnyArray, found: AnyArray, raw: AnyArray) -> None:
    """Refuse ids that a field's raw values should not have."""
    wrong = np.flatnonzero(expected != found)
    if wrong.size:
        at = int(wrong[0])
        raise ExactnessError(
            f"field {name!r}: the file gives {raw[at]!r:.60} the id {found[at]}, the Dataset {expected[at]} "
            f"({wrong.size:,} of {len(expected):,} values differ); nothing was written"
        )


def onnx_runtime(model: bytes | str | os.PathLike[str]) -> tuple[Run, str]:
    """Return what runs an ONNX model, and its name: onnxruntime, or else the reference that onnx brings along."""
    given = model if isinstance(model, bytes) else str(Path(model))
    try:
        onnxruntime = import_module("onnxruntime")
    except ImportError:
        return _reference(given)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]

    def run(feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
        return dict(zip(names, session.run(names, feeds), strict=True))

    return run, f"onnxruntime {onnxruntime.__version__}"


def _reference(model: bytes | str) -> tuple[Run, str]:
    onnx = need_onnx()
    evaluator = onnx.reference.ReferenceEvaluator(
        model if isinstance(model, str) else onnx.load_from_string(model)
    )

    def run(feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
        return dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))

    return run, f"onnx.reference {onnx.__version__}"
