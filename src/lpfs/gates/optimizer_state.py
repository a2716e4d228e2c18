"""The state of an optimizer when a weight is rescaled, cut or removed.

If a weight becomes w' = g·w, its gradient becomes 1/g of the old one: a state that is a mean or sum of gradients
is divided by g, one of squared gradients by g². The state of a weight whose gate is zero is reset.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lpfs.errors import InputError

# A slice of a weight: (dim, start, stop). What is kept of a weight: dim -> indices; other dims are kept whole.
WeightSlice: TypeAlias = tuple[int, int, int]
KeptIndices: TypeAlias = Mapping[int, Tensor]

# Optimizer class name -> state key -> power of the gradient in it (0: independent of the scale of the gradient).
GRADIENT_POWERS: dict[str, dict[str, int]] = {
    "SGD": {"momentum_buffer": 1},
    "Adagrad": {"sum": 2, "step": 0},
    "Adam": {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "step": 0},
    "RMSprop": {"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0, "step": 0},
    "RowWiseAdagrad": {"sum": 2, "step": 0},
}
GRADIENT_POWERS["AdamW"] = GRADIENT_POWERS["SparseAdam"] = GRADIENT_POWERS["Adam"]
GRADIENT_POWERS["NAdam"] = {**GRADIENT_POWERS["Adam"], "mu_product": 0}


def get_powers(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the entry of an optimizer in GRADIENT_POWERS; raise InputError if it has none."""
    for cls in type(optimizer).__mro__:
        if cls.__name__ in GRADIENT_POWERS:
            return GRADIENT_POWERS[cls.__name__]
    known = ", ".join(sorted(GRADIENT_POWERS))
    raise InputError(
        f"lpfs does not know the state of {type(optimizer).__name__} (it knows {known}); add it to "
        "lpfs.gates.optimizer_state.GRADIENT_POWERS, or omit optimizer= and create a new optimizer"
    )


def optimizer_list(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    """Return no, one or several optimizers as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def check_state(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the powers of an optimizer's state; raise InputError if a part of the state is unknown."""
    powers = get_powers(optimizer)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and key not in powers:
                raise InputError(
                    f"lpfs does not know the state {key!r} of {type(optimizer).__name__}; it knows "
                    f"{', '.join(sorted(powers))}"
                )
    return powers


def slice_of(value: Tensor, weight: Tensor, part: WeightSlice | None) -> Tensor | None:
    """Return the view of a state, or of the weight itself, that belongs to a slice of the weight.

    A state shaped like the weight (R, D) has the same slice. A state with one number per row, (R,) or (R, 1), has
    it along dim 0 only: None otherwise.
    """
    if part is None:
        return value
    dim, start, stop = part
    if value.shape == weight.shape or (dim == 0 and _row_wise(value, weight)):
        return value.narrow(dim, start, stop - start)
    return None


def _row_wise(value: Tensor, weight: Tensor) -> bool:
    rows = weight.shape[0] if weight.ndim else 0
    return value.shape in ((rows,), (rows, 1))


def check_part(optimizer: torch.optim.Optimizer, weight: nn.Parameter, part: WeightSlice | None) -> None:
    """Raise InputError if a slice of a weight cannot be rescaled because a state has one number per row."""
    for key, value in optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor) and value.ndim and slice_of(value, weight, part) is None:
            raise InputError(f"the row-wise state {key!r} of a Linear cannot be rescaled by columns")


def add_copied_parameter(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, name: str) -> None:
    """Add a weight that is a copy of another one, with a copy of its state."""
    for group in optimizer.param_groups:
        positions = [index for index, parameter in enumerate(group["params"]) if parameter is old]
        if positions:
            group["params"].insert(positions[0], new)
            if "param_names" in group:
                group["param_names"].insert(positions[0], name)
            if old in optimizer.state:
                optimizer.state[new] = {key: _cut(value, old, {}) for key, value in optimizer.state[old].items()}
            return


def rescale_state(
    optimizer: torch.optim.Optimizer, weight: nn.Parameter, gate: float, part: WeightSlice | None = None
) -> None:
    """Rescale the state of a weight that was multiplied by ``gate``, whole or in a slice, in place."""
    powers = get_powers(optimizer)
    for key, value in optimizer.state.get(weight, {}).items():
        power = powers.get(key, 0)
        if not isinstance(value, Tensor) or not value.ndim or not power:
            continue
        piece = slice_of(value, weight, part)
        assert piece is not None  # check_part ran before anything changed
        if gate == 0:
            piece.zero_()
        else:
            piece.div_(gate**power)


def transfer_optimizer(
    optimizer: torch.optim.Optimizer,
    replaced: Mapping[nn.Parameter, nn.Parameter | None],
    kept: Mapping[nn.Parameter, KeptIndices],
) -> torch.optim.Optimizer | None:
    """Return an optimizer of the same class over new weights, with its state; None if no weight is left.

    Args:
        optimizer: the old one; it is not changed.
        replaced: old weight -> its replacement, or None if it was removed.
        kept: old weight -> what is kept of it, if it was cut.
    """
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        after = [replaced.get(parameter, parameter) for parameter in group["params"]]
        groups.append({**settings, "params": [parameter for parameter in after if parameter is not None]})
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    if not any(group["params"] for group in groups):
        return None
    result: torch.optim.Optimizer = kind(groups, **defaults)
    result.state.clear()
    for old, state in optimizer.state.items():
        assert isinstance(old, nn.Parameter)
        new = replaced.get(old, old)
        if new is not None:
            result.state[new] = {key: _cut(value, old, kept.get(old, {})) for key, value in state.items()}
    return result


def _cut(value: Any, weight: Tensor, kept: KeptIndices) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not kept or not value.ndim:
        return value.clone()
    if value.shape != weight.shape and (set(kept) != {0} or not _row_wise(value, weight)):
        raise InputError("the row-wise optimizer state of a Linear cannot be cut by columns; prune with cut=False")
    return take_kept(value, kept)


def take_kept(value: Tensor, kept: KeptIndices) -> Tensor:
    """Return a copy of what is kept of a tensor."""
    for dim, index in kept.items():
        value = value.index_select(dim, index.to(value.device))
    return value if kept else value.clone()
