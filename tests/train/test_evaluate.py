from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from tiny import log, tiny
from torch import nn

from lpfs.errors import InputError, NonFiniteError
from lpfs.train import metrics
from lpfs.train.evaluate import Metrics, evaluate


def logits_of(model, data):
    model.eval()
    with torch.no_grad():
        batch = next(iter(data.stream(len(data))))
        return model(batch).numpy(), batch.labels.numpy()


def test_it_is_exact_over_the_whole_set_whatever_the_batch_size(data):
    model = tiny()
    z, y = logits_of(model, data)
    for size in (7, 64, 1000):
        found = evaluate(model, data.stream(size))
        assert found.tasks == {"click": metrics.scores(found_logits(model, data, size), y[:, 0], None, 0.5)}
        assert found.auc == pytest.approx(metrics.auc(z, y[:, 0]), abs=1e-6)
        assert found.main.rows == len(data)


def found_logits(model, data, size):
    with torch.no_grad():
        return torch.cat([model(batch) for batch in data.stream(size)]).numpy()


def test_days_are_told_apart_in_time_order_only(data):
    model = tiny()
    found = evaluate(model, data.stream(50))
    assert list(found.days) == ["day 0", "day 1"]
    for number, name in enumerate(found.days):
        alone = evaluate(model, data.days(number, number + 1).stream(50))
        assert found.days[name]["click"].auc == pytest.approx(alone.auc, abs=1e-6)
        assert found.days[name]["click"].rows == 320
        assert alone.days == {}
    assert evaluate(model, data.stream(50, shuffle=True)).days == {}
    part = evaluate(model, data.part(300, 400).stream(30))
    assert [each["click"].rows for each in part.days.values()] == [20, 80]


def test_a_stream_that_goes_on_in_the_middle_knows_its_days(data):
    stream = data.stream(50)
    batches = iter(stream)
    for _ in range(6):
        next(batches)
    later = data.stream(50)
    later.load_state_dict(stream.state_dict())
    assert [each["click"].rows for each in evaluate(tiny(), later).days.values()] == [20, 320]


def test_several_tasks_each_have_their_scores(tmp_path):
    data = log(tmp_path / "log", tasks=("like", "share"))
    model = tiny(tasks=3)
    found = evaluate(model, data.stream(64))
    assert list(found.tasks) == ["click", "like", "share"]
    assert len({each.auc for each in found.tasks.values()}) == 3
    assert list(evaluate(tiny(), data.stream(64)).tasks) == ["click"]
    assert list(found.days["day 0"]) == ["click", "like", "share"]


def test_every_module_is_back_in_its_mode_and_nothing_has_a_gradient(data):
    model = tiny()
    model.train()
    model.drop.eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    evaluate(model, data.stream(64))
    assert (model.training, model.drop.training, model.user.training) == (True, False, True)
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_the_mode_is_back_after_an_error_too(data):
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
    found = evaluate(model, stream, weights=lambda batch: 1.0 + (batch.labels[:, 0] == 0))
    y = logits_of(model, data)[1][:, 0]
    z = found_logits(model, data, 64)
    assert found.main == metrics.scores(z, y, 2.0 - y, 0.5)
    with pytest.raises(InputError, match=r"weights must give a tensor of shape \(64,\)"):
        evaluate(model, stream, weights=lambda batch: batch.labels)


def test_the_rate_of_negatives_comes_from_the_dataset_or_from_you(data):
    model = tiny()
    stream = data.stream(64)
    known, given = evaluate(model, stream), evaluate(model, stream, negative_rate=0.1)
    assert known.main.corrected == evaluate(model, stream, negative_rate=0.5).main.corrected
    assert given.main.corrected != known.main.corrected
    assert given.main.calibration == known.main.calibration
    assert evaluate(model, list(stream)).main.corrected is None


def test_one_class_is_none_and_reads_as_a_dash(data):
    batches = []
    for batch in data.stream(64):
        batch.labels.zero_()
        batches.append(batch)
    found = evaluate(tiny(), batches)
    assert found.auc is None
    assert " - " in str(found)
    assert json.loads(json.dumps(found.to_json()))["tasks"]["label"]["auc"] is None


def test_json_in_and_out(data):
    found = evaluate(tiny(), data.stream(64))
    assert Metrics.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.logloss == found.main.logloss
    assert f"{found.auc:.5f}" in str(found)
    with pytest.raises(InputError, match="unknown key 'speed' for Metrics"):
        Metrics.from_json({**found.to_json(), "speed": 1})


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


def test_no_batch_is_an_error_and_so_is_a_wrong_shape(data):
    with pytest.raises(InputError, match="gave no batch"):
        evaluate(tiny(), [])
    with pytest.raises(InputError, match=r"found \(64, 2\)"):
        evaluate(tiny(tasks=2), data.stream(64))

    class Two(nn.Module):
        def forward(self, batch):
            return batch.labels, batch.labels

    with pytest.raises(InputError, match="found tuple"):
        evaluate(Two(), data.stream(64))
