"""The inputs of an ONNX file: one column per field, with the nodes that turn its raw values into ids.

A tensor has no null, so every column defines a value that means "missing" and, in a bag, one that means "padding".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from typing import Any

import numpy as np

from lpfs.data.dataset import Dataset
from lpfs.data.store.format import FIRST_ID, MISSING_ID, UNSEEN_ID, AnyArray
from lpfs.errors import DataError
from lpfs.export.onnx_graph import Graph
from lpfs.schema import Field, Schema

OUTPUTS = ("probability", "logit", "corrected_probability")
VALID_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
PAD_ID = -1  # id of padding in a row of a bag
OUT_OF_RANGE = 1 << 40  # an id beyond every table: the runtime raises an error
HASHED = {  # the number that is taken modulo the range, by type of value; see lpfs.data.encoders.vocabulary
    "text": "BLAKE2b(UTF-8) of 8 bytes, little endian,",
    "integer": "the value (a negative one plus 2**64)",
    "float": "the 64 bits of the float64",
}


def input_names(fields: Sequence[str]) -> dict[str, str]:
    """Return field -> name of its input: the field's name if it is valid and free, else a similar valid name.

    >>> input_names(["a.b", "a_b", "logit", "7"])
    {'a.b': 'a_b_2', 'a_b': 'a_b', 'logit': 'logit_2', '7': '_7'}
    """
    names = {name: name for name in fields if VALID_NAME.fullmatch(name) and name not in OUTPUTS}
    for name in fields:
        if name not in names:
            base = re.sub(r"^(?=[0-9])|[^A-Za-z0-9_]", "_", name)
            candidates = chain([base], (f"{base}_{number}" for number in count(2)))
            used = {*OUTPUTS, *names.values()}
            names[name] = next(candidate for candidate in candidates if candidate not in used)
    return {name: names[name] for name in fields}


def special_values(vocabulary: Any) -> tuple[Any, Any, Any]:
    """Return the values that mean missing, padding (in a bag) and unseen; none of them is in the vocabulary.

    Missing is "", the lowest int64 or NaN, padding "<pad>", the highest int64 or -inf; another one if that is taken.

    >>> special_values(["a"]), special_values(["a", "", "<pad>"])
    (('', '<pad>', '<unseen>'), ('<missing>', '<pad>2', '<unseen>'))
    """
    candidates: tuple[Iterable[Any], ...]
    if isinstance(vocabulary, list):
        used, candidates = set(vocabulary), (_texts("", "<missing>"), _texts("<pad>"), _texts("<unseen>"))
    elif vocabulary.dtype.kind == "f":
        pads = (-np.inf, np.inf, *np.arange(-1e300, -2e300, -1e298).tolist())
        used, candidates = set(vocabulary.tolist()), ([np.nan], pads, (number + 0.5 for number in count()))
    else:
        limits = np.iinfo(np.int64)
        used, candidates = set(as_int64(vocabulary).tolist()), (count(limits.min), count(limits.max, -1), count())
    missing, pad, unseen = (next(value for value in values if value not in used) for values in candidates)
    return missing, pad, unseen


def as_int64(values: AnyArray) -> AnyArray:
    """Return integers as int64; values of 2**63 and above keep their bits."""
    return values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)


def _texts(*first: str) -> Iterator[str]:
    yield from first
    yield from (f"{first[-1]}{number}" for number in count(2))


@dataclass(frozen=True)
class InputColumn:
    """One field as one input: (B,), (B, L) for a bag of up to L values, (B, w) for w numbers.

    ``encode`` adds the nodes that turn raw values into ids; ``example_values`` is the inverse, for the check.
    """

    field: Field
    input: str

    @property
    def multi(self) -> bool:
        """Whether a row is a bag."""
        return self.field.kind == "multi"

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Shape of the input; B and L are dynamic."""
        return ("B", f"{self.input}_length") if self.multi else ("B",)

    def description(self) -> str:
        """Return which values the input takes, for the metadata."""
        raise NotImplementedError

    def encode(self, graph: Graph) -> str:
        """Add the input and the nodes that compute its ids; padding gets ``PAD_ID``."""
        raise NotImplementedError

    def example_values(self, ids: AnyArray) -> AnyArray:
        """Return raw values that have these ids, (B,) or (B, L)."""
        raise NotImplementedError

    def examples(self) -> tuple[AnyArray, AnyArray]:
        """Return raw values that cover every case of the encoding, and their ids; empty if ids are the input."""
        return np.zeros(0), np.zeros(0)

    def metadata(self) -> dict[str, Any]:
        """Return the description of the input as JSON values."""
        return {"field": self.field.name, "input": self.input, "kind": self.field.kind, "takes": self.description()}


@dataclass(frozen=True)
class IdColumn(InputColumn):
    """A field whose ids the caller computes: it is hashed, or there is no Dataset that defines its ids."""

    modulo: int | None = None
    of: str | None = None

    def description(self) -> str:
        text = f"ids from 0 to {self.field.cardinality - 1}"
        if self.modulo is not None:
            number = HASHED.get(self.of or "", "the value")
            text += f": {FIRST_ID} + {number} modulo {self.modulo}; {MISSING_ID} if missing"
        return text + (f"; {PAD_ID} is padding" if self.multi else "")

    def encode(self, graph: Graph) -> str:
        ids = graph.add_input(self.input, graph.onnx.TensorProto.INT64, self.shape, self.description())
        above = graph.add("GreaterOrEqual", ids, PAD_ID if self.multi else 0)
        below = graph.add("Less", ids, self.field.cardinality)
        return graph.add("Where", graph.add("And", above, below), ids, OUT_OF_RANGE)

    def example_values(self, ids: AnyArray) -> AnyArray:
        return ids.astype(np.int64)

    def metadata(self) -> dict[str, Any]:
        hashing = {"hash_modulo": self.modulo, "hash_of": self.of}
        return {**super().metadata(), **hashing, **({"pad": PAD_ID} if self.multi else {})}


@dataclass(frozen=True)
class VocabularyColumn(InputColumn):
    """A field with a vocabulary: a LabelEncoder node maps raw values to ids.

    Args:
        values: the vocabulary in id order: a list of text, or an array of integers or of floats.
        also_missing: further text that means missing.
        hexadecimal: whether the integers are written in hexadecimal in the log.
    """

    values: Any
    also_missing: tuple[str, ...] = ()
    hexadecimal: bool = False

    @property
    def value_type(self) -> str:
        """``text``, ``integer`` or ``float``."""
        if isinstance(self.values, list):
            return "text"
        return "float" if self.values.dtype.kind == "f" else "integer"

    @cached_property
    def special(self) -> tuple[Any, Any, Any]:
        """The values that mean missing, padding and unseen."""
        return special_values(self.values)

    def description(self) -> str:
        text = {"text": "text", "integer": "integers", "float": "numbers"}[self.value_type]
        if self.hexadecimal:
            text += ", hexadecimal ones as int(text, 16)"
        missing, pad, _ = self.special
        return f"{text}; {missing!r} if missing" + (f"; {pad!r} is padding" if self.multi else "")

    def keys(self) -> tuple[AnyArray, AnyArray]:
        """Return all keys and their ids; a missing float is NaN, which cannot be a key."""
        missing, pad, _ = self.special
        special: dict[Any, int] = {} if self.value_type == "float" else {missing: MISSING_ID}
        known = set(self.values) if self.also_missing else set()
        special |= {text: MISSING_ID for text in self.also_missing if text not in known}
        if self.multi:
            special[pad] = PAD_ID
        ids = np.arange(FIRST_ID, FIRST_ID + len(self.values), dtype=np.int64)
        keys = np.concatenate([self.to_array(self.values), self.to_array(list(special))])
        return keys, np.concatenate([ids, np.array(list(special.values()), np.int64)])

    def to_array(self, values: Any) -> AnyArray:
        """Return values as the input takes them."""
        if self.value_type == "integer":
            return as_int64(np.asarray(values))
        return np.array(values, object if self.value_type == "text" else np.float64)

    def encode(self, graph: Graph) -> str:
        types = graph.onnx.TensorProto
        dtype = {"text": types.STRING, "integer": types.INT64, "float": types.DOUBLE}[self.value_type]
        value = graph.add_input(self.input, dtype, self.shape, self.description())
        keys, ids = self.keys()
        graph.count_bytes(ids.nbytes + (sum(len(key) + 4 for key in keys) if dtype == types.STRING else keys.nbytes))
        tensor = graph.onnx.numpy_helper.from_array
        encoded = graph.add(
            "LabelEncoder",
            value,
            domain="ai.onnx.ml",
            keys_tensor=tensor(keys, "keys"),
            values_tensor=tensor(ids, "ids"),
            default_tensor=tensor(np.array([UNSEEN_ID], np.int64), "unseen"),
        )
        if self.value_type != "float":
            return encoded
        return graph.add("Where", graph.add("IsNaN", value), MISSING_ID, encoded)

    def example_values(self, ids: AnyArray) -> AnyArray:
        missing, pad, unseen = self.special
        values = [self.to_array([missing, unseen]), self.to_array(self.values), self.to_array([pad])]
        return np.concatenate(values)[ids]  # MISSING_ID and UNSEEN_ID are the first, PAD_ID is the last

    def examples(self) -> tuple[AnyArray, AnyArray]:
        special = [MISSING_ID, UNSEEN_ID, *([PAD_ID] if self.multi else [])]
        ids = np.concatenate([np.arange(FIRST_ID, FIRST_ID + len(self.values)), special]).astype(np.int64)
        return self.example_values(ids), ids

    def metadata(self) -> dict[str, Any]:
        missing, pad, _ = self.special
        special = {"missing": None if self.value_type == "float" else missing, "hexadecimal": self.hexadecimal}
        padding = {"pad": str(pad) if isinstance(pad, float) else pad}
        return {**super().metadata(), **special, **(padding if self.multi else {})}


@dataclass(frozen=True)
class BinnedColumn(InputColumn):
    """Numbers that become ids of bins: FIRST_ID + number of edges that are not above the value."""

    edges: AnyArray

    def description(self) -> str:
        return "numbers; NaN if missing"

    def encode(self, graph: Graph) -> str:
        types = graph.onnx.TensorProto
        value = graph.add_input(self.input, types.DOUBLE, self.shape, self.description())
        missing = graph.add("Or", graph.add("IsNaN", value), graph.add("IsInf", value))
        reached = graph.add("GreaterOrEqual", graph.add("Unsqueeze", value, [1]), self.edges[None])
        bins = graph.add("ReduceSum", graph.add("Cast", reached, to=types.INT64), [1], keepdims=0)
        return graph.add("Where", missing, MISSING_ID, graph.add("Add", bins, FIRST_ID))

    def example_values(self, ids: AnyArray) -> AnyArray:
        """Return the lower edge of each bin; for the first bin, the next number below its upper edge."""
        first = np.nextafter(self.edges[:1], -np.inf) if len(self.edges) else np.zeros(1)
        return np.concatenate([[np.nan, np.nan], first, self.edges])[ids]

    def examples(self) -> tuple[AnyArray, AnyArray]:
        bins = np.arange(FIRST_ID, FIRST_ID + len(self.edges))
        values = np.concatenate([self.edges, np.nextafter(self.edges, -np.inf), [np.nan, np.inf, -np.inf, 0.0]])
        zero = FIRST_ID + int((self.edges <= 0).sum())
        return values, np.concatenate([bins + 1, bins, [MISSING_ID] * 3, [zero]])

    def metadata(self) -> dict[str, Any]:
        return {**super().metadata(), "bins": len(self.edges) + 1}


@dataclass(frozen=True)
class NumericColumn(InputColumn):
    """Numbers that are transformed and standardised, or that the caller gives standardised.

    ``add_inputs`` encodes all columns of this kind together.
    """

    scale: tuple[str, AnyArray, AnyArray] | None = None  # transform, means and deviations

    @property
    def shape(self) -> tuple[int | str, ...]:
        return ("B",) if self.field.dim == 1 else ("B", self.field.dim)

    def description(self) -> str:
        return f"numbers{'' if self.scale else ' as the Dataset stores them, standardised'}; NaN if missing"

    def example_values(self, ids: AnyArray) -> AnyArray:
        """Return the raw numbers that are standardised to these (B, w)."""
        values = ids.astype(np.float64)
        if self.scale is not None:
            transform, mean, deviation = self.scale
            values = values * deviation + mean
            if transform == "log":
                with np.errstate(over="ignore"):
                    magnitude = np.minimum(np.expm1(np.abs(values)), np.finfo(float).max)
                values = np.copysign(magnitude, values)
        return values[:, 0] if self.field.dim == 1 else values


def build_columns(schema: Schema, dataset: Dataset | None) -> list[InputColumn]:
    """Return the fields of a model as inputs, encoded as the Dataset encoded them."""
    names = input_names(schema.names)
    if dataset is None or dataset.settings.get("made_by") != "prepare":
        return [(NumericColumn if field.kind == "numeric" else IdColumn)(field, names[field.name]) for field in schema]
    try:
        return [_column_from_dataset(dataset, field, names[field.name]) for field in schema]
    except DataError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(
            f"{dataset.path} does not store how it was encoded ({error!r}); prepare the log again"
        ) from None


def _column_from_dataset(dataset: Dataset, field: Field, name: str) -> InputColumn:
    encoding = dataset.settings["fields"][field.name]
    if field.kind == "numeric":
        scale = encoding["transform"], np.array(encoding["mean"], float), np.array(encoding["deviation"], float)
        return NumericColumn(field, name, scale)
    if encoding["ids"] == "hash":
        return IdColumn(field, name, encoding["modulo"], encoding["value_type"])
    if encoding["ids"] == "bins":
        return BinnedColumn(field, name, np.array(encoding["edges"], float))
    values = dataset.vocabulary(field.name)
    is_text = isinstance(values, list) and field.kind != "multi"  # missing-value texts apply to whole cells only
    missing_texts: Sequence[str] = dataset.settings["options"]["missing"] if is_text else ()
    return VocabularyColumn(field, name, values, tuple(missing_texts), bool(encoding["hexadecimal"]))
