"""Small schemas and batches of every kind of input, and every registered model in small."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from lpfs.data.batch import Batch
from lpfs.models import MODELS, make_model, model_class
from lpfs.schema import Field, Schema

B = 12
SMALL = {"dim": 4, "hidden": (8, 6), "bottom": (5,), "head": (5,), "other_dim": 3, "number_dim": 2}

# names that a parameter could not have, and one that a module has
MIXED = Schema(
    (
        Field("n1", "numeric", group="user"),
        Field("a.b", cardinality=5, group="user"),
        Field("..", cardinality=4, group="item"),
        Field("a bag", "multi", cardinality=7, group="item"),
        Field("three", "numeric", dim=3),
        Field("weight", cardinality=3, group="combine"),
        Field("c*d", cardinality=6),
        Field("n2", "numeric"),
        Field("dense", "multi", cardinality=4, group="combine"),
    )
)
IDS = Schema(tuple(Field(name, cardinality=n) for name, n in (("x", 5), ("y", 4), ("z", 6))))
NUMBERS = Schema(tuple(Field(name, "numeric") for name in "uvw"))
TASKS = Schema(MIXED.fields, tasks=("buy", "stay"))
SCHEMAS = {"mixed": MIXED, "tasks": TASKS, "ids": IDS, "numbers": NUMBERS}


@dataclass(frozen=True)
class Case:
    """A model with some arguments."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)

    def make(self, schema: Schema, **more: Any):
        known = inspect.signature(model_class(self.name)).parameters
        small = {key: value for key, value in SMALL.items() if key in known}
        return awake(make_model(self.name, schema, **{**small, **self.config, **more}))

    def __str__(self) -> str:
        return "-".join([self.name, *(str(each) for each in self.config.values())])


CASES = [
    *(Case(name) for name in MODELS),
    Case("mlp", {"pooling": "sum"}),
    Case("dlrm", {"interaction": "dot"}),
    Case("dlrm", {"bottom": ()}),
    Case("dcnv2", {"structure": "parallel"}),
    Case("dcnv2", {"rank": 2}),
]


def batch_of(schema: Schema, *, whole: bool = False, missing: bool = True, rows: int = B, seed: int = 1) -> Batch:
    """A batch that fits; whole numbers, and bags of 0, 1, 2 or 4, where everything is to be exact."""
    made = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(each.cardinality, (rows,), generator=made) for each in schema if each.kind == "categorical"
    ]
    width = sum(each.dim for each in schema if each.kind == "numeric")
    if whole:
        dense = torch.randint(-2, 3, (rows, width), generator=made).float()
    else:
        dense = torch.randn(rows, width, generator=made)
    absent = torch.rand(rows, width, generator=made) < 0.3
    bags = {}
    for each in schema:
        if each.kind == "multi":
            sizes = torch.tensor([0, 1, 2, 4] if whole else [0, 3, 1, 5])[torch.arange(rows) % 4]
            values = torch.randint(each.cardinality, (int(sizes.sum()),), generator=made).int()
            bags[each.name] = (values, (sizes.cumsum(0) - sizes).int())
    return Batch(
        torch.stack(ids, 1).int() if ids else torch.zeros(rows, 0, dtype=torch.int32),
        dense.masked_fill(absent, 0.0) if missing else dense,
        torch.randint(2, (rows, 1 + len(schema.tasks)), generator=made).float(),
        absent if missing else None,
        bags,
    )


def whole_numbers(model, largest: int = 2):
    """Give a model small whole numbers as weights: sums and products of them are exact in any order."""
    made = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randint(-largest, largest + 1, weight.shape, generator=made))
    return awake(model)


def awake(model):
    """Lift the biases so that few ReLUs sleep: every field then has a way to the logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.add_(1.0)
    return model


def some_gates(count: int) -> list[float]:
    """Powers of two of both signs, and zeros, but not for the first."""
    return [[0.5, 0.0, -2.0, 1.0, 0.0, -0.5, 2.0][number % 7] for number in range(count)]
