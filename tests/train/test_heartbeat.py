"""Which rank is named when ranks lose their connection: two heartbeats in one process, on one store."""

from __future__ import annotations

import os
import time

import pytest
from torch.distributed import HashStore

from lpfs.errors import InputError, RankError
from lpfs.train.distributed import heartbeat
from lpfs.train.distributed.heartbeat import Heartbeat

LIMIT = 3.0  # a heartbeat every 50 ms


class Shared:
    """A store that two heartbeats of one process share."""

    def __init__(self) -> None:
        self.store = HashStore()

    def clone(self):
        return self.store


@pytest.fixture
def two():
    store = Shared()
    beats = [Heartbeat(store, rank, 2, LIMIT) for rank in (0, 1)]  # type: ignore[arg-type]
    for beat in beats:
        beat.start()
    until(lambda: all(beat._last_beats[1 - beat.rank][0] != heartbeat.NO_BEAT for beat in beats))
    yield beats
    for beat in beats:
        beat.close()


def until(done, within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def broken(beat: Heartbeat) -> str:
    """Return the error of a rank after an interrupted collective."""
    error = beat.explain_interrupt(RuntimeError("Connection closed by peer"))
    assert isinstance(error, RankError)
    assert "--resume" in str(error)
    return str(error)


def test_a_rank_without_heartbeats_is_dead_or_stopped(two):
    first, second = two
    second.close()
    first.enter_collective("adding up gradients")
    assert "rank 1 is dead or stopped" in broken(first)


def test_a_rank_that_never_sent_a_heartbeat_is_named():
    first = Heartbeat(Shared(), 0, 2, LIMIT)  # type: ignore[arg-type]
    first.start()
    first.enter_collective("adding up gradients")
    try:
        assert "rank 1 is dead or stopped" in broken(first)
    finally:
        first.close()


def test_a_live_rank_that_does_not_enter_a_collective_hangs(two):
    first, second = two
    for beat in two:
        beat.enter_collective("counting rows")
        beat.set_activity("working")
    first.enter_collective("adding up gradients")
    text = broken(first)
    assert "rank 1 did not enter collective 2 (adding up gradients)" in text
    assert "hangs after collective 1 (working)" in text
    assert broken(second).startswith(text[: text.index(".")])  # all ranks report the same


def test_the_error_of_a_failed_rank_is_reported(two):
    first, second = two
    assert second.report_error(InputError("no such row"))
    assert "rank 1 ended: InputError: no such row" in broken(first)


def test_the_same_error_is_reported_once(two):
    first, second = two
    assert first.report_error(RankError("rank 2 is gone"))
    assert not second.report_error(RankError("rank 2 is gone"))
    assert not first.store.check(["ended/0"])


def test_an_interrupt_by_the_user_is_not_a_lost_rank(two):
    """Ctrl-C reaches all ranks; none of them is reported, though they end one after another."""
    first, second = two
    interrupt = KeyboardInterrupt()
    assert second.explain_interrupt(interrupt) is interrupt
    second.close()
    assert first.explain_interrupt(interrupt) is interrupt


def test_an_interrupt_by_torchrun_names_the_dead_rank(two):
    """torchrun ends the other ranks when one is killed."""
    first, second = two
    second.close()
    assert "rank 1 is dead or stopped" in str(first.explain_interrupt(KeyboardInterrupt()))


def test_waiting_ends_when_rank_0_is_silent_or_has_ended(two):
    first, second = two
    second.check_alive(0, "preparing")
    first.report_error(InputError("no such file"))
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        second.check_alive(0, "preparing")
    second._last_beats[0] = second._last_beats[0][0], time.monotonic() - 2 * LIMIT
    first.close()
    second._last_beats[0] = second._last_beats[0][0], time.monotonic() - 2 * LIMIT
    with pytest.raises(RuntimeError, match="no heartbeat of rank 0"):
        second.check_alive(0, "preparing")


def test_a_process_stuck_in_a_collective_ends_itself(two, monkeypatch, capsys):
    first, second = two
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), first._end.set()))
    assert heartbeat.os is os
    second.close()
    first.enter_collective("adding up gradients")
    first.since = time.monotonic() - 2 * LIMIT
    until(lambda: ended)
    until(lambda: "rank 1" in capsys.readouterr().err or len(ended) > 1)
    assert ended[0] == 1
