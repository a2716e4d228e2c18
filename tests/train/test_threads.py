"""The number of CPU threads."""

import pytest
import torch

from lpfs.train import threads


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement by given seconds; torch has four threads, and no environment variable sets them."""
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_default", [])
    torch.set_num_threads(4)

    def use(seconds):
        monkeypatch.setattr(threads.fastest_threads, "__defaults__", (seconds.__getitem__,))

    return use


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({4: 0.01, 2: 0.02}, 4),  # an idle machine
        ({4: 1.0, 2: 0.9, 1: 0.01}, 1),  # other work on all cores
        ({4: 1.0, 2: 0.01, 1: 0.02}, 2),
        ({4: 0.012, 2: 0.010, 1: 0.011}, 4),  # no clear difference
    ],
)
def test_fewer_threads_are_used_if_they_are_much_faster(measured, seconds, expected):
    measured(seconds)
    threads.choose_threads()
    assert torch.get_num_threads() == expected
    words = threads.describe_threads()
    assert words.startswith(f"{expected} CPU thread")
    assert ("more were slower" in words) == (expected < 4)


def test_a_later_choice_may_use_more_threads_again(measured):
    measured({4: 1.0, 2: 0.9, 1: 0.01})
    threads.choose_threads()
    measured({4: 0.01, 2: 0.02, 1: 0.04})
    threads.choose_threads()
    assert torch.get_num_threads() == 4
    torch.set_num_threads(2)  # by the user
    threads.choose_threads()
    assert torch.get_num_threads() == 2


def test_the_number_of_the_user_is_kept(measured, monkeypatch):
    measured({})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    threads.choose_threads()
    assert torch.get_num_threads() == 4
    assert threads.describe_threads().endswith("(OMP_NUM_THREADS)")


def test_the_measurement_uses_the_threads():
    assert threads.seconds_per_step(2) > 0
    assert torch.get_num_threads() == 2
