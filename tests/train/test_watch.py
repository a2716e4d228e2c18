"""Who is named when ranks lose each other: two watches in one process, on one store."""

from __future__ import annotations

import os
import time

import pytest
from torch.distributed import HashStore

from lpfs.errors import InputError, RankError
from lpfs.train.distributed import heartbeat as watching
from lpfs.train.distributed.heartbeat import Heartbeat

LIMIT = 3.0  # a sign of life every 50 ms


class Shared:
    """A store that two watches of one process share."""

    def __init__(self) -> None:
        self.store = HashStore()

    def clone(self):
        return self.store


@pytest.fixture
def two():
    store = Shared()
    made = [Heartbeat(store, rank, 2, LIMIT) for rank in (0, 1)]  # type: ignore[arg-type]
    for each in made:
        each.begin()
    until(lambda: all(each._seen[1 - each.rank][0] != watching.NOTHING for each in made))
    yield made
    for each in made:
        each.close()


def until(done, within: float = 20.0) -> None:
    latest = time.monotonic() + within
    while not done():
        assert time.monotonic() < latest
        time.sleep(0.01)


def broken(watch: Heartbeat) -> str:
    """What a rank says when a collective broke off."""
    found = watch.explain_interrupt(RuntimeError("Connection closed by peer"))
    assert isinstance(found, RankError)
    assert "The last checkpoint is intact" in str(found)
    return str(found)


def test_one_that_gives_no_sign_of_life_is_dead_or_stopped(two):
    first, second = two
    second.close()
    first.enter("adding up gradients")
    assert "rank 1 is dead or stopped: no sign of life" in broken(first)


def test_one_that_never_gave_a_sign_is_named_too():
    first = Heartbeat(Shared(), 0, 2, LIMIT)  # type: ignore[arg-type]
    first.begin()
    first.enter_collective("adding up gradients")
    try:
        assert "rank 1 is dead or stopped" in broken(first)
    finally:
        first.close()


def test_one_that_lives_but_does_not_come_hangs(two):
    first, second = two
    for each in two:
        each.enter("counting rows")
        each.leave()
    first.enter("adding up gradients")
    said = broken(first)
    assert "rank 1 did not come to meeting 2 (adding up gradients)" in said
    assert "hangs after meeting 1 (working)" in said
    assert broken(second).startswith(said[: said.index(".")])  # all say the same


def test_one_that_failed_has_left_word(two):
    first, second = two
    assert second.told(InputError("no such row"))
    assert "rank 1 ended: InputError: no such row" in broken(first)


def test_the_same_error_is_told_once_and_names_nobody(two):
    first, second = two
    assert first.told(RankError("rank 2 is gone"))
    assert not second.told(RankError("rank 2 is gone"))
    assert not first.store.check(["ended/0"])


def test_being_asked_to_stop_is_no_loss(two):
    """Ctrl-C reaches all ranks: none of them is to blame, though they end one after another."""
    first, second = two
    asked = KeyboardInterrupt()
    assert second.lost(asked) is asked
    second.close()
    assert first.lost(asked) is asked


def test_who_is_asked_to_stop_because_another_is_gone_says_so(two):
    """torchrun ends the other ranks when one is killed."""
    first, second = two
    second.close()
    assert "rank 1 is dead or stopped" in str(first.lost(KeyboardInterrupt()))


def test_waiting_ends_when_rank_0_is_silent_or_has_ended(two):
    first, second = two
    second.refuse_silence(0, "preparing")
    first.told(InputError("no such file"))
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        second.refuse_silence(0, "preparing")
    second._seen[0] = second._seen[0][0], time.monotonic() - 2 * LIMIT
    first.close()
    second._seen[0] = second._seen[0][0], time.monotonic() - 2 * LIMIT
    with pytest.raises(RuntimeError, match="rank 0 has been silent"):
        second.refuse_silence(0, "preparing")


def test_a_process_that_no_error_frees_ends_itself(two, monkeypatch, capsys):
    first, second = two
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), first._end.set()))
    assert watching.os is os
    second.close()
    first.enter("adding up gradients")
    first.since = time.monotonic() - 2 * LIMIT
    until(lambda: ended)
    until(lambda: "rank 1" in capsys.readouterr().err or len(ended) > 1)
    assert ended[0] == 1
