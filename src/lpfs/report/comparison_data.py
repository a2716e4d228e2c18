"""ComparisonReport: the values that the report of a comparison shows, from any source.

``ComparisonReport.from_json`` reads plain values and ignores keys that the report does not show; ``from_record``
also reads what ``compare`` wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from lpfs._fileio import read_json
from lpfs._validation import check_json
from lpfs.errors import InputError
from lpfs.report.format import command_line, option_text

COMPARISON_FILE = "comparison.json"
FORMAT = "lpfs-comparison"
ALL_FIELDS = "all fields"  # the model of all fields: a level in the charts, not a method
Verdict = Literal["ahead", "behind", "level", "unknown"]


RANGE, MEASURED = {"low": float, "high": float}, {"value": float}
DIFFERENCES = {"*?": {**MEASURED, "seeds?": RANGE, "rows?": RANGE, "verdict": Verdict}}
PLAIN_SCHEMA = {  # of comparison.json with plain values; results and differences have the keys of their classes
    "results": [dict],
    "fields?": list[str],
    "all_fields?": float,
    "differences?": [dict],
    "measures?": {"*": dict[str, float | None]},
    "failed?": dict[str, str],
    "versions?": dict,
}
COMPARISON_SCHEMA = {  # of comparison.json of ``compare``: the keys that the report reads
    "results": [{"method": str, "status": str, "kept?": list[str], "reason?": str}],
    "best": str | None,
    "unranked?": list[str],
    "all_fields": {"auc?": MEASURED},
    "methods": {
        "*": {
            "area?": MEASURED,
            "overlap": float | None,
            "search": {"epochs": float | None, "memory_ratio": float | None},
            "differences": DIFFERENCES,
            "sizes": {"*": {"differences": DIFFERENCES}},
        }
    },
    "plan": {"methods": list[str], "keep": list[int], "seeds": int, "tune": int, "options": {"*": dict}},
    "settings": {"source?": list[str], "must_keep?": list[str], "must_drop?": list[str]},
    **{"seeds": list[int], "steps": dict, "versions": dict, "fingerprint": str},
}


@dataclass(frozen=True)
class Result:
    """One search and the quality of its fields.

    Args:
        method: its name in ``lpfs methods``.
        keep: number of fields to keep.
        seed: seed of the search and the training.
        auc: test AUC of the kept fields trained from scratch; None if the method failed.
        logloss: test logloss of the same model.
        kept: the kept fields.
        seconds: duration of the search.
        memory: peak memory of the search in bytes.
    """

    method: str
    keep: int
    seed: int
    auc: float | None
    logloss: float | None = None
    kept: tuple[str, ...] = ()
    seconds: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Difference:
    """``method`` minus ``other``: in AUC at the same number of fields, or in area under the K-AUC curve.

    Args:
        method: the first method.
        other: the method it is compared with.
        keep: number of fields; None for the area.
        mean: mean over seeds.
        low, high: interval over seeds; None with a single seed.
        p: p-value of a test, if there was one.
        rows: interval over test rows.
        verdict: ``ahead``, ``behind``, ``level`` or ``unknown``; derived from the interval if it is None.
    """

    method: str
    other: str
    keep: int | None
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    rows: tuple[float, float] | None = None
    verdict: Verdict | None = None

    @property
    def final_verdict(self) -> str:
        """The given verdict, or the one that follows from the interval over seeds."""
        if self.verdict is not None:
            return self.verdict
        if self.low is None or self.high is None:
            return "unknown"
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"


@dataclass(frozen=True)
class ComparisonReport:
    """What the report of a comparison shows.

    Args:
        results: one for each method, number of fields and seed.
        fields: all fields, in the order of the table.
        name: name of the comparison in the page.
        all_fields: test AUC of all fields.
        differences: to the best method, or to another one; if there are none, the page pairs the results by seed.
        measures: method -> name of a measure -> value, for example the area under the K-AUC curve.
        failed: method -> why some or all of its runs failed.
        order: the methods, the best one first; sorted by mean AUC if empty.
        unranked: methods that cannot be the best one, such as an oracle.
        record: command, configuration, fingerprint, versions.
    """

    results: tuple[Result, ...]
    fields: tuple[str, ...] = ()
    name: str = "comparison"
    all_fields: float | None = None
    differences: tuple[Difference, ...] = ()
    measures: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    unranked: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.results:
            raise InputError("a comparison needs at least one result; 'results' is empty")

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that have a result, the best one first."""
        aucs: dict[str, list[float]] = {}
        for result in self.results:
            if result.auc is not None:
                aucs.setdefault(result.method, []).append(result.auc)
        position = {name: number for number, name in enumerate(self.order)}
        means = {name: sum(values) / len(values) for name, values in aucs.items()}
        return tuple(sorted(aucs, key=lambda name: (position.get(name, len(position)), -means[name])))

    @property
    def ranked_methods(self) -> tuple[str, ...]:
        """The methods that can be the best one."""
        return tuple(name for name in self.methods if name not in self.unranked)

    @property
    def keeps(self) -> tuple[int, ...]:
        """The numbers of fields, in ascending order."""
        return tuple(sorted({result.keep for result in self.results}))

    @property
    def seed_count(self) -> int:
        """The number of seeds."""
        return len({result.seed for result in self.results})

    def aucs(self, method: str, keep: int) -> dict[int, float]:
        """Return seed -> AUC."""
        return {result.seed: result.auc for result in self.results_of(method, keep) if result.auc is not None}

    def results_of(self, method: str, keep: int | None = None) -> list[Result]:
        """Return the results of a method, for one number of fields or for all."""
        return [result for result in self.results if result.method == method and keep in (None, result.keep)]

    @classmethod
    def from_json(cls, values: Mapping[str, Any], name: str = "comparison") -> ComparisonReport:
        """Build a comparison from plain values (see docs/compare.md)."""
        check_json(values, PLAIN_SCHEMA)
        results = _results(values)
        names = values.get("fields") or dict.fromkeys(name for result in results for name in result.kept)
        return cls(
            results=results,
            fields=tuple(names),
            name=name,
            differences=tuple(Difference(**row) for row in _checked_rows(Difference, values, "differences")),
            record={key: value for key, value in values.items() if key not in ("results", "differences")},
            **{key: values[key] for key in ("all_fields", "measures", "failed") if key in values},
        )


def _results(values: Mapping[str, Any]) -> tuple[Result, ...]:
    """Return results of plain values; ``kept`` may be None."""
    rows = [{**row, "kept": row.get("kept") or ()} for row in values["results"]]
    return tuple(Result(**{**row, "kept": tuple(row["kept"])}) for row in _checked_rows(Result, {"results": rows}))


def _checked_rows(cls: type, values: Mapping[str, Any], key: str = "results") -> list[dict[str, Any]]:
    """Return rows as keyword arguments of a dataclass; raise InputError for a missing key or another type."""
    names = {known.name for known in fields(cls)}
    rows = [{name: value for name, value in row.items() if name in names} for row in values.get(key) or ()]
    for number, row in enumerate(rows):
        check_json(row, cls, f"{key}[{number}]")
    return rows


def read_comparison(run_dir: Path) -> ComparisonReport:
    """Read ``comparison.json``, written by ``compare`` or with plain values."""
    path = run_dir / COMPARISON_FILE
    record = read_json(path)
    try:
        return from_record(record, run_dir.resolve().name)
    except InputError as error:
        raise InputError(f"{path} is not a comparison: {error}") from None


def from_record(record: Mapping[str, Any], name: str = "comparison") -> ComparisonReport:
    """Return the report of a record of ``compare`` (see docs/compare.md), or of other plain values."""
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        return ComparisonReport.from_json(record, name)
    check_json(record, COMPARISON_SCHEMA)
    results = [row for row in record["results"] if row["method"] != ALL_FIELDS]
    all_rows = [row for row in record["results"] if row["method"] == ALL_FIELDS and row.get("kept")]
    names = (field_name for row in all_rows or results for field_name in row.get("kept") or ())
    auc = record["all_fields"].get("auc")
    return ComparisonReport(
        results=_results({"results": [{"auc": None, **row, **_search_cost(row)} for row in results]}),
        fields=tuple(dict.fromkeys(names)),
        name=name,
        all_fields=None if auc is None else auc["value"],
        differences=tuple(_differences(record)),
        measures={
            method: {
                "Area": (values.get("area") or {}).get("value"),
                "Overlap": values["overlap"],
                "Search, epochs": values["search"]["epochs"],
                "Memory, times": values["search"]["memory_ratio"],
            }
            for method, values in record["methods"].items()
        },
        failed=_failures(record["results"]),
        order=tuple(record["methods"]),
        unranked=tuple(record.get("unranked") or ()),
        record=_provenance(record, name),
    )


def _search_cost(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"seconds": row.get("search_seconds"), "memory": row.get("search_memory")}


def _differences(record: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences of each method to the best one: of the area first, then at each number of fields."""
    best = record["best"]
    for method, values in record["methods"].items():
        for keep, at_keep in [(None, values), *values["sizes"].items()]:
            difference = at_keep["differences"].get("best")
            if difference is not None and best is not None:
                seeds, rows = difference.get("seeds") or {}, difference.get("rows")
                yield Difference(
                    *(method, best, None if keep is None else int(keep), difference["value"]),
                    low=seeds.get("low"),
                    high=seeds.get("high"),
                    rows=None if rows is None else (rows["low"], rows["high"]),
                    verdict=difference["verdict"],
                )


def _failures(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return method -> the number of its failed runs, and why they failed."""
    total = Counter(row["method"] for row in results)
    failed = Counter((row["method"], row["reason"]) for row in results if row["status"] == "failed")
    texts: dict[str, list[str]] = {}
    for (method, reason), count in failed.items():
        texts.setdefault(method, []).append(f"{count} of {total[method]} runs: {reason}")
    return {method: "; ".join(parts) for method, parts in texts.items()}


def _provenance(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    plan, settings = record["plan"], record["settings"]
    words = ["--methods", ",".join(plan["methods"]), "--keep", ",".join(map(str, plan["keep"]))]
    words += ["--seeds", str(plan["seeds"]), *(["--tune", str(plan["tune"])] if plan["tune"] else [])]
    for method, options in plan["options"].items():
        for key, value in options.items():
            words += ["--method-option", f"{method}:{key}={option_text(value)}"]
    command = command_line(settings, name, command="compare", extra=words)
    return {
        **{key: record[key] for key in ("fingerprint", "versions")},
        "seed": ", ".join(map(str, record["seeds"])),
        "configuration": {"plan": plan, "steps": record["steps"], **settings},
        **({} if command is None else {"command": command}),
    }
