"""User text in HTML, JSON and CSV is parsed as the same text, and never as anything else."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import os
import shutil
import subprocess

import pytest
from hypothesis import given, strategies as st
from markupsafe import Markup

from lpfs._text import (
    csv_cell,
    describe_target,
    escape_control_chars,
    escape_json,
    field_name_html,
    html_environment,
    is_formula,
    json_script,
    multiline_html,
    quote_command,
    truncate_middle,
)

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
def test_text_and_attributes_are_parsed_as_the_same_text(text):
    page = Parsed(html_environment().from_string('<p title="{{ text }}">{{ text }}</p>').render(text=text))
    assert page.tags == ["p"]
    assert page.text == page.attributes["title"] == escape_control_chars(text)
    escape_control_chars(text).encode("utf-8")


@given(ANY)
def test_multiline_text_keeps_its_line_breaks(text):
    page = Parsed(f"<pre>{multiline_html(text)}</pre>")
    assert page.tags == ["pre"]
    assert page.text == "\n".join(map(escape_control_chars, text.split("\n")))


@given(st.recursive(ANY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY, inner, max_size=3)))
def test_json_in_a_script_is_parsed_as_the_same_values_and_cannot_end_the_element(values):
    text = json_script(values, "data")
    inside = text.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == values


@given(st.lists(ANY, min_size=1, max_size=5))
def test_csv_cells_are_read_as_the_same_text_and_never_as_a_formula(texts):
    line = ",".join(map(csv_cell, texts))
    cells = next(csv.reader(io.StringIO(line, newline=""))) if line else [""]
    assert [cell.removeprefix("'") for cell in cells] == [text.removeprefix("'") for text in texts]
    assert not any(map(is_formula, cells))


@pytest.mark.parametrize("sign", list("=+-@＝＋－＠"))
@pytest.mark.parametrize(
    "start", ["", " ", "\t", "\xa0", "\u3000", "\u200b", "\ufeff \u2060", "\x00", "\x1f", "\u202e"]
)
def test_formulas_after_blanks_and_invisible_characters_get_an_apostrophe(start, sign):
    cell = csv_cell(f"{start}{sign}1")
    assert cell == f"'{start}{sign}1"
    assert csv_cell(f"a{start}{sign}1") == f"a{start}{sign}1"


@given(st.recursive(ANY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY, inner, max_size=3)))
def test_escaped_json_has_the_same_values_and_no_unprintable_character(values):
    for indent in (None, 1):
        text = escape_json(json.dumps(values, indent=indent, ensure_ascii=False))
        assert text.replace("\n", "").isprintable()
        assert json.loads(text) == values


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_quoted_commands_are_read_by_a_shell_as_the_same_words():
    words = ["", "a b", "it's", "$(x)", "a\x1b[31m'\\", "new\nline\t", "\x85\u202e日", "\udcff\x7f", "\x01f", "*"]
    command = quote_command("printf", "%s\\0", *words)
    assert command.isprintable()
    printed = subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout
    assert [os.fsdecode(word) for word in printed.split(b"\0")[:-1]] == words


def test_numbers_lists_and_none_in_csv():
    assert (csv_cell(-1.5), csv_cell(3), csv_cell(None), csv_cell("-1.5")) == ("-1.5", "3", "", "'-1.5")
    assert csv_cell(["=1", 2]) == '"[""=1"", 2]"'


@given(ANY, st.integers(5, 30))
def test_truncated_text_has_the_maximum_length(text, max_length):
    short = truncate_middle(text, max_length)
    assert short == text if len(text) <= max_length else len(short) == max_length


def test_names_are_isolated_and_the_tooltip_has_the_whole_name():
    assert field_name_html("שלום") == '<bdi class="name">שלום</bdi>'
    page = Parsed(field_name_html("x" * 300))
    assert len(page.text) == 120
    assert page.attributes["title"] == "x" * 300


def test_markup_is_not_escaped_twice_and_nan_is_refused():
    render = html_environment().from_string("{{ safe }}{{ text }}{{ number }}").render
    assert render(safe=Markup("<b>"), text="<b>", number=3) == "<b>&lt;b&gt;3"
    with pytest.raises(ValueError, match="JSON compliant"):
        json_script(float("nan"), "x")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"keep": 1}, "exactly 1 field"),
        ({"keep": 7, "max_auc_loss": 0.1}, "exactly 7 fields"),
        ({"penalty": 0.25}, "penalty of 0.25"),
        ({"budget": 3.5, "unit": "ms"}, "3.5 ms"),
        ({"max_auc_loss": 0.001}, "0.001 of AUC"),
    ],
)
def test_targets_are_described(target, words):
    assert describe_target(**target).endswith(words)
    assert describe_target() == ""
