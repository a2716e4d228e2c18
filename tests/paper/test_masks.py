"""The masks of the paper: number and order of their fields."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lpfs.paper
from lpfs.data.planning import CATEGORIES
from lpfs.errors import InputError
from lpfs.paper.masks import TERABYTE_MASKS, mask_fields

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "lpfs.tex"


def test_seventeen_masks_of_27_characters():
    assert list(TERABYTE_MASKS) == list(range(26, 9, -1))
    assert {len(mask) for mask in TERABYTE_MASKS.values()} == {27}
    assert set("".join(TERABYTE_MASKS.values())) == {"0", "1"}


@pytest.mark.parametrize("size", range(10, 27))
def test_every_mask_keeps_as_many_fields_as_the_table_says(size):
    assert TERABYTE_MASKS[size].count("1") == size
    fields = mask_fields(size)
    assert len(fields) == len(set(fields)) == size
    assert fields[0] == "dense"  # the numbers are in every mask
    assert set(fields[1:]) <= set(CATEGORIES)


def test_the_largest_mask_drops_c5():
    assert set(CATEGORIES) - set(mask_fields(26)) == {"C5"}


def test_masks_that_are_not_nested():
    added = {size: set(mask_fields(size)) - set(mask_fields(size + 1)) for size in range(10, 26)}
    assert {size: names for size, names in added.items() if names} == {
        21: {"C6"},
        15: {"C15"},
        11: {"C9"},
        10: {"C19", "C21"},
    }


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside this checkout")
def test_masks_agree_with_the_source_of_the_paper():
    printed = re.findall(r"(\d\d) & ([01]{27})", PAPER.read_text("utf-8"))
    assert {int(size): mask for size, mask in printed} == dict(TERABYTE_MASKS)


def test_unknown_size():
    with pytest.raises(InputError, match="no mask of 9 fields.*10 to 26"):
        mask_fields(9)


def test_public_names():
    assert {name: hasattr(lpfs.paper, name) for name in lpfs.paper.__all__} == dict.fromkeys(lpfs.paper.__all__, True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lpfs.paper.nothing
