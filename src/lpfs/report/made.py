"""How a result was made: command, configuration, fingerprint, versions, rows and times, ready to copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lpfs.markup import Html, tag
from lpfs.report import words
from lpfs.report.command import command_of
from lpfs.report.parts import Cell, card, copyable, folded, table, word
from lpfs.report.run import Run

PERIODS = {
    "early": "Pretraining",
    "search": "Search",
    "valid": "Validation (choices)",
    "test": "Test (judged once)",
    "train": "Pretraining and search",
}


def how_made(run: Run) -> Html:
    """Return the card of a selection."""
    asked = run.part("configuration")
    parts: list[object] = []
    line = command_of(asked) if asked else None
    if line is not None:
        parts.append(copyable(line, "command"))
    elif asked:
        parts.append(tag("p", "The table was in memory: lpfs.select(table, …) with the configuration below."))
    parts.append(facts(run.said, run.method))
    if run.part("periods"):
        parts.append(folded("Rows", periods(run.part("periods"))))
    if run.part("seconds"):
        parts.append(folded("Time", seconds(run.part("seconds"))))
    if asked:
        text = json.dumps({"format": "lpfs-run", **asked}, indent=1, ensure_ascii=False)
        parts.append(folded("Configuration (config.json)", copyable(text, "configuration")))
    return card("How it was made", *parts)


def facts(said: Mapping[str, Any], method: str) -> Html:
    """Return method, seed, fingerprint and versions."""
    versions = said.get("versions") or {}
    pairs = {
        "Method": method,
        "Seed": said.get("seed"),
        "Data fingerprint": said.get("fingerprint"),
        "Versions": ", ".join(f"{name} {each}" for name, each in versions.items()),
    }
    inside = [
        tag("div", tag("dt", name), tag("dd", tag("bdi", value)))
        for name, value in pairs.items()
        if value not in (None, "")
    ]
    return tag("dl", *inside, class_="facts")


def periods(parts: Mapping[str, Any]) -> Html:
    """Return which rows did what."""
    rows = [
        [
            word(PERIODS.get(name, name)),
            Cell(f"{each['rows']:,}"),
            word(" to ".join(map(str, dict.fromkeys(each["days"])))),
        ]
        for name, each in parts.items()
    ]
    return table(["", "Rows", "Days"], rows)


def seconds(spent: Mapping[str, float]) -> Html:
    """Return how long each stage took."""
    rows = [
        [word(name.replace("_", " ").capitalize()), Cell(words.duration(each))] for name, each in spent.items()
    ]
    rows.append([word("Together"), Cell(words.duration(sum(spent.values())))])
    return table(["Stage", "Time"], rows)
