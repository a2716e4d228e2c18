"""Small schemas and batches with every kind of input, and small versions of every registered model."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

import torch

from lpfs.data.batch import Batch
from lpfs.models import MODELS, make_model, model_class
from lpfs.schema import Field, Schema

B = 12
SMALL = {"dim": 4, "hidden": (8, 6), "bottom": (5,), "head": (5,), "other_dim": 3, "number_dim": 2}

# names that a parameter could not have, and one that a parameter has
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
    """A registered model with some arguments."""

    name: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, schema: Schema, **more: Any):
        known = inspect.signature(model_class(self.name)).parameters
        small = {key: value for key, value in SMALL.items() if key in known}
        return awake(make_model(self.name, schema, **{**small, **self.config, **more}))

    def __str__(self) -> str:
        return "-".join([self.name, *(str(value) for value in self.config.values())])


CASES = [
    *(Case(name) for name in MODELS),
    Case("mlp", {"pooling": "sum"}),
    Case("dlrm", {"interaction": "dot"}),
    Case("dlrm", {"bottom": ()}),
    Case("dcnv2", {"structure": "parallel"}),
    Case("dcnv2", {"rank": 2}),
]


def batch_of(schema: Schema, *, whole: bool = False, missing: bool = True, rows: int = B, seed: int = 1) -> Batch:
    """Return a batch of the schema; ``whole``: integers and bags of 0, 1, 2 or 4, for exact arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(field.cardinality, (rows,), generator=generator)
        for field in schema
        if field.kind == "categorical"
    ]
    width = sum(field.dim for field in schema if field.kind == "numeric")
    if whole:
        dense = torch.randint(-2, 3, (rows, width), generator=generator).float()
    else:
        dense = torch.randn(rows, width, generator=generator)
    absent = torch.rand(rows, width, generator=generator) < 0.3
    bags = {}
    for field in schema:
        if field.kind == "multi":
            sizes = torch.tensor([0, 1, 2, 4] if whole else [0, 3, 1, 5])[torch.arange(rows) % 4]
            values = torch.randint(field.cardinality, (int(sizes.sum()),), generator=generator).int()
            bags[field.name] = (values, (sizes.cumsum(0) - sizes).int())
    return Batch(
        torch.stack(ids, 1).int() if ids else torch.zeros(rows, 0, dtype=torch.int32),
        dense.masked_fill(absent, 0.0) if missing else dense,
        torch.randint(2, (rows, 1 + len(schema.tasks)), generator=generator).float(),
        absent if missing else None,
        bags,
    )


def whole_numbers(model, largest: int = 2):
    """Set all weights to small integers: their sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randint(-largest, largest + 1, weight.shape, generator=generator))
    return awake(model)


def awake(model):
    """Increase the biases so that few ReLUs are zero and every field reaches the logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.add_(1.0)
    return model


def some_gates(count: int) -> list[float]:
    """Return gates: powers of two of both signs, and zeros; the first is not zero."""
    return [[0.5, 0.0, -2.0, 1.0, 0.0, -0.5, 2.0][number % 7] for number in range(count)]
