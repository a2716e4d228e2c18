"""The page, parsed: every name is text, whatever it says."""

from __future__ import annotations

import html.parser
import json
import re

import hostile
import pytest

from lpfs.markup import shortened, visible
from lpfs.report.comparison import Comparison, Difference, Result
from lpfs.report.page import SCRIPTS, STYLES, asset, hashed
from lpfs.report.selection import selection_page
from lpfs.report.verb import report, report_comparison
from lpfs.report.versus import curves

ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "script",
        "noscript",
        "body",
        "header",
        "main",
        "footer",
        "section",
    ),
    *("div", "span", "h1", "h2", "p", "b", "bdi", "dl", "dt", "dd", "figure", "figcaption", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "pre", "code"),
    *("input", "button", "label", "output", "select", "option"),
}


class Page(html.parser.HTMLParser):
    """What a parser makes of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.names, self.scripts, self.inside = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        self.named = tag == "bdi" and ("class", "name") in attrs
        if self.named:
            self.names.append("")
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in ("meta", "input"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        assert self.inside, f"</{tag}> ends nothing"
        assert self.inside.pop() == tag

    def handle_data(self, data):
        if self.inside and self.inside[-1] == "bdi" and self.named:
            self.names[-1] += data
        if self.inside and self.inside[-1] == "script":
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))


def read(path):
    return Page(path.read_text("utf-8"))


def test_200_hostile_names_are_200_texts(make_folder):
    names = hostile.names()
    assert len(set(names)) == 200
    page = read(report(make_folder(names)))
    assert page.names[:200] == [shortened(visible(each)) for each in names]
    assert set(page.tags) <= ALLOWED
    assert page.inside == []
    assert not [
        each for each in page.attributes if each[1].startswith("on") or each[1] in ("href", "src", "style")
    ]
    data = json.loads(page.scripts[0][1])
    assert data["names"] == names
    assert [each[0] for each in page.scripts] == [{"type": "application/json", "id": "charts"}, {}, {}]


def test_the_page_of_any_names_has_the_tags_of_a_harmless_one(make_folder):
    names = hostile.names()
    tame = [f"field {number}" for number in range(200)]
    one = read(report(make_folder(names, name="one")))
    other = read(report(make_folder(tame, name="other")))
    assert one.tags == other.tags


def test_hostile_texts_outside_of_names(make_folder):
    evil = hostile.TAGS[1]
    told = {"method": evil, "fingerprint": evil, "versions": {evil: evil}, "seconds": {evil: 1.0}}
    page = read(report(make_folder(["a", "b"], **told)))
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("script") == 3


def test_a_comparison_of_hostile_names(tmp_path):
    names = tuple(hostile.names())
    results = [
        Result(evil, keep, seed, 0.8, kept=names[:keep], seconds=2.0)
        for evil in hostile.TAGS[:6]
        for keep in (50, 100)
        for seed in (0, 1)
    ]
    found = Comparison(tuple(results), names, failed={hostile.TAGS[1]: hostile.TAGS[0]}, all_fields=0.9)
    page = read(report_comparison(found, tmp_path / "page.html"))
    assert sorted(page.names) == sorted(shortened(visible(each)) for each in names)
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("script") == 3
    assert not [each for each in page.attributes if each[1].startswith("on")]


def test_nothing_in_the_page_can_ask_the_network_for_anything(make_folder):
    text = report(make_folder(["a", "b"])).read_text("utf-8")
    page = Page(text)
    policy = next(value for _, key, value in page.attributes if key == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for each in (*SCRIPTS, *STYLES):
        assert hashed(asset(each)) in policy
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", text)
    for each in SCRIPTS:
        assert "</script" not in asset(each).lower()
        assert "<!--" not in asset(each)
        assert "innerHTML" not in asset(each)


def test_files_are_written_where_they_are_asked_for_only(make_folder):
    folder = make_folder(hostile.names(), name="a run")
    before = {each.relative_to(folder.parent) for each in folder.parent.rglob("*")}
    report(folder)
    after = {each.relative_to(folder.parent).as_posix() for each in folder.parent.rglob("*")}
    assert after - {each.as_posix() for each in before} == {"a run/report.html"}


@pytest.mark.parametrize(
    ("count", "records", "most"), [(40, 200, 1e6), (40, 5000, 1e6), (1000, 200, 3e6), (1000, 2000, 3e6)]
)
def test_the_page_stays_small(make_folder, count, records, most):
    path = report(make_folder([f"feature_number_{number:04d}" for number in range(count)], records=records))
    assert path.stat().st_size < most


def test_many_fields_are_all_in_the_table(make_folder):
    names = [f"f{number}" for number in range(3000)]
    page = read(report(make_folder(names, records=30)))
    assert len(page.names) == 3000
    assert len(json.loads(page.scripts[0][1])["trajectories"]["fields"]) == 1000


@pytest.mark.parametrize(
    "gone",
    [
        "metrics",
        "validation",
        "savings",
        "certificates",
        "fields",
        "hot_start",
        "made",
        "configuration",
        "periods",
        "versions",
        "chosen_in",
        "gates",
        "seconds",
        "max_logit_change",
    ],
)
def test_a_run_that_says_less_has_a_page_too(make_folder, gone):
    folder = make_folder(["a", "b", "c"], kept=1)
    values = json.loads((folder / "selection.json").read_text())
    del values[gone]
    (folder / "selection.json").write_text(json.dumps(values))
    page = read(report(folder))
    assert page.names == ["a", "b", "c"]


def test_the_barest_run():
    from lpfs.report.run import make_run

    page = Page(selection_page(make_run({"kept": ["a"], "dropped": []})))
    assert page.names == ["a"]


def test_a_comparison_in_numbers(tmp_path):
    results = [
        Result(name, keep, seed, 0.7 + keep / 100 + gain + seed / 1000, kept=("a", "b")[: keep // 5])
        for name, gain in (("one", 0.0), ("two", 0.01))
        for keep in (5, 10)
        for seed in (0, 1)
    ]
    found = Comparison(tuple(results), ("a", "b"))
    text = report_comparison(found, tmp_path / "x.html").read_text("utf-8")
    assert found.methods == ("two", "one")
    assert "two is best on average over 2 numbers of fields, and first at 2 of 2." in text
    assert "0.7605 ± 0.0007" in text
    assert "−0.0100 … −0.0100" in text
    given = Difference("one", "two", 5, -0.01, -0.02, -0.001, 0.03)
    told = Comparison(
        tuple(results), ("a", "b"), differences=(given, Difference("one", "two", 10, -0.01, -0.02, 0.001))
    )
    text = report_comparison(told, tmp_path / "x.html").read_text("utf-8")
    assert (text.count("beyond noise</span>"), text.count("within noise</span>")) == (1, 1)


def test_many_methods_stay_readable(tmp_path):
    results = [
        Result(f"method {number:02d}", keep, seed, 0.8 - number / 50 + keep / 1000, kept=("a",), seconds=1.0)
        for number in range(12)
        for keep in (5, 10)
        for seed in (0, 1)
    ]
    found = Comparison(tuple(results), ("a", "b"))
    drawn = curves(found)
    assert [each["colour"] for each in drawn["series"]].count("off") == 4
    assert [each["label"] for each in drawn["series"] if "low" in each] == [f"method {at:02d}" for at in range(8)]
    assert 0.64 < drawn["range"][0] < 0.8 - 7 / 50 + 0.005  # the weakest of the first eight is in the picture
    assert 'class="heat many"' in report_comparison(found, tmp_path / "x.html").read_text("utf-8")


def test_who_stands_aside_is_never_the_best(tmp_path):
    results = [Result(name, 5, 0, auc, kept=("a",)) for name, auc in (("oracle", 0.9), ("one", 0.8), ("two", 0.7))]
    found = Comparison(tuple(results), ("a", "b"), order=("oracle", "two", "one"), aside=("oracle",))
    assert (found.methods, found.fair) == (("oracle", "two", "one"), ("two", "one"))
    text = report_comparison(found, tmp_path / "x.html").read_text("utf-8")
    assert "two is best on average over 1 number of fields, and first at 0 of 1." in text
