from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lpfs.errors import CheckpointError, InputError, LpfsError
from lpfs.train.callbacks import Callback
from lpfs.train.checkpoint import Checkpoints, CheckpointWarning
from lpfs.train.fit import fit
from lpfs.train.tensor_io import states_equal
from tests.helpers.tiny import log, tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


class StopError(Exception):
    pass


class Momentum(Callback):
    """A callback with its own optimizer, like that of the gates; it can end the run with an error."""

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


def go(data, folder, stop=None, *, seed=0, optimizer="adam", stream_options=None, **settings):
    model = tiny(seed)
    trained = [*model.user.parameters(), *model.head.parameters()]
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
    stream = data.stream(64, shuffle=True, seed=2, **(stream_options or {}))
    done = fit(model, stream, optimizer, parameters=trained, folder=folder, callbacks=[callback], **settings)
    return model, done


def outcome(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    state = checkpoints.load(checkpoints.steps()[-1])
    state.pop("log")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("rows_per_second")
    return {"state": state, "lines": lines}


@pytest.mark.parametrize("content", ["all", "model"])
@pytest.mark.parametrize(("seconds", "is_saved"), [(1000.0, False), (0.0, True)])
def test_last_checkpoint_is_left_out_if_it_is_not_due(data, tmp_path, content, seconds, is_saved):
    """The training is then repeated on resume, with the same result."""
    settings = {"checkpoint_every": 100, "checkpoint_seconds": seconds, "final_checkpoint": content}
    model, _ = go(data, tmp_path / "run", **settings, final_if_due=True)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == ([47] if is_saved else [])
    again, done = go(data, tmp_path / "run", **settings, final_if_due=True)
    assert done.resumed == (47 if is_saved else None)
    assert states_equal(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("stop", [1, 6, 7, 10, 11, 30, 47])
def test_training_resumes_bit_for_bit(data, tmp_path, stop, optimizer):
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
def test_the_initial_state_can_be_restored_after_a_kill(data, tmp_path, stop):
    """The first evaluation stays the best: both runs end with the initial model and optimizer."""
    options = {"keep": "best", "min_delta": 0.9, "evaluate_first": True}
    whole, expected = go(data, tmp_path / "whole", **options)
    with pytest.raises(StopError):
        go(data, tmp_path / "cut", stop, **options)
    model, done = go(data, tmp_path / "cut", seed=0 if stop < 7 else 9, **options)
    assert done.resumed == ((stop - 1) // 6 * 6 or None)
    assert expected.best_step == done.best_step == 0
    assert states_equal(dict(model.state_dict()), dict(whole.state_dict()))
    assert states_equal(dict(model.state_dict()), dict(tiny().state_dict()))
    assert states_equal(outcome(tmp_path / "cut"), outcome(tmp_path / "whole"))


def test_a_stopped_run_stays_stopped(data, tmp_path):
    _, done = go(data, tmp_path, steps=200, lr=1.0, patience=1)
    assert done.stopped
    _, again = go(data, tmp_path, steps=200, lr=1.0, patience=1)
    assert (again.steps, again.stopped) == (done.steps, done.stopped)


def damage(path, kind):
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[len(data) // 3] ^= 16
    path.write_bytes(data if kind == "flip" else data[: len(data) // 2])


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "checkpoint.json"])
@pytest.mark.parametrize("kind", ["flip", "truncate"])
def test_after_damage_training_resumes_from_the_previous_checkpoint(data, tmp_path, file, kind):
    go(data, tmp_path / "whole")
    with pytest.raises(StopError):
        go(data, tmp_path / "cut", 33)
    damage(tmp_path / "cut" / "checkpoints" / "step-000000000030" / file, kind)
    with pytest.warns(CheckpointWarning, match="step-000000000030 is damaged"):
        _, done = go(data, tmp_path / "cut")
    assert done.resumed == 24
    assert states_equal(outcome(tmp_path / "cut"), outcome(tmp_path / "whole"))


def test_if_all_checkpoints_are_damaged_resume_raises(data, tmp_path):
    go(data, tmp_path, keep_checkpoints=1)
    damage(next((tmp_path / "checkpoints").iterdir()) / "state.json", "flip")
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="all 1 checkpoints"):
        go(data, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"counters": None},
        {"counters": {"step": "5"}},
        {"counters": {"step": -1, "rows": 0, "best_step": None, "waiting": 0, "stop": ""}},
        {"log": "x"},
        {"optimizer": None},
        {"optimizer": {"class": "Adam", "state": {}}},
        {"random": [{"torch": 3}]},
        {"model": []},
        {"callbacks": 3},
        {"loss": {}},
    ],
    ids=str,
)
def test_a_checkpoint_with_another_state_is_refused_in_one_line(data, tmp_path, changes):
    with pytest.raises(StopError):
        go(data, tmp_path, 10)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    step = checkpoints.steps()[-1]
    checkpoints.save(step, {**checkpoints.load(step), **changes})
    with pytest.raises(LpfsError) as caught:
        go(data, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["all", "result", "model"])
def test_the_best_model_survives_damage_of_the_last_checkpoint(data, tmp_path, content):
    options = {"keep": "best", "min_delta": 0.9, "final_checkpoint": content}  # the first evaluation stays the best
    model, done = go(data, tmp_path, **options)
    assert done.best_step == 9
    damage(tmp_path / "checkpoints" / "step-000000000047" / "state.json", "flip")
    with pytest.warns(CheckpointWarning, match="step-000000000047 is damaged"):
        again, repeated = go(data, tmp_path, seed=5, **options)
    assert (repeated.resumed, repeated.best, repeated.metrics) == (42, done.best, done.metrics)
    assert states_equal(dict(again.state_dict()), dict(model.state_dict()))


def test_a_checkpoint_without_its_best_model_is_refused_in_one_line(data, tmp_path):
    options = {"keep": "best", "min_delta": 0.9}
    go(data, tmp_path, **options)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(47, {**checkpoints.load(47), "best_state": None})
    with pytest.raises(CheckpointError, match="best model, of step 9, is missing"):
        go(data, tmp_path, **options)


class Result(Callback):
    """Records the optimizer state that a run ends with."""

    def on_end(self, state):
        self.optimizer = state.optimizer.state_dict()


@pytest.mark.parametrize("keep", ["last", "best"])
@pytest.mark.parametrize("content", ["result", "model", "none"])
def test_a_finished_run_gives_the_content_of_its_last_checkpoint_again(data, tmp_path, keep, content):
    def run(folder, seed, **options):
        model, result = tiny(seed), Result()
        stream, valid = data.stream(64, shuffle=True, seed=2), data.stream(100)
        settings = {"keep": keep, "min_delta": 0.9, "evaluate_every": 9, "checkpoint_every": 6, "quiet": True}
        done = fit(model, stream, valid=valid, folder=folder, resume=True, callbacks=[result], **settings, **options)
        return dict(model.state_dict()), result.optimizer, done

    whole = run(tmp_path / "whole", 0, steps=30)
    first = run(tmp_path / "run", 0, steps=30, final_checkpoint=content)
    assert states_equal(first[0], whole[0])
    if content == "result":
        assert states_equal(first[1], whole[1])
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name / "checkpoints" / "step-000000000030").iterdir())
        for name in ("whole", "run")
    ]
    assert sizes[1] < sizes[0] or (keep, content) == ("last", "result")
    again = run(tmp_path / "run", 5, steps=30, final_checkpoint=content)
    assert (again[2].metrics, again[2].best, again[2].resumed) == (first[2].metrics, first[2].best, 30)
    assert states_equal(again[0], dict(tiny(5).state_dict()) if content == "none" else first[0])
    if content == "result":
        assert states_equal(again[1], first[1])
    with pytest.raises(InputError, match="ended after 30 steps.*cannot be continued"):
        run(tmp_path / "run", 5, steps=40, final_checkpoint=content)


def test_a_checkpoint_is_left_out_while_the_last_one_is_recent(data, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("lpfs.train.fit.time.monotonic", lambda: clock[0])

    class Clock(Callback):
        def __init__(self):
            self.saved = []

        def after_step(self, state):
            clock[0] += 1.0

        def on_checkpoint(self, state, path):
            self.saved.append(state.step)
            clock[0] += 0.02

    def saved(**options):
        callback, clock[0] = Clock(), 0.0
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        fit(tiny(), data.stream(64), folder=folder, steps=40, quiet=True, callbacks=[callback], **options)
        return callback.saved

    assert saved(checkpoint_every=6) == [6, 12, 18, 24, 30, 36, 40]
    assert saved(checkpoint_every=6, checkpoint_seconds=10) == [12, 24, 36, 40]
    assert saved(checkpoint_every=6, checkpoint_seconds=1000) == [40]
    monkeypatch.setattr("lpfs.train.fit.BYTES_PER_SECOND", 1e9)  # a save of no duration
    assert saved(checkpoint_every=6, checkpoint_seconds=None) == [6, 12, 18, 24, 30, 36, 40]
    monkeypatch.setattr("lpfs.train.fit.TrainingRun._estimate_save_seconds", lambda run: 0.02)  # √(2·.02·3600) = 12
    assert saved(checkpoint_every=5, checkpoint_seconds=None)[0] == 15


def test_resume_with_another_computation_is_refused_and_changes_nothing(data, tmp_path):
    with pytest.raises(StopError):
        go(data, tmp_path / "run", 20)
    run, before = tmp_path / "run", outcome(tmp_path / "run")
    with pytest.raises(InputError, match="contains a run.*resume=True"):
        go(data, run, resume=False)
    with pytest.raises(InputError, match=r"clip=1.0.*2.0"):
        go(data, run, clip=2.0)
    with pytest.raises(InputError, match="optimizer='adam'"):
        go(data, run, optimizer="adagrad")
    with pytest.raises(InputError, match="stream of drop_last False.*True"):
        go(data, run, stream_options={"drop_last": True})
    with pytest.raises(InputError, match="the saved stream"):
        go(log(tmp_path / "other", rows=638), run)
    model = tiny(tasks=2)
    options = {
        "steps": 47,
        "evaluate_every": 9,
        "checkpoint_every": 6,
        "log_every": 4,
        "schedule": "cosine",
        "clip": 1.0,
    }
    stream = data.stream(64, shuffle=True, seed=2)
    with pytest.raises(InputError, match=r"callbacks \['Momentum'\].*\[\]"):
        fit(model, stream, "adam", folder=run, resume=True, **options)
    with pytest.raises(InputError, match=r"'head.weight' is torch.float32 \(2, 9\), the checkpoint has .*\(1, 9\)"):
        fit(model, stream, "adam", folder=run, resume=True, callbacks=[Momentum(model)], **options)
    with pytest.raises(InputError, match=r"groups of the optimizer \[3\].*\[4\]"):
        fit(tiny(), stream, "adam", folder=run, resume=True, callbacks=[Momentum(model)], **options)
    smaller, three = tiny(), {"parameters": list(model.parameters())[1:]}
    del smaller.item
    with pytest.raises(InputError, match="only the checkpoint has 'item.weight'"):
        fit(smaller, stream, "adam", folder=run, resume=True, callbacks=[Momentum(model)], **options)
    with pytest.raises(InputError, match="stream.*state_dict"):
        fit(tiny(), list(stream), "adam", folder=run, resume=True, callbacks=[Momentum(model)], **options, **three)
    assert states_equal(outcome(run), before)


def test_a_run_resumes_after_a_full_disk(data, tmp_path, monkeypatch):
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


@pytest.mark.long
@pytest.mark.campaign
def test_six_kills(tmp_path):
    """After SIGKILL at random moments, some during a save, every run ends like an uninterrupted one."""
    out = tmp_path / "kills.json"
    result = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "6", "--out", out], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr + result.stdout
    report = json.loads(out.read_text())["training"]
    assert report["kills"] == 6
    assert report["kills_in_the_middle_of_a_save"] >= 1
    assert report["kills_by_moment"]["half a tensor"] >= 1
    assert report["identical"]
    assert report["runs_compared"] >= 2
