"""kept_fields.txt holds any name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lpfs.pipeline.results import format_field_list, parse_field_list


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_names_are_read_back(names):
    text = format_field_list(names)
    assert parse_field_list(text) == tuple(names)
    assert len(text.splitlines()) == text.count("\n") == len(names)


def test_plain_names_stay_as_they_are():
    assert format_field_list(["user", "a b", "Größe", 'the "x"']) == 'user\na b\nGröße\nthe "x"\n'
    assert format_field_list(['"x"', "", " a"]) == '"\\"x\\""\n""\n" a"\n'
