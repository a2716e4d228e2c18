"""FairFS: integrated gradients of a network whose training penalizes the size of its attributions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.methods.base import (
    Count,
    HistoryCallback,
    Method,
    MethodOptions,
    NonNegative,
    SearchCost,
    SearchTask,
    rank_fields,
)
from lpfs.methods.masks import TokenMask, apply_mask, check_maskable
from lpfs.methods.pretraining import new_model, pretrain
from lpfs.methods.sampling import iterate_unseen, unseen_batches
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import State
from lpfs.train.evaluate import device_of, eval_mode, on_device, predict_batch
from lpfs.train.step import bce_loss


@dataclass(frozen=True)
class FairFSOptions(MethodOptions):
    """φ of the penalty, number of points P of a path, and of rows besides the validation rows that are scored."""

    strength: NonNegative = 0.01
    points: Count = 5
    rows: Count = 200_000


class FairFS(Method):
    r"""Attributions along the path from a row to its mean embedding, of a network trained to keep them small.

    .. math:: \min L + \varphi \big\|(I_b)_b\big\|_2, \qquad
              I_b = \sum_n \Big\langle \frac{\partial L}{\partial e_{bn}},\, e_{bn} - \bar e_b \Big\rangle, \qquad
              \text{score}_n = \sum_{\text{batches}} \Big|\operatorname*{mean}_{b,\,j}
              \Big\langle \frac{\partial L}{\partial e_n}\Big|_{e - \frac jP (e - \bar e)},\,
              \frac{e_n - \bar e}{P} \Big\rangle\Big|

    FairFS, 2026 (arXiv 2602.20001), defined as in its public code: ē_b is the mean over the fields of row b, the
    points j = 0 … P move all fields together, and one number per row is penalized. A network of its own is trained
    from new weights on the rows of pretraining, with early stopping on the validation rows, and scored on the rows
    that it was not trained on. Signs cancel within a batch, so the batch size matters (10,000 rows in the code, here
    that of the validation and search rows). In the code φ must be given, 0.01 to 100 by data set, and K and φ are
    chosen by test results; here φ is an option, and ``compare --tune`` chooses it on validation rows. Without the
    rows of pretraining (``lpfs.search``) a copy of the model is trained further on the search rows. The model itself
    is not changed.
    """

    Options = FairFSOptions
    options: FairFSOptions
    trial_options = ({"strength": 1.0}, {"strength": 100.0}, {"strength": 0.1}, {"points": 10})
    pretrains = True
    cuda_graph = True

    def search(self, task: SearchTask) -> Selection:
        model = check_maskable(task.model, self.name)
        self.check(task.target, model.names, task.steps)
        cost, path = SearchCost(), EmbeddingPath(model.names)
        if task.early is not None:
            net, optimizer = new_model(task, self.name), None
        else:
            net, optimizer = copy.deepcopy((model, task.optimizer))
        steps = task.steps if task.early is None else task.early_steps
        with apply_mask(net, path, self.name):
            penalty = AttributionPenalty(steps, path, self.options.strength)
            if optimizer is None:
                pretrain(task, net, "fairfs", cost, penalty)
            else:
                task.fit(penalty, cost, model=net, optimizer=optimizer)
            with cost:
                scores, rows = self.score(task, net, path, cost)
        facts = {"steps": steps, "rows": rows, "history": penalty.history, **cost.to_dict()}
        return rank_fields(task, self.name, dict(zip(path.names, scores.tolist(), strict=True)), **facts)

    def score(self, task: SearchTask, net: Model, path: EmbeddingPath, cost: SearchCost) -> tuple[Tensor, int]:
        """Return the score of every part (N,) and the number of rows."""
        total, rows, points = torch.zeros(len(path.names), dtype=torch.float64), 0, self.options.points
        with eval_mode(net):
            for batch in unseen_rows(task, self.options.rows):
                batch = on_device(batch, device_of(net))
                attributions = torch.zeros_like(total)
                for point in range(points + 1):
                    path.share = point / points
                    logits, labels = predict_batch(net, batch)
                    loss = bce_loss(logits, labels, task.training.task_weights) * len(batch)  # rows stay separate
                    assert path.tokens is not None
                    (grad,) = torch.autograd.grad(loss, [path.tokens])
                    attributions += path.by_part(grad * path.direction / points).cpu()
                total += (attributions / (len(batch) * (points + 1))).abs()
                rows += len(batch)
                cost.add(forwards=(points + 1) * len(batch), backwards=(points + 1) * len(batch))
        path.share = None
        return total, rows


def unseen_rows(task: SearchTask, rows: int) -> Iterator[Batch]:
    """Yield the validation rows, and other rows that the network was not trained on, at most ``rows`` of these."""
    valid: Iterable[Batch] = () if task.valid is None else task.valid
    yield from valid
    is_unseen = task.early is not None or task.holdout is not None or task.valid is None
    if is_unseen and unseen_batches(task):
        yield from iterate_unseen(task, rows)


class EmbeddingPath(TokenMask):
    """Stores the embeddings of a batch; with ``share``, moved by that share towards the mean over the row's fields."""

    needs = "all fields"

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names, steps=0, seed=0)
        self.share: float | None = None
        self.tokens: Tensor | None = None  # (B, N, D) that the rest of the model uses
        self.direction = torch.empty(0)  # (B, N, D) e - ē
        self.numbers = torch.empty(0)  # (N,) part of each column of tokens

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        self.direction, self.numbers = tokens - tokens.mean(1, keepdim=True), numbers
        if self.share is None:
            self.tokens = tokens
        else:
            self.direction = self.direction.detach()
            self.tokens = (tokens - self.share * self.direction).detach().requires_grad_()
        return self.tokens

    def by_part(self, products: Tensor) -> Tensor:
        """Return the sum over rows and width of products (B, N, D), in the order of the parts (N,)."""
        sums = products.detach().double().sum((0, 2))
        return torch.zeros_like(sums).index_copy_(0, self.numbers, sums)


class AttributionPenalty(HistoryCallback):
    """Adds φ‖(I_b)‖ to the loss of every step."""

    def __init__(self, steps: int, path: EmbeddingPath, strength: float) -> None:
        super().__init__(steps)
        self.path, self.strength = path, strength
        self.penalty = torch.zeros(())  # of this step; read when it is recorded, because reading waits for a GPU

    def before_backward(self, state: State) -> None:
        tokens, loss = self.path.tokens, state.loss
        assert tokens is not None
        assert loss is not None
        (grad,) = torch.autograd.grad(loss, [tokens], create_graph=True)
        attributions = (grad * self.path.direction).sum((1, 2))  # (B,)
        penalty = torch.linalg.vector_norm(attributions)
        state.loss = loss + self.strength * penalty
        if self.penalty.device != penalty.device:
            self.penalty = torch.zeros_like(penalty)
        self.penalty.copy_(penalty.detach())  # in place: a captured step writes to the tensor of its capture

    def after_step(self, state: State) -> None:
        if self.should_record(state.step):
            self.record(state, attribution=float(self.penalty))
