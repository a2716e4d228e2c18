"""From what ``compare`` wrote down to what a report says of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpfs.errors import InputError
from lpfs.report.command import command_of
from lpfs.report.comparison import COMPARISON, Comparison, Difference, Result

FORMAT = "lpfs-comparison"
ALL_FIELDS = "all fields"  # trained as the selections are; a level in the charts, no method


def read_comparison(folder: Path) -> Comparison:
    """Read the folder that ``compare`` left, or one with plain values."""
    place = folder / COMPARISON
    try:
        values = json.loads(place.read_text("utf-8"))
        name = folder.resolve().name
        if isinstance(values, Mapping) and values.get("format") == FORMAT:
            return of_compare(values, name)
        return Comparison.from_json(values, name)
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{place} cannot be read as a comparison: {error!r}") from None


def of_compare(values: Mapping[str, Any], name: str = "comparison") -> Comparison:
    """Return the comparison that the values of ``compare`` describe (see docs/compare.md)."""
    results = [each for each in values["results"] if each["method"] != ALL_FIELDS]
    every = [each for each in values["results"] if each["method"] == ALL_FIELDS and each.get("kept")]
    kept = (field for each in every or results for field in each.get("kept") or ())
    level = values["all_fields"]["auc"]
    return Comparison(
        results=tuple(map(result, results)),
        fields=tuple(dict.fromkeys(kept)),
        name=name,
        all_fields=None if level is None else level["value"],
        differences=tuple(differences(values)),
        measures={method: measures(each) for method, each in values["methods"].items()},
        failed=failures(values["results"]),
        order=tuple(values["methods"]),
        aside=tuple(values.get("aside") or ()),
        said=said(values, name),
    )


def result(row: Mapping[str, Any]) -> Result:
    """Return one run."""
    return Result(
        method=row["method"],
        keep=row["keep"],
        seed=row["seed"],
        auc=row.get("auc"),
        logloss=row.get("logloss"),
        kept=tuple(row.get("kept") or ()),
        seconds=row.get("search_seconds"),
        memory=row.get("search_memory"),
    )


def differences(values: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences of every method to the best one: of the area first, then at every K."""
    best = values["best"]
    for method, each in values["methods"].items():
        found: list[tuple[int | None, Any]] = [(None, each["against"].get("best"))]
        found += [(int(size), of["against"].get("best")) for size, of in each["sizes"].items()]
        for keep, of in found:
            if of is not None and best is not None:
                seeds, rows = of["seeds"] or {}, of["rows"]
                yield Difference(
                    method=method,
                    other=best,
                    keep=keep,
                    mean=of["value"],
                    low=seeds.get("low"),
                    high=seeds.get("high"),
                    rows=None if rows is None else (rows["low"], rows["high"]),
                    verdict=of["verdict"],
                )


def measures(method: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what is told of a method beside its AUCs."""
    area, search = method["area"], method["search"]
    return {
        "Area": None if area is None else area["value"],
        "Overlap": method["overlap"],
        "Search, epochs": search["epochs"],
        "Memory, times": search["memory_ratio"],
    }


def failures(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return method -> how many of its runs failed, and why."""
    total = Counter(each["method"] for each in results)
    why: dict[str, Counter[str]] = {}
    for each in results:
        if each["status"] == "failed":
            why.setdefault(each["method"], Counter())[each["reason"]] += 1
    return {
        method: "; ".join(f"{times} of {total[method]} runs: {text}" for text, times in found.items())
        for method, found in why.items()
    }


def said(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return how it was made."""
    plan, settings = values["plan"], values["settings"]
    words = ["--methods", ",".join(plan["methods"]), "--keep", ",".join(map(str, plan["keep"]))]
    words += ["--seeds", str(plan["seeds"])]
    words += ["--tune", str(plan["tune"])] if plan["tune"] else []
    for method, options in plan["options"].items():
        for key, value in options.items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--method-option", f"{method}:{key}={text}"]
    command = command_of(settings, name, verb="compare", more=words)
    return {
        **{key: values[key] for key in ("fingerprint", "versions")},
        "seed": ", ".join(map(str, values["seeds"])),
        "configuration": {"plan": plan, "recipe": values["recipe"], **settings},
        **({} if command is None else {"command": command}),
    }
