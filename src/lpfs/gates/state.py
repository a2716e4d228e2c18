"""What happens to an optimizer's state when a weight is rescaled, cut or leaves.

Where a weight becomes w' = g·w its gradient becomes 1/g of the old one, so a state that is a mean or sum of
gradients is divided by g, one of squared gradients by g². A weight whose gate is zero starts anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lpfs.errors import InputError

# a part of a weight: (dim, start, stop); what stays of a weight: dim -> indices, and the whole of other dims
Part: TypeAlias = tuple[int, int, int]
Kept: TypeAlias = Mapping[int, Tensor]

# optimizer class name -> state key -> power of the gradient it holds (0: does not depend on its scale)
POWERS: dict[str, dict[str, int]] = {
    "SGD": {"momentum_buffer": 1},
    "Adagrad": {"sum": 2, "step": 0},
    "Adam": {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "step": 0},
    "RMSprop": {"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0, "step": 0},
    "RowWiseAdagrad": {"sum": 2, "step": 0},
}
POWERS["AdamW"] = POWERS["SparseAdam"] = POWERS["Adam"]
POWERS["NAdam"] = {**POWERS["Adam"], "mu_product": 0}


def powers_of(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the table for this optimizer, or say that it is not known."""
    for cls in type(optimizer).__mro__:
        if cls.__name__ in POWERS:
            return POWERS[cls.__name__]
    known = ", ".join(sorted(POWERS))
    raise InputError(
        f"the state of {type(optimizer).__name__} is not known to lpfs (known: {known}); add it to "
        "lpfs.gates.state.POWERS, or go on without optimizer= and start a new optimizer"
    )


def as_list(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    """Return none, one or several optimizers as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def check_state(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Refuse an optimizer with a state that cannot be carried along, before anything changes."""
    powers = powers_of(optimizer)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and key not in powers:
                raise InputError(
                    f"state {key!r} of {type(optimizer).__name__} is not known to lpfs: it holds "
                    f"{', '.join(sorted(powers))} only"
                )
    return powers


def part_of(value: Tensor, weight: Tensor, part: Part | None) -> Tensor | None:
    """Return the view of a state, or of the weight itself, that belongs to a part of the weight.

    A state shaped like the weight (R, D) has the same part. One with a number a row, (R,) or (R, 1), has it along
    dim 0 only: None otherwise.
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


def check_part(optimizer: torch.optim.Optimizer, weight: nn.Parameter, part: Part | None) -> None:
    """Refuse to rescale a part of a weight across the rows of a state that has one number a row."""
    for key, value in optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor) and value.ndim and part_of(value, weight, part) is None:
            raise InputError(f"the row-wise state {key!r} of a Linear cannot be rescaled by columns")


def add_twin(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, name: str) -> None:
    """Add a weight that was split off another one, with a copy of its state."""
    for group in optimizer.param_groups:
        places = [number for number, each in enumerate(group["params"]) if each is old]
        if places:
            group["params"].insert(places[0], new)
            if "param_names" in group:
                group["param_names"].insert(places[0], name)
            if old in optimizer.state:
                optimizer.state[new] = {key: _cut(value, old, {}) for key, value in optimizer.state[old].items()}
            return


def rescale_state(
    optimizer: torch.optim.Optimizer, weight: nn.Parameter, gate: float, part: Part | None = None
) -> None:
    """Rescale the state of a weight that was multiplied by ``gate``, all of it or a part, in place."""
    powers = powers_of(optimizer)
    for key, value in optimizer.state.get(weight, {}).items():
        power = powers.get(key, 0)
        if not isinstance(value, Tensor) or not value.ndim or not power:
            continue
        its = part_of(value, weight, part)
        assert its is not None  # check_part was asked before anything changed
        if gate == 0:
            its.zero_()
        else:
            its.div_(gate**power)


def carry_over(
    optimizer: torch.optim.Optimizer,
    replaced: Mapping[nn.Parameter, nn.Parameter | None],
    kept: Mapping[nn.Parameter, Kept],
) -> torch.optim.Optimizer | None:
    """Return an optimizer of the same kind over new weights, with its state; None if it has no weight left.

    Args:
        optimizer: the old one; it is left as it was.
        replaced: old weight -> its successor, or None where it is gone.
        kept: old weight -> what of it stays, where it was cut.

    """
    check_state(optimizer)
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        after = [replaced.get(each, each) for each in group["params"]]
        groups.append({**settings, "params": [each for each in after if each is not None]})
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    if not any(each["params"] for each in groups):
        return None
    result: torch.optim.Optimizer = kind(groups, **defaults)
    result.state.clear()
    for old, state in optimizer.state.items():
        assert isinstance(old, nn.Parameter)
        new = replaced.get(old, old)
        if new is not None:
            result.state[new] = {key: _cut(value, old, kept.get(old, {})) for key, value in state.items()}
    return result


def _cut(value: Any, weight: Tensor, kept: Kept) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not kept or not value.ndim:
        return value.clone()
    if value.shape != weight.shape and (set(kept) != {0} or not _row_wise(value, weight)):
        raise InputError("the row-wise optimizer state of a Linear cannot be cut by columns: prune without cut")
    return keep_of(value, kept)


def keep_of(value: Tensor, kept: Kept) -> Tensor:
    """Return a copy of what stays of a tensor."""
    for dim, index in kept.items():
        value = value.index_select(dim, index.to(value.device))
    return value if kept else value.clone()
