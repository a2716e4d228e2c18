"""Cross-fitting: networks that are each blind to one fold of the search rows, under the gates of one search.

A gate that learns from rows that the weights have seen keeps what they have memorized, and one that learns from rows
whose ids the weights have never seen drops fields with new ids. So the search rows are split at random into M folds,
and network m is trained on all rows but those of fold m. The gradient of the gates is the mean over m of that of
network m on fold m (cross-fitting as in Chernozhukov et al., Double/debiased machine learning, 2018). The model of the
search itself is trained on all rows under the same gates and gives them no gradient; its gates are absorbed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.gates.hooks import install
from lpfs.gates.module import Gates
from lpfs.methods.base import RowFold, SearchCost
from lpfs.methods.training import HoldoutBatches, holdout_loss, train_only
from lpfs.train.callbacks import State
from lpfs.train.config import Training, lr_factor
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import weighted_mean
from lpfs.train.evaluate import on_device
from lpfs.train.step import Stepper


class FoldNetwork:
    """A copy of the model and its optimizer in training on the rows of one fold."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, fold: RowFold, config: Training) -> None:
        self.model, self.optimizer = copy.deepcopy((model, optimizer))
        self.model.train()
        factor = lr_factor(config.schedule, config.schedule_steps or config.steps, config.rise)
        self.state = State(self.model, self.optimizer, config, config.steps)
        self.stepper = Stepper(self.state, [], factor, None)
        self.stream, self.holdout = HoldoutBatches(fold.stream), HoldoutBatches(fold.holdout)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, the state of the optimizer and the positions in the rows."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "holdout": self.holdout.state_dict(),
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.model.load_state_dict(values["model"])
        self.optimizer.load_state_dict(values["optimizer"])
        self.stream.load_state_dict(values["stream"])
        self.holdout.load_state_dict(values["holdout"])


class FoldNetworks:
    """The networks of a cross-fitted search; make them before gates are attached to the model.

    Args:
        model, optimizer: copied for every fold.
        folds: the rows of every network.
        config: settings of the training loop, with the number of steps.
        cost: counts the rows.

    Attributes:
        per_step: number of networks that take a step, and give the gradient, in each step of the search, in turn.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folds: Sequence[RowFold],
        config: Training,
        cost: SearchCost,
    ) -> None:
        config = replace(config, graph=False)
        self.networks = [FoldNetwork(model, optimizer, fold, config) for fold in folds]
        self.cost, self.per_step = cost, len(folds)
        self.loss = torch.zeros(())  # of the held-out rows of the last step, mean over the networks

    def install(self, gates: Gates) -> None:
        """Multiply the embeddings of every network by the gates of the search."""
        for network in self.networks:
            install(network.model, gates, gates.places, gates.names)

    def active(self, step: int) -> list[FoldNetwork]:
        """Return the networks of a step."""
        first = step * self.per_step
        return [self.networks[(first + number) % len(self.networks)] for number in range(self.per_step)]

    def train(self, gates: Gates, step: int) -> None:
        """Take one training step of the networks of a step; the gates are constant."""
        gates.x.requires_grad_(False)
        try:
            for network in self.active(step):
                batch = on_device(network.stream.next(), network.stepper.device)
                network.state.step = step
                network.stepper.step(batch, lambda: f"step {step + 1:,} of a network that is blind to a fold")
                self.cost.add(forwards=len(batch), backwards=len(batch))
        finally:
            gates.x.requires_grad_(True)

    def gradient(self, gates: Gates, step: int) -> Tensor:
        """Return the gradient of x (N,): the mean over networks of that on rows that they are blind to."""
        gradients, losses = [], []
        for network in self.active(step):
            batch = network.holdout.next()
            with train_only(network.model, []):
                loss = holdout_loss(network.state, batch)
                (grad,) = torch.autograd.grad(loss, [gates.x])
            gradients.append(weighted_mean(current_group(), grad, len(batch), "averaging gradients of held-out rows"))
            losses.append(loss.detach())
            self.cost.add(forwards=len(batch), backwards=len(batch))
        self.loss = torch.stack(losses).mean()
        return torch.stack(gradients).mean(0)

    def close(self) -> None:
        """End the passes over the rows."""
        for network in self.networks:
            network.stream.close()
            network.holdout.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all networks."""
        return {"networks": [network.state_dict() for network in self.networks]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from saved states."""
        for network, saved in zip(self.networks, values["networks"], strict=True):
            network.load_state_dict(saved)
