"""Run: what a report says about a selection, as plain values, and how it is read from the folder of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lpfs.errors import InputError

ANSWER, HISTORY = "selection.json", "history.parquet"
POINTS = 150_000  # numbers of all trajectories together
LEAST = 40  # records that are drawn in any case
DRAWN = 1000  # fields whose trajectory is drawn
TRACKS = ("loss", "alive", "penalty", "epsilon", "lr")


@dataclass(frozen=True)
class Row:
    """A field in the table; None where the run does not say."""

    name: str
    kept: bool
    gate: float | None = None
    score: float | None = None
    kind: str | None = None
    group: str | None = None
    cardinality: int | None = None
    cost: float | None = None
    memory: float | None = None
    chosen: int | None = None


@dataclass(frozen=True)
class History:
    """How a search went, thinned: ``steps`` (R,), ``tracks`` name -> (R,), ``gates`` field -> (R,)."""

    steps: tuple[int, ...]
    tracks: Mapping[str, Sequence[float | None]]
    gates: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Run:
    """A selection and how it was made.

    Args:
        name: of the run, as the page calls it.
        method: how it was searched.
        rows: the fields, kept ones first, the strongest first.
        seeds: how many searches there were.
        history: None where the search left none.
        said: the rest of ``selection.json`` as it is: metrics, certificates, savings, configuration …

    """

    name: str
    method: str
    rows: tuple[Row, ...]
    seeds: int = 1
    history: History | None = None
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[str, ...]:
        """The fields that stay."""
        return tuple(each.name for each in self.rows if each.kept)

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a part of what was said; empty where there is none."""
        found = self.said.get(name)
        return found if isinstance(found, Mapping) else {}


def read_run(folder: Path) -> Run:
    """Read the folder that ``select`` or ``search`` left."""
    place = folder / ANSWER
    try:
        said = json.loads(place.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"there is no {ANSWER} in {folder}: is it the folder of a run? Give one of select, search or compare"
        ) from None
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {error}") from None
    if not isinstance(said, dict) or not {"kept", "dropped"} <= set(said):
        raise InputError(f"{place} holds no selection: there is no kept and dropped in it")
    return make_run(said, name=folder.resolve().name, history=read_history(folder / HISTORY))


def make_run(said: Mapping[str, Any], *, name: str = "run", history: History | None = None) -> Run:
    """Return the run that the values of a ``selection.json`` describe."""
    gates, scores = said.get("gates") or {}, (said.get("made") or {}).get("scores") or {}
    facts, kept, chosen = said.get("fields") or {}, set(said["kept"]), said.get("chosen_in") or {}
    bytes_of = memory(facts, said)
    names = list(gates) or [*said["kept"], *said["dropped"]]
    rows = tuple(
        Row(
            name=each,
            kept=each in kept,
            gate=gates.get(each),
            score=scores.get(each),
            memory=bytes_of.get(each),
            chosen=chosen.get(each),
            cardinality=facts.get(each, {}).get("cardinality") or None,
            **{key: facts.get(each, {}).get(key) for key in ("kind", "group", "cost")},
        )
        for each in names
    )
    seeds = (said.get("configuration") or {}).get("seeds") or 1
    return Run(name, str(said.get("method", "")), tuple(sorted(rows, key=strongest)), seeds, history, said)


def strongest(row: Row) -> tuple[bool, float, float]:
    """Return what fields are ordered by: kept ones first, then by gate, then by score."""
    return (not row.kept, -abs(row.gate or 0.0), -(row.score or 0.0))


def memory(facts: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes of the tables of each field: its share of the rows, which all have the same width."""
    total = ((said.get("savings") or {}).get("all_fields") or {}).get("table_bytes")
    rows = {name: each.get("cardinality") or 0 for name, each in facts.items()}
    every = sum(rows.values())
    return {} if not total or not every else {name: total * count / every for name, count in rows.items() if count}


def read_history(path: Path) -> History | None:
    """Read the history of a search; None where it left none."""
    if not path.exists():
        return None
    import polars as pl

    frame = pl.read_parquet(path)
    if not len(frame) or "step" not in frame.columns:
        return None
    columns = [name for name in frame.columns if name.startswith("gate:")]
    fields = some(columns, DRAWN)
    frame = frame[some(range(len(frame)), max(LEAST, POINTS // max(1, len(fields))))]
    return History(
        steps=tuple(frame["step"].to_list()),
        tracks={name: list(map(finite, frame[name].to_list())) for name in TRACKS if name in frame.columns},
        gates={name.removeprefix("gate:"): frame[name].to_list() for name in fields},
    )


def some(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many, evenly spread, the first and the last among them.

    >>> some(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def finite(value: float | None) -> float | None:
    """Return a number, or None where it is none."""
    return value if value is not None and math.isfinite(value) else None
