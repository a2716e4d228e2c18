"""What a selection is worth: AUC before and after, the certificate, what it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lpfs.markup import Html, tag
from lpfs.report import words
from lpfs.report.parts import Cell, bar, card, chart, table, word
from lpfs.report.run import Run

PROOFS = {"zeros": "Dropped fields fed as zeros", "cut": "Their columns cut out of the network"}
SAVED: dict[str, tuple[str, Callable[[float | None], str], bool]] = {
    "table_bytes": ("Embedding tables", words.size, False),
    "parameters": ("Parameters", words.number, False),
    "rows_per_second": ("Rows served a second", words.number, True),
}


def quality(run: Run, charts: Mapping[str, object]) -> list[Html]:
    """Return AUC before and after, the hot start, and what further cuts cost."""
    test, valid = run.part("metrics"), run.part("validation")
    if not test and not valid:
        return []
    names = [name for name in words.STAGES if name in test or name in valid]
    base = words.auc(test.get("all_fields"))
    rows = [quality_line(name, test.get(name), valid.get(name), base, run.said.get("model")) for name in names]
    header = ["Model", "Test AUC", "to all fields", "Logloss", "Validation AUC"]
    rows += [line for name in names for line in task_lines(test.get(name), words.STAGES[name])]
    note = "Choices were made on validation rows; test rows were read once, at the end."
    found = [card("AUC before and after", table(header, rows), note=note)]
    if "hot-start" in charts:
        told = run.part("hot_start")
        at = told.get("level_at")
        text = (
            f"Not level with training from scratch within {told['steps']:,} steps."
            if at is None
            else f"Level with training from scratch after {at:,} steps: {told['steps_saved']:,} steps saved."
        )
        place = chart("hot-start", "Validation AUC of the pruned model, trained on", 220)
        found.append(card("Hot start", place, note=text, wide=False, scripted=True))
    if "cuts" in charts:
        text = "Validation AUC lost against all fields trained as long, with the gates still moving."
        place = chart("cuts", "AUC lost by the number of fields", 220)
        found.append(card("What fewer fields would cost", place, note=text, wide=False, scripted=True))
    return found


def quality_line(
    name: str, test: Mapping[str, Any] | None, valid: Mapping[str, Any] | None, base: float | None, chosen: object
) -> list[Cell]:
    """Return the cells of a model."""
    auc, loss = words.auc(test), None if not test else test.get("logloss")
    apart = None if auc is None or base is None or name == "all_fields" else auc - base
    left = tag("span", "left in model/", class_="pill yes") if name == chosen else ""
    return [
        word(tag("span", words.STAGES[name], " ", left)),
        Cell("–" if auc is None else f"{auc:.5f}"),
        Cell("" if name == "all_fields" else words.delta(apart)),
        Cell("–" if loss is None else f"{loss:.5f}"),
        Cell("–" if words.auc(valid) is None else f"{words.auc(valid):.5f}"),
    ]


def task_lines(metrics: Mapping[str, Any] | None, model: str) -> list[list[Cell]]:
    """Return a line for every further task."""
    tasks = list((metrics or {}).get("tasks", {}).items())[1:]
    return [
        [
            word(f"{model}, {name}"),
            Cell("–" if each.get("auc") is None else f"{each['auc']:.5f}"),
            Cell(""),
            Cell(words.number(each.get("logloss"), 5)),
            Cell(""),
        ]
        for name, each in tasks
    ]


def certificate(run: Run) -> Html:
    """Return the proof that removing the dropped fields changed nothing."""
    proofs = run.part("certificates")
    if not proofs:
        return card("Certificate", tag("p", "This run proved nothing: nothing was pruned."), wide=False)
    rows = [
        [
            word(PROOFS.get(name, name)),
            Cell(words.number(each["max_logit_change"], 2)),
            Cell(words.number(each["bound"], 2)),
            word(verdict(each)),
        ]
        for name, each in proofs.items()
    ]
    count = max(len(each.get("checked") or ()) for each in proofs.values())
    note = (
        f"The values of {words.plural(count, 'dropped field')} were replaced on held-out rows and no logit moved; "
        "then the fields were removed."
    )
    header = ["Removed how", "max |Δ logit|", "bound", ""]
    return card("Certificate", table(header, rows), note=note if count else None, wide=False)


def verdict(proof: Mapping[str, Any]) -> Html:
    """Return whether a proof holds."""
    if not proof.get("certified"):
        return tag("span", "not certified", class_="pill no")
    equal = proof["max_logit_change"] == 0
    return tag("span", "bit-equal" if equal else "certified", class_="pill yes")


def savings(run: Run) -> Html:
    """Return what is saved: tables, parameters, time."""
    saved = run.part("savings")
    if not saved:
        return card("What it saves", tag("p", "Not measured in this run."), wide=False)
    old, new = saved["all_fields"], saved["kept"]
    rows = []
    for key, (title, show, more) in SAVED.items():
        before, after = old.get(key), new.get(key)
        if before is not None and after is not None:
            most = max(before, after) or 1
            better = after >= before if more else after <= before
            rows.append(
                [
                    word(title),
                    Cell(tag("span", show(before), bar(before / most, "off"), class_="barred")),
                    Cell(
                        tag("span", show(after), bar(after / most, "" if better else "negative"), class_="barred")
                    ),
                    Cell(words.change(before, after)),
                ]
            )
    note = "Serving speed is the median of a few runs on the machine of the search."
    return card("What it saves", table(["", "All fields", "Kept", ""], rows), note=note, wide=False)
