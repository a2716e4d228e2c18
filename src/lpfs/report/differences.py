"""What is beyond noise: the differences of the methods to the best one."""

from __future__ import annotations

from statistics import mean

from lpfs.markup import Html, tag
from lpfs.report import words
from lpfs.report.comparison import Comparison
from lpfs.report.parts import Cell, card, table, word

VERDICTS = ("behind", "level", "unknown", "ahead")  # as they are sorted
PILLS = {"ahead": "yes", "behind": "bad"}
NOISE = "Differences to the best. Beyond noise: the intervals leave zero on one side."
ONE_SEED = "With one seed the luck of the training is not known: no difference can be said to be beyond noise."


def best_at(found: Comparison, keep: int) -> str | None:
    """Return the method with the highest mean AUC at a number of fields."""
    means = {name: mean(found.aucs(name, keep).values()) for name in found.fair if found.aucs(name, keep)}
    return max(means, key=lambda name: means[name]) if means else None


def significance(found: Comparison) -> Html:
    """Return which differences are beyond noise; paired over seeds where the comparison gives none."""
    by_rows = any(each.rows is not None for each in found.differences)
    tested = any(each.p is not None for each in found.differences)
    if found.differences:
        rows = [
            [
                Cell("area" if each.keep is None else each.keep, each.keep or 0),
                word(f"{each.method} – {each.other}"),
                Cell(words.delta(each.mean), each.mean),
                Cell(between(each.low, each.high), each.low),
                *([Cell(between(*(each.rows or (None, None))), (each.rows or (None,))[0])] if by_rows else []),
                *([Cell("–" if each.p is None else f"{each.p:.2g}", each.p)] if tested else []),
                Cell(verdict(each.said), VERDICTS.index(each.said), number=False),
            ]
            for each in found.differences
        ]
        header = ["K", "Methods", "Difference", "95 % over seeds" if by_rows else "interval"]
        header += [*(["95 % over rows"] if by_rows else []), *(["p"] if tested else []), "Verdict"]
        note = f"{NOISE} {ONE_SEED}" if all(each.said == "unknown" for each in found.differences) else NOISE
        return card("What is beyond noise", table(header, rows, identity="differences", style="long"), note=note)
    note = "Against the best at each number of fields, paired over seeds; few seeds prove little."
    header = ["K", "Methods", "Δ AUC", "least … most", "worse in"]
    listed = table(header, paired(found), identity="differences", style="long")
    return card("Differences to the best", listed, note=note)


def between(low: float | None, high: float | None) -> str:
    """Return both ends of an interval."""
    return "–" if low is None or high is None else f"{words.delta(low)} … {words.delta(high)}"


def verdict(said: str) -> Html:
    """Return whether a difference is more than noise."""
    text = {"level": "level, within noise", "unknown": "not known"}.get(said, f"{said}, beyond noise")
    return tag("span", text, class_=f"pill {PILLS.get(said, 'no')}")


def paired(found: Comparison) -> list[list[Cell]]:
    """Return the difference of every method to the best one, seed by seed."""
    rows = []
    for keep in found.keeps:
        best = best_at(found, keep)
        if best is None:
            continue
        top = found.aucs(best, keep)
        for method in found.methods:
            own = found.aucs(method, keep)
            apart = [own[seed] - top[seed] for seed in sorted(set(own) & set(top))]
            if method != best and apart:
                worse = sum(each < 0 for each in apart)
                rows.append(
                    [
                        Cell(keep, keep),
                        word(f"{method} – {best}"),
                        Cell(words.delta(mean(apart)), mean(apart)),
                        Cell(f"{words.delta(min(apart))} … {words.delta(max(apart))}", min(apart)),
                        Cell(f"{worse} of {len(apart)}", worse / len(apart)),
                    ]
                )
    return rows
