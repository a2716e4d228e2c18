"""The 17 sets of fields that LPFS++ kept on the Terabyte log in the paper, from 26 down to 10 of 27 fields.

A mask has 27 characters, "1" for a kept field: the token of the 13 numeric fields first, then the 26 categorical
fields in the order of the log. The masks are not all nested: those of 21, 15, 11 and 10 fields contain fields that
the next larger one does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lpfs.data.planning import CATEGORIES
from lpfs.errors import InputError

# number of fields -> mask (appendix of the paper, table "Feature mask for Terabyte dataset")
TERABYTE_MASKS: Mapping[int, str] = MappingProxyType(
    {
        26: "111110111111111111111111111",
        25: "111100111111111111111111111",
        24: "111100111111111111011111111",
        23: "111100011111111111011111111",
        22: "111100011111111101011111111",
        21: "111100110111110101011111111",
        20: "111100010111110101011111111",
        19: "111100010111110101011101111",
        18: "111100010111110101011101011",
        17: "111100010111110101010101011",
        16: "111100010111110001010101011",
        15: "111100010011110101000101011",
        14: "111100010011110001000101011",
        13: "111100010011110001000001011",
        12: "111100010011110000000001011",
        11: "111100010101110000000001001",
        10: "101100010100110000010101000",
    }
)


def mask_fields(size: int) -> tuple[str, ...]:
    """Return the names of the fields in the mask of this size.

    >>> mask_fields(10)
    ('dense', 'C2', 'C3', 'C7', 'C9', 'C12', 'C13', 'C19', 'C21', 'C23')
    """
    if size not in TERABYTE_MASKS:
        known = f"{min(TERABYTE_MASKS)} to {max(TERABYTE_MASKS)}"
        raise InputError(f"the paper has no mask of {size} fields; choose a size from {known}")
    names = ("dense", *CATEGORIES)  # DLRM has one token, "dense", for all numeric fields
    return tuple(name for name, char in zip(names, TERABYTE_MASKS[size], strict=True) if char == "1")
