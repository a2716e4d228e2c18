"""A raw log with every kind of field, and its rows as the inputs of an ONNX file."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import onnxruntime
import polars as pl

import lpfs

HALF = [1.5, -2.25, 0.0, 7.0]
BIG = 2**63 + 5
PAD = {"tags é": "<pad>", "nums": 2**63 - 1, "fractions": -np.inf, "hashed bag": -1}
MISSING = {"city": "", "age": -(2**63), "code": -(2**63), "big": -(2**63), "tags é": "", "nums": -(2**63)}
FIELDS = {
    "city": {"kind": "categorical", "group": "user"},
    "age": {"kind": "categorical", "group": "user"},
    "code": {"kind": "categorical", "hexadecimal": True, "group": "item"},
    "half": {"kind": "categorical", "group": "item"},
    "big": {"kind": "categorical"},
    "price": {"kind": "numeric", "group": "user"},
    "tiny": {"kind": "numeric"},
    "level": {"kind": "numeric", "bins": 7},
    "vector": {"kind": "numeric", "width": 3, "transform": "none"},
    "tags é": {"kind": "multi", "group": "item"},
    "nums": {"kind": "multi"},
    "fractions": {"kind": "multi"},
    "hashed": {"kind": "categorical", "hash": 50},
    "hashed bag": {"kind": "multi", "hash": 20},
}


def table(rows: int, seed: int, *, more: int = 0) -> pl.DataFrame:
    """Return rows; ``more`` adds values and bag lengths that smaller tables do not have."""
    rng = np.random.default_rng(seed)

    def with_nulls(values, share=0.1):
        return [None if rng.random() < share else value for value in values]

    def bags(values, dtype):
        rows_of_values = [
            [values[i] for i in rng.integers(0, len(values), rng.integers(0, 4 + more))] for _ in range(rows)
        ]
        return pl.Series(with_nulls(rows_of_values), dtype=pl.List(dtype))

    return pl.DataFrame(
        {
            "click": rng.integers(0, 2, rows),
            "city": with_nulls([f"city {i}" for i in rng.integers(0, 20 + more, rows)]),
            "age": pl.Series(with_nulls(rng.integers(-3, 40 + more, rows).tolist()), dtype=pl.Int64),
            "code": with_nulls([f"{i * 2**26 + 5:08x}" for i in rng.integers(0, 30 + more, rows).tolist()]),
            "half": with_nulls([[*HALF, 9.5][i] for i in rng.integers(0, 4 + bool(more), rows)]),
            "big": pl.Series(with_nulls([BIG + i for i in rng.integers(0, 9 + more, rows).tolist()]), dtype=pl.UInt64),
            "price": with_nulls((rng.lognormal(size=rows) * 10 - 3).tolist(), 0.2),
            "tiny": rng.random(rows) * 1e-11,
            "level": with_nulls((rng.integers(-50, 50, rows) / 10).tolist(), 0.2),
            "vector": pl.Series(with_nulls(rng.normal(size=(rows, 3)).tolist()), dtype=pl.List(pl.Float64)),
            "tags é": bags([f"t{i}" for i in range(12 + more)], pl.String),
            "nums": bags([int(i) for i in range(-3, 9 + more)], pl.Int64),
            "fractions": bags([i / 4 for i in range(6 + more)], pl.Float64),
            "hashed": with_nulls([f"u{i}" for i in rng.integers(0, 500, rows)]),
            "hashed bag": bags([f"v{i}" for i in range(90)], pl.String),
        }
    )


def prepared(out, rows: int = 1500, **options):
    """Prepare a Dataset of such rows, with half of the negatives."""
    settings = {"label": "click", "fields": FIELDS, "shuffle": True, "negatives": 0.5, "quiet": True, **options}
    return lpfs.prepare(table(rows, seed=0), out, **settings)


def hashed_id(text: str | None, modulo: int) -> int:
    """Return the id of hashed text by the documented formula."""
    if text is None:
        return 0
    return 2 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % modulo


def feeds(rows: pl.DataFrame, inputs: list[dict]) -> dict[str, np.ndarray]:
    """Return rows as inputs of a file, by the documented rules and without lpfs.export."""
    result = {}
    for described in inputs:
        name = described["field"]
        column = rows[name].to_list()
        if name.startswith("hashed"):
            modulo = FIELDS[name]["hash"]
            column = [
                ([0] if row is None else [hashed_id(text, modulo) for text in row])
                if name in PAD
                else hashed_id(row, modulo)
                for row in column
            ]
        if name == "code":
            column = [None if text is None else int(text, 16) for text in column]
        if name == "big":
            column = [None if value is None else value - 2**64 for value in column]
        missing = MISSING.get(name, np.nan)
        if name in PAD:
            column = [[missing] if row is None else row for row in column]
            longest = max(map(len, column))
            column = [[*row, *[PAD[name]] * (longest - len(row))] for row in column]
        elif name == "vector":
            column = [[np.nan] * 3 if row is None else row for row in column]
        else:
            column = [missing if value is None else value for value in column]
        dtype = {"city": object, "tags é": object}.get(name)
        dtype = dtype or (np.int64 if name in (*MISSING, "hashed", "hashed bag") else np.float64)
        result[described["input"]] = np.array(column, dtype)
    return result


def session(path):
    """Open a file in onnxruntime and return it with the description of its inputs."""
    opened = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return opened, json.loads(opened.get_modelmeta().custom_metadata_map["lpfs.inputs"])
