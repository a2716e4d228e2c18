"""The page of a selection: the answer, the fields, how the gates moved, what it is worth, how it was made."""

from __future__ import annotations

from lpfs.markup import Html, tag, together
from lpfs.report import words
from lpfs.report.charts import charts_of
from lpfs.report.fields import fields
from lpfs.report.made import how_made
from lpfs.report.moves import gates
from lpfs.report.page import page
from lpfs.report.parts import tile
from lpfs.report.run import Run
from lpfs.report.worth import certificate, quality, savings


def selection_page(run: Run) -> str:
    """Return the page of a run as one document."""
    charts = charts_of(run)
    body = together(
        hero(run),
        fields(run),
        tag("div", *gates(run, charts), class_="grid"),
        tag("div", *quality(run, charts), certificate(run), savings(run), class_="grid"),
        how_made(run),
    )
    return page(f"{words.answer(run)} – {run.name}", f"Selection report · {run.name}", body, charts)


def hero(run: Run) -> Html:
    """Return the answer and the numbers that matter."""
    metrics, saved = run.part("metrics") or run.part("validation"), run.part("savings")
    chosen = metrics.get(str(run.said.get("model"))) or metrics.get("gated")
    before, after = words.auc(metrics.get("all_fields")), words.auc(chosen)
    total, kept = len(run.rows), len(run.kept)
    tiles = [tile("Fields kept", f"{kept:,}", f"of {total:,}, {total - kept:,} dropped")]
    if before is not None and after is not None:
        rows = "Test AUC" if run.part("metrics") else "Held-out AUC"
        moved = round(after - before, 4)
        tiles.append(tile(rows, f"{after:.4f}", f"{words.delta(moved)} against all fields", good=moved >= 0))
    if saved:
        for title, key, show in (
            ("Tables", "table_bytes", words.size),
            ("Parameters", "parameters", words.number),
        ):
            old, new = saved["all_fields"].get(key), saved["kept"].get(key)
            if old is not None and new is not None:
                tiles.append(
                    tile(title, show(new), f"{words.change(old, new)}, from {show(old)}", good=new <= old)
                )
    moved_most = run.said.get("max_logit_change")
    if moved_most is not None:
        tiles.append(tile("Largest change of a logit", words.number(moved_most, 2), "by removing the fields"))
    method = run.method or "a search"
    wish = wished(run)
    return tag(
        "div",
        tag("h1", words.answer(run)),
        tag("p", f"Found by {method}{f', told to {wish}' if wish else ''}.", class_="lead"),
        tag("dl", *tiles, class_="tiles"),
        class_="hero",
    )


def wished(run: Run) -> str:
    """Say what was asked for."""
    asked = run.part("configuration")
    if asked.get("keep") is not None:
        return f"keep exactly {asked['keep']}"
    if asked.get("penalty") is not None:
        return f"use a fixed penalty of {asked['penalty']:g}"
    if asked.get("budget") is not None:
        return f"stay within a budget of {asked['budget']:g}"
    if not asked:
        return ""
    allowed = asked.get("max_auc_loss") or run.part("made").get("end", {}).get("allowed", 0.001)
    return f"lose at most {allowed:g} of AUC"
