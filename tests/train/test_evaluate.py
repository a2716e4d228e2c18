from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from lpfs.errors import InputError, NonFiniteError
from lpfs.train import metrics
from lpfs.train.evaluate import Metrics, evaluate
from tests.helpers.tiny import log, tiny


def logits_of(model, data):
    model.eval()
    with torch.no_grad():
        batch = next(iter(data.stream(len(data))))
        return model(batch).numpy(), batch.labels.numpy()


def test_metrics_do_not_depend_on_the_batch_size(data):
    model = tiny()
    z, y = logits_of(model, data)
    for size in (7, 64, 1000):
        result = evaluate(model, data.stream(size))
        assert result.tasks == {"click": metrics.scores(batch_logits(model, data, size), y[:, 0], None, 0.5)}
        assert result.auc == pytest.approx(metrics.auc(z, y[:, 0]), abs=1e-6)
        assert result.main.rows == len(data)


def batch_logits(model, data, size):
    with torch.no_grad():
        return torch.cat([model(batch) for batch in data.stream(size)]).numpy()


def test_days_are_evaluated_in_time_order_only(data):
    model = tiny()
    result = evaluate(model, data.stream(50))
    assert list(result.days) == ["day 0", "day 1"]
    for number, name in enumerate(result.days):
        single = evaluate(model, data.days(number, number + 1).stream(50))
        assert result.days[name]["click"].auc == pytest.approx(single.auc, abs=1e-6)
        assert result.days[name]["click"].rows == 320
        assert single.days == {}
    assert evaluate(model, data.stream(50, shuffle=True)).days == {}
    part = evaluate(model, data.part(300, 400).stream(30))
    assert [day["click"].rows for day in part.days.values()] == [20, 80]


def test_days_of_a_stream_that_starts_in_the_middle(data):
    stream = data.stream(50)
    batches = iter(stream)
    for _ in range(6):
        next(batches)
    later = data.stream(50)
    later.load_state_dict(stream.state_dict())
    assert [day["click"].rows for day in evaluate(tiny(), later).days.values()] == [20, 320]


def test_every_task_has_scores(tmp_path):
    data = log(tmp_path / "log", tasks=("like", "share"))
    model = tiny(tasks=3)
    result = evaluate(model, data.stream(64))
    assert list(result.tasks) == ["click", "like", "share"]
    assert len({task.auc for task in result.tasks.values()}) == 3
    assert list(evaluate(tiny(), data.stream(64)).tasks) == ["click"]
    assert list(result.days["day 0"]) == ["click", "like", "share"]


def test_modes_are_restored_and_nothing_has_a_gradient(data):
    model = tiny()
    model.train()
    model.drop.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate(model, data.stream(64))
    assert (model.training, model.drop.training, model.user.training) == (True, False, True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_the_mode_is_restored_after_an_error(data):
    class Broken(nn.Module):
        def forward(self, batch):
            raise KeyError("broken")

    model = Broken()
    with pytest.raises(KeyError):
        evaluate(model, data.stream(64))
    assert model.training


def test_sample_weights(data):
    model = tiny()
    stream = data.stream(64)
    result = evaluate(model, stream, weights=lambda batch: 1.0 + (batch.labels[:, 0] == 0))
    y = logits_of(model, data)[1][:, 0]
    z = batch_logits(model, data, 64)
    assert result.main == metrics.scores(z, y, 2.0 - y, 0.5)
    with pytest.raises(InputError, match=r"weights.*\(64,\)"):
        evaluate(model, stream, weights=lambda batch: batch.labels)


def test_the_negative_rate_comes_from_the_dataset_or_the_argument(data):
    model = tiny()
    stream = data.stream(64)
    default, explicit = evaluate(model, stream), evaluate(model, stream, negative_rate=0.1)
    assert default.main.corrected == evaluate(model, stream, negative_rate=0.5).main.corrected
    assert explicit.main.corrected != default.main.corrected
    assert explicit.main.calibration == default.main.calibration
    assert evaluate(model, list(stream)).main.corrected is None


def test_an_undefined_metric_is_none_and_printed_as_a_dash(data):
    batches = []
    for batch in data.stream(64):
        batch.labels.zero_()
        batches.append(batch)
    result = evaluate(tiny(), batches)
    assert result.auc is None
    assert " - " in str(result)
    assert json.loads(json.dumps(result.to_json()))["tasks"]["label"]["auc"] is None


def test_json_in_and_out(data):
    result = evaluate(tiny(), data.stream(64))
    assert Metrics.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert result.logloss == result.main.logloss
    assert f"{result.auc:.5f}" in str(result)
    with pytest.raises(InputError, match="unknown key 'speed' for Metrics"):
        Metrics.from_json({**result.to_json(), "speed": 1})


def test_bfloat16_is_close(data):
    model = tiny()
    exact, rough = evaluate(model, data.stream(64)), evaluate(model, data.stream(64), precision="bfloat16")
    assert rough.auc != exact.auc
    assert rough.auc == pytest.approx(exact.auc, abs=0.01)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_named(data, value):
    model = tiny()
    with torch.no_grad():
        model.user.weight[3] = value
    first = int(np.flatnonzero(torch.cat([b.ids[:, 0] for b in data.stream(64)]).numpy() == 3)[0])
    with pytest.raises(NonFiniteError, match=f"logit of row {first} is not finite"):
        evaluate(model, data.stream(64))


def test_no_batch_and_a_wrong_shape_are_refused(data):
    with pytest.raises(InputError, match="no batch"):
        evaluate(tiny(), [])
    with pytest.raises(InputError, match=r"found \(64, 2\)"):
        evaluate(tiny(tasks=2), data.stream(64))

    class Two(nn.Module):
        def forward(self, batch):
            return batch.labels, batch.labels

    with pytest.raises(InputError, match="found tuple"):
        evaluate(Two(), data.stream(64))
