from __future__ import annotations

import io

import pytest
import torch

from lpfs.gates.functions import gate_function
from lpfs.gates.module import Gates
from lpfs.methods.polarize import Polarize
from lpfs.train import loggers
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.loggers import ProgressBar, sparkline


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.fixture
def state():
    layer = torch.nn.Linear(1, 1)
    return State(layer, torch.optim.SGD(layer.parameters()), Training(), steps=10)


def test_a_line_of_blocks():
    assert sparkline([31, 31, 20, 15, 0], 31) == "██▅▄▁"
    assert sparkline([], 3) == ""
    assert len(sparkline(range(1000), 1000)) == 16
    assert sparkline(range(1000), 1000)[-1] == "█"


def test_gates_alive_are_told_as_they_were_written_down(state):
    gates = Gates(["a", "b", "c"], gate_function("lpfs++"), steps=10)
    driver = Polarize(gates, gates.optimizer(penalty=0.1))
    assert driver.describe(state) == ""
    seen = []
    state.note = lambda kind, values: seen.append((kind, values))
    driver.record(state)
    with torch.no_grad():
        gates.x[0] = 0.0
    driver.record(state)
    assert driver.describe(state) == "2 of 3 gates alive █▅"
    assert [each[1]["alive"] for each in seen] == [3, 2]
    assert seen[1][1]["values"]["gates"][0] == 0.0


@pytest.mark.parametrize(("encoding", "blocks"), [("utf-8", "█▅▁"), ("ascii", "#-_")])
def test_what_a_terminal_cannot_show_is_told_otherwise(state, monkeypatch, encoding, blocks):
    monkeypatch.setattr(loggers, "REFRESH", 0.0)
    raw = io.BytesIO()
    out = Terminal(raw, encoding=encoding)
    shown = ProgressBar(stream=out, more=lambda state: "2 of 3 gates alive █▅▁")
    shown.begin(state)
    shown.update(state)
    shown.end(state)
    out.flush()
    assert f"2 of 3 gates alive {blocks}" in raw.getvalue().decode(encoding)
