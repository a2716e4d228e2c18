"""SelectionReport: the values that the report of a selection shows, from memory or from a run directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lpfs._fileio import check_files, check_regular_file, no_result_error, read_json
from lpfs._validation import SHORT, is_number
from lpfs.errors import DataError, InputError

SELECTION_FILE, HISTORY_FILE = "selection.json", "history.parquet"
GATE_COLUMN = "gate:"  # prefix of the gate columns in history.parquet
MAX_POINTS = 150_000  # values of all trajectories together
MIN_RECORDS = 40  # records that are kept however many fields there are
MAX_TRAJECTORIES = 1000  # fields whose trajectory is drawn
TRACKS = ("loss", "alive", "penalty", "epsilon", "lr")
ADVICE = "use another copy of the directory, or do the run again"
Records = Sequence[Mapping[str, Any]]


SCORES = {"auc?": float, "logloss?": float, "auc_low?": float, "auc_high?": float, "rows?": int, "positives?": int}
METRICS = {"*?": {**SCORES, "tasks?": {"*": {"auc?": float, "logloss?": float}}}}
MEASURED = {"value": float, "low?": float, "high?": float}  # a value with its 95 % interval
FIELD_FACTS = {
    **{"kind?": str, "group?": str, "cardinality?": int, "cost?": float, "auc_alone?": float},
    **{"loss_if_removed?": MEASURED, "loss_if_removed_from_kept?": MEASURED, "gain_if_added_to_kept?": MEASURED},
    **{"substitutes?": [{"name": str, "share": float}], "missing?": float, "distinct?": int, "drift?": float},
}
VERDICT = {
    **{"kind": Literal["enough", "costs", "not decided"], "text": str, "reason?": str},
    **{"loss?": float, "low?": float, "high?": float, "rows?": int, "positives?": int, "logloss_loss?": MEASURED},
    **{"allowed?": float, "allowed_because?": str},
    "checks?": [{"fields": int, "loss?": float, "upper?": float, "rows?": int, "positives?": int, "holds?": bool}],
}
CURVE = {
    "points": [
        {
            **{"fields": int, "removed?": str, "auc?": float, "logloss?": float, "logloss_loss?": float},
            **{"loss?": float, "low?": float, "high?": float, "upper?": float},
        }
    ],
    **{"kept?": list[str], "recommended?": int, "allowed?": float, "rows?": int, "positives?": int, "folds?": int},
    **{"networks?": int, "seconds?": float},
}
WARNINGS = [{"text": str, "kind?": str, "fields?": list[str]}]
SELECTION_SCHEMA = {  # of selection.json: the keys that the report and ``prune`` read
    "kept": list[str],
    "dropped": list[str],
    "gates?": dict[str, float],
    "method?": str,
    "verdict?": VERDICT,
    "warnings?": WARNINGS,
    "hints?": WARNINGS,
    "curve?": CURVE,
    "fields?": {"*": FIELD_FACTS},
    "groups?": list[list[str]],
    "cost?": {"all_fields": float, "kept": float, "unit?": str},
    "metrics?": METRICS,
    "validation?": METRICS,
    "max_logit_change?": float,
    "certificates?": {"*": {"max_logit_change": float, "bound": float, "certified?": bool, "checked?": list[str]}},
    "model?": str,
    "chosen_in?": dict[str, int],
    "savings?": {"*?": dict[str, float | None]},
    "seconds?": dict[str, float],
    "configuration?": {"source?": list[str], "seeds?": int, "must_keep?": list[str], "must_drop?": list[str]},
    "splits?": {"*": {"rows": int, "days": list, "positives?": int}},
    "versions?": dict[str, str],
    "made?": {
        "scores?": dict[str, float],
        "curve?": [{"alive": int, "loss": float}],
        "end?": {"allowed?": float},
        "exchanged?": [{"dropped": str, "kept": str}],
        "unit?": str,
    },
    "hot_start?": {
        **{"steps?": int, "retrain_steps?": int, "matched_at?": int, "steps_saved?": int},
        "validation?": list[tuple[int, float]],
    },
    "files?": dict[str, str],
}
UNIT, LOSS, COUNT = (0.0, 1.0), (-100.0, 100.0), (0.0, 1e15)  # limits of a loss may lie outside of -1 to 1
INTERVAL = {"value": LOSS, "low": LOSS, "high": LOSS}
MODEL_BOUNDS = {"*": {"auc": UNIT, "auc_low": UNIT, "auc_high": UNIT, "rows": COUNT, "positives": COUNT}}
LOSS_BOUNDS = {"loss": LOSS, "low": LOSS, "high": LOSS, "upper": LOSS, "rows": COUNT, "positives": COUNT}
BOUNDS = {  # of selection.json: smallest and largest value; * stands for every key or item
    "verdict": {**LOSS_BOUNDS, "allowed": LOSS, "checks": {"*": {**LOSS_BOUNDS, "fields": COUNT}}},
    "curve": {
        "points": {"*": {**LOSS_BOUNDS, "auc": UNIT, "fields": COUNT}},
        **{"allowed": LOSS, "recommended": COUNT, "rows": COUNT, "positives": COUNT},
    },
    "fields": {
        "*": {
            **{"loss_if_removed": INTERVAL, "loss_if_removed_from_kept": INTERVAL, "gain_if_added_to_kept": INTERVAL},
            **{"auc_alone": UNIT, "missing": UNIT, "distinct": COUNT, "drift": COUNT, "cost": COUNT},
            "substitutes": {"*": {"share": LOSS}},
        }
    },
    "metrics": MODEL_BOUNDS,
    "validation": MODEL_BOUNDS,
    "splits": {"*": {"rows": COUNT, "positives": COUNT}},
    "savings": {"*": {"*": COUNT}},
    "cost": {"all_fields": COUNT, "kept": COUNT},
}


def check_bounds(value: Any, bounds: Any, key: str = "") -> None:
    """Raise InputError with the key and its value if a number is out of its bounds; NaN and infinity pass.

    >>> check_bounds({"a": [{"share": 2.0}]}, {"a": {"*": {"share": (0.0, 1.0)}}})
    Traceback (most recent call last):
    lpfs.errors.InputError: the key 'a.0.share' must be from 0 to 1, found 2.0
    """
    if isinstance(bounds, Mapping):
        items = dict(enumerate(value)) if isinstance(value, Sequence) else value or {}
        for pattern, inner in bounds.items():
            for name in items if pattern == "*" else [pattern]:
                check_bounds(items.get(name), inner, f"{key}.{name}" if key else str(name))
    elif is_number(value) and math.isfinite(value) and not bounds[0] <= value <= bounds[1]:
        raise InputError(f"the key {SHORT.repr(key)} must be from {bounds[0]:g} to {bounds[1]:g}, found {value!r}")


class Cell(NamedTuple):
    """A table cell; ``macros.html`` draws each kind.

    Args:
        text: the text.
        value: number by which the table is sorted; None to sort by text.
        number: whether the column is aligned to the right.
        shade: level of a heat map.
        kind: ``text``, ``field`` (a field name), ``isolated`` (other user text), ``strong``, ``pill``, ``bar`` (the
            text after a bar), ``names`` (the text is a list of field names, each with a remark).
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


class Measured(NamedTuple):
    """A value and the half width of its 95 % interval, None if it has none."""

    value: float
    half_width: float | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None, prefix: str = "", value: str = "value") -> Measured | None:
        """Return the value with the key ``value`` and its limits ``low`` and ``high``; None if it is not finite."""
        number, low, high = ((values or {}).get(key) for key in (value, f"{prefix}low", f"{prefix}high"))
        if number is None or finite_or_none(number) is None:
            return None
        half_width = None if low is None or high is None else finite_or_none((high - low) / 2)
        return cls(number, half_width)


@dataclass(frozen=True)
class FieldRow:
    """A field in the table; a value that the run does not contain is None.

    Args:
        worth: AUC that the kept fields lose without a kept field, or gain with a dropped one.
        worth_to_all: AUC that all fields lose without the field.
        substitutes: other fields, and the share of the worth that each one makes up for.
    """

    name: str
    kept: bool
    gate: float | None = None
    worth: Measured | None = None
    worth_to_all: Measured | None = None
    auc_alone: float | None = None
    substitutes: tuple[tuple[str, float], ...] = ()
    missing: float | None = None
    distinct: int | None = None
    drift: float | None = None
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
        rows: the fields: kept ones first, each part sorted by worth, or by the curve, or by gate.
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
            *(field, field in kept, gates.get(field)),
            score=scores.get(field),
            table_bytes=table_bytes.get(field),
            chosen=chosen.get(field),
            **_field_values(facts.get(field) or {}, field in kept),
        )
        for field in list(gates) or [*record["kept"], *record["dropped"]]
    ]
    removed = {name: number for number, name in enumerate(removal_order(record.get("curve") or {}))}

    def order(row: FieldRow) -> tuple[float, ...]:
        worth = -math.inf if row.worth is None else row.worth.value
        return (not row.kept, -worth, -removed.get(row.name, -1), -abs(row.gate or 0.0), -(row.score or 0.0))

    return SelectionReport(name, tuple(sorted(rows, key=order)), history, record)


def _field_values(facts: Mapping[str, Any], kept: bool) -> dict[str, Any]:
    """Return the values of a field of the record as arguments of FieldRow."""
    return {
        **{key: facts.get(key) for key in ("kind", "group", "cost", "distinct")},
        **{key: finite_or_none(facts.get(key)) for key in ("auc_alone", "missing", "drift")},
        "cardinality": facts.get("cardinality") or None,
        "worth": Measured.from_json(facts.get("loss_if_removed_from_kept" if kept else "gain_if_added_to_kept")),
        "worth_to_all": Measured.from_json(facts.get("loss_if_removed")),
        "substitutes": tuple((other["name"], other["share"]) for other in facts.get("substitutes") or ()),
    }


def removal_order(curve: Mapping[str, Any]) -> list[str]:
    """Return the fields in the order in which the curve removes them; one that it never removes is missing."""
    points = sorted(curve.get("points") or (), key=lambda point: -point["fields"])
    return list(dict.fromkeys(point["removed"] for point in points if point.get("removed") is not None))


def read_selection(run_dir: Path) -> SelectionReport:
    """Read the directory that ``select`` or ``search`` wrote."""
    path = run_dir / SELECTION_FILE
    if not path.exists():
        advice = "pass a directory that select, search or compare wrote"
        raise no_result_error(run_dir, f"{run_dir} has no {SELECTION_FILE}", advice)
    record = read_json(path, SELECTION_SCHEMA, allow_nan=True, advice=ADVICE)
    try:
        check_bounds(record, BOUNDS)
    except InputError as error:
        raise InputError(f"{path} cannot be used: {error}; {ADVICE}") from None
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
