from __future__ import annotations

import pytest
import torch
from torch import nn

from lpfs.errors import DeviceMemoryError, InputError
from lpfs.train.config import Training
from lpfs.train.step import bce_loss, convert_out_of_memory, make_optimizer


def test_the_loss_is_binary_cross_entropy_by_task_and_weight():
    logits, labels = torch.randn(10, 2), (torch.rand(10, 2) < 0.5).float()
    rows = torch.rand(10)
    p = torch.sigmoid(logits)
    losses = -(labels * p.log() + (1 - labels) * (1 - p).log())
    torch.testing.assert_close(bce_loss(logits, labels), losses.mean(0).sum())
    torch.testing.assert_close(bce_loss(logits, labels, (1.0, 0.25)), losses[:, 0].mean() + losses[:, 1].mean() / 4)
    torch.testing.assert_close(bce_loss(logits, labels, None, rows), (losses * rows[:, None]).mean(0).sum())
    with pytest.raises(InputError, match="task_weights.* 2; found 3"):
        bce_loss(logits, labels, (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("name", "kind", "lr"),
    [
        ("adagrad", "Adagrad", 0.01),
        ("rowwise-adagrad", "RowWiseAdagrad", 0.01),
        ("adam", "Adam", 0.001),
        ("sgd", "SGD", 0.01),
    ],
)
def test_optimizers_by_name_with_their_rates(name, kind, lr):
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    optimizer = make_optimizer(Training(optimizer=name), layer.parameters())
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == (kind, lr)
    assert optimizer.param_groups[0]["params"] == [layer.weight]
    assert make_optimizer(Training(optimizer=name, lr=0.5), layer.parameters()).param_groups[0]["lr"] == 0.5
    with pytest.raises(InputError, match="no parameter"):
        make_optimizer(Training(), [layer.bias])


@pytest.mark.parametrize(("rows", "advice"), [(1000, "batch_size=512"), (512, "batch_size=256"), (2, "batch_size=1")])
def test_no_memory_left_says_which_batch_size_to_try(rows, advice):
    message = rf"{rows} rows; try {advice}\..*\(CUDA out of memory"
    with pytest.raises(DeviceMemoryError, match=message), convert_out_of_memory(rows):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")


def test_no_memory_for_a_single_row():
    with pytest.raises(DeviceMemoryError, match="the model is too large"), convert_out_of_memory(1):
        raise torch.OutOfMemoryError("CUDA out of memory")
