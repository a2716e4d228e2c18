"""Training of a model with an embedding Table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lpfs
from lpfs.data.batch import Batch
from lpfs.embeddings.table import Table
from lpfs.errors import NonFiniteError
from lpfs.train.callbacks import Callback
from tests.helpers.tiny import VALUES


class Tabled(nn.Module):
    """The tiny model without dropout, with a Table or an nn.Embedding."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table: nn.Module = Table((VALUES, VALUES), 4)
        self.head = nn.Linear(9, 1)
        if plain:
            self.table = nn.Embedding.from_pretrained(self.table.weight.detach().clone(), freeze=False)

    def forward(self, batch: Batch) -> Tensor:
        ids = batch.ids if isinstance(self.table, Table) else batch.ids + torch.tensor([0, VALUES])
        return self.head(torch.cat([self.table(ids).flatten(1), batch.dense], 1))[:, 0]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("how", [{}, {"clip": 0.05}, {"optimizer": "sgd", "lr": 0.5}, {"schedule": "rise"}])
def test_a_table_trains_as_an_embedding_does(data, how):
    """Sums of 64 gradients taken in another order: 1e-6 of a step of at most lr, over 20 steps."""
    models = [Tabled(), Tabled(plain=True)]
    for model in models:
        lpfs.fit(model, data.stream(64), steps=20, quiet=True, **how)
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-5, atol=5e-6)
    assert not torch.equal(weights(models[0]), weights(Tabled()))
    assert models[0].table.weight.grad is None


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise-adagrad", "adam", "sgd"])
def test_training_with_a_table_resumes_bit_for_bit(data, tmp_path, optimizer):
    whole, parts = Tabled(), Tabled()
    lpfs.fit(whole, data.stream(64), optimizer, steps=12, quiet=True)
    for steps in (5, 12):
        lpfs.fit(parts, data.stream(64), optimizer, steps=steps, quiet=True, folder=tmp_path, resume=True)
        parts = parts if steps == 12 else Tabled()
    assert torch.equal(weights(whole), weights(parts))


class Spoil(Callback):
    """Sets a value in the gradient of one row to infinity."""

    def before_step(self, state) -> None:
        if state.step == 4:  # the last one
            state.model.table.weight.row_grads[0].values[1, 2] = float("inf")


@pytest.mark.parametrize(
    ("how", "message"), [({"clip": 1.0}, "the gradient is not finite"), ({}, "'table.weight' is not finite")]
)
def test_a_non_finite_row_gradient_is_refused(data, tmp_path, how, message):
    with pytest.raises(NonFiniteError, match=message):
        lpfs.fit(Tabled(), data.stream(64), steps=5, quiet=True, folder=tmp_path, callbacks=[Spoil()], **how)
    assert not list(tmp_path.glob("**/step-*"))
