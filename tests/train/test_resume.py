from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import log, tiny

from lpfs.errors import CheckpointError, InputError
from lpfs.train.callbacks import Callback
from lpfs.train.checkpoint import Checkpoints, CheckpointWarning
from lpfs.train.fit import fit
from lpfs.train.tensor_io import states_equal

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


class StopError(Exception):
    pass


class Momentum(Callback):
    """A callback with an optimizer of its own, as the gates will have; it can end the run by an error."""

    def __init__(self, model, stop=None):
        self.optimizer = torch.optim.SGD(model.item.parameters(), lr=0.05, momentum=0.9)
        self.stop, self.order = stop, []

    def after_step(self, state):
        if state.step == self.stop:
            raise StopError
        self.optimizer.step()
        self.order.append(int(state.batch.ids.sum()))

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "order": self.order}

    def load_state_dict(self, values):
        self.optimizer.load_state_dict(values["optimizer"])
        self.order = list(values["order"])


def go(data, folder, stop=None, *, seed=0, optimizer="adam", how=None, **settings):
    model = tiny(seed)
    moved = [*model.user.parameters(), *model.head.parameters()]
    callback = Momentum(model, stop)
    settings = {
        "steps": 47,
        "valid": data.stream(100, shuffle=True, seed=1),
        "evaluate_every": 9,
        "checkpoint_every": 6,
        "log_every": 4,
        "schedule": "cosine",
        "clip": 1.0,
        "quiet": True,
        "resume": True,
        **settings,
    }
    stream = data.stream(64, shuffle=True, seed=2, **(how or {}))
    done = fit(model, stream, optimizer, parameters=moved, folder=folder, callbacks=[callback], **settings)
    return model, done


def outcome(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    state = checkpoints.load(checkpoints.steps()[-1])
    state.pop("log")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("rows_per_second")
    return {"state": state, "lines": lines}


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("stop", [1, 6, 7, 10, 11, 30, 47])
def test_it_goes_on_bit_by_bit(data, tmp_path, stop, optimizer):
    whole, expected = go(data, tmp_path / "whole", optimizer=optimizer)
    with pytest.raises(StopError):
        go(data, tmp_path / "cut", stop, optimizer=optimizer)
    model, done = go(data, tmp_path / "cut", seed=0 if stop < 7 else 9, optimizer=optimizer)
    last = (stop - 1) // 6 * 6
    assert done.resumed == (last or None)
    assert (done.metrics, done.best, done.best_step) == (expected.metrics, expected.best, expected.best_step)
    assert states_equal(dict(model.state_dict()), dict(whole.state_dict()))
    assert states_equal(outcome(tmp_path / "cut"), outcome(tmp_path / "whole"))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_checkpoint_at_the_very_end_of_a_pass(data, tmp_path, shuffle):
    def once(folder, steps):
        model = tiny()
        stream = data.stream(64, shuffle=shuffle)
        fit(model, stream, steps=steps, folder=folder, resume=True, quiet=True, checkpoint_every=10)
        return model

    whole = once(tmp_path / "whole", 30)
    for steps in (10, 20, 30):
        model = once(tmp_path / "parts", steps)
    assert states_equal(dict(model.state_dict()), dict(whole.state_dict()))


def test_a_finished_run_gives_its_result_again(data, tmp_path):
    model, done = go(data, tmp_path, keep="best")
    before = outcome(tmp_path)
    again, repeated = go(data, tmp_path, seed=5, keep="best")
    assert states_equal(dict(again.state_dict()), dict(model.state_dict()))
    assert (repeated.metrics, repeated.best_step, repeated.resumed) == (done.metrics, done.best_step, 47)
    assert states_equal(outcome(tmp_path), before)


@pytest.mark.parametrize("stop", [1, 5, 8, 20])
def test_the_state_it_began_with_is_there_after_a_kill(data, tmp_path, stop):
    """The first evaluation stays the best: both runs end where they began, model and optimizer."""
    how = {"keep": "best", "min_delta": 0.9, "evaluate_first": True}
    whole, expected = go(data, tmp_path / "whole", **how)
    with pytest.raises(StopError):
        go(data, tmp_path / "cut", stop, **how)
    model, done = go(data, tmp_path / "cut", seed=9, **how)
    assert done.resumed == (stop - 1) // 6 * 6  # also from step 0
    assert expected.best_step == done.best_step == 0
    assert states_equal(dict(model.state_dict()), dict(whole.state_dict()))
    assert states_equal(dict(model.state_dict()), dict(tiny().state_dict()))
    assert states_equal(outcome(tmp_path / "cut"), outcome(tmp_path / "whole"))


def test_a_setting_that_an_older_run_did_not_know_had_its_default(data, tmp_path):
    with pytest.raises(StopError):
        go(data, tmp_path, 20)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    step, state = checkpoints.latest()
    del state["config"]["evaluate_first"]
    checkpoints.save(step, state)
    with pytest.raises(InputError, match="begun with evaluate_first=False and cannot go on with True"):
        go(data, tmp_path, evaluate_first=True)
    assert go(data, tmp_path)[1].resumed == step


def test_an_early_stop_stays_a_stop(data, tmp_path):
    _, done = go(data, tmp_path, steps=200, lr=1.0, patience=1)
    assert done.stopped
    _, again = go(data, tmp_path, steps=200, lr=1.0, patience=1)
    assert (again.steps, again.stopped) == (done.steps, done.stopped)


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 3] ^= 16
    path.write_bytes(data if how == "flip" else data[: len(data) // 2])


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "checkpoint.json"])
@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_after_damage_it_goes_on_from_the_one_before_to_the_same_end(data, tmp_path, file, how):
    go(data, tmp_path / "whole")
    with pytest.raises(StopError):
        go(data, tmp_path / "cut", 33)
    damage(tmp_path / "cut" / "checkpoints" / "step-000000000030" / file, how)
    with pytest.warns(CheckpointWarning, match="step-000000000030 is damaged"):
        _, done = go(data, tmp_path / "cut")
    assert done.resumed == 24
    assert states_equal(outcome(tmp_path / "cut"), outcome(tmp_path / "whole"))


def test_all_damaged_is_an_error(data, tmp_path):
    go(data, tmp_path, keep_checkpoints=1)
    damage(next((tmp_path / "checkpoints").iterdir()) / "state.json", "flip")
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        go(data, tmp_path)


def test_a_best_checkpoint_that_is_damaged_leaves_the_last_model(data, tmp_path):
    how = {"keep": "best", "min_delta": 0.9}  # so that the first evaluation stays the best
    _, done = go(data, tmp_path, **how)
    assert done.best_step < 47
    damage(tmp_path / "checkpoints" / f"step-{done.best_step:012d}" / "state.json", "flip")
    with pytest.warns(CheckpointWarning, match="the last model is left instead of the best"):
        model, _ = go(data, tmp_path, **how)
    assert states_equal(dict(model.state_dict()), outcome(tmp_path)["state"]["model"])


def test_what_computes_something_else_is_refused_and_changes_nothing(data, tmp_path):
    with pytest.raises(StopError):
        go(data, tmp_path / "run", 20)
    run, before = tmp_path / "run", outcome(tmp_path / "run")
    with pytest.raises(InputError, match="holds a run already; go on with resume=True"):
        go(data, run, resume=False)
    with pytest.raises(InputError, match=r"begun with clip=1.0 and cannot go on with 2.0"):
        go(data, run, clip=2.0)
    with pytest.raises(InputError, match="begun with optimizer='adam'"):
        go(data, run, optimizer="adagrad")
    with pytest.raises(InputError, match="a stream of drop_last False and cannot go on with True"):
        go(data, run, how={"drop_last": True})
    with pytest.raises(InputError, match="the saved stream has"):
        go(log(tmp_path / "other", rows=638), run)
    model = tiny(tasks=2)
    how = {
        "steps": 47,
        "evaluate_every": 9,
        "checkpoint_every": 6,
        "log_every": 4,
        "schedule": "cosine",
        "clip": 1.0,
    }
    stream = data.stream(64, shuffle=True, seed=2)
    with pytest.raises(InputError, match=r"begun with callbacks \['Momentum'\] and cannot go on with \[\]"):
        fit(model, stream, "adam", folder=run, resume=True, **how)
    with pytest.raises(
        InputError, match=r"'head.weight' is torch.float32 \(2, 9\), the checkpoint has .*\(1, 9\)"
    ):
        fit(model, stream, "adam", folder=run, resume=True, callbacks=[Momentum(model)], **how)
    with pytest.raises(InputError, match=r"so many parameters a group: \[3\] and cannot go on with \[4\]"):
        fit(tiny(), stream, "adam", folder=run, resume=True, callbacks=[Momentum(model)], **how)
    smaller, three = tiny(), {"parameters": list(model.parameters())[1:]}
    del smaller.item
    with pytest.raises(InputError, match="not the model of the run: only the checkpoint has 'item.weight'"):
        fit(smaller, stream, "adam", folder=run, resume=True, callbacks=[Momentum(model)], **how)
    with pytest.raises(InputError, match="resume needs a stream with state_dict"):
        fit(tiny(), list(stream), "adam", folder=run, resume=True, callbacks=[Momentum(model)], **how, **three)
    assert states_equal(outcome(run), before)


def test_a_full_disk_ends_the_run_and_it_goes_on_when_there_is_room(data, tmp_path, monkeypatch):
    go(data, tmp_path / "whole")
    saved = []

    def full(folder, state, ranks):
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(folder)
        return write(folder, state, ranks)

    from lpfs.train import checkpoint

    write = checkpoint.write_rank_part
    monkeypatch.setattr(checkpoint, "write_rank_part", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        go(data, tmp_path / "cut")
    monkeypatch.undo()
    _, done = go(data, tmp_path / "cut")
    assert done.resumed == 6
    assert states_equal(outcome(tmp_path / "cut"), outcome(tmp_path / "whole"))


def test_ten_real_kills(tmp_path):
    """SIGKILL at random moments, some in the middle of a save; every run ends as the one that nobody killed."""
    out = tmp_path / "kills.json"
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "10", "--out", out], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    found = json.loads(out.read_text())
    assert found["kills"] == 10
    assert found["kills_in_the_middle_of_a_save"] >= 1
    assert found["kills_by_moment"]["half a tensor"] >= 1
    assert found["identical"]
    assert found["runs_compared"] >= 2
