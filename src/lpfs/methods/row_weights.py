"""Weights of the fields computed from each row: AdaFS and the SE block of COLD.

A model that was trained for long has put the importance of a field into the norm of its embedding, and the weights
then carry little information. Observed on simulated logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpfs.methods.base import Count, MethodOptions, Positive, SearchTask
from lpfs.methods.masks import RowWeightMask
from lpfs.methods.training import MaskMethod
from lpfs.models.base import Model
from lpfs.models.layers import dense_layers


@dataclass(frozen=True)
class AdaFSOptions(MethodOptions):
    """Learning rate of the controller, width of its hidden layer, and whether only the K best of a row pass."""

    lr: Positive = 0.001
    hidden: Count = 64
    hard: bool = False


class AdaFS(RowWeightMask):
    r"""Weights of the fields of a row,

    .. math:: w(x) = N\,\mathrm{softmax}(\mathrm{MLP}(\mathrm{BN}(e)))

    or, with ``hard``, only its K largest, scaled to a mean of 1 again. The score is the mean of w.
    """

    def __init__(self, names: Sequence[str], steps: int, seed: int, width: int, hidden: int, best: int | None) -> None:
        super().__init__(names, steps, seed)
        self.best = best
        self.norm = nn.BatchNorm1d(width)
        with torch.random.fork_rng([]):
            self.controller = dense_layers(len(names) * width, (hidden,), len(names))
        with torch.no_grad():
            for parameter in self.controller.parameters():  # torch's initialization, with the seed of the search
                bound = parameter.shape[-1] ** -0.5
                parameter.uniform_(-bound, bound, generator=self.draw)

    def weights(self, tokens: Tensor) -> Tensor:
        normalized = self.norm(tokens.flatten(0, 1)).view_as(tokens)
        shares = self.controller(normalized.flatten(1)).softmax(1)
        if self.best is not None:
            largest, fields = shares.topk(self.best, 1)
            shares = torch.zeros_like(shares).scatter(1, fields, largest / largest.sum(1, keepdim=True))
        weights: Tensor = shares * (shares.shape[1] if self.best is None else self.best)
        return weights


class AdaFSMethod(MaskMethod):
    """A controller that weights the fields of every row, trained with the weights of the model.

    Lin et al., AdaFS: Adaptive Feature Selection in Deep Recommender System, 2022. Defined as in public code,
    except that weights have a mean of 1, so that the embeddings of the pretrained model are not divided by N at
    the start. With ``hard`` few true fields were found on a simulated log, probably because the choice of fields,
    made from the whole row, can itself encode the prediction.
    """

    Options = AdaFSOptions
    options: AdaFSOptions
    mask_class = AdaFS
    trial_options = ({"lr": 0.003}, {"lr": 0.01}, {"lr": 0.0003}, {"hidden": 16})

    def __init__(self, name: str, options: AdaFSOptions | None = None) -> None:
        super().__init__(name, options)
        self.search_per_k = self.options.hard  # K is then part of the network

    def make_mask(self, model: Model, task: SearchTask, options: AdaFSOptions) -> AdaFS:
        names, best = tuple(model.sites()), task.target.keep if options.hard else None
        return AdaFS(names, task.steps, task.seed, model.inputs.width, options.hidden, best)


@dataclass(frozen=True)
class ColdSEOptions(MethodOptions):
    """Learning rate of the block."""

    lr: Positive = 0.001


class ColdSE(RowWeightMask):
    r"""One Linear from the row to a weight per field,

    .. math:: s = \sigma(W [e_1, \dots, e_N] + b), \qquad v_n = 2 s_n e_n

    with W = 0 and b = 0, so that v = e at the start. The score is the mean of 2s.
    """

    def __init__(self, names: Sequence[str], steps: int, seed: int, width: int) -> None:
        super().__init__(names, steps, seed)
        self.linear = nn.Linear(len(names) * width, len(names))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def weights(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.linear(tokens.flatten(1))
        return 2 * logits.sigmoid()


class ColdSEMethod(MaskMethod):
    """The SE block of COLD: a squeeze-and-excitation weight per field, computed from the whole row.

    Wang et al., COLD: Towards the Next Generation of Pre-Ranking System, 2020. The formula is that of a description
    of the paper, except for the factor 2, which keeps the embeddings of the pretrained model at the start; no public
    code was found. In the paper the block is trained with the model from the beginning, and K is found by trials.
    """

    Options = ColdSEOptions
    mask_class = ColdSE
    trial_options = ({"lr": 0.003}, {"lr": 0.01}, {"lr": 0.0003}, {"lr": 0.03})

    def make_mask(self, model: Model, task: SearchTask, options: ColdSEOptions) -> ColdSE:
        return ColdSE(tuple(model.sites()), task.steps, task.seed, model.inputs.width)
