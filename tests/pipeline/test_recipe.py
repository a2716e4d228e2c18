"""How long to train and in which steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpfs.errors import InputError
from lpfs.pipeline.splits import plan_stages


def parts(early, train):
    rows = {"early": early, "search": train - early, "train": train}
    return SimpleNamespace(dealt=False, **{name: SimpleNamespace(rows=count) for name, count in rows.items()})


def test_a_large_log_is_gone_through_once():
    """The paper's shape: T2 is a quarter of T1."""
    found = plan_stages(parts(18_000_000, 22_500_000))
    assert (found.batch_size, found.pretrain, found.search, found.shuffle) == (512, 35_157, 8789, False)
    assert (found.train, found.hot_start) == (43_946, 10_986)
    assert (found.separate_gate_rows, found.lr_factor) == (False, 1.0)


@pytest.mark.parametrize(
    ("rows", "batch", "pretrain", "shuffle"),
    [
        (512_000, 512, 2000, True),
        (1_024_000, 512, 2000, False),
        (511_999, 256, 2000, False),
        (100_000, 64, 2000, True),
        (1000, 64, 2000, True),
    ],
)
def test_a_small_table_gets_smaller_batches_and_is_repeated(rows, batch, pretrain, shuffle):
    found = plan_stages(parts(rows, rows * 5 // 4))
    assert (found.batch_size, found.pretrain, found.search, found.shuffle) == (batch, pretrain, 2000, shuffle)
    assert (found.separate_gate_rows, found.gate_batch_size) == (True, 512)
    assert found.lr_factor == 3.0 * min(1.0, 2 * rows / (2000 * batch))


@given(rows=st.integers(1, 10**9), more=st.integers(0, 10**9))
def test_rules_that_always_hold(rows, more):
    found = plan_stages(parts(rows, rows + more))
    assert found.batch_size in (64, 128, 256, 512)
    assert found.pretrain >= 2000
    assert found.search == max(2000, round(found.pretrain / 4))
    assert found.separate_gate_rows == (found.search * found.batch_size > 1.2 * more)
    assert found.pretrain * found.batch_size >= rows  # every row is seen
    assert found.shuffle == (found.pretrain > -(-rows // found.batch_size))
    assert found.train >= found.pretrain
    assert found.hot_start == max(1, round(found.train / 4))


def test_what_is_said_goes_before_what_is_found():
    found = plan_stages(parts(1000, 1250), batch_size=100, pretrain_steps=10, search_steps=7)
    assert found.to_json() == {
        "batch_size": 100, "pretrain": 10, "search": 7, "train": 12, "hot": 3, "shuffle": False,
        "apart": True, "held": 512, "pace": 3.0,
    }  # fmt: skip
    assert plan_stages(parts(1000, 1250), batch_size=100, pretrain_steps=11).shuffle
    assert plan_stages(parts(1000, 1250), pretrain_steps=12000).search == 3000


@pytest.mark.parametrize("name", ["batch_size", "pretrain_steps", "search_steps"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "3"])
def test_numbers_that_are_none(name, value):
    with pytest.raises(InputError, match=f"{name} must be a whole number >= 1, found"):
        plan_stages(parts(1000, 1250), **{name: value})
