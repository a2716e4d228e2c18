"""A raw log with every kind of field, and its rows as an ONNX file takes them."""

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
    """Rows; with ``more``, values and lengths of bags that smaller tables do not have."""
    made = np.random.default_rng(seed)

    def some(values, share=0.1):
        return [None if made.random() < share else each for each in values]

    def bags(values, dtype):
        picked = [
            [values[i] for i in made.integers(0, len(values), made.integers(0, 4 + more))] for _ in range(rows)
        ]
        return pl.Series(some(picked), dtype=pl.List(dtype))

    return pl.DataFrame(
        {
            "click": made.integers(0, 2, rows),
            "city": some([f"city {i}" for i in made.integers(0, 20 + more, rows)]),
            "age": pl.Series(some(made.integers(-3, 40 + more, rows).tolist()), dtype=pl.Int64),
            "code": some([f"{i * 2**26 + 5:08x}" for i in made.integers(0, 30 + more, rows).tolist()]),
            "half": some([[*HALF, 9.5][i] for i in made.integers(0, 4 + bool(more), rows)]),
            "big": pl.Series(some([BIG + i for i in made.integers(0, 9 + more, rows).tolist()]), dtype=pl.UInt64),
            "price": some((made.lognormal(size=rows) * 10 - 3).tolist(), 0.2),
            "tiny": made.random(rows) * 1e-11,
            "level": some((made.integers(-50, 50, rows) / 10).tolist(), 0.2),
            "vector": pl.Series(some(made.normal(size=(rows, 3)).tolist()), dtype=pl.List(pl.Float64)),
            "tags é": bags([f"t{i}" for i in range(12 + more)], pl.String),
            "nums": bags([int(i) for i in range(-3, 9 + more)], pl.Int64),
            "fractions": bags([i / 4 for i in range(6 + more)], pl.Float64),
            "hashed": some([f"u{i}" for i in made.integers(0, 500, rows)]),
            "hashed bag": bags([f"v{i}" for i in range(90)], pl.String),
        }
    )


def prepared(out, rows: int = 1500, **options):
    """A Dataset of such rows, its negatives down-sampled to half."""
    given = {"label": "click", "fields": FIELDS, "shuffle": True, "negatives": 0.5, "quiet": True, **options}
    return lpfs.prepare(table(rows, seed=0), out, **given)


def hashed_id(text: str | None, modulo: int) -> int:
    """What the documentation says of hashed text."""
    if text is None:
        return 0
    return 2 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % modulo


def feeds(rows: pl.DataFrame, about: list[dict]) -> dict[str, np.ndarray]:
    """Rows as the documentation says that a file takes them, without any help of lpfs.export."""
    result = {}
    for each in about:
        name, column = each["field"], rows[each["field"]].to_list()
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
        result[each["input"]] = np.array(column, dtype)
    return result


def session(path):
    """A file in onnxruntime, and what it says of its inputs."""
    opened = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return opened, json.loads(opened.get_modelmeta().custom_metadata_map["lpfs.inputs"])
