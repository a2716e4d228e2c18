"""The report in a real browser: it renders, sorts and searches, without console messages or requests."""

from __future__ import annotations

import csv
import io
import json
import random

import polars as pl
import pytest

from lpfs._text import escape_control_chars, truncate_middle
from lpfs.report import Comparison, Result, report, report_comparison
from tests.helpers import hostile
from tests.helpers.judged import NAMES, judged_record

pytestmark = pytest.mark.browser
FIELDS = [f"field_{number:02d}" for number in range(40)]
INK = """place => {
    const canvas = place.querySelector("canvas");
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.filter((value, at) => at % 4 === 3 && value > 0).length;
}"""
DRAWN = "[...document.querySelectorAll('[data-chart]')].every(element => element.querySelector('canvas'))"
MIDDLE = """(() => {
    const over = document.querySelector("[data-chart=trajectories] .u-over");
    over.scrollIntoView({block: "center"});
    const box = over.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height * 0.47];
})()"""
SHARES = """[...document.querySelectorAll("#heat tbody tr")]
    .reduce((sum, row) => sum + Number(row.cells[1].dataset.v), 0)"""


def write_run(run_dir, fields, records=200, values=None):
    """Write a run directory in which gates decrease to zero or increase to one."""
    run_dir.mkdir()
    values = values or hostile.selection_record(fields)
    (run_dir / "selection.json").write_text(json.dumps(values), "utf-8")
    rng, kept = random.Random(0), len(values["kept"])
    columns = {"step": [5 * (at + 1) for at in range(records)], "loss": [rng.random() for _ in range(records)]}
    columns["alive"] = [max(kept, len(fields) - at) for at in range(records)]
    columns["penalty"] = [0.1 if at < records / 2 else 0.1 * 0.8 ** (at - records / 2) for at in range(records)]
    columns["epsilon"] = [0.1 * 0.95**at for at in range(records)]
    for number, name in enumerate(fields):
        try:
            name.encode()
        except UnicodeEncodeError:
            continue
        end = rng.randrange(20, 150)
        wave = [0.6 + 0.4 * abs(1 - 2 * at / records) + rng.gauss(0, 0.02) for at in range(records)]
        columns[f"gate:{name}"] = wave if number < kept else [max(0.0, 1 - at / end) for at in range(records)]
    pl.DataFrame(columns).write_parquet(run_dir / "history.parquet")
    return run_dir


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    return report(write_run(tmp_path_factory.mktemp("run") / "run", FIELDS))


@pytest.fixture(scope="session")
def judged(tmp_path_factory):
    """A run with verdict, warnings, curve and the worth of its fields."""
    return report(write_run(tmp_path_factory.mktemp("judged") / "run", NAMES, values=judged_record()))


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    rng = random.Random(0)
    results = [
        Result(name, keep, seed, 0.85 - 0.3 / keep - lost, 0.4, tuple(rng.sample(FIELDS, keep)), cost)
        for name, lost, cost in (("lpfs++", 0.0, 12.0), ("lpfs", 0.004, 11.0), ("permutation", 0.01, 2.0))
        for keep in (5, 10, 20)
        for seed in range(3)
    ]
    comparison = Comparison(tuple(results), tuple(FIELDS), "cmp", 0.86)
    return report_comparison(comparison, tmp_path_factory.mktemp("cmp") / "report.html")


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """A comparison of more methods than colors."""
    rng = random.Random(0)
    results = [
        Result(f"method_{number}", keep, seed, 0.8 - number / 100, 0.4, tuple(rng.sample(FIELDS, keep)), 1.0 + number)
        for number in range(25)
        for keep in (5, 20)
        for seed in range(2)
    ]
    comparison = Comparison(tuple(results), tuple(FIELDS), "many", 0.81, unranked=("method_0",))
    return report_comparison(comparison, tmp_path_factory.mktemp("many") / "report.html")


def field_names(browser, shown=True):
    rows = "[...document.querySelectorAll('#fields tbody tr')]"
    some = f"{rows}.filter(row => row.offsetParent !== null)" if shown else rows
    return browser.run(f"{some}.map(row => row.cells[0].textContent)")


def set_value(browser, identity, value, event="input"):
    place = f"document.getElementById('{identity}')"
    browser.run(f"{place}.value = '{value}'; {place}.dispatchEvent(new Event('{event}', {{bubbles: true}}))")


def open_all(browser):
    """Open all closed sections and wait until their charts are drawn."""
    browser.run("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    browser.until(DRAWN)


def assert_no_messages_or_requests(browser, path):
    assert browser.problems() == []
    assert browser.requests() == [path.resolve().as_uri()]


@pytest.mark.parametrize(
    ("kind", "width", "dark"), [("light", 1200, False), ("dark", 1200, True), ("phone", 390, False)]
)
@pytest.mark.parametrize("which", ["page", "judged", "compared", "many"])
def test_it_renders_without_messages_or_requests(browser, request, artefacts, which, kind, width, dark):
    path = request.getfixturevalue(which)
    browser.open(path, width=width, dark=dark)
    browser.picture(artefacts / f"report-{which}-{kind}.png")
    assert browser.run("document.documentElement.scrollWidth") <= width
    open_all(browser)
    browser.picture(artefacts / f"report-{which}-{kind}-open.png")
    browser.until(DRAWN)
    assert_no_messages_or_requests(browser, path)
    assert browser.run("document.documentElement.scrollWidth") <= width
    drawn = browser.run(f"[...document.querySelectorAll('[data-chart]')].map({INK})")
    assert len(drawn) == {"page": 8, "judged": 9, "compared": 2, "many": 2}[which]
    assert min(drawn) > 500, drawn


@pytest.mark.parametrize("which", ["page", "judged", "compared"])
def test_printing(browser, request, artefacts, which):
    path = request.getfixturevalue(which)
    browser.open(path, dark=True)
    assert browser.pdf(artefacts / f"report-{which}.pdf").stat().st_size > 20_000
    assert_no_messages_or_requests(browser, path)
    assert browser.run("document.documentElement.classList.contains('printing')") is False
    assert browser.run("document.querySelectorAll('details[open]').length") == 0


CURVE = """(() => {
    const chips = id => [...document.querySelectorAll(`#${id} .chip`)].map(chip => chip.textContent);
    const text = id => document.getElementById(id).textContent;
    return [text("curve-text"), text("curve-change"), chips("curve-change"), chips("curve-fields")];
})()"""


def test_the_slider_of_the_curve(browser, judged, artefacts):
    browser.open(judged)
    text, change, _, fields = browser.run(CURVE)
    assert text.startswith("12 fields: AUC 0.8591 · AUC lost 0.0009")
    assert "within the allowed loss" in text
    assert (change, fields) == ("", list(NAMES[:12]))
    set_value(browser, "curve-keep", "9")
    text, change, chips, fields = browser.run(CURVE)
    assert text.startswith("9 fields: ")
    assert "not shown to be within the allowed loss" in text
    assert change.startswith("Gone")
    assert (chips, fields) == (list(NAMES[11:8:-1]), list(NAMES[:9]))
    browser.picture(artefacts / "report-slider.png")
    set_value(browser, "curve-keep", "14")
    _, change, chips, fields = browser.run(CURVE)
    assert change.startswith("Added")
    assert (chips, fields) == (list(NAMES[13:11:-1]), list(NAMES[:14]))
    set_value(browser, "curve-keep", "0")
    assert browser.run(CURVE)[3] == []
    limits = "(({min, max}) => [min, max])(document.querySelector('[data-chart=curve]').plot.scales.y)"
    before = browser.run(limits)
    browser.run("document.getElementById('curve-range').click()")
    after = browser.run(limits)
    assert before[1] < 0.01 < 0.3 < after[1]
    assert_no_messages_or_requests(browser, judged)


def test_wide_tables_have_a_cue_until_their_end(browser, page, judged):
    style = "getComputedStyle(document.getElementById('fields').parentElement.previousElementSibling)"
    browser.open(judged, width=390)
    browser.until(f"{style}.display === 'block'")
    assert browser.run(f"[{style}.display, {style}.visibility]") == ["block", "visible"]
    browser.run("document.getElementById('fields').parentElement.scrollLeft = 1e6")
    browser.until(f"{style}.visibility === 'hidden'")
    assert browser.run(f"{style}.visibility") == "hidden"
    browser.open(page)
    assert browser.run(f"{style}.display") == "none"


def test_sorting(browser, page):
    browser.open(page)
    assert field_names(browser) == FIELDS
    head = "[...document.querySelectorAll('#fields th')].find(head => head.textContent.startsWith('{}'))"
    click = head + ".querySelector('button').click()"
    browser.run(click.format("Cardinality"))
    assert field_names(browser) == FIELDS[::-1]
    assert browser.run(head.format("Cardinality") + ".getAttribute('aria-sort')") == "descending"
    browser.run(click.format("Cardinality"))
    assert field_names(browser) == FIELDS
    browser.run(click.format("Field"))
    browser.run(click.format("Field"))
    assert field_names(browser) == sorted(FIELDS, reverse=True)
    browser.run(click.format("Gate"))
    assert field_names(browser)[0] == "field_00"
    assert_no_messages_or_requests(browser, page)


def test_search_and_choice(browser, page):
    browser.open(page)
    set_value(browser, "search", "FIELD_0")
    assert field_names(browser) == FIELDS[:10]
    assert browser.run("document.getElementById('count').textContent") == "10 of 40"
    browser.run("document.querySelector('[data-show=dropped]').click()")
    assert field_names(browser) == []
    set_value(browser, "search", "")
    assert field_names(browser) == FIELDS[20:]
    browser.run("document.querySelector('[data-show=kept]').click()")
    assert field_names(browser) == FIELDS[:20]
    assert_no_messages_or_requests(browser, page)


def test_hover_names_a_field_and_the_slider_moves_the_histogram(browser, page, artefacts):
    browser.open(page)
    open_all(browser)
    at = browser.run(MIDDLE)
    browser("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    browser.settle()
    tip = browser.run("document.querySelector('[data-chart=trajectories] .tip').textContent")
    assert tip.startswith("field_")
    assert " at step " in tip
    browser.picture(artefacts / "report-hover.png")
    position = "document.getElementById('histogram-at').textContent"
    assert browser.run(position) == "1,000: 20 at 0"
    set_value(browser, "histogram-step", "0")
    assert browser.run(position) == "5: 0 at 0"
    assert_no_messages_or_requests(browser, page)


def test_the_heat_map_follows_the_number_of_fields(browser, compared):
    browser.open(compared)
    assert browser.run(SHARES) == pytest.approx(100 * 35 / 3, abs=25)
    set_value(browser, "heat-keep", "5", "change")
    assert browser.run(SHARES) == pytest.approx(500, abs=15)
    assert_no_messages_or_requests(browser, compared)


def test_200_hostile_field_names(browser, tmp_path, artefacts):
    hostile_names = hostile.names()
    path = report(write_run(tmp_path / "run", hostile_names, values=judged_record(hostile_names)))
    browser.open(path)
    for count in ("0", "100", "200"):
        set_value(browser, "curve-keep", count)
    open_all(browser)
    browser.picture(artefacts / "report-hostile.png")
    assert_no_messages_or_requests(browser, path)
    assert browser.run("typeof window.pwned") == "undefined"
    assert browser.run("document.querySelectorAll('script').length") == 3
    assert browser.run("document.querySelectorAll('img, iframe, a, form, object, base, link').length") == 0
    assert field_names(browser, shown=False) == [truncate_middle(escape_control_chars(name)) for name in hostile_names]
    assert browser.run("document.documentElement.scrollWidth") <= 1200
    text = browser.run("window.lpfsCsv()")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert len(rows) == 201
    assert not [row for row in rows if row[0].startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝"))]
    assert [row[0].removeprefix("'") for row in rows[1:]] == [name.removeprefix("'") for name in hostile_names]


def test_a_thousand_fields(browser, tmp_path):
    fields = [f"f{number:04d}" for number in range(1000)]
    path = report(write_run(tmp_path / "run", fields))
    browser.open(path)
    assert_no_messages_or_requests(browser, path)
    assert len(field_names(browser)) == 60
    browser.run("document.querySelector('button.more').click()")
    assert len(field_names(browser)) == 1000


def test_without_javascript_the_tables_are_there(browser, page, artefacts):
    browser("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.events.clear()
        browser("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in browser.events):
            browser.events.append(browser._next())
        browser("Page.captureScreenshot")
        text = browser.run("document.body.innerText")
    finally:
        browser("Emulation.setScriptExecutionDisabled", value=False)
    assert all(name in text for name in FIELDS)
    assert "Charts, sorting and search need JavaScript" in text
    assert "bit-equal" in text
    assert "Search fields" not in text
    assert "Gate trajectories" not in text
    assert "How the search went" in text


def test_a_chart_without_room_is_drawn_again_when_there_is_room(browser, page):
    browser.open(page)
    open_all(browser)
    browser.run("document.body.style.display = 'none'")
    browser.set_view(dark=True)
    browser.settle()
    browser.run("document.querySelectorAll('[data-chart]').forEach(element => { element.before = element.plot; })")
    browser.run("document.body.style.display = ''")
    redrawn = "[...document.querySelectorAll('[data-chart]')].every(element => element.plot !== element.before)"
    browser.until(redrawn)
    assert browser.run(redrawn)
    assert browser.run(DRAWN)
    assert browser.problems() == []
