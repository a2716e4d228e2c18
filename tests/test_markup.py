"""Text of users in HTML, JSON and CSV comes back as it was, and is never anything else."""

from __future__ import annotations

import csv
import html.parser
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpfs.markup import FORMULA, Html, cell, embedded, escaped, named, shortened, tag, together, visible

ANY = st.text(st.characters(exclude_categories=()), max_size=60)


class Parsed(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], {}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data):
        self.text += data


@given(ANY)
def test_text_and_attributes_come_back(text):
    page = Parsed(tag("p", text, title=text))
    assert page.tags == ["p"]
    assert page.text == page.attributes["title"] == visible(text)
    visible(text).encode("utf-8")


@given(st.recursive(ANY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY, inner, max_size=3)))
def test_embedded_values_come_back_and_cannot_end_their_element(values):
    text = embedded("data", values)
    inside = text.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == values


@given(st.lists(ANY, min_size=1, max_size=5))
def test_cells_come_back_but_for_an_apostrophe(texts):
    line = ",".join(map(cell, texts))
    found = next(csv.reader(io.StringIO(line, newline=""))) if line else [""]
    assert [each.removeprefix("'") for each in found] == [each.removeprefix("'") for each in texts]
    assert not any(each.startswith(FORMULA) for each in found)


def test_numbers_are_numbers_in_csv():
    assert (cell(-1.5), cell(3), cell(None), cell("-1.5")) == ("-1.5", "3", "", "'-1.5")


@given(ANY, st.integers(5, 30))
def test_shortened_text_is_as_long_as_it_may_be(text, longest):
    found = shortened(text, longest)
    assert found == text if len(text) <= longest else len(found) == longest


def test_names_are_isolated_and_the_whole_of_a_long_one_is_told():
    assert named("שלום") == '<bdi class="name">שלום</bdi>'
    page = Parsed(named("x" * 300))
    assert len(page.text) == 120
    assert page.attributes["title"] == "x" * 300


def test_markup_stays_and_attributes_may_be_left_out():
    assert together(Html("<b>"), "<b>") == "<b>&lt;b&gt;"
    assert tag("input", hidden=True, title=None, id=False) == "<input hidden>"
    with pytest.raises(ValueError, match="JSON compliant"):
        embedded("x", float("nan"))
    assert escaped(3) == "3"
