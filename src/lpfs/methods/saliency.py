"""SFS and SHARK: first-order importance of the embeddings of a trained model, from its gradients.

Embeddings are taken where gates would be attached, with the wide weights of a field. The model is not trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lpfs._validation import check_options
from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.gates.sites import ResolvedSite, resolve_sites
from lpfs.methods.base import RankingMethod, SearchCost, SearchTask
from lpfs.methods.sampling import iterate_unseen, unseen_batches
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.train.evaluate import device_of, eval_mode, on_device, predict_batch
from lpfs.train.step import bce_loss

EmbeddingStacks: TypeAlias = dict[str, Tensor]  # path of a module -> a value for all its parts, (B, slots, D)
NO_LIMIT = 1 << 62  # rows of batches of unknown size: only the number of batches is limited


@dataclass(frozen=True)
class SFSOptions:
    """Number of batches, at most one pass over the rows."""

    batches: int = 100

    def __post_init__(self) -> None:
        check_options(self, count=("batches",))


class SFS(RankingMethod):
    r"""Derivative of the loss with respect to a mask on each field, at a mask of ones.

    .. math:: \text{score}_n = \frac{s_n}{\sum_m s_m}, \qquad
              s_n = \frac1T \sum_{t=1}^T \Big| \frac{\partial L_t}{\partial c_n} \Big|_{c=1}, \qquad
              \frac{\partial L_t}{\partial c_n} = \Big\langle \frac{\partial L_t}{\partial e_n}, e_n \Big\rangle

    Wang et al., Single-shot Feature Selection for Multi-task Recommendations, 2023. c_n multiplies the embedding
    of field n where its gate would be, with its wide weights, and L_t is the mean loss of batch t. The model is
    not trained.
    """

    Options = SFSOptions
    options: SFSOptions
    trial_options = ({"batches": 300}, {"batches": 30}, {"batches": 1_000}, {"batches": 10})

    def score(self, task: SearchTask, model: Model, cost: SearchCost) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the share of every part in the sum of all derivatives."""
        captured, total, count = CapturedEmbeddings(model), EmbeddingStacks(), 0
        stream, batches = unseen_batches(task), self.options.batches
        rows = batches * stream.batch_size if isinstance(stream, Stream) else NO_LIMIT
        with captured.capture():
            for batch in islice(iterate_unseen(task, rows), batches):
                values, grads = captured.gradients(task, batch)
                for path, grad in grads.items():
                    slope = (grad * values[path]).sum((0, 2)).abs().double() / len(batch)  # (slots,)
                    total[path] = total[path] + slope if path in total else slope
                count += 1
                cost.add(forwards=len(batch), backwards=len(batch))
            scores = captured.by_name({path: slopes / count for path, slopes in total.items()})
        scale = sum(scores.values()) or 1.0
        return {name: score / scale for name, score in scores.items()}, {"batches": count}


@dataclass(frozen=True)
class SHARKOptions:
    """Number of rows."""

    rows: int = 200_000

    def __post_init__(self) -> None:
        check_options(self, count=("rows",))


class SHARK(RankingMethod):
    r"""First-order change of the loss if the embedding of a field is replaced by its mean.

    .. math:: \text{score}_n = \mathbb{E}\,\Big|\Big\langle \frac{\partial L}{\partial e_n},\;
              \bar e_n - e_n \Big\rangle\Big|

    Zhang et al., SHARK: A Lightweight Model Compression Approach for Large-scale Recommender Systems, 2023. The
    first term of the Taylor series approximates a permutation of the field, with one forward and backward pass for
    all fields instead of one pass per field. ē is the mean over the sampled rows; gradients are those of each
    row's own loss, from one backward pass of the sum. Embeddings are taken where gates would be, with the wide
    weights of a field. The model is not trained.
    """  # fmt: skip

    Options = SHARKOptions
    options: SHARKOptions
    trial_options = ({"rows": 50_000}, {"rows": 20_000}, {"rows": 10_000}, {"rows": 5_000})

    def score(self, task: SearchTask, model: Model, cost: SearchCost) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the mean change of the loss for every part."""
        captured, total, rows = CapturedEmbeddings(model), EmbeddingStacks(), 0
        with captured.capture():
            means = mean_embeddings(task, captured, self.options.rows, cost)
            for batch in iterate_unseen(task, self.options.rows):
                values, grads = captured.gradients(task, batch)
                for path, grad in grads.items():
                    change = (grad * (means[path] - values[path])).sum(-1).abs().double().sum(0)  # (slots,)
                    total[path] = total[path] + change if path in total else change
                rows += len(batch)
                cost.add(forwards=len(batch), backwards=len(batch))
            return captured.by_name({path: changes / rows for path, changes in total.items()}), {"rows": rows}


def mean_embeddings(task: SearchTask, captured: CapturedEmbeddings, max_rows: int, cost: SearchCost) -> EmbeddingStacks:
    """Return the mean of each embedding (slots, D) over the sampled rows."""
    total: EmbeddingStacks = {}
    rows = 0
    for batch in iterate_unseen(task, max_rows):
        for path, values in captured.values(batch).items():
            batch_sum = values.double().sum(0)
            total[path] = total[path] + batch_sum if path in total else batch_sum
        rows += len(batch)
        cost.add(forwards=len(batch))
    return {path: (values / rows).float() for path, values in total.items()}


class CapturedEmbeddings:
    """Captures the parts of a model in every forward pass, as leaves: no gradient reaches the tables.

    Args:
        model: in evaluation mode inside :meth:`capture`, afterwards in its previous mode.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        places = resolve_sites(model, dict(model.sites()))
        self.slots = {name: _find_slot(model, places[name][0]) for name in model.names}
        self.leaves: EmbeddingStacks = {}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the parts while the block runs."""
        paths = dict.fromkeys(path for path, _ in self.slots.values())
        hooks = [
            self.model.get_submodule(path).register_forward_hook(_CaptureHook(self.leaves, path)) for path in paths
        ]
        try:
            with eval_mode(self.model):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self.leaves.clear()

    def values(self, batch: Batch) -> EmbeddingStacks:
        """Return the parts of a batch, with wide weights."""
        with torch.no_grad():
            self.model(on_device(batch, device_of(self.model)))
        return self._stack(self.leaves)

    def gradients(self, task: SearchTask, batch: Batch) -> tuple[EmbeddingStacks, EmbeddingStacks]:
        """Return the parts of a batch, and the gradient of each row's own loss with respect to them."""
        batch = on_device(batch, device_of(self.model))
        logits, labels = predict_batch(self.model, batch)
        total = bce_loss(logits, labels, task.training.task_weights) * len(batch)  # a sum: rows stay separate
        grads = torch.autograd.grad(total, list(self.leaves.values()))
        values = {path: leaf.detach() for path, leaf in self.leaves.items()}
        return self._stack(values), self._stack(dict(zip(self.leaves, grads, strict=True)))

    def _stack(self, outputs: EmbeddingStacks) -> EmbeddingStacks:
        """Return outputs as (B, slots, D): crosses are concatenated, possibly followed by other columns."""
        stacks = {}
        for path, output in outputs.items():
            module = self.model.get_submodule(path)
            if isinstance(module, Crosses):
                output = output[:, : module.slots * module.dim].unflatten(1, (module.slots, module.dim))
            stacks[path] = output
        return stacks

    def by_name(self, values: EmbeddingStacks) -> dict[str, float]:
        """Return the value of every part, from one value per slot, (slots,) for each module."""
        lists = {path: slots.tolist() for path, slots in values.items()}
        return {name: lists[path][slot] for name, (path, slot) in self.slots.items()}


class _CaptureHook:
    """Forward hook that replaces the output of a module by a leaf with the same values, and stores it."""

    def __init__(self, leaves: EmbeddingStacks, path: str) -> None:
        self.leaves, self.path = leaves, path

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.leaves[self.path] = leaf = output.detach().requires_grad_(torch.is_grad_enabled())
        return leaf


def _find_slot(model: Model, place: ResolvedSite) -> tuple[str, int]:
    """Return the path of the module that computes a part, and the slot of the part in its output."""
    module = model.get_submodule(place.module)
    assert place.start is not None  # models of lpfs.models number their parts
    if isinstance(module, Crosses):
        return place.module, module.plan.places[place.start]
    filled = getattr(module, "filled", None)
    return place.module, place.start if filled is None else int(filled[place.start])
