"""Columns of numbers: as ids of bins, or compressed and standardised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lpfs.data.store.format import FIRST_ID, MISSING_ID, AnyArray
from lpfs.export.preprocessing import Column
from lpfs.export.onnx_graph import Graph


@dataclass(frozen=True)
class Bins(Column):
    """Numbers that become ids of bins: FIRST_ID + how many edges are not above the number."""

    edges: AnyArray

    def encode(self, graph: Graph) -> str:
        """Count edges; NaN and infinite numbers are missing."""
        kinds = graph.onnx.TensorProto
        value = graph.take_in(self.input, kinds.DOUBLE, self.shape, "numbers; NaN if missing")
        missing = graph.add("Or", graph.add("IsNaN", value), graph.add("IsInf", value))
        tall = graph.add("Unsqueeze", value, graph.constant(np.array([1])))
        above = graph.add("GreaterOrEqual", tall, graph.constant(self.edges[None]))
        place = graph.add(
            "ReduceSum", graph.add("Cast", above, to=kinds.INT64), graph.constant(np.array([1])), keepdims=0
        )
        ids = graph.add("Add", place, graph.constant(np.array(FIRST_ID)))
        return graph.add("Where", missing, graph.constant(np.array(MISSING_ID)), ids)

    def raw(self, ids: AnyArray) -> AnyArray:
        """Return the lower edge of each bin; of the first, the next number below its upper edge."""
        first = np.nextafter(self.edges[:1], -np.inf) if len(self.edges) else np.zeros(1)
        known = np.concatenate([[np.nan, np.nan], first, self.edges])
        return known[ids]

    def examples(self) -> tuple[AnyArray, AnyArray]:
        """Return every edge, the next number below it, and what is missing."""
        places = np.arange(FIRST_ID, FIRST_ID + len(self.edges))
        raw = np.concatenate([self.edges, np.nextafter(self.edges, -np.inf), [np.nan, np.inf, -np.inf, 0.0]])
        zero = FIRST_ID + int((self.edges <= 0).sum())
        return raw, np.concatenate([places + 1, places, [MISSING_ID] * 3, [zero]])

    def about(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        return {**super().about(), "takes": "numbers; NaN if missing", "bins": len(self.edges) + 1}


@dataclass(frozen=True)
class Numbers(Column):
    """Numbers that are compressed and standardised, or that the caller gives as the Dataset stores them."""

    scale: tuple[str, AnyArray, AnyArray] | None = None  # transform, means and deviations

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The shape of the input."""
        return ("B",) if self.field.dim == 1 else ("B", self.field.dim)

    def raw(self, ids: AnyArray) -> AnyArray:
        """Return the numbers (B, w) that are standardised to these."""
        scaled = ids.astype(np.float64)
        if self.scale is not None:
            transform, mean, deviation = self.scale
            scaled = scaled * deviation + mean
            if transform == "log":
                with np.errstate(over="ignore"):
                    large = np.minimum(np.expm1(np.abs(scaled)), np.finfo(float).max)
                scaled = np.copysign(large, scaled)
        return scaled[:, 0] if self.field.dim == 1 else scaled

    def takes(self) -> str:
        """Say what the input takes."""
        return f"numbers{'' if self.scale else ' as the Dataset stores them, standardised'}; NaN if missing"

    def about(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        return {**super().about(), "takes": self.takes()}
