"""The first layer of a model, cut into the columns of each field, for methods that penalise it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs
from lpfs.models.layers import Segments


class FirstLayer:
    """The weight W of the one Linear that reads all parts of a model; block n, W_n, are the columns of part n.

    Args:
        path: of the Linear.
        weight: (H, columns).
        names: the parts, in order.
        segments: who owns the columns, in order; what is no part (it reads zeros) is left alone.

    """

    def __init__(self, path: str, weight: nn.Parameter, names: Sequence[str], segments: Segments) -> None:
        self.path, self.weight, self.names = path, weight, tuple(names)
        place = {name: number for number, name in enumerate(names)}
        owners = [place.get(str(owner), len(names)) for owner, width in segments for _ in range(width)]
        self.owner = torch.tensor(owners, device=weight.device)  # (columns,) the part of each, N for none
        widths = [owners.count(number) for number in range(len(names))]
        self.widths = torch.tensor(widths, device=weight.device, dtype=weight.dtype)

    @torch.no_grad()
    def energies(self) -> Tensor:
        """Return ‖W_n‖² of every part (N,)."""
        total = self.weight.new_zeros(len(self.names) + 1)
        return total.index_add_(0, self.owner, self.weight.square().sum(0))[:-1]

    @torch.no_grad()
    def multiply(self, factors: Tensor) -> None:
        """Multiply each block by its factor (N,), in place."""
        self.weight.mul_(torch.cat([factors, factors.new_ones(1)])[self.owner])

    def columns(self) -> Tensor:
        """Return the columns of every part (N, d), where all parts are of one width."""
        return torch.stack([torch.nonzero(self.owner == number)[:, 0] for number in range(len(self.names))])


def first_layer(model: nn.Module, method: str) -> FirstLayer:
    """Return the first layer of a model; refuse one where fields do not enter through one Linear alone."""
    if not isinstance(model, Model):
        raise InputError(f"{method} penalises the first layer of a model of lpfs.models; this one is not")
    inputs = {path: each for path, each in model.named_modules() if isinstance(each, Inputs)}
    read = {
        name: dims
        for name, dims in model.layout().items()
        if not any(name.startswith(f"{path}.") for path in inputs)
    }
    why = _other_ways(model, list(inputs.values()), [each for dims in read.values() for each in dims.get(1, ())])
    if not why and (len(read) != 1 or set(next(iter(read.values()))) != {1}):
        why = f"fields enter through {', '.join(read) or 'no Linear at all'}"
    if why:
        raise InputError(
            f"{method} judges a field by its columns of the first layer, so a field must enter through that one "
            f"Linear alone; in {type(model).__name__} {why}. Choose mlp, dlrm with interaction='concat', or "
            "dlrm_cross"
        )
    (name, dims), *_ = read.items()
    return FirstLayer(name.rpartition(".")[0], model.get_parameter(name), model.names, dims[1])


def _other_ways(model: Model, inputs: Sequence[Inputs], segments: Sequence[tuple[Hashable, int]]) -> str:
    """Say how fields reach the prediction past the columns that are theirs alone; empty if they do not."""
    if any(each.width != each.dim for each in inputs):
        return "fields have linear weights beside it"
    parts = set(model.fields_of_parts())
    shared = next((owner for owner, _ in segments if owner not in parts), None)
    return "" if shared is None else f"columns belong to products of fields such as {shared!r}"
