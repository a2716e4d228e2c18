"""SubsetModel: one network that predicts from any subset of the fields.

Every training row sees a random subset of the fields, whose share is uniform, so that the network learns p(y | x_S) for
every subset S. The loss of a subset on held-out rows can then be read without training another network (Covert et al.,
Understanding Global Feature Contributions with Additive Importance Measures, 2020; Jethani et al., FastSHAP, 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch, Index, RowBlock
from lpfs.gates.sites import declared_sites, resolve_sites
from lpfs.methods.masks import ReplaceOutput, check_maskable, parts_by_module
from lpfs.models.base import Model
from lpfs.train.evaluate import device_of, eval_mode, on_device

FULL_SHARE = 0.25  # of the training rows that see all fields, with which every set is compared
CHAIN_SHARE = 0.8  # of the other rows, that see a set of the chain once it is known
CHUNK_ELEMENTS = 1 << 21  # elements of the largest tensor while subsets are evaluated


def random_subsets(rows: int, parts: int, device: torch.device | None = None) -> Tensor:
    """Return a random subset per row (rows, parts), 1.0 for the parts in it; the generator is torch's default.

    The share of parts is uniform between 0 and 1, so that every size is equally likely; a quarter of the rows has all.
    """
    share = torch.rand(rows, 2, device=device)
    is_full = share[:, 1:] < FULL_SHARE
    return ((torch.rand(rows, parts, device=device) < share[:, :1]) | is_full).float()


class SubsetModel(nn.Module):
    r"""A model whose parts are masked: at random in training mode, by given subsets in :meth:`logits`.

    .. math:: y_S = f(m_1 e_1, \dots, m_N e_N), \qquad m_n = 1 \text{ if } n \in S \text{ else } 0

    A masked part is zero, as it is behind a gate of zero and in a pruned model. Center the embeddings of a trained
    model first, so that zero is their mean.

    Args:
        model: a model of ``lpfs.models`` without gates; it is trained in place and has the mask until :meth:`remove`.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = check_maskable(model, "a subset model")
        self.names = tuple(model.sites())
        self.rows: Tensor | None = None  # (B, N) subset of each row of this training step
        self.subsets: Tensor | None = None  # (S, N) to evaluate on every row
        self.chain: Tensor | None = None  # (S, N) sets that most training rows see; None: random subsets only
        device = device_of(model)
        modules = parts_by_module(resolve_sites(model, declared_sites(model)), self.names)
        self._hooks = [
            model.get_submodule(path).register_forward_hook(ReplaceOutput(self._mask_tokens, numbers.to(device)))
            for path, numbers in modules.items()
        ]
        self._width = max(1, sum(parameter.shape[-1] for parameter in model.parameters() if parameter.ndim == 2))
        entrance = model.entrance()
        self._linear: nn.Linear | None = None  # reads the concatenated embeddings and nothing else does
        if entrance is not None and list(modules) == ["inputs"] and model.inputs.width == model.inputs.dim:
            linear = model.get_submodule(entrance)
            assert isinstance(linear, nn.Linear)
            self._linear = linear
            self._hooks.append(linear.register_forward_hook(self._mask_columns))
            slots = [self.names.index(name) if name in self.names else 0 for name in model.inputs.slots]
            self._slots = torch.tensor(slots, device=device)  # part in each slot; a silent slot is zero anyway

    def remove(self) -> Model:
        """Take the mask off the model and return the model."""
        for hook in self._hooks:
            hook.remove()
        return self.model

    def forward(self, batch: Batch) -> Tensor:
        """Return logits; in training mode of a random subset of the fields of every row, else of all fields."""
        self.rows = self._draw(len(batch), batch.labels.device) if self.training else None
        out: Tensor = self.model(batch)
        return out

    def _draw(self, rows: int, device: torch.device) -> Tensor:
        """Return the subset of every row (rows, N)."""
        subsets = random_subsets(rows, len(self.names), device)
        if self.chain is None:
            return subsets
        draw = torch.rand(3, rows, 1, device=device)
        sets = self.chain[(draw[0, :, 0] * len(self.chain)).long()]
        chosen = torch.where(draw[1] < CHAIN_SHARE, sets, subsets)
        return torch.where(draw[2] < FULL_SHARE, 1.0, chosen)

    @torch.no_grad()
    def logits(self, batch: Batch, subsets: Tensor) -> Tensor:
        """Return the logits of the main task (S, B) of every row for every subset (S, N), 1.0 for the parts in it."""
        batch, subsets = on_device(batch, device_of(self.model)), subsets.to(device_of(self.model))
        width = self._linear.out_features if self._linear is not None else self._width
        size = max(1, CHUNK_ELEMENTS // (width * len(batch)))
        self.rows = None
        pieces = []
        with eval_mode(self):
            for chunk in subsets.split(size):
                self.subsets = chunk
                try:
                    out: Tensor = self.model(batch)
                finally:
                    self.subsets = None
                pieces.append((out if out.ndim == 1 else out[:, 0]).float().view(len(chunk), len(batch)))
        return torch.cat(pieces)

    def logits_of_rows(self, rows: RowBlock, subsets: Tensor) -> Tensor:
        """Return the logits (S, rows) on the CPU, in batches that fit the caches."""
        width = self._linear.out_features * len(self.names) if self._linear is not None else self._width
        size = max(16, min(256, CHUNK_ELEMENTS // width))
        batches = (rows.slice(first, min(first + size, len(rows))).batch() for first in range(0, len(rows), size))
        return torch.cat([self.logits(batch, subsets).cpu() for batch in batches], 1)

    def _mask_tokens(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        """Return masked embeddings (B, P, D), or (S·B, P, D) for S subsets; ``numbers`` (P,) are their parts."""
        if self.rows is not None:
            return tokens * self.rows[:, numbers, None].to(tokens.dtype)
        if self.subsets is None or self._linear is not None:
            return tokens
        return (self.subsets[:, None, numbers, None].to(tokens.dtype) * tokens).flatten(0, 1)

    def _mask_columns(self, linear: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        """Return the output of the first Linear for every subset (S·B, H), from the products of every part, once."""
        if self.subsets is None:
            return output
        parts = len(self._slots)
        tokens = args[0].unflatten(1, (parts, -1)).transpose(0, 1)  # (P, B, D)
        weights = linear.weight.unflatten(1, (parts, -1)).permute(1, 2, 0)  # (P, D, H)
        products = torch.bmm(tokens, weights).flatten(1)  # (P, B·H)
        sums = self.subsets[:, self._slots].to(products.dtype) @ products
        return sums.view(-1, linear.out_features) + linear.bias


class ResidentStream:
    """Shuffled batches of rows in memory, in a new order for each pass; the position can be saved.

    Args:
        rows: the rows.
        batch_size: rows of a batch.
        seed: seed of the orders.
        device: device of the batches.
        index: (n,) the rows to use; default: all.
    """

    def __init__(
        self, rows: RowBlock, batch_size: int, seed: int, device: torch.device | None = None, index: Index | None = None
    ) -> None:
        self.resident, self.batch_size, self.seed, self.device, self.index = rows, batch_size, seed, device, index
        self.count = len(rows) if index is None else len(index)
        self._epoch = self._position = 0

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._epoch)
        order = torch.randperm(self.count, generator=generator).numpy()
        order = order if self.index is None else self.index[order]
        while self._position < len(order):
            first, self._position = self._position, min(self._position + self.batch_size, len(order))
            batch = self.resident.take(order[first : self._position]).batch()
            yield batch if self.device is None else batch.to(self.device)
        self._epoch, self._position = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"rows": self.count, "seed": self.seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        if self._position >= self.count:  # saved after the last batch of a pass
            self._epoch, self._position = self._epoch + 1, 0


def subset_matrix(subsets: Sequence[Sequence[str]], names: Sequence[str]) -> Tensor:
    """Return subsets given by names as (S, N).

    >>> subset_matrix([["a"], ["a", "c"]], ["a", "b", "c"])
    tensor([[1., 0., 0.],
            [1., 0., 1.]])
    """
    return torch.tensor([[float(name in subset) for name in names] for subset in map(set, subsets)])
