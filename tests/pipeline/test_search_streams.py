"""Which rows a search learns from: weights, and what learns beside them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lpfs.pipeline.stages import search_streams


class Part:
    """Rows that remember in which batches they were asked for."""

    def __init__(self, name):
        self.name = name

    def stream(self, size, **_):
        return self.name, size


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("lpfs++", (("early", 64), ("search", 512))),
        ("stg", (("early", 64), ("search", 512))),
        ("group_lasso", (("train", 64), None)),
        ("gbdt", (("train", 64), None)),
    ],
)
def test_where_rows_come_again_masks_have_their_own_and_others_get_all(method, expected):
    parts = SimpleNamespace(**{name: Part(name) for name in ("early", "search", "train")})
    recipe = SimpleNamespace(apart=True, batch_size=64, held=512)
    work = SimpleNamespace(parts=parts, recipe=recipe, device="cpu", settings=SimpleNamespace(method=method))
    assert search_streams(work, ("a",), 0) == expected
    recipe.apart = False
    work.stream = lambda part, fields, train, seed: (part.name, train)
    assert search_streams(work, ("a",), 0) == (("search", True), None)
