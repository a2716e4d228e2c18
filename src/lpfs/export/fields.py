"""The fields of a model as inputs, with what its Dataset says about how they were encoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lpfs.data.dataset import Dataset
from lpfs.errors import DataError
from lpfs.export.preprocessing import Column, Ids, Values
from lpfs.export.names import input_names
from lpfs.export.number_columns import Bins, Numbers
from lpfs.schema import Field, Schema


def columns_of(schema: Schema, dataset: Dataset | None) -> list[Column]:
    """Return the fields of a model as inputs, with what a Dataset says about how they were encoded."""
    names = input_names(schema.names)
    known = dataset is not None and dataset.settings.get("made_by") == "prepare"
    if dataset is None or not known:
        kinds = [Numbers if each.kind == "numeric" else Ids for each in schema]
        return [kind(each, names[each.name]) for kind, each in zip(kinds, schema, strict=True)]
    try:
        return [_known(dataset, each, names[each.name]) for each in schema]
    except KeyError as error:
        raise DataError(
            f"{dataset.path}: {error} is not stored, an older lpfs made this Dataset; prepare its log again"
        ) from None


def _known(dataset: Dataset, field: Field, name: str) -> Column:
    about = dataset.settings["fields"][field.name]
    if field.kind == "numeric":
        scale = about["transform"], np.array(about["mean"], float), np.array(about["deviation"], float)
        return Numbers(field, name, scale)
    if about["ids"] == "hash":
        return Ids(field, name, about["modulo"], about["of"])
    if about["ids"] == "bins":
        return Bins(field, name, np.array(about["edges"], float))
    values = dataset.vocabulary(field.name)
    text = isinstance(values, list) and field.kind != "multi"  # marks are for a whole value of the log
    marks: Sequence[str] = dataset.settings["options"]["missing"] if text else ()
    return Values(field, name, values, tuple(marks), bool(about["hexadecimal"]))
