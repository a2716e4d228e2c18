"""Columns: a field as an input of the graph, from the raw value to the id that the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID, AnyArray
from lpfs.export.onnx_graph import Graph
from lpfs.export.marks import as_whole, missing_mark, pad_mark, unseen_value
from lpfs.schema import Field

PAD_ID = -1  # in a row of a bag: no value
HASHED = {  # what is taken modulo the range, by the sort of values; see lpfs.data.encoders.vocabulary.hashed
    "text": "BLAKE2b(UTF-8) of 8 bytes, little endian,",
    "whole": "the value (a negative one plus 2**64)",
    "fraction": "the 64 bits of the float64",
}
OUTSIDE = 1 << 40  # no table has so many rows: the runtime refuses the id


@dataclass(frozen=True)
class Column:
    """One field as one input: (B,), (B, L) for a bag of up to L values, (B, w) for w numbers.

    ``encode`` adds the nodes that make ids of raw values; ``raw`` goes the other way, for the check.
    """

    field: Field
    input: str

    @property
    def multi(self) -> bool:
        """Whether a row is a bag."""
        return self.field.kind == "multi"

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The shape of the input; B and L may change from call to call."""
        return ("B", f"{self.input}_length") if self.multi else ("B",)

    def encode(self, graph: Graph) -> str:
        """Add the input, and what makes ids of it; a place without a value gets ``PAD_ID``."""
        raise NotImplementedError

    def raw(self, ids: AnyArray) -> AnyArray:
        """Return values that have these ids, (B,) or (B, L)."""
        raise NotImplementedError

    def examples(self) -> tuple[AnyArray, AnyArray]:
        """Return raw values that try everything that can become an id, and their ids; none where ids come in."""
        none = np.zeros(0, np.int64)
        return none, none

    def about(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        return {"field": self.field.name, "input": self.input, "kind": self.field.kind}


@dataclass(frozen=True)
class Ids(Column):
    """A field whose ids the caller gives: it is hashed, or the Dataset does not say how ids were made."""

    modulo: int | None = None
    of: str | None = None

    def encode(self, graph: Graph) -> str:
        """Pass ids on; one that the field does not have is an error in the runtime, as it is in the model."""
        ids = graph.take_in(self.input, graph.onnx.TensorProto.INT64, self.shape, self._takes())
        lowest = PAD_ID if self.multi else 0
        above = graph.add("GreaterOrEqual", ids, graph.constant(np.array(lowest, np.int64)))
        below = graph.add("Less", ids, graph.constant(np.array(self.field.cardinality, np.int64)))
        outside = graph.constant(np.array(OUTSIDE, np.int64))
        return graph.add("Where", graph.add("And", above, below), ids, outside)

    def raw(self, ids: AnyArray) -> AnyArray:
        """Return the ids."""
        return ids.astype(np.int64)

    def _takes(self) -> str:
        takes = f"ids from 0 to {self.field.cardinality - 1}"
        if self.modulo is not None:
            number = HASHED.get(self.of or "", "the value")
            takes += f": {FIRST_ID} + {number} modulo {self.modulo}; {MISSING_ID} if missing"
        return takes + (f"; {PAD_ID} fills up a row" if self.multi else "")

    def about(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        known = {"takes": self._takes(), "hash_modulo": self.modulo, "hash_of": self.of}
        return {**super().about(), **known, **({"pad": PAD_ID} if self.multi else {})}


@dataclass(frozen=True)
class Values(Column):
    """A field with a vocabulary: a LabelEncoder makes ids of its raw values.

    Args:
        values: the vocabulary in id order: text, or an array of whole numbers or of fractions.
        also_missing: further text that reads as missing.
        hexadecimal: whether the numbers are written in hexadecimal in the log.

    """

    values: Any
    also_missing: tuple[str, ...] = ()
    hexadecimal: bool = False

    @property
    def sort(self) -> str:
        """What the values are."""
        if isinstance(self.values, list):
            return "text"
        return "fraction" if self.values.dtype.kind == "f" else "whole"

    @cached_property
    def missing(self) -> Any:
        """What stands for a missing value."""
        return missing_mark(self.values)

    @cached_property
    def pad(self) -> Any:
        """What stands for no value, in a bag."""
        return pad_mark(self.values)

    def keys(self) -> tuple[AnyArray, AnyArray]:
        """Return all keys and their ids; a missing fraction is NaN, which is no key."""
        marks: dict[Any, int] = {} if self.sort == "fraction" else {self.missing: MISSING_ID}
        known = set(self.values) if self.also_missing else set()
        marks.update({text: MISSING_ID for text in self.also_missing if text not in known})
        if self.multi:
            marks[self.pad] = PAD_ID
        ids = np.arange(FIRST_ID, FIRST_ID + len(self.values), dtype=np.int64)
        keys = np.concatenate([self.array(self.values), self.array(list(marks))])
        return keys, np.concatenate([ids, np.array(list(marks.values()), np.int64)])

    def array(self, values: Any) -> AnyArray:
        """Return values as the input takes them."""
        if self.sort == "text":
            return np.array(values, object)
        if isinstance(values, np.ndarray) and self.sort == "whole":
            return as_whole(values)
        return np.asarray(values, np.int64 if self.sort == "whole" else np.float64)

    def encode(self, graph: Graph) -> str:
        """Add the LabelEncoder."""
        kinds = graph.onnx.TensorProto
        kind = {"text": kinds.STRING, "whole": kinds.INT64, "fraction": kinds.DOUBLE}[self.sort]
        value = graph.take_in(self.input, kind, self.shape, self._takes())
        keys, ids = self.keys()
        graph.room(ids.nbytes + (sum(len(each) + 4 for each in keys) if self.sort == "text" else keys.nbytes))
        tensor = graph.onnx.numpy_helper.from_array
        found = graph.add(
            "LabelEncoder",
            value,
            domain="ai.onnx.ml",
            keys_tensor=tensor(keys, "keys"),
            values_tensor=tensor(ids, "ids"),
            default_tensor=tensor(np.array([UNSEEN_ID], np.int64), "unseen"),
        )
        if self.sort != "fraction":
            return found
        return graph.add("Where", graph.add("IsNaN", value), graph.constant(np.array(MISSING_ID, np.int64)), found)

    def raw(self, ids: AnyArray) -> AnyArray:
        """Return the values of these ids."""
        pad = self.pad if self.multi else self.missing
        special = [self.missing, unseen_value(self.values, self.missing, pad)]  # MISSING_ID, UNSEEN_ID
        known = np.concatenate([self.array(special), self.array(self.values), self.array([pad])])
        return known[ids]  # PAD_ID is the last

    def examples(self) -> tuple[AnyArray, AnyArray]:
        """Return every value, an unseen and a missing one, and no value if there can be none."""
        special = [MISSING_ID, UNSEEN_ID, *([PAD_ID] if self.multi else [])]
        ids = np.concatenate([np.arange(FIRST_ID, FIRST_ID + len(self.values)), special]).astype(np.int64)
        return self.raw(ids), ids

    def _takes(self) -> str:
        takes = {"text": "text", "whole": "whole numbers", "fraction": "numbers"}[self.sort]
        if self.hexadecimal:
            takes += ", hexadecimal ones as int(text, 16)"
        takes += f"; {self.missing!r} if missing"
        return takes + (f"; {self.pad!r} fills up a row" if self.multi else "")

    def about(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        missing = None if self.sort == "fraction" else self.missing
        known = {"takes": self._takes(), "missing": missing, "hexadecimal": self.hexadecimal}
        return {**super().about(), **known, **({"pad": _plain(self.pad)} if self.multi else {})}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) else value
