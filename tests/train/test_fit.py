from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import lpfs
from lpfs.embeddings.optim import Adagrad, Adam
from lpfs.errors import DeviceMemoryError, InputError, MissingPackageError, NonFiniteError
from lpfs.train.callbacks import Callback
from lpfs.train.checkpoint import Checkpoints
from lpfs.train.config import Training
from lpfs.train.evaluate import evaluate
from lpfs.train.fit import fit
from lpfs.train.step import bce_loss
from lpfs.train.tensor_io import states_equal
from tests.helpers.tiny import log, tiny


def fitted(data, model=None, optimizer="adam", **settings):
    model = tiny() if model is None else model
    stream = settings.pop("stream", None) or data.stream(64, shuffle=True)
    return model, fit(model, stream, optimizer, **{"quiet": True, "lr": 0.02, **settings})


def records(folder, kind=None):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def on_begin(self, state):
        self.calls.append(("begin", state.step))

    def before_backward(self, state):
        self.calls.append(("before backward", state.step))

    def before_step(self, state):
        self.calls.append(("before step", state.step))

    def after_step(self, state):
        self.calls.append(("after step", state.step))

    def on_evaluate(self, state):
        self.calls.append(("evaluate", state.step))

    def on_checkpoint(self, state, path):
        assert path.is_dir()
        self.calls.append(("checkpoint", state.step))

    def on_end(self, state):
        self.calls.append(("end", state.step))


def test_training_improves_the_model_and_logs(data, tmp_path, capsys):
    model, done = fitted(data, epochs=6, valid=data.stream(100), folder=tmp_path, quiet=False, log_every=10)
    assert (done.steps, done.rows, done.stopped, done.resumed) == (60, 3840, "", None)
    assert done.metrics.auc > 0.75 > evaluate(tiny(), data.stream(100)).auc
    assert done.metrics == evaluate(model, data.stream(100))
    assert [line["step"] for line in records(tmp_path, "train")] == [10, 20, 30, 40, 50, 60]
    assert [line["step"] for line in records(tmp_path, "evaluate")] == [10, 20, 30, 40, 50, 60]
    losses = [line["loss"] for line in records(tmp_path, "train")]
    assert losses[-1] < losses[0]
    assert capsys.readouterr().err.startswith("trained 60 steps, 3,840 rows: loss")


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_weights_equal_those_of_a_plain_torch_loop(data, name):
    """The same forward, loss and optimizer in the same order give the same bits."""
    mine, _ = fitted(data, optimizer=name, steps=25, clip=0.5, seed=5)
    model = tiny()
    optimizer = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[name](model.parameters(), lr=0.02)
    torch.manual_seed(5)
    stream, step = data.stream(64, shuffle=True), 0
    while step < 25:
        for batch in stream:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels[:, 0])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            step += 1
            if step == 25:
                break
    assert states_equal(dict(mine.state_dict()), dict(model.state_dict()))


def test_the_result_depends_on_the_seed_only(data, tmp_path):
    def once(folder, seed):
        model, done = fitted(data, epochs=2, valid=data.stream(100), folder=folder, seed=seed)
        lines = [{k: v for k, v in line.items() if k != "rows_per_second"} for line in records(folder)]
        return dict(model.state_dict()), lines, done.metrics

    (one, *logged), (two, *again) = once(tmp_path / "a", 3), once(tmp_path / "b", 3)
    assert states_equal(one, two)
    assert logged == again
    assert not states_equal(one, once(tmp_path / "c", 4)[0])


def test_hooks_are_called_in_order(data, tmp_path):
    seen = Recorder()
    fitted(data, steps=2, valid=data.stream(100), folder=tmp_path, callbacks=[seen], evaluate_every=2)
    step = ["before backward", "before step"]
    first = [("begin", 0), *((name, 0) for name in step), ("after step", 1)]
    second = [*((name, 1) for name in step), ("after step", 2), ("evaluate", 2), ("checkpoint", 2), ("end", 2)]
    assert seen.calls == [*first, *second]


def test_a_callback_that_does_nothing_changes_nothing(data):
    one, _ = fitted(data, steps=5)
    two, _ = fitted(data, steps=5, callbacks=[Callback()])
    assert states_equal(dict(one.state_dict()), dict(two.state_dict()))


def test_a_callback_may_add_to_the_loss_and_stop(data):
    class Shrink(Callback):
        def before_backward(self, state):
            state.loss = state.loss + 10 * state.model.head.weight.square().sum()

        def after_step(self, state):
            if state.step == 7:
                state.stop = "enough"

    plain, _ = fitted(data, steps=7)
    model, done = fitted(data, steps=50, callbacks=[Shrink()])
    assert (done.steps, done.stopped) == (7, "enough")
    assert model.head.weight.abs().sum() < plain.head.weight.abs().sum()


def test_only_the_given_parameters_are_trained(data):
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fitted(data, model, steps=3, parameters=model.head.parameters())
    after = model.state_dict()
    assert torch.equal(before["user.weight"], after["user.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_an_optimizer_object_keeps_its_groups_and_rates(data):
    model = tiny()
    groups = [{"params": model.user.parameters()}, {"params": model.head.parameters(), "lr": 0.001}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    class Rates(Callback):
        def after_step(self, state):
            self.last = [group["lr"] for group in state.optimizer.param_groups]

    rates = Rates()
    fit(model, data.stream(64), optimizer, steps=4, schedule="linear", quiet=True, callbacks=[rates])
    assert rates.last == pytest.approx([0.1 / 4, 0.001 / 4])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.001]  # a schedule ends with the training
    assert optimizer.state[model.head.weight]["momentum_buffer"].any()
    with pytest.raises(InputError, match="leave out lr="):
        fit(model, data.stream(64), optimizer, lr=0.1, steps=1)
    with pytest.raises(InputError, match="optimizer must be.*found 3"):
        fit(model, data.stream(64), 3, steps=1)
    with pytest.raises(InputError, match="optimizer must be one of adagrad, rowwise-adagrad, adam, sgd"):
        fit(model, data.stream(64), "lion", steps=1)


def test_the_rate_follows_the_schedule(data, tmp_path):
    fitted(
        data, optimizer="adagrad", lr=0.01, steps=21, schedule="rise", schedule_steps=20, folder=tmp_path, log_every=1
    )
    rates = [line["lr"] for line in records(tmp_path, "train")]
    assert (rates[0], rates[10], rates[20]) == (0.01, pytest.approx(0.01 * 10**0.5), pytest.approx(0.1))


def test_several_tasks_with_weights(tmp_path):
    data = log(tmp_path / "log", tasks=("like",))
    stream = data.stream(64)
    both, _ = fitted(data, tiny(tasks=2), stream=stream, steps=20, task_weights=(1.0, 1.0))
    first, _ = fitted(data, tiny(tasks=2), stream=data.stream(64), steps=20, task_weights=(1.0, 0.0))
    start = tiny(tasks=2)
    assert torch.equal(first.head.weight[1], start.head.weight[1])  # a task of weight 0 is not trained
    assert not torch.equal(both.head.weight[1], start.head.weight[1])
    with pytest.raises(InputError, match="task_weights.* 2; found 1"):
        fitted(data, tiny(tasks=2), stream=data.stream(64), steps=1, task_weights=(1.0,))


def test_sample_weights_affect_training_and_evaluation(data):
    one, _ = fitted(data, steps=10, weights=lambda batch: torch.ones(len(batch)))
    none, _ = fitted(data, steps=10)
    clicks, done = fitted(data, steps=40, weights=lambda batch: batch.labels[:, 0], valid=data.stream(64))
    assert states_equal(dict(one.state_dict()), dict(none.state_dict()))
    assert clicks(next(iter(data.stream(640)))).mean() > none(next(iter(data.stream(640)))).mean()
    assert done.metrics.main.positives == done.metrics.main.calibration * 0 + 231  # weights count in evaluation too


def test_bfloat16_trains_float32_weights(data):
    model, done = fitted(data, steps=60, precision="bfloat16", valid=data.stream(100))
    assert model.head.weight.dtype == torch.float32
    assert done.metrics.auc > 0.7


def test_clipping_bounds_the_gradient(data):
    class Norm(Callback):
        def after_step(self, state):
            grads = [weight.grad for weight in state.model.parameters()]
            assert nn.utils.get_total_norm(grads) <= 0.01 + 1e-6

    fitted(data, steps=3, clip=0.01, callbacks=[Norm()])


class Spoil(Callback):
    """Multiplies the loss, or sets the gradient, of one step."""

    def __init__(self, step, value, target="loss"):
        self.at, self.value, self.target = step, value, target

    def before_backward(self, state):
        if state.step == self.at and self.target == "loss":
            state.loss = state.loss * self.value

    def before_step(self, state):
        if state.step == self.at and self.target == "gradient":
            state.model.head.weight.grad.fill_(self.value)


class LastWeights(Callback):
    def __init__(self):
        self.moved = 0

    def after_step(self, state):
        self.moved = state.step
        self.weights = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_loss_changes_nothing_and_names_the_batch(data, tmp_path, value):
    model, watch = tiny(), LastWeights()
    message = r"at step 14 \(pass 2, batch 4 of 10\), rows 192 to 256.*no parameter was changed"
    with pytest.raises(NonFiniteError, match=message):
        fitted(data, model, steps=40, folder=tmp_path, checkpoint_every=5, callbacks=[watch, Spoil(13, value)])
    assert watch.moved == 13
    assert states_equal(watch.weights, dict(model.state_dict()))
    step, saved = Checkpoints(tmp_path / "checkpoints").latest()
    assert step == 10
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())


def test_a_non_finite_gradient_is_detected_when_clipping(data):
    model, watch = tiny(), LastWeights()
    with pytest.raises(NonFiniteError, match="the gradient is not finite at step 3 .*no parameter was changed"):
        fitted(data, model, steps=5, clip=1.0, callbacks=[watch, Spoil(2, math.inf, "gradient")])
    assert states_equal(watch.weights, dict(model.state_dict()))


def test_non_finite_weights_are_not_saved(data, tmp_path):
    with pytest.raises(NonFiniteError, match=r"parameter 'head.weight' is not finite after step 10"):
        fitted(data, steps=40, folder=tmp_path, checkpoint_every=5, callbacks=[Spoil(9, math.nan, "gradient")])
    assert Checkpoints(tmp_path / "checkpoints").steps() == [5]


def test_rare_checks_still_detect_it_before_a_log_record_or_a_checkpoint(data, tmp_path):
    with pytest.raises(NonFiniteError, match="or in the 99 steps before"):
        fitted(data, steps=40, folder=tmp_path, check_every=100, log_every=8, callbacks=[Spoil(9, math.nan)])
    assert [line["step"] for line in records(tmp_path)] == [8]
    one, _ = fitted(data, steps=20)
    two, _ = fitted(data, steps=20, check_every=7)
    assert states_equal(dict(one.state_dict()), dict(two.state_dict()))


def test_no_memory_left(data):
    class Huge(Callback):
        def before_backward(self, state):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    with pytest.raises(DeviceMemoryError, match="64 rows; try batch_size=32"):
        fitted(data, steps=5, callbacks=[Huge()])


def scripted(monkeypatch, *aucs):
    """Replace the AUC of successive evaluations by these values."""
    remaining = list(aucs)

    def pretend(model, stream, **options):
        result = evaluate(model, stream, **options)
        main = replace(result.main, auc=remaining.pop(0), logloss=1.0)
        return replace(result, tasks={"click": main}, days={})

    monkeypatch.setattr("lpfs.train.fit.evaluate", pretend)


@pytest.mark.parametrize("folder", [False, True])
def test_keep_best_restores_the_best_model(data, tmp_path, monkeypatch, folder):
    options = {"folder": tmp_path, "keep_checkpoints": 1} if folder else {}
    scripted(monkeypatch, 0.6, 0.8, 0.7, 0.8)
    at, _ = fitted(data, steps=20)
    model, done = fitted(data, steps=40, valid=data.stream(100), keep="best", **options)
    assert (done.best_step, done.best.auc, done.metrics.auc, done.steps) == (20, 0.8, 0.8, 40)
    assert states_equal(dict(model.state_dict()), dict(at.state_dict()))
    if folder:
        assert Checkpoints(tmp_path / "checkpoints").steps() == [40]
        saved = Checkpoints(tmp_path / "checkpoints").load(40)
        assert states_equal(saved["best_state"]["model"], dict(at.state_dict()))
        assert not states_equal(saved["model"], dict(at.state_dict()))  # the run itself could go on from its last step


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_keep_best_restores_the_optimizer_too(data, tmp_path, monkeypatch, folder, optimizer):
    def trained(steps, **options):
        model = tiny()
        chosen_optimizer = {"adam": Adam, "adagrad": Adagrad}[optimizer](model.parameters(), lr=0.02)
        fitted(data, model, chosen_optimizer, lr=None, steps=steps, schedule="linear", schedule_steps=80, **options)
        return model, chosen_optimizer

    scripted(monkeypatch, 0.6, 0.8, 0.7, 0.8)
    expected = trained(20)
    result = trained(40, valid=data.stream(100), keep="best", **({"folder": tmp_path} if folder else {}))
    assert states_equal(dict(result[0].state_dict()), dict(expected[0].state_dict()))
    assert states_equal(result[1].state_dict(), expected[1].state_dict())
    assert result[1].param_groups[0]["lr"] == 0.02
    for model, chosen_optimizer in (expected, result):  # the next step is the same too
        fitted(data, model, chosen_optimizer, lr=None, steps=1)
    assert states_equal(dict(result[0].state_dict()), dict(expected[0].state_dict()))


def test_keep_optimizer_last_keeps_the_current_state(data, monkeypatch):
    optimizers = []
    for options in ({}, {"valid": data.stream(100), "keep": "best", "keep_optimizer": "last"}):
        scripted(monkeypatch, 0.8, 0.7, 0.7)
        model = tiny()
        optimizers.append(Adagrad(model.parameters(), lr=0.02))
        fitted(data, model, optimizers[-1], lr=None, steps=30, **options)
    assert states_equal(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.parametrize("folder", [False, True])
def test_the_initial_model_can_be_the_best(data, tmp_path, monkeypatch, folder):
    options = {"folder": tmp_path, "keep_checkpoints": 1} if folder else {}
    scripted(monkeypatch, 0.9, 0.6, 0.8, 0.7)
    recorder = Recorder()
    settings = {"valid": data.stream(100), "keep": "best", "evaluate_first": True, "callbacks": [recorder]}
    model, done = fitted(data, steps=30, **settings, **options)
    assert (done.best_step, done.best.auc, done.metrics.auc, done.steps) == (0, 0.9, 0.7, 30)
    assert states_equal(dict(model.state_dict()), dict(tiny().state_dict()))
    assert recorder.calls[:2] == [("begin", 0), ("evaluate", 0)]
    assert [step for name, step in recorder.calls if name == "evaluate"] == [0, 10, 20, 30]
    if folder:
        assert Checkpoints(tmp_path / "checkpoints").steps() == [30]
        assert [record["step"] for record in records(tmp_path, "evaluate")] == [0, 10, 20, 30]


def test_the_last_model_is_kept_by_default(data, monkeypatch):
    scripted(monkeypatch, 0.8, 0.6)
    plain, _ = fitted(data, steps=20)
    model, done = fitted(data, steps=20, valid=data.stream(100))
    assert (done.best_step, done.metrics.auc, done.best.auc) == (10, 0.6, 0.8)
    assert states_equal(dict(model.state_dict()), dict(plain.state_dict()))


def test_early_stopping(data, monkeypatch):
    scripted(monkeypatch, 0.6, 0.7, 0.7, None, 0.9)
    _, done = fitted(data, steps=100, valid=data.stream(100), patience=2)
    assert (done.steps, done.best_step, done.stopped) == (40, 20, "no better auc in 2 evaluations")
    scripted(monkeypatch, 0.6, 0.65, 0.69, 0.9)
    _, done = fitted(data, steps=100, valid=data.stream(100), patience=2, min_delta=0.1)
    assert (done.steps, done.best_step) == (30, 10)


def test_logloss_can_be_monitored(data):
    _, done = fitted(data, steps=60, lr=0.2, valid=data.stream(100), monitor="logloss", evaluate_every=5)
    assert done.best.logloss <= done.metrics.logloss


def test_a_failing_logger_never_stops_training(data, tmp_path):
    seen = []

    def broken(record):
        raise RuntimeError("server gone")

    plain, _ = fitted(data, steps=10)
    with pytest.warns(UserWarning, match="server gone"):
        model, _ = fitted(data, steps=10, folder=tmp_path, loggers=[broken, seen.append], log_every=2)
    assert seen == records(tmp_path)
    assert states_equal(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_log_that_cannot_be_written_does_not_stop_training(data, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.warns(UserWarning, match="metrics.jsonl"):
        _, done = fitted(data, steps=10, folder=tmp_path, resume=True)
    assert done.steps == 10
    assert Checkpoints(tmp_path / "checkpoints").load(10)["log"] is None


def test_any_iterable_of_batches_works_until_it_is_exhausted(data):
    batches = list(data.stream(64))
    _, done = fitted(data, stream=batches, epochs=2)
    assert done.steps == 20
    _, done = fitted(data, stream=iter(batches))
    assert done.steps == 10
    with pytest.raises(InputError, match="no batch"):
        fitted(data, stream=iter(batches), steps=11)
    with pytest.raises(InputError, match="schedule_steps"):
        fitted(data, stream=iter(batches), schedule="rise")


def test_conflicting_arguments_are_refused_before_anything_changes(data, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="unknown key 'learning_rate' for Training"):
        fitted(data, learning_rate=0.1)
    with pytest.raises(InputError, match="give valid="):
        fitted(data, patience=3)
    with pytest.raises(InputError, match="resume=True.*folder="):
        fitted(data, resume=True)
    with pytest.raises(InputError, match="tensorboard=True.*folder="):
        fitted(data, tensorboard=True)
    monkeypatch.setitem(__import__("sys").modules, "tensorboard", None)
    with pytest.raises(MissingPackageError, match="pip install"):
        fitted(data, tensorboard=True, folder=tmp_path)


def test_settings_override_the_configuration(data):
    config = Training(steps=3, quiet=True)
    assert fit(tiny(), data.stream(64), config=config).steps == 3
    assert fit(tiny(), data.stream(64), "adam", config=config, steps=4).steps == 4
    assert lpfs.Training is Training
    assert lpfs.fit is fit


def test_without_a_folder_nothing_is_written(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fitted(data, epochs=1, valid=data.stream(64))
    assert list(tmp_path.iterdir()) == []


def test_the_loss_of_the_log_is_the_mean_since_the_last_line(data, tmp_path):
    model = tiny(dropout=0.0)
    with torch.no_grad():
        losses = [float(bce_loss(model(b)[:, None], b.labels)) for b in data.stream(64)]
    fit(model, data.stream(64), "adam", lr=1e-12, folder=tmp_path, log_every=5, quiet=True)
    logged = [line["loss"] for line in records(tmp_path, "train")]
    assert logged == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5], rel=1e-6)
