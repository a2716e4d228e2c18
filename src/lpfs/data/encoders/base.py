"""The contract of encoders, one a field."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from lpfs.data.fields import FieldPlan
from lpfs.data.store.format import AnyArray
from lpfs.schema import Field

RowLocator = Callable[[int], str]


class Encoder(ABC):
    """The contract: ``observe`` training rows, ``finish`` once, then ``encode`` any rows.

    ``restored`` with what ``about`` and ``stored`` gave is an encoder that encodes the same, bit by bit.
    """

    kind: str

    def __init__(self, plan: FieldPlan) -> None:
        self.plan = plan
        self.name = plan.name

    @classmethod
    @abstractmethod
    def from_stored(cls, plan: FieldPlan, about: Mapping[str, Any], values: Any) -> Encoder:
        """Return the encoder that learned this; a KeyError names what is not there."""

    @abstractmethod
    def observe(self, column: pl.Series, where: RowLocator) -> Callable[[], list[AnyArray]]:
        """Take in rows of the training period; return a function that gives what tells the column apart."""

    @abstractmethod
    def partial_state(self) -> Any:
        """Return what observing found, small and apart from counts of values and samples of numbers."""

    @abstractmethod
    def merge(self, notes: Any) -> None:
        """Take in the notes of an encoder of the same field that observed the next chunk, somewhere else."""

    @abstractmethod
    def finish(self) -> None:
        """Decide on ids or scales."""

    @abstractmethod
    def encode(self, column: pl.Series, where: RowLocator) -> Any:
        """Return ids, numbers, or a bag (ids, lengths)."""

    @property
    @abstractmethod
    def constant(self) -> bool:
        """Whether every training row holds the same."""

    @property
    def cardinality(self) -> int:
        """Number of ids, special ones included."""
        return 0

    def values_to_store(self) -> Any:
        """Return raw values in id order, or None."""
        return None

    def metadata(self) -> dict[str, Any]:
        """Return JSON values that say how the column was turned into the field, all that was learned."""
        return {}

    @property
    def field(self) -> Field:
        """The field as it goes into the schema."""
        plan = self.plan
        dim = plan.width if self.kind == "numeric" else plan.dim
        return Field(plan.name, self.kind, self.cardinality, dim, plan.group, float(plan.cost))  # type: ignore[arg-type]
