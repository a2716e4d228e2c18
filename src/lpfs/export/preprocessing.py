"""Columns: a field as an input of the graph, from the raw value to the id that the model reads.

Names of inputs: fields have any text as a name, inputs of a graph only letters, digits and _.

Marks: what stands for a missing value, and for no value at all, where a tensor has no place for either.

Columns of numbers: as ids of bins, or compressed and standardised.

The fields of a model as inputs, with what its Dataset says about how they were encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from lpfs.data.dataset import Dataset
from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID, AnyArray
from lpfs.errors import DataError
from lpfs.export.onnx_graph import Graph
from lpfs.schema import Field, Schema

OUTPUTS = ("probability", "logit", "corrected_probability")
VALID = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def input_names(fields: Sequence[str], taken: Sequence[str] = OUTPUTS) -> dict[str, str]:
    """Return a name for the input of each field: its own where that is valid and free, else the nearest that is.

    >>> input_names(["a.b", "a_b", "logit", "7"])
    {'a.b': 'a_b_2', 'a_b': 'a_b', 'logit': 'logit_2', '7': '_7'}
    """
    used = set(taken)
    names = {name: name for name in fields if VALID.fullmatch(name) and name not in used}
    used.update(names)
    for name in fields:
        if name in names:
            continue
        base = re.sub(r"[^A-Za-z0-9_]", "_", name)
        base = "_" + base if base[0].isdigit() else base
        number, found = 2, base
        while found in used:
            number, found = number + 1, f"{base}_{number}"
        names[name] = found
        used.add(found)
    return {name: names[name] for name in fields}


LOWEST, HIGHEST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)


def missing_value(values: Any) -> Any:
    """Return what stands for missing beside the values of a vocabulary: "", the lowest int64, or NaN.

    >>> missing_mark(["a"]), missing_mark(["a", ""])
    ('', '<missing>')
    """
    if isinstance(values, list):
        return _unused_value(values, _texts("", "<missing>"))
    return float("nan") if values.dtype.kind == "f" else _unused_value(as_whole(values).tolist(), count(LOWEST))


def padding_value(values: Any) -> Any:
    """Return what fills up the rows of a bag: "<pad>", the highest int64, or -inf.

    >>> pad_mark(["a", "<pad>"])
    '<pad>2'
    """
    if isinstance(values, list):
        return _unused_value(values, _texts("<pad>"))
    if values.dtype.kind == "f":
        return _unused_value(values.tolist(), (-np.inf, np.inf, *np.arange(-1e300, -2e300, -1e298).tolist()))
    return _unused_value(as_whole(values).tolist(), count(HIGHEST, -1))


def unseen_value(values: Any, missing: Any, pad: Any) -> Any:
    """Return a value that is not in a vocabulary and no mark."""
    if isinstance(values, list):
        return _unused_value([*values, missing, pad], _texts("<unseen>"))
    if values.dtype.kind == "f":
        return _unused_value([*values.tolist(), pad], (number + 0.5 for number in count()))
    return _unused_value([*as_whole(values).tolist(), missing, pad], count())


def as_whole(values: AnyArray) -> AnyArray:
    """Return whole numbers as int64; those from 2**63 on keep their bits."""
    return values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)


def _texts(*first: str) -> Iterator[str]:
    yield from first
    yield from (f"{first[-1]}{number}" for number in count(2))


def _unused_value(taken: Any, wanted: Any) -> Any:
    known = set(taken)
    return next(each for each in wanted if each not in known)


PAD_ID = -1  # in a row of a bag: no value
HASHED = {  # what is taken modulo the range, by the sort of values; see lpfs.data.encoders.vocabulary.hashed_ids
    "text": "BLAKE2b(UTF-8) of 8 bytes, little endian,",
    "whole": "the value (a negative one plus 2**64)",
    "fraction": "the 64 bits of the float64",
}
OUT_OF_RANGE = 1 << 40  # no table has so many rows: the runtime refuses the id


@dataclass(frozen=True)
class InputColumn:
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

    def example_values(self, ids: AnyArray) -> AnyArray:
        """Return values that have these ids, (B,) or (B, L)."""
        raise NotImplementedError

    def examples(self) -> tuple[AnyArray, AnyArray]:
        """Return raw values that try everything that can become an id, and their ids; none where ids come in."""
        none = np.zeros(0, np.int64)
        return none, none

    def metadata(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        return {"field": self.field.name, "input": self.input, "kind": self.field.kind}


@dataclass(frozen=True)
class IdColumn(InputColumn):
    """A field whose ids the caller gives: it is hashed, or the Dataset does not say how ids were made."""

    modulo: int | None = None
    of: str | None = None

    def encode(self, graph: Graph) -> str:
        """Pass ids on; one that the field does not have is an error in the runtime, as it is in the model."""
        ids = graph.add_input(self.input, graph.onnx.TensorProto.INT64, self.shape, self._takes())
        lowest = PAD_ID if self.multi else 0
        above = graph.add("GreaterOrEqual", ids, graph.constant(np.array(lowest, np.int64)))
        below = graph.add("Less", ids, graph.constant(np.array(self.field.cardinality, np.int64)))
        outside = graph.constant(np.array(OUT_OF_RANGE, np.int64))
        return graph.add("Where", graph.add("And", above, below), ids, outside)

    def example_values(self, ids: AnyArray) -> AnyArray:
        """Return the ids."""
        return ids.astype(np.int64)

    def _takes(self) -> str:
        takes = f"ids from 0 to {self.field.cardinality - 1}"
        if self.modulo is not None:
            number = HASHED.get(self.of or "", "the value")
            takes += f": {FIRST_ID} + {number} modulo {self.modulo}; {MISSING_ID} if missing"
        return takes + (f"; {PAD_ID} fills up a row" if self.multi else "")

    def metadata(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        known = {"takes": self._takes(), "hash_modulo": self.modulo, "hash_of": self.of}
        return {**super().metadata(), **known, **({"pad": PAD_ID} if self.multi else {})}


@dataclass(frozen=True)
class VocabularyColumn(InputColumn):
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
        return missing_value(self.values)

    @cached_property
    def pad(self) -> Any:
        """What stands for no value, in a bag."""
        return padding_value(self.values)

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
        value = graph.add_input(self.input, kind, self.shape, self._takes())
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

    def example_values(self, ids: AnyArray) -> AnyArray:
        """Return the values of these ids."""
        pad = self.pad if self.multi else self.missing
        special = [self.missing, unseen_value(self.values, self.missing, pad)]  # MISSING_ID, UNSEEN_ID
        known = np.concatenate([self.array(special), self.array(self.values), self.array([pad])])
        return known[ids]  # PAD_ID is the last

    def examples(self) -> tuple[AnyArray, AnyArray]:
        """Return every value, an unseen and a missing one, and no value if there can be none."""
        special = [MISSING_ID, UNSEEN_ID, *([PAD_ID] if self.multi else [])]
        ids = np.concatenate([np.arange(FIRST_ID, FIRST_ID + len(self.values)), special]).astype(np.int64)
        return self.example_values(ids), ids

    def _takes(self) -> str:
        takes = {"text": "text", "whole": "whole numbers", "fraction": "numbers"}[self.sort]
        if self.hexadecimal:
            takes += ", hexadecimal ones as int(text, 16)"
        takes += f"; {self.missing!r} if missing"
        return takes + (f"; {self.pad!r} fills up a row" if self.multi else "")

    def metadata(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        missing = None if self.sort == "fraction" else self.missing
        known = {"takes": self._takes(), "missing": missing, "hexadecimal": self.hexadecimal}
        return {**super().metadata(), **known, **({"pad": _plain(self.pad)} if self.multi else {})}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) else value


@dataclass(frozen=True)
class BinnedColumn(InputColumn):
    """Numbers that become ids of bins: FIRST_ID + how many edges are not above the number."""

    edges: AnyArray

    def encode(self, graph: Graph) -> str:
        """Count edges; NaN and infinite numbers are missing."""
        kinds = graph.onnx.TensorProto
        value = graph.add_input(self.input, kinds.DOUBLE, self.shape, "numbers; NaN if missing")
        missing = graph.add("Or", graph.add("IsNaN", value), graph.add("IsInf", value))
        tall = graph.add("Unsqueeze", value, graph.constant(np.array([1])))
        above = graph.add("GreaterOrEqual", tall, graph.constant(self.edges[None]))
        place = graph.add(
            "ReduceSum", graph.add("Cast", above, to=kinds.INT64), graph.constant(np.array([1])), keepdims=0
        )
        ids = graph.add("Add", place, graph.constant(np.array(FIRST_ID)))
        return graph.add("Where", missing, graph.constant(np.array(MISSING_ID)), ids)

    def example_values(self, ids: AnyArray) -> AnyArray:
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

    def metadata(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        return {**super().metadata(), "takes": "numbers; NaN if missing", "bins": len(self.edges) + 1}


@dataclass(frozen=True)
class NumericColumn(InputColumn):
    """Numbers that are compressed and standardised, or that the caller gives as the Dataset stores them."""

    scale: tuple[str, AnyArray, AnyArray] | None = None  # transform, means and deviations

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The shape of the input."""
        return ("B",) if self.field.dim == 1 else ("B", self.field.dim)

    def example_values(self, ids: AnyArray) -> AnyArray:
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

    def metadata(self) -> dict[str, Any]:
        """Return what a caller needs to know, as JSON values."""
        return {**super().metadata(), "takes": self.takes()}


def build_columns(schema: Schema, dataset: Dataset | None) -> list[InputColumn]:
    """Return the fields of a model as inputs, with what a Dataset says about how they were encoded."""
    names = input_names(schema.names)
    known = dataset is not None and dataset.settings.get("made_by") == "prepare"
    if dataset is None or not known:
        kinds = [NumericColumn if each.kind == "numeric" else IdColumn for each in schema]
        return [kind(each, names[each.name]) for kind, each in zip(kinds, schema, strict=True)]
    try:
        return [_column_from_dataset(dataset, each, names[each.name]) for each in schema]
    except KeyError as error:
        raise DataError(
            f"{dataset.path}: {error} is not stored, an older lpfs made this Dataset; prepare its log again"
        ) from None


def _column_from_dataset(dataset: Dataset, field: Field, name: str) -> InputColumn:
    about = dataset.settings["fields"][field.name]
    if field.kind == "numeric":
        scale = about["transform"], np.array(about["mean"], float), np.array(about["deviation"], float)
        return NumericColumn(field, name, scale)
    if about["ids"] == "hash":
        return IdColumn(field, name, about["modulo"], about["of"])
    if about["ids"] == "bins":
        return BinnedColumn(field, name, np.array(about["edges"], float))
    values = dataset.vocabulary(field.name)
    text = isinstance(values, list) and field.kind != "multi"  # marks are for a whole value of the log
    marks: Sequence[str] = dataset.settings["options"]["missing"] if text else ()
    return VocabularyColumn(field, name, values, tuple(marks), bool(about["hexadecimal"]))
