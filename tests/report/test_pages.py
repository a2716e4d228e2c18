"""The pages, parsed: every name is text, nothing is loaded, and every section can be missing."""

from __future__ import annotations

import html.parser
import json
import re

import pytest

from lpfs._text import escape_control_chars, truncate_middle
from lpfs.report import Comparison, Difference, Result, build_report, report, report_comparison, report_experiment
from lpfs.report.build import SCRIPTS, STYLES, _asset, _csp_hash
from lpfs.report.comparison import VERDICT_TEXTS, comparison_context, k_auc_chart
from tests.helpers import hostile
from tests.helpers.judged import judged_record

ALLOWED = {
    *("html", "head", "meta", "title", "style", "script", "noscript", "body", "header", "main", "footer", "section"),
    *(
        "div",
        "span",
        "h1",
        "h2",
        "h3",
        "ul",
        "li",
        "p",
        "b",
        "bdi",
        "dl",
        "dt",
        "dd",
        "figure",
        "figcaption",
        "details",
        "summary",
    ),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "pre", "code"),
    *("input", "button", "label", "output", "select", "option"),
}


class Page(html.parser.HTMLParser):
    """The elements, attributes, field names and scripts of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.names, self.scripts, self.open_tags = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag == "wbr":  # after an underscore of a name
            return
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        self.in_name = tag == "bdi" and ("class", "name") in attrs
        if self.in_name:
            self.names.append("")
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in ("meta", "input", "img"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags, f"</{tag}> closes no element"
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        if self.open_tags and self.open_tags[-1] == "bdi" and self.in_name:
            self.names[-1] += data
        if self.open_tags and self.open_tags[-1] == "script":
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))


def read(path):
    return Page(path.read_text("utf-8"))


def test_200_hostile_names_are_200_texts(make_run_dir):
    names = hostile.names()
    assert len(set(names)) == 200
    page = read(report(make_run_dir(names)))
    assert page.names[:200] == [truncate_middle(escape_control_chars(name)) for name in names]
    assert set(page.tags) <= ALLOWED
    assert page.open_tags == []
    keys = {key for _, key, _ in page.attributes}
    assert not [key for key in keys if key.startswith("on") or key in ("href", "src", "style")]
    assert json.loads(page.scripts[0][1])["names"] == names
    assert [attributes for attributes, _ in page.scripts] == [{"type": "application/json", "id": "charts"}, {}, {}]


def test_hostile_names_change_no_tag(make_run_dir):
    hostile_page = read(report(make_run_dir(hostile.names(), name="hostile")))
    plain_page = read(report(make_run_dir([f"field {number}" for number in range(200)], name="plain")))
    assert hostile_page.tags == plain_page.tags


def test_hostile_names_in_verdict_warnings_and_curve():
    names = hostile.names()
    page, plain = (Page(build_report(judged_record(fields))) for fields in (names, [f"field {n}" for n in range(200)]))
    assert page.tags == plain.tags
    assert set(page.tags) <= ALLOWED
    assert set(page.names) == {truncate_middle(escape_control_chars(name)) for name in names}
    charts = json.loads(page.scripts[0][1])
    assert [charts["names"][field] for field in charts["curve"]["removed"]] == names[::-1]
    texts = {"text": hostile.TAGS[1], "kind": "costs", "reason": hostile.TAGS[0], "allowed_because": hostile.TAGS[2]}
    record = judged_record(names, warnings=[{"kind": hostile.TAGS[4], "text": hostile.TAGS[5], "fields": names}])
    page = Page(build_report({**record, "verdict": {**record["verdict"], **texts}}))
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("script") == 3


def test_hostile_texts_outside_of_names(make_run_dir):
    text = hostile.TAGS[1]
    sections = {"method": text, "fingerprint": text, "versions": {text: text}, "seconds": {text: 1.0}}
    page = read(report(make_run_dir(["a", "b"], **sections)))
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("script") == 3


def test_a_comparison_of_hostile_names(tmp_path):
    names = tuple(hostile.names())
    results = [
        Result(method, keep, seed, 0.8, kept=names[:keep], seconds=2.0)
        for method in hostile.TAGS[:6]
        for keep in (50, 100)
        for seed in (0, 1)
    ]
    comparison = Comparison(tuple(results), names, failed={hostile.TAGS[1]: hostile.TAGS[0]}, all_fields=0.9)
    page = read(report_comparison(comparison, tmp_path / "page.html"))
    assert sorted(page.names) == sorted(truncate_middle(escape_control_chars(name)) for name in names)
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("script") == 3
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]


def test_an_experiment_of_hostile_texts(tmp_path):
    text, picture = hostile.TAGS[1], tmp_path / "figure.png"
    picture.write_bytes(b"PNG")
    record = {
        "experiment": text,
        "claim": text,
        "data": {"kind": "simulated", "description": f"simulated: {text}", "fingerprint": "ff00"},
        "full": False,
        "seconds": 75.0,
        "seed": 0,
        "settings": {"seeds": 2, "x": text},
        "table": [[text, "1", "2"]],
        "measured": {"alpha": [1, 2]},
        "command": "lpfs reproduce alpha\n  --full",
        "versions": {"lpfs": "0"},
    }
    path = report_experiment(record, text, picture, tmp_path / "page.html")
    page = read(path)
    assert set(page.tags) <= {*ALLOWED, "img"}
    assert page.tags.count("script") == 3
    assert ("img", "src", "data:image/png;base64,UE5H") in page.attributes
    assert next(value for _, key, value in page.attributes if key == "content").count("img-src data:") == 1
    assert "lpfs reproduce alpha\n  --full</code>" in path.read_text("utf-8")


def test_nothing_is_loaded_from_the_network(make_run_dir):
    text = report(make_run_dir(["a", "b"])).read_text("utf-8")
    page = Page(text)
    policy = next(value for _, key, value in page.attributes if key == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "img-src" not in policy
    for name in (*SCRIPTS, *STYLES):
        assert _csp_hash(_asset(name)) in policy
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", text)
    for name in SCRIPTS:
        assert "</script" not in _asset(name).lower()
        assert "<!--" not in _asset(name)
        assert "innerHTML" not in _asset(name)


def test_only_the_report_is_written(make_run_dir):
    run_dir = make_run_dir(hostile.names(), name="a run")
    before = set(run_dir.parent.rglob("*"))
    report(run_dir)
    assert set(run_dir.parent.rglob("*")) - before == {run_dir / "report.html"}


@pytest.mark.parametrize(
    ("fields", "records", "max_bytes"), [(40, 200, 1e6), (40, 5000, 1e6), (1000, 200, 3e6), (1000, 2000, 3e6)]
)
def test_the_page_stays_small(make_run_dir, fields, records, max_bytes):
    path = report(make_run_dir([f"feature_number_{number:04d}" for number in range(fields)], records=records))
    assert path.stat().st_size < max_bytes


def test_many_fields_are_all_in_the_table(make_run_dir):
    page = read(report(make_run_dir([f"f{number}" for number in range(3000)], records=30)))
    assert len(page.names) == 3000
    assert len(json.loads(page.scripts[0][1])["trajectories"]["fields"]) == 1000


SECTIONS = ("metrics", "validation", "savings", "certificates", "fields", "hot_start", "made", "configuration")
SECTIONS += ("splits", "versions", "chosen_in", "gates", "seconds", "max_logit_change")
SECTIONS += ("verdict", "warnings", "curve", "groups", "cost")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_can_be_missing(make_run_dir, section):
    run_dir = make_run_dir(["a", "b", "c"], kept=1)
    for record in (hostile.selection_record(["a", "b", "c"], 1), judged_record(["a", "b", "c"], 1)):
        record.pop(section, None)
        (run_dir / "selection.json").write_text(json.dumps(record))
        assert set(read(report(run_dir)).names) == {"a", "b", "c"}


def test_the_smallest_record():
    assert Page(build_report({"kept": ["a"], "dropped": []})).names == ["a"]


def test_a_comparison_in_numbers(tmp_path):
    results = [
        Result(name, keep, seed, 0.7 + keep / 100 + gain + seed / 1000, kept=("a", "b")[: keep // 5])
        for name, gain in (("one", 0.0), ("two", 0.01))
        for keep in (5, 10)
        for seed in range(3)
    ]
    comparison = Comparison(tuple(results), ("a", "b"))
    text = report_comparison(comparison, tmp_path / "x.html").read_text("utf-8")
    assert comparison.methods == ("two", "one")
    assert re.search("<h1>two .* 2 numbers of fields.* one .*more than noise", text)
    assert "0.7610\xa0±\xa00.0010" in text
    assert "−0.0100 … −0.0100" in text
    differences = (
        Difference("one", "two", 5, -0.01, -0.02, -0.001, 0.03),
        Difference("one", "two", 10, -0.01, -0.02, 0.001),
    )
    comparison = Comparison(tuple(results), ("a", "b"), differences=differences)
    text = report_comparison(comparison, tmp_path / "x.html").read_text("utf-8")
    for verdict in ("behind", "level"):
        assert text.count(f"{VERDICT_TEXTS[verdict]}</span>") == 1


def test_many_methods_stay_readable(tmp_path):
    results = [
        Result(f"method {number:02d}", keep, seed, 0.8 - number / 50 + keep / 1000, kept=("a",), seconds=1.0)
        for number in range(12)
        for keep in (5, 10)
        for seed in range(3)
    ]
    comparison = Comparison(tuple(results), ("a", "b"))
    chart = k_auc_chart(comparison)
    assert [series["color"] for series in chart["series"]].count("off") == 4
    with_band = [series["label"] for series in chart["series"] if "low" in series]
    assert with_band == [f"method {number:02d}" for number in range(8)]
    assert 0.64 < chart["range"][0] < 0.8 - 7 / 50 + 0.005  # the weakest of the first eight is visible
    assert 'class="heat many"' in report_comparison(comparison, tmp_path / "x.html").read_text("utf-8")


def test_an_unranked_method_is_never_the_best(tmp_path):
    results = [Result(name, 5, 0, auc, kept=("a",)) for name, auc in (("oracle", 0.9), ("one", 0.8), ("two", 0.7))]
    comparison = Comparison(tuple(results), ("a", "b"), order=("oracle", "two", "one"), unranked=("oracle",))
    assert (comparison.methods, comparison.ranked_methods) == (("oracle", "two", "one"), ("two", "one"))
    text = report_comparison(comparison, tmp_path / "x.html").read_text("utf-8")
    assert "<h1>two " in text


def compared(deltas, keeps=(5, 10), differences=()):
    """A comparison of "best" and others, each with its difference to it in every seed."""
    aucs = {"best": [0.8] * len(next(iter(deltas.values()))), **{m: [0.8 + d for d in ds] for m, ds in deltas.items()}}
    results = [
        Result(method, keep, seed, auc)
        for method, values in aucs.items()
        for keep in keeps
        for seed, auc in enumerate(values)
    ]
    return Comparison(tuple(results), ("a", "b"), order=tuple(aucs), differences=differences)


@pytest.mark.parametrize(
    ("deltas", "words"),
    [
        ({"other": [-0.1, -0.2]}, ["2 seeds", "noise"]),
        ({"other": [-0.1, -0.2, 0.01]}, ["no difference"]),
        ({"other": [-0.1, -0.2, -0.01]}, ["other", "more than noise"]),
        ({"near": [-0.1, 0.01, 0.0], "far": [-0.1, -0.2, -0.3]}, ["near is within noise", "far is worse"]),
        ({"far": [-0.2] * 3, **{name: [-0.1, 0.2, 0.0] for name in "abcde"}}, ["5 other methods are within", "far is"]),
    ],
)  # fmt: skip
def test_the_headline_of_a_comparison_says_what_is_within_noise(deltas, words):
    headline = comparison_context(compared(deltas))["headline"]
    assert headline.startswith("best is best on average over 2 numbers of fields")
    assert all(word in headline for word in words)


def test_the_headline_takes_the_verdicts_that_are_given():
    level = Difference("other", "best", None, -0.1, verdict="level")
    headline = comparison_context(compared({"other": [-0.1] * 3}, differences=(level,)))["headline"]
    assert "no difference to it is more than noise" in headline


def test_points_for_a_few_numbers_of_fields_and_ranges_from_three_seeds_on():
    few, many = compared({"other": [-0.1] * 2}), compared({"other": [-0.1, -0.2, 0.1]}, keeps=range(1, 9))
    assert k_auc_chart(few)["points"]
    assert "points" not in k_auc_chart(many)
    assert ["low" in series for series in k_auc_chart(few)["series"]] == [False, False]
    assert ["low" in series for series in k_auc_chart(many)["series"]] == [True, True]
    assert "±" not in str(comparison_context(few)["quality"])
    assert "±" in str(comparison_context(many)["quality"])
    assert "Best" not in str(comparison_context(many)["tiles"])
