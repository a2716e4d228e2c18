"""Learning rates by name (lpfs.train.config)."""

from __future__ import annotations

import pytest

from lpfs.errors import InputError
from lpfs.train.config import SCHEDULES, lr_factor


def test_the_industrial_rise_is_exponential_from_a_hundredth_to_a_tenth():
    factor = lr_factor("rise", 1000)
    rates = [0.01 * factor(step) for step in range(0, 1001, 100)]
    assert rates[0] == 0.01
    assert rates[-1] == pytest.approx(0.1)
    ratios = {round(after / before, 9) for before, after in zip(rates[:-1], rates[1:], strict=True)}
    assert len(ratios) == 1
    assert factor(10_000) == factor(1000)


def test_the_others():
    assert {lr_factor("constant", None)(step) for step in (0, 1, 999)} == {1.0}
    assert [lr_factor("warmup", 4)(step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [lr_factor("linear", 4)(step) for step in range(6)] == [1, 0.75, 0.5, 0.25, 0, 0]
    cosine = lr_factor("cosine", 4)
    assert (cosine(0), cosine(2), cosine(4), cosine(9)) == (1.0, pytest.approx(0.5), 0.0, 0.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_they_are_pure(name):
    one, two = lr_factor(name, 50), lr_factor(name, 50)
    later = [two(step) for step in reversed(range(80))]
    assert [one(step) for step in range(80)] == later[::-1]


def test_an_unknown_name_and_an_unknown_length():
    with pytest.raises(InputError, match="no schedule 'exponential'; there are constant, rise"):
        lr_factor("exponential", 10)
    with pytest.raises(InputError, match="schedule 'rise' must know over how many steps"):
        lr_factor("rise", None)
