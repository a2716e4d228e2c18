"""SFS and SHARK: first-order importance of the embeddings of a trained model, from its gradients.

Embeddings are taken where gates would be attached, with the wide weights of a field. The model is not trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.gates.sites import ResolvedSite, resolve_sites
from lpfs.methods.base import Count, MethodOptions, RankingMethod, SearchCost, SearchTask
from lpfs.methods.sampling import iterate_unseen, unseen_batches
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.train.evaluate import device_of, eval_mode, on_device, predict_batch
from lpfs.train.step import bce_loss

EmbeddingStacks: TypeAlias = dict[str, Tensor]  # path of a module -> a value for all its parts, (B, slots, D)


@dataclass(frozen=True)
class SFSOptions(MethodOptions):
    """Number of batches, at most one pass over the rows."""

    batches: Count = 100


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
        captured, total, count = CapturedEmbeddings(model), EmbeddingStacks(), 0
        stream, batches = unseen_batches(task), self.options.batches
        rows = batches * stream.batch_size if isinstance(stream, Stream) else sys.maxsize
        with captured.capture():
            for batch in islice(iterate_unseen(task, rows), batches):
                values, grads = captured.gradients(task, batch)
                for path, grad in grads.items():
                    slope = (grad * values[path]).sum((0, 2)).abs().double() / len(batch)  # (slots,)
                    total[path] = total.get(path, 0) + slope
                count += 1
                cost.add(forwards=len(batch), backwards=len(batch))
            scores = captured.by_name({path: slopes / count for path, slopes in total.items()})
        scale = sum(scores.values()) or 1.0
        return {name: score / scale for name, score in scores.items()}, {"batches": count}


@dataclass(frozen=True)
class SHARKOptions(MethodOptions):
    """Number of rows."""

    rows: Count = 200_000


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
        captured, sums, total, rows = CapturedEmbeddings(model), EmbeddingStacks(), EmbeddingStacks(), 0
        with captured.capture():
            for batch in iterate_unseen(task, self.options.rows):
                for path, values in captured.values(batch).items():
                    sums[path] = sums.get(path, 0) + values.double().sum(0)
                rows += len(batch)
            means = {path: (values / rows).float() for path, values in sums.items()}  # (slots, D)
            for batch in iterate_unseen(task, self.options.rows):
                embeddings, grads = captured.gradients(task, batch)
                for path, grad in grads.items():
                    change = (grad * (means[path] - embeddings[path])).sum(-1).abs().double().sum(0)  # (slots,)
                    total[path] = total.get(path, 0) + change
            cost.add(forwards=2 * rows, backwards=rows)
            return captured.by_name({path: changes / rows for path, changes in total.items()}), {"rows": rows}


class CapturedEmbeddings:
    """Captures the parts of a model in every forward pass, as leaves: no gradient reaches the tables."""

    def __init__(self, model: Model) -> None:
        self.model = model
        places = resolve_sites(model, dict(model.sites()))
        self.slots = {name: _find_slot(model, places[name][0]) for name in model.names}
        self.leaves: EmbeddingStacks = {}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the parts, in evaluation mode, while the block runs."""
        with ExitStack() as stack, eval_mode(self.model):
            stack.callback(self.leaves.clear)
            for path in dict.fromkeys(path for path, _ in self.slots.values()):
                hook = self.model.get_submodule(path).register_forward_hook(partial(self._store, path))
                stack.callback(hook.remove)
            yield

    def _store(self, path: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Replace the output of a module by a leaf with the same values, and store it."""
        self.leaves[path] = leaf = output.detach().requires_grad_(torch.is_grad_enabled())
        return leaf

    def values(self, batch: Batch) -> EmbeddingStacks:
        """Return the parts of a batch, with wide weights."""
        with torch.no_grad():
            self.model(on_device(batch, device_of(self.model)))
        return self._stack(self.leaves)

    def gradients(self, task: SearchTask, batch: Batch) -> tuple[EmbeddingStacks, EmbeddingStacks]:
        """Return the parts of a batch, and the gradient of each row's own loss with respect to them."""
        logits, labels = predict_batch(self.model, on_device(batch, device_of(self.model)))
        total = bce_loss(logits, labels, task.training.task_weights) * len(batch)  # a sum: rows stay separate
        grads = torch.autograd.grad(total, list(self.leaves.values()))
        values = {path: leaf.detach() for path, leaf in self.leaves.items()}
        return self._stack(values), self._stack(dict(zip(self.leaves, grads, strict=True)))

    def _stack(self, outputs: EmbeddingStacks) -> EmbeddingStacks:
        """Return outputs as (B, slots, D): crosses are concatenated, possibly followed by other columns."""
        stacks = dict(outputs)
        for path, output in outputs.items():
            module = self.model.get_submodule(path)
            if isinstance(module, Crosses):
                stacks[path] = output[:, : module.slots * module.dim].unflatten(1, (module.slots, module.dim))
        return stacks

    def by_name(self, values: EmbeddingStacks) -> dict[str, float]:
        """Return the value of every part, from one value per slot, (slots,) for each module."""
        lists = {path: slots.tolist() for path, slots in values.items()}
        return {name: lists[path][slot] for name, (path, slot) in self.slots.items()}


def _find_slot(model: Model, place: ResolvedSite) -> tuple[str, int]:
    """Return the path of the module that computes a part, and the slot of the part in its output."""
    module = model.get_submodule(place.module)
    assert place.start is not None  # models of lpfs.models number their parts
    if isinstance(module, Crosses):
        return place.module, module.plan.places[place.start]
    filled = getattr(module, "filled", None)
    return place.module, place.start if filled is None else int(filled[place.start])
