"""Numbers and sentences of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpfs.report.run import Run

STAGES = {
    "all_fields": "All fields",
    "gated": "With gates, after the search",
    "pruned": "Pruned",
    "hot_start": "Pruned, trained on",
    "retrained": "Kept fields from scratch",
}


def number(value: float | None, digits: int = 3) -> str:
    """Return a number in few digits.

    >>> number(1234567), number(0.012345), number(None), number(3.0)
    ('1,234,567', '0.0123', '–', '3')
    """
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.{digits}g}"


def size(count: float | None) -> str:
    """Return a number of bytes.

    >>> size(856896), size(0), size(None)
    ('857 KB', '0 B', '–')
    """
    if count is None:
        return "–"
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Return a time.

    >>> duration(8.2), duration(200), duration(7330)
    ('8.2 s', '3 min 20 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def plural(count: int, noun: str) -> str:
    """Return a count and its noun.

    >>> plural(1, "field"), plural(3, "field")
    ('1 field', '3 fields')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def change(before: float | None, after: float | None) -> str:
    """Return a change in percent.

    >>> change(200, 150), change(200, 200), change(0, 1)
    ('−25 %', '±0 %', '–')
    """
    if not before or after is None:
        return "–"
    part = round(100 * (after / before - 1), 1)
    text = f"{abs(part):.1f}" if abs(part) < 10 and part % 1 else f"{abs(part):.0f}"
    return f"{'+' if part > 0 else '−' if part < 0 else '±'}{text} %"


def delta(value: float | None) -> str:
    """Return a difference of AUC with its sign.

    >>> delta(-0.00123), delta(0.00001), delta(None)
    ('−0.0012', '±0.0000', '–')
    """
    if value is None:
        return "–"
    value = round(value, 4)
    return f"{'+' if value > 0 else '−' if value < 0 else '±'}{abs(value):.4f}"


def answer(run: Run) -> str:
    """Return the answer in one sentence: how many fields are enough, and what that does to the AUC."""
    total, kept = len(run.rows), len(run.kept)
    metrics = run.part("metrics") or run.part("validation")
    rows = "test" if run.part("metrics") else "held-out"
    chosen = metrics.get(str(run.said.get("model"))) or metrics.get("gated") or {}
    before, after = auc(metrics.get("all_fields")), auc(chosen)
    verb = "is" if kept == 1 else "are"
    first = f"{kept:,} of {plural(total, 'field')} {verb} enough"
    if before is None or after is None:
        return f"{first}."
    moved = round(after - before, 4)
    if moved == 0:
        return f"{first}: the {rows} AUC stays at {after:.4f}."
    way = "rises" if moved > 0 else "falls"
    return f"{first}: the {rows} AUC {way} by {abs(moved):.4f}, from {before:.4f} to {after:.4f}."


def auc(metrics: Mapping[str, Any] | None) -> float | None:
    """Return the AUC out of some metrics."""
    return None if not metrics else metrics.get("auc")
