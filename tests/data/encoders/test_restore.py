"""An encoder is restored from the settings and the vocabulary of a Dataset only if they are valid."""

import numpy as np
import pytest

from lpfs.data.encoders import restore_encoder
from lpfs.errors import InputError

NUMERIC = {"name": "f", "kind": "numeric", "mean": [0.0], "deviation": [1.0], "signed": True}
BINNED = {"name": "f", "kind": "numeric", "bins": 4, "edges": [1.0, 2.0]}
HASHED = {"name": "f", "hash": 7, "raw_type": "String", "value_type": "text"}
WORDS = {"name": "f", "values_seen": 2, "covered": 1.0, "raw_type": "String"}


@pytest.mark.parametrize(
    ("settings", "values"),
    [(NUMERIC, None), (BINNED, ["x"]), (HASHED, None), (WORDS, ["a", "b"]), (WORDS, np.arange(3))],
)
def test_valid_settings_are_restored(settings, values):
    assert restore_encoder(settings, values).name == "f"


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (None, None),
        ([], None),
        ({}, None),
        ({**NUMERIC, "name": 3, "width": "x"}, None),
        ({**NUMERIC, "width": 1 << 20}, None),
        ({**NUMERIC, "width": 10**30}, None),
        ({**NUMERIC, "mean": None}, None),
        ({**NUMERIC, "mean": ["x"]}, None),
        ({**NUMERIC, "mean": [[0.0]]}, None),
        ({**NUMERIC, "mean": [float("nan")]}, None),
        ({**NUMERIC, "deviation": [0.0]}, None),
        ({**NUMERIC, "deviation": [1.0, 2.0]}, None),
        ({**BINNED, "edges": [2.0, 1.0]}, None),
        ({**BINNED, "edges": "x"}, None),
        ({**BINNED, "bins": 10**9}, None),
        ({**HASHED, "hash": 10**30}, None),
        ({**HASHED, "hash": -1}, None),
        ({**HASHED, "value_type": []}, None),
        ({**HASHED, "raw_type": 3}, None),
        ({**WORDS, "covered": ["x"]}, ["a"]),
        ({**WORDS, "values_seen": None}, ["a"]),
        ({**HASHED, "why": None}, None),
        (WORDS, None),
        (WORDS, ["a", "a"]),
        (WORDS, np.zeros(1000, np.int64)),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_in_one_line(settings, values):
    with pytest.raises(InputError) as caught:
        restore_encoder(settings, values)
    assert "\n" not in str(caught.value)
