"""Small comparisons: their options, their results, and methods that need no training."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpfs.errors import AllGatesZeroError, InputError
from lpfs.methods.base import Method, rank_fields

MODEL_OPTIONS = ["--model-option", "dim=2", "--model-option", "hidden=4"]
TINY = ["--pretrain-steps", "50", "--search-steps", "120", "--batch-size", "64", *MODEL_OPTIONS]
METHODS = ["--methods", "lpfs++,permutation", "--method-option", "permutation:repeats=1"]
PLAN = [*METHODS, "--keep", "4,8", "--seeds", "2"]
QUICK: dict[str, Any] = {  # the same for lpfs.compare, even smaller
    "pretrain_steps": 20,
    "search_steps": 50,
    "batch_size": 64,
    "model_options": {"dim": 2, "hidden": [4]},
    "quiet": True,
}
SINGLE = {**QUICK, "fleet": False}  # models are trained one by one
REPRODUCIBLE = ("method", "keep", "seed", "status", "kept", "test", "validation", "trained", "options")


def read_results(directory: Path) -> list[dict[str, Any]]:
    """Return what must be the same in two runs of the same comparison."""
    records = [json.loads(path.read_text()) for path in sorted((directory / "results").glob("*.json"))]
    return [{name: record.get(name) for name in REPRODUCIBLE} for record in records]


@dataclass(frozen=True)
class FakeOptions:
    """``first`` is the index of the field that is ranked first; ``failure`` is how the method fails."""

    first: int = 0
    penalty: float = 0.5
    failure: str = ""


class FakeMethod(Method):
    """Ranks the fields in their order, starting at some field, or fails."""

    Options = FakeOptions

    def check(self, target, names, steps):
        super().check(target, names, steps)
        if self.options.failure == "refused":
            raise InputError("fake is not defined on this model")

    def search(self, task):
        options, names = self.options, task.model.names
        if options.failure == "dead":
            raise AllGatesZeroError("every gate is at zero\nin step 7")
        if options.failure == "broken":
            raise KeyError("=SUM(A1)|<b>")
        order = [*names[options.first :], *names[: options.first]]
        scores = {name: -float(order.index(name)) for name in names}
        selection = rank_fields(task, "fake", scores, steps=0)
        if options.failure == "inverted":
            return replace(selection, kept=selection.dropped, dropped=selection.kept)
        return selection
