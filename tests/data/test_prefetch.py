import threading
import time

import pytest

from lpfs.data.stream import prefetch


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lpfs-prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_all_items_come_in_order(depth):
    assert list(prefetch(range(50), depth)) == list(range(50))
    assert not alive()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_after_the_items_before_it(depth):
    def items():
        yield 1
        yield 2
        raise KeyError("broken")

    got = []
    with pytest.raises(KeyError, match="broken"):
        got.extend(prefetch(items(), depth))
    assert got == [1, 2]
    assert not alive()


def test_breaking_off_ends_the_thread():
    made = []

    def endless():
        while True:
            made.append(1)
            yield 1

    for item in prefetch(endless(), 2):
        assert item == 1
        break
    assert not alive()
    count = len(made)
    time.sleep(0.01)
    assert len(made) == count <= 5


def test_a_generator_that_is_thrown_away_ends_its_thread():
    items = prefetch(iter(range(1000)), 2)
    next(items)
    assert alive()
    del items
    assert not alive()


def test_work_runs_ahead():
    made: list[int] = []

    def items():
        for at in range(10):
            made.append(at)
            yield at

    ahead = prefetch(items(), 3)
    next(ahead)
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(made) >= 4
    ahead.close()
