"""What the report of a selection says: verdict, warnings, curve, savings, fields, quality, command."""

from __future__ import annotations

import re
import shlex

import pytest

from lpfs.report import build_report
from lpfs.report.selection import selection_context
from lpfs.report.selection_data import from_record
from tests.helpers import hostile
from tests.helpers.judged import ALLOWED, NAMES, judged_record

SPACE = "\N{NO-BREAK SPACE}"


def context(record=None, **sections):
    return selection_context(from_record(judged_record(**sections) if record is None else record, name="a run"))


def column(table, title):
    number = table.header.index(title)
    return [row[number].text for row in table.rows]


def test_exchanged_fields_are_named():
    title = "Exchanged after the search, by held-out loss"
    pairs = [{"kept": f"in {number}", "dropped": f"out {number}"} for number in range(10)]
    assert dict(context(made={"exchanged": pairs[:2]})["verdict_facts"])[title] == (
        "in 0 instead of out 0, in 1 instead of out 1"
    )
    assert dict(context(made={"exchanged": pairs})["verdict_facts"])[title].endswith("in 7 instead of out 7 and 2 more")
    assert title not in dict(context(made={"exchanged": []})["verdict_facts"])


def test_the_order_is_that_of_its_readers():
    text = build_report(judged_record(), hostile.search_history(list(NAMES), 9))
    titles = re.findall(r"<h[12][^>]*>([^<]*)</h[12]>", text)
    wanted = [
        "12 of 40",
        "Warnings",
        "How many fields",
        "What it saves",
        "Certificate",
        "Fields",
        "AUC before and after",
    ]
    wanted += ["How the search went", "Gate trajectories", "Gate histogram", "The search", "Hot start", "AUC loss"]
    assert [title[: len(start)] for title, start in zip(titles, [*wanted, "How it was made"], strict=True)] == [
        *wanted,
        "How it was made",
    ]
    closed = text[text.index('<details class="card"') :]
    assert closed.count('<details class="card"') == 2
    assert " open" not in re.findall("<details[^>]*>", text)


def test_the_verdict_is_the_headline():
    page = context()
    assert page["headline"].replace(SPACE, " ") == judged_record()["verdict"]["text"]
    facts = dict(page["verdict_facts"])
    assert facts["Judged on"].startswith("61,000 test rows, 3,900 positives (days 2024")
    assert facts["Allowed loss of AUC"] == "0.0021: 1 % of what all fields gain over none"
    checks = facts["Checked before, on 20,000 validation rows, 1,200 positives"]
    assert re.search("10 fields lose at most 0.0031, too much; 12 fields lose at most 0.0019, which holds", checks)
    assert facts["Target"] == "keep exactly 12 fields"


def test_an_undecided_verdict_gives_its_reason_once():
    reason = "the test rows have 3 positives; at least 50 are needed"
    verdict = {"kind": "not decided", "text": f"not decided: {reason}", "reason": reason, "rows": 3_000, "positives": 3}
    page = context(verdict=verdict)
    assert page["headline"] == f"Not decided: {reason}"
    assert (page["verdict_style"], "Why" in dict(page["verdict_facts"])) == ("open", False)
    page = context(verdict={**verdict, "text": "not decided"})
    assert dict(page["verdict_facts"])["Why"] == reason


def test_all_warnings_are_on_top_with_their_fields():
    leak, unique, drift = context()["warnings"]
    assert (leak.title, leak.style, leak.names) == ("Possible leak", "bad", [])  # its text names the field
    assert [name for name, _ in unique.names] == list(NAMES[-3:])
    assert [name for name, _ in drift.names] == [NAMES[3]]
    hints = {"hints": [{"kind": "same column", "fields": ["a", "b"], "text": "'a' and 'b' are one column"}]}
    (hint,) = context(hostile.selection_record(["a", "b"], **hints))["warnings"]
    assert (hint.title, hint.names) == ("Same column", [])


def test_the_curve_marks_the_recommended_number_and_that_of_the_run():
    chart = context()["charts"]["curve"]
    assert chart["marks"] == [{"x": 12, "label": "recommended, this run: 12"}]
    assert chart["x"] == list(range(41))
    low, high = chart["range"]
    assert low < 0 < 2 * ALLOWED < high < 0.1  # the allowance is visible, the loss of no field is not
    curve = {**judged_record()["curve"], "recommended": 9}
    marks = context(curve=curve)["charts"]["curve"]["marks"]
    assert marks == [{"x": 12, "label": "this run: 12"}, {"x": 9, "label": "recommended: 9"}]
    checks = [{"fields": 9, "upper": 0.1, "holds": False}, {"fields": 12, "upper": -0.01, "holds": True}]
    page = context(curve=curve, verdict={**judged_record()["verdict"], "checks": checks})
    assert page["charts"]["curve"]["marks"][1]["label"] == "recommended (check failed): 9"
    assert (
        "12 fields gain at least 0.0100, which holds"
        in dict(page["verdict_facts"])["Checked before, on validation rows"]
    )
    table = context()["curve_table"]
    assert column(table, "Removed last")[:3] == ["–", NAMES[-1], NAMES[-2]]
    assert [row[0].text for row, style in zip(table.rows, table.row_styles, strict=True) if style] == ["12"]


def test_a_curve_that_removes_other_fields_has_no_list_of_fields():
    curve = judged_record()["curve"]
    points = [{**point, "removed": None if point["fields"] == 3 else point["removed"]} for point in curve["points"]]
    assert "removed" not in context(curve={**curve, "points": points})["charts"]["curve"]
    assert "curve" not in context(curve={"points": points[:1]})["charts"]


def test_what_is_saved_with_the_spread_of_the_time_and_the_unit_of_the_costs():
    tiles = {tile.title: tile for tile in context()["savings"]}
    assert (tiles["Fields to fetch"].value, tiles["Fields to fetch"].text) == ("12", "of 40, −70 %")
    assert tiles["Cost of the fields (ms)"].value == "13"
    assert tiles["Time per 1,000 rows"].value == "3.14 ms"
    assert tiles["Time per 1,000 rows"].text.endswith("Spread: 3.08 ms to 3.32 ms")
    assert {tile.good for tile in tiles.values()} == {True}
    slower = {"all_fields": {"rows_per_second": 100.0}, "kept": {"rows_per_second": 50.0}}
    tiles = {tile.title: tile for tile in context(savings=slower, cost=None)["savings"]}
    assert set(tiles) == {"Fields to fetch", "Time per 1,000 rows"}
    assert not tiles["Time per 1,000 rows"].good


def test_the_table_of_fields_is_sorted_by_worth_and_hides_constants():
    record = judged_record()
    values = list(record["fields"].items())
    record["fields"] = dict(reversed(values))
    record["gates"] = dict(reversed(record["gates"].items()))
    table = context(record)["fields"]
    assert column(table, "Field") == list(NAMES)
    assert column(table, "Worth to the kept fields")[0] == f"0.0600{SPACE}±{SPACE}0.0012"
    assert not {"Group", "Kind", "Cost", "Cardinality", "Chosen in 1"} & set(table.header)  # constant or repeated
    assert {"Worth to all fields", "AUC alone", "Substitutes", "Missing", "Distinct values", "Drift"} <= set(
        table.header
    )
    closest = {"value": 0.5, "low": 0.4, "high": 0.6}
    record["fields"][NAMES[30]]["gain_if_added_to_kept"] = closest
    assert column(context(record)["fields"], "Field")[12] == NAMES[30]


def test_without_worth_the_curve_orders_the_fields_and_then_the_gates():
    record = hostile.selection_record(list("abcdef"), 2)
    assert column(context(record)["fields"], "Field") == list("abcdef")
    points = [{"fields": 6, "removed": None, "loss": 0.0}]
    points += [{"fields": 5 - number, "removed": name, "loss": 0.1} for number, name in enumerate("cfedba")]
    record["curve"] = {"points": points}
    assert column(context(record)["fields"], "Field") == list("abdefc")


def test_auc_before_and_after_with_intervals_and_the_shipped_row():
    table = context()["quality"]
    assert column(table, "Test AUC")[0] == f"0.861{SPACE}±{SPACE}0.006"
    shipped = table.row_styles.index("shipped")
    assert table.rows[shipped][0].badge == "shipped"
    assert column(table, "vs all fields")[shipped] == f"−0.0004{SPACE}±{SPACE}0.0011"
    better = {**judged_record()["verdict"], "loss": -0.0083, "low": -0.011, "high": -0.0056}
    assert column(context(verdict=better)["quality"], "vs all fields")[shipped] == f"+0.0083{SPACE}±{SPACE}0.0027"
    plain = context(hostile.selection_record(["a", "b"]))["quality"]
    assert column(plain, "Test AUC")[0] == "0.8000"


def test_the_boundary_of_the_search_is_labeled():
    history = hostile.search_history(["a", "b", "c", "d"], 5)
    gates = [
        [1.0, 1.0, 1.0, 1.0],
        [0.9, 0.8, 0.0, 0.2],
        [0.9, 0.7, 0.0, 0.1],
        [0.9, 0.5, 0.0, 0.0],
        [1.0, 0.4, 0.0, 0.0],
    ]
    history = [{**record, "gates": values} for record, values in zip(history, gates, strict=True)]
    text = build_report(hostile.selection_record(["a", "b", "c", "d"], 2), history)
    chart = re.search(r'"trajectories":({.*?})', text).group(1)
    fields, labeled = (
        list(map(int, re.search(rf'"{key}":\[([^]]*)', chart)[1].split(","))) for key in ("fields", "labeled")
    )
    assert [fields[line] for line in labeled] == [1, 3]  # b is the kept field with the smallest gate, d is dropped last


@pytest.mark.parametrize("name", ["a run", "-run", "it's"])
def test_the_command_is_the_real_one(name):
    record = judged_record(configuration={"source": ["my log.csv"], "label": "x y", "curve": False, "graph": True})
    command = selection_context(from_record(record, name=name))["command"]
    words = shlex.split(command)
    assert words[:5] == ["lpfs", "select", "my log.csv", "--label", "x y"]
    assert "--no-curve" in words
    assert words[words.index("--graph") + 1] == "on"
    assert words[-1].removeprefix("--out=") == name
