"""Training on a GPU. Needs only pytest, torch and numpy (no other fixture)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import lpfs
from lpfs.errors import DeviceMemoryError
from lpfs.train.callbacks import Callback
from lpfs.train.tensor_io import states_equal
from tests.helpers.tiny import log, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class StopError(Exception):
    pass


class Stop(Callback):
    def __init__(self, step):
        self.at = step

    def after_step(self, state):
        if state.step == self.at:
            raise StopError


def go(data, folder, stop=0, seed=0, **settings):
    model = tiny(seed).cuda()
    stream = data.stream(64, shuffle=True, device="cuda")
    valid = data.stream(100, device="cuda")
    options = {"steps": 33, "checkpoint_every": 5, "clip": 1.0, "quiet": True, "resume": True, **settings}
    done = lpfs.fit(model, stream, "adam", lr=0.02, valid=valid, folder=folder, callbacks=[Stop(stop)], **options)
    return dict(model.state_dict()), done


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_resumes_bit_for_bit_with_dropout_on_the_gpu(tmp_path, precision):
    data = log(tmp_path / "log")
    whole, expected = go(data, tmp_path / "whole", precision=precision)
    with pytest.raises(StopError):
        go(data, tmp_path / "cut", stop=18, precision=precision)
    model, done = go(data, tmp_path / "cut", seed=4, precision=precision)
    assert done.resumed == 15
    assert states_equal(model, whole)
    assert done.metrics == expected.metrics


def test_batches_of_the_cpu_are_moved_to_the_model(tmp_path):
    data = log(tmp_path / "log")
    model = tiny().cuda()
    done = lpfs.fit(model, data.stream(64), steps=30, check_every=10, valid=data.stream(64), quiet=True)
    assert done.metrics.auc is not None
    assert model.head.weight.is_cuda


def test_no_memory_left_says_which_batch_size_to_try(tmp_path):
    class Huge(Callback):
        def before_backward(self, state):
            self.memory = torch.empty(1 << 42, dtype=torch.uint8, device="cuda")

    data = log(tmp_path / "log")
    with pytest.raises(DeviceMemoryError, match="64 rows.*batch_size=32"):
        lpfs.fit(tiny().cuda(), data.stream(64), steps=5, callbacks=[Huge()], quiet=True)
