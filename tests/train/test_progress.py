from __future__ import annotations

import io
import sys

import pytest
import torch

from lpfs.train import loggers
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.evaluate import Metrics
from lpfs.train.loggers import ProgressBar
from lpfs.train.metrics import scores


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def state():
    layer = torch.nn.Linear(1, 1)
    return State(layer, torch.optim.SGD(layer.parameters()), Training(), steps=10)


def go(shown, state):
    shown.begin(state)
    shown.loss = 0.25
    state.metrics = Metrics({"click": scores([0.0, 1.0], [0, 1])})
    for _ in range(10):
        state.step += 1
        state.rows += 100
        shown.update(state)
    shown.say("a word")
    shown.end(state)


def test_plain_lines_where_there_is_no_terminal(state, monkeypatch):
    monkeypatch.setattr(loggers, "EVERY", 0.0)
    out = io.StringIO()
    go(ProgressBar(stream=out), state)
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 1 of 10: loss 0.25000, auc 1.00000"
    assert lines[1].startswith("step 2 of 10: loss 0.25000, auc 1.00000, ")
    assert "rows/s" in lines[1]
    assert lines[1].endswith("s left")
    assert lines[-1].startswith("trained 10 steps, 1,000 rows: loss 0.25000")
    assert "\x1b" not in out.getvalue()


def test_the_first_step_which_compiles_does_not_spoil_the_time_left(state, monkeypatch):
    times = iter([0.0, 30.0, 31.0, 31.0, 31.0])
    monkeypatch.setattr(loggers.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(loggers, "EVERY", 0.0)
    out = io.StringIO()
    shown = ProgressBar(stream=out)
    shown.begin(state)
    for _ in range(2):
        state.step += 1
        state.rows += 100
        shown.update(state)
    assert out.getvalue().splitlines() == ["step 1 of 10", "step 2 of 10: 100 rows/s, 8 s left"]


def test_few_lines(state):
    out = io.StringIO()
    go(ProgressBar(stream=out), state)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["a", "trained"]


def test_a_bar_on_a_terminal(state, monkeypatch):
    monkeypatch.setattr(loggers, "REFRESH", 0.0)
    out = Terminal()
    go(ProgressBar(stream=out), state)
    assert "10/10" in out.getvalue()
    assert "auc 1.00000" in out.getvalue()
    assert "a word" in out.getvalue()


def test_lines_on_a_terminal_without_rich(state, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(loggers, "EVERY", 0.0)
    out = Terminal()
    go(ProgressBar(stream=out), state)
    assert out.getvalue().startswith("step 1 of 10")


def test_quiet(state):
    out = Terminal()
    go(ProgressBar(quiet=True, stream=out), state)
    assert out.getvalue() == ""


def test_unknown_length_and_no_auc(state):
    state.steps = None
    state.metrics = Metrics({"click": scores([0.0, 1.0], [0, 0])})
    out = io.StringIO()
    shown = ProgressBar(stream=out)
    shown.begin(state)
    assert shown.describe(state).startswith("auc -")
    assert "left" not in shown.describe(state)
