"""kept_fields.txt holds any name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lpfs.protocol.listing import listed, names_in


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_names_are_read_back(names):
    text = listed(names)
    assert names_in(text) == tuple(names)
    assert len(text.splitlines()) == text.count("\n") == len(names)


def test_plain_names_stay_as_they_are():
    assert listed(["user", "a b", "Größe", 'the "x"']) == 'user\na b\nGröße\nthe "x"\n'
    assert listed(['"x"', "", " a"]) == '"\\"x\\""\n""\n" a"\n'
