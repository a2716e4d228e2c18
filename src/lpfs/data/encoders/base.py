"""Encoder: the contract of encoders, one per field."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from lpfs.data.fields import FieldPlan
from lpfs.data.store.format import AnyArray
from lpfs.schema import Field

RowLocator = Callable[[int], str]  # describes the location of a row, for messages


class Encoder(ABC):
    """Turns a raw column into a field: ``observe`` training rows, ``finish`` once, then ``encode`` any rows.

    ``from_stored`` with the results of ``metadata`` and ``values_to_store`` encodes bitwise identically.
    """

    kind: str

    def __init__(self, plan: FieldPlan) -> None:
        self.plan = plan
        self.name = plan.name

    @classmethod
    @abstractmethod
    def from_stored(cls, plan: FieldPlan, metadata: Mapping[str, Any], values: Any) -> Encoder:
        """Return the fitted encoder; raise KeyError if the metadata is incomplete."""

    @abstractmethod
    def observe(self, column: pl.Series, locate: RowLocator) -> Callable[[], list[AnyArray]]:
        """Add training rows; return a function that returns arrays that identify the content of the column."""

    @abstractmethod
    def partial_state(self) -> Any:
        """Return the small part of the observed state: without counts of values and samples of numbers."""

    @abstractmethod
    def merge(self, state: Any) -> None:
        """Add the ``partial_state`` of another encoder of the same field that observed the next chunk."""

    @abstractmethod
    def finish(self) -> None:
        """Fix ids or scales."""

    @abstractmethod
    def encode(self, column: pl.Series, locate: RowLocator) -> Any:
        """Return ids, numbers, or a bag (ids, lengths)."""

    @property
    @abstractmethod
    def constant(self) -> bool:
        """Whether all training rows are equal."""

    @property
    def near_unique(self) -> bool:
        """Whether most of the training values have an id and occur once; False for numbers and hashed values."""
        return False

    @property
    def cardinality(self) -> int:
        """Number of ids, including the special ones."""
        return 0

    def values_to_store(self) -> Any:
        """Return raw values in id order, or None."""
        return None

    def metadata(self) -> dict[str, Any]:
        """Return everything that was fitted, besides the stored values, as JSON values."""
        return {}

    @property
    def field(self) -> Field:
        """The field of the schema."""
        plan = self.plan
        dim = plan.width if self.kind == "numeric" else plan.dim
        return Field(plan.name, self.kind, self.cardinality, dim, plan.group, float(plan.cost))  # type: ignore[arg-type]
