"""SelectionReport: the values that the report of a selection shows, from memory or from a run directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lpfs._fileio import check_files, check_regular_file, read_json
from lpfs.errors import DataError, InputError

SELECTION_FILE, HISTORY_FILE = "selection.json", "history.parquet"
GATE_COLUMN = "gate:"  # prefix of the gate columns in history.parquet
MAX_POINTS = 150_000  # values of all trajectories together
MIN_RECORDS = 40  # records that are kept however many fields there are
MAX_TRAJECTORIES = 1000  # fields whose trajectory is drawn
TRACKS = ("loss", "alive", "penalty", "epsilon", "lr")
ADVICE = "use another copy of the directory, or do the run again"
Records = Sequence[Mapping[str, Any]]


METRICS = {"*?": {"auc?": float, "logloss?": float, "tasks?": {"*": {"auc?": float, "logloss?": float}}}}
SELECTION_SCHEMA = {  # of selection.json: the keys that the report and ``prune`` read
    "kept": list[str],
    "dropped": list[str],
    "gates?": dict[str, float],
    "method?": str,
    "fields?": {"*": {"kind?": str, "group?": str, "cardinality?": int, "cost?": float}},
    "metrics?": METRICS,
    "validation?": METRICS,
    "max_logit_change?": float,
    "certificates?": {"*": {"max_logit_change": float, "bound": float, "certified?": bool, "checked?": list[str]}},
    "model?": str,
    "chosen_in?": dict[str, int],
    "savings?": {"*?": dict[str, float | None]},
    "seconds?": dict[str, float],
    "configuration?": {"source?": list[str], "seeds?": int, "must_keep?": list[str], "must_drop?": list[str]},
    "splits?": {"*": {"rows": int, "days": list}},
    "versions?": dict[str, str],
    "made?": {
        "scores?": dict[str, float],
        "curve?": [{"alive": int, "loss": float}],
        "end?": {"allowed?": float},
        "unit?": str,
    },
    "hot_start?": {
        **{"steps?": int, "retrain_steps?": int, "matched_at?": int, "steps_saved?": int},
        "validation?": list[tuple[int, float]],
    },
    "files?": dict[str, str],
}


class Cell(NamedTuple):
    """A table cell; ``macros.html`` draws each kind.

    Args:
        text: the text.
        value: number by which the table is sorted; None to sort by text.
        number: whether the column is aligned to the right.
        shade: level of a heat map.
        kind: ``text``, ``field`` (a field name), ``isolated`` (other user text), ``strong``, ``pill``,
            ``bar_before`` or ``bar_after`` (the text with a bar).
        style: CSS class of the pill or the bar.
        share: length of the bar, from 0 to 1.
        badge: text of a pill after the text.
    """

    text: object
    value: float | None = None
    number: bool = True
    shade: int | None = None
    kind: str = "text"
    style: str = ""
    share: float = 0.0
    badge: str = ""


class ReportTable(NamedTuple):
    """A table; one with an id can be sorted and searched. The first row decides the alignment of the columns."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    id: str = ""
    style: str = ""
    row_styles: Sequence[str] = ()


class Tile(NamedTuple):
    """A large number in the summary; ``good`` is None if its value is neither good nor bad."""

    title: str
    value: object
    text: str
    good: bool | None = None


def text_cell(text: object, **kwargs: Any) -> Cell:
    """Return a cell aligned to the left."""
    return Cell(text, number=False, **kwargs)


@dataclass(frozen=True)
class FieldRow:
    """A field in the table; a value that the run does not contain is None."""

    name: str
    kept: bool
    gate: float | None = None
    score: float | None = None
    kind: str | None = None
    group: str | None = None
    cardinality: int | None = None
    cost: float | None = None
    table_bytes: float | None = None
    chosen: int | None = None


@dataclass(frozen=True)
class SearchHistory:
    """The thinned history of a search: ``steps`` (R,), ``tracks`` name -> (R,), ``gates`` field -> (R,)."""

    steps: tuple[int, ...]
    tracks: Mapping[str, Sequence[float | None]]
    gates: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class SelectionReport:
    """What the report of a selection shows.

    Args:
        name: name of the run in the page.
        rows: the fields: kept ones first, sorted by gate.
        history: None if the search recorded none.
        record: the values of ``selection.json``: metrics, certificates, savings, configuration, …
    """

    name: str
    rows: tuple[FieldRow, ...]
    history: SearchHistory | None
    record: Mapping[str, Any]

    @property
    def kept(self) -> tuple[str, ...]:
        """The kept fields."""
        return tuple(row.name for row in self.rows if row.kept)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the record; empty if it has none."""
        section = self.record.get(name)
        return section if isinstance(section, Mapping) else {}


def from_record(
    record: Mapping[str, Any], history: SearchHistory | None = None, *, name: str = "run"
) -> SelectionReport:
    """Return the report of a record, which holds the values of ``selection.json``."""
    if not isinstance(record, Mapping) or not {"kept", "dropped"} <= set(record):
        raise InputError("the record of a selection needs 'kept' and 'dropped'")
    gates, scores = record.get("gates") or {}, (record.get("made") or {}).get("scores") or {}
    facts, kept, chosen = record.get("fields") or {}, set(record["kept"]), record.get("chosen_in") or {}
    table_bytes = table_bytes_by_field(facts, record)
    rows = [
        FieldRow(
            *(field, field in kept, gates.get(field), scores.get(field)),
            table_bytes=table_bytes.get(field),
            chosen=chosen.get(field),
            cardinality=facts.get(field, {}).get("cardinality") or None,
            **{key: facts.get(field, {}).get(key) for key in ("kind", "group", "cost")},
        )
        for field in list(gates) or [*record["kept"], *record["dropped"]]
    ]
    rows.sort(key=lambda row: (not row.kept, -abs(row.gate or 0.0), -(row.score or 0.0)))
    return SelectionReport(name, tuple(rows), history, record)


def read_selection(run_dir: Path) -> SelectionReport:
    """Read the directory that ``select`` or ``search`` wrote."""
    path = run_dir / SELECTION_FILE
    if not path.exists():
        raise InputError(f"{run_dir} has no {SELECTION_FILE}; pass a directory that select, search or compare wrote")
    record = read_json(path, SELECTION_SCHEMA, allow_nan=True, advice=ADVICE)
    files = record.pop("files", None)
    check_files(run_dir, files or {}, ADVICE)
    has_history = files is None or HISTORY_FILE in files  # otherwise the file is of an older run
    history = read_history(run_dir / HISTORY_FILE) if has_history else None
    return from_record(record, history, name=run_dir.resolve().name)


def table_bytes_by_field(facts: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes of each field's embeddings: its share of the table rows, which all have the same width."""
    total = ((record.get("savings") or {}).get("all_fields") or {}).get("table_bytes")
    counts = {name: values["cardinality"] for name, values in facts.items() if values.get("cardinality")}
    all_rows = sum(counts.values())
    return {name: total * count / all_rows for name, count in counts.items()} if total else {}


def history_from_records(history: Records, names: Sequence[str]) -> SearchHistory | None:
    """Return the thinned history of ``Selection.history``; ``names`` are the fields in the order of its gates."""
    if not history or "step" not in history[0]:
        return None
    index = {name: position for position, name in enumerate(names if "gates" in history[0] else ())}

    def column(name: str, rows: list[int]) -> list[Any]:
        if name.startswith(GATE_COLUMN):
            position = index[name.removeprefix(GATE_COLUMN)]
            return [history[row]["gates"][position] for row in rows]
        return [history[row].get(name) for row in rows]

    columns = [*dict.fromkeys(key for record in history for key in record), *(GATE_COLUMN + name for name in index)]
    return _thin_history(len(history), columns, column)


def read_history(path: Path) -> SearchHistory | None:
    """Return the thinned history in ``history.parquet``; None if the search wrote none."""
    if not path.exists():
        return None
    import polars as pl
    from polars.exceptions import PanicException

    try:
        check_regular_file(path)
        with path.open("rb") as file:  # a path may contain the wildcards of a glob pattern
            frame = pl.read_parquet(file)
        if not len(frame) or "step" not in frame.columns:
            return None
        for name, column in zip(frame.columns, frame, strict=True):
            is_required = name == "step" or name.startswith(GATE_COLUMN)
            if is_required and (column.null_count() or not column.cast(pl.Float64).is_finite().all()):
                raise ValueError(f"column {name!r} has values that are not finite numbers")
            if name in TRACKS and not (column.dtype.is_numeric() or column.dtype == pl.Null):
                raise ValueError(f"column {name!r} has the type {column.dtype}")
        return _thin_history(len(frame), frame.columns, lambda name, rows: frame[name].gather(rows).to_list())
    except (DataError, OSError, TypeError, ValueError, pl.exceptions.PolarsError, PanicException) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path} is not the history of a search ({reason}); {ADVICE}") from None


def _thin_history(records: int, columns: Sequence[str], column: Callable[[str, list[int]], list[Any]]) -> SearchHistory:
    gates = evenly_spaced([name for name in columns if name.startswith(GATE_COLUMN)], MAX_TRAJECTORIES)
    rows = evenly_spaced(range(records), max(MIN_RECORDS, MAX_POINTS // max(1, len(gates))))
    return SearchHistory(
        steps=tuple(column("step", rows)),
        tracks={name: list(map(finite_or_none, column(name, rows))) for name in TRACKS if name in columns},
        gates={name.removeprefix(GATE_COLUMN): column(name, rows) for name in gates},
    )


def evenly_spaced(items: Sequence[Any], max_count: int) -> list[Any]:
    """Return at most ``max_count`` items, evenly spaced, with the first and the last one.

    >>> evenly_spaced(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= max_count:
        return list(items)
    return [items[round(number * (len(items) - 1) / (max_count - 1))] for number in range(max_count)]


def finite_or_none(value: float | None) -> float | None:
    """Return a finite number unchanged, and None for NaN, infinity or None."""
    return value if value is not None and math.isfinite(value) else None
