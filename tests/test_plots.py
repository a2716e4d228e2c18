"""Figures and notebook HTML of a selection: they show its values, and names are text."""

from __future__ import annotations

import html.parser
import io
import sys

import matplotlib as mpl
import pytest

from lpfs import plots
from lpfs._text import escape_control_chars, truncate_middle
from lpfs.errors import InputError, MissingPackageError
from lpfs.notebook import outcome_html
from lpfs.schema import Selection
from tests.helpers import hostile
from tests.helpers.judged import ALLOWED, judged_record

mpl.use("agg")
HISTORY = [
    {"step": step, "alive": 3 - step, "penalty": 0.1 / step, "epsilon": 0.1, "gates": [1.0, 0.5 / step, 1 - step / 2]}
    for step in (1, 2)
]
SELECTION = Selection(("a", "b"), ("c",), {"a": 0.9, "b": -0.4, "c": 0.0}, history=HISTORY, made={"method": "lpfs++"})


def drawn(figure):
    """Render a figure, because most errors occur while it is drawn."""
    out = io.BytesIO()
    figure.savefig(out, format="png")
    assert out.getvalue().startswith(b"\x89PNG")
    return figure


def test_every_gate_has_its_bar():
    axes = drawn(plots.gates(SELECTION)).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.9, -0.4, 0.0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]


def test_the_histogram_counts_every_gate():
    axes = drawn(plots.histogram(SELECTION)).axes[0]
    assert sum(bar.get_height() for bar in axes.patches) == 3


def test_trajectories_are_the_history():
    axes = drawn(plots.trajectories(SELECTION, highlight=["c"])).axes[0]
    lines = sorted(tuple(line.get_ydata()) for line in axes.lines)
    assert lines == sorted([(1.0, 1.0), (0.5, 0.25), (0.5, 0.0)])
    assert [text.get_text() for text in axes.texts] == ["c"]
    with pytest.raises(InputError, match="no field 'z'"):
        plots.trajectories(SELECTION, highlight=["z"])


def test_the_search_and_the_overview():
    assert [axes.get_title("left") for axes in drawn(plots.search(SELECTION)).axes] == list(plots.TITLES.values())
    assert len(drawn(SELECTION.plot()).axes) == 2
    bare = Selection(("a",), ("b",), {"a": 1.0, "b": 0.0})
    assert len(drawn(bare.plot()).axes) == 1
    with pytest.raises(InputError, match=r"history\.parquet"):
        plots.search(bare)
    with pytest.raises(InputError, match="no gates to draw"):
        Selection(("a",), ()).plot()


def test_auc_of_every_model():
    metrics = {"all_fields": {"auc": 0.8}, "pruned": {"auc": 0.79}, "hot_start": {"auc": None}}
    axes = drawn(plots.quality(metrics, {"pruned": "Pruned"})).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.8000", "0.7900"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["all_fields", "Pruned"]
    with pytest.raises(InputError, match="no AUC"):
        plots.quality({"all_fields": {"auc": None}}, {})


def test_an_auc_has_no_more_digits_than_its_interval():
    metrics = {"all_fields": {"auc": 0.81234, "auc_low": 0.8062, "auc_high": 0.8184}}
    axes = drawn(plots.quality(metrics, {})).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.812 ± 0.006"]


def test_the_curve():
    record = judged_record()
    axes = drawn(plots.curve(record)).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        *("AUC lost", "95 % interval", "allowed", "this run: 12")
    ]
    assert ALLOWED < axes.get_ylim()[1] < 0.1
    other = {**record, "curve": {**record["curve"], "recommended": 9}}
    assert "recommended: 9" in [text.get_text() for text in drawn(plots.curve(other)).axes[0].get_legend().get_texts()]
    with pytest.raises(InputError, match="--no-curve"):
        plots.curve({"kept": ["a"]})


def test_figures_stay_out_of_pyplot():
    from matplotlib import pyplot

    plots.histogram(SELECTION)
    assert pyplot.get_fignums() == []


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'lpfs\[plots\]'"):
        SELECTION.plot()


@pytest.mark.filterwarnings("ignore:Glyph")
def test_hostile_names_are_drawn_as_they_are():
    names = [*hostile.names(), r"$\frac{1}$", "$x$ $", "%d_{"]
    values = {name: 1.0 - number / 1000 for number, name in enumerate(names)}
    figure = drawn(plots.gates(Selection(tuple(names), (), values)))
    first = figure.axes[0].get_yticklabels()[0].get_text()
    assert first == truncate_middle(escape_control_chars(names[0]), 40)
    drawn(plots.gates(Selection(tuple(names[-3:]), (), dict.fromkeys(names[-3:], 1.0))))


class Parsed(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [key for key, _ in attrs]

    def handle_data(self, data):
        self.text += data


def test_a_selection_in_a_notebook():
    page = Parsed(SELECTION._repr_html_())
    assert page.text.startswith("2 of 3 fields kept by lpfs++")
    assert "1 dropped" in page.text
    assert "-0.400" in page.text


def test_hostile_names_in_a_notebook():
    names = hostile.names()
    selection = Selection(tuple(names[:100]), tuple(names[100:]), dict.fromkeys(names, 1.0), made={"method": "<b>"})
    record = {"verdict": {"text": names[0]}, "warnings": [{"text": names[1]}]}
    card = outcome_html(selection, {"<i>": {"auc": 0.5}}, {}, "<s>", record)
    for text in (selection._repr_html_(), card):
        page = Parsed(text)
        assert set(page.tags) <= {"div", "b", "span", "table", "tr", "th", "td", "bdi", "details", "summary", "code"}
        assert set(page.attributes) <= {"style", "class", "title"}
        for name in names:
            assert truncate_middle(escape_control_chars(name)) in page.text
