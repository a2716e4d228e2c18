"""absorb: gate values, signs included, move into the weights; nothing learnable is left of the gates."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lpfs.errors import ExactnessError, SharedTableError, StateError
from lpfs.gates.attach import detach, gates_of
from lpfs.gates.fold import Fold, apply_fold, plan_folds, refuse_overflow, shared_weights
from lpfs.gates.hooks import Factors, install_factors
from lpfs.gates.logits import Call, logits_of, max_change, precise, rounding_bound
from lpfs.gates.sites import Place
from lpfs.gates.state import add_twin, as_list, check_part, check_state
from lpfs.gates.wrapped import refuse_wrapped
from lpfs.schema import Selection


def absorb(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    untie: bool = False,
    constants: bool = True,
    batch: Any = None,
    call: Call | None = None,
) -> Selection:
    """Multiply the gates into the weights and take them off, in place, all or nothing.

    A gate goes into the table of its field (bit-equal), into the field's own Linear or the last one of its
    branch, into the columns of the Linear that reads it (rounding), or into the weights that a module which
    takes gates itself names for that part. Where nothing can take it in, it stays as a constant, which is
    bit-equal too.

    Args:
        model: a model with gates.
        optimizer: the model's optimizer, or several; their state is rescaled with the weights.
        untie: where a table is shared with another module, give the field a copy of its own.
        constants: allow constants; False raises instead where one would be needed.
        batch: inputs to check on: the model's output before and after is compared, on a copy first, and
            ``selection.made["max_logit_change"]`` says by how much it moved.
        call: how to run the model on the batch, ``call(model, batch)``; by default ``model(*batch)`` for a
            tuple or list, else ``model(batch)``.

    Returns:
        the Selection; ``made["absorbed"]`` says where each gate went.

    """
    gates = gates_of(model, "absorb")
    gates.refuse_idle()
    optimizers = as_list(optimizer)
    for each in optimizers:
        check_state(each)
    values = dict(zip(gates.names, gates.values.tolist(), strict=True))
    folds, left = plan_folds(model, gates, values)
    shared = shared_weights(model, folds)
    for fold, path, others in shared:
        if fold.how in ("part", "rows") or not untie:
            advice = (
                f"A part of it cannot be untied: give {type(fold.module).__name__} a weight of its own"
                if fold.how in ("part", "rows")
                else "Pass untie=True to give the field a copy of its own"
            )
            raise SharedTableError(
                f"field {fold.field!r}: the weight {path!r} also serves {', '.join(map(repr, others))}, which has "
                f"another gate or none. {advice}"
            )
    if left and not constants:
        raise ExactnessError(
            f"no weight can take in the gate of {', '.join(map(repr, left))}; allow constants=True"
        )
    refuse_overflow(folds)
    for each in optimizers:
        for fold in folds:
            for weight in fold.parameters():
                check_part(each, weight, fold.part)
    exact = all(fold.exact for fold in folds)
    change = None if batch is None else _trial(model, batch, call, untie, exact)
    selection = gates.selection(
        absorbed={**dict.fromkeys(left, "constant"), **{fold.field: fold.how for fold in folds}},
        constants={name: [place.to_json() for place in places] for name, places in left.items()},
        untied=sorted({path.rpartition(".")[0] for _, path, _ in shared}),
        exact=exact,
        max_logit_change=change,
    )

    for fold in folds:
        if untie:
            _untie(model, fold, optimizers)
        apply_fold(fold, optimizers)
    detach(model)
    install_factors(model, left, [values[name] for name in left], gates.x.device)
    return selection


def restore(model: nn.Module, selection: Selection) -> None:
    """Give a fresh model the shape that ``absorb`` left, in place, so that its state dict can be loaded.

    Needed only where gates stayed as constants or tables were untied; ``selection.made`` says so.
    """
    refuse_wrapped(model, "restore")
    if any(isinstance(each, Factors) for each in model.children()):
        raise StateError("restore: this model has constants already")
    for path in selection.made.get("untied", ()):
        module = model.get_submodule(path)
        old = module.weight
        assert isinstance(old, nn.Parameter)
        module.weight = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    left = {
        name: tuple(Place.from_json(each) for each in places)
        for name, places in selection.made.get("constants", {}).items()
    }
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    install_factors(model, left, [selection.gates[name] for name in left], device)


def _trial(model: nn.Module, batch: Any, call: Call | None, untie: bool, exact: bool) -> float:
    """Absorb on a copy, and return how much its output moved; refuse if that is more than promised."""
    trial = copy.deepcopy(model)
    absorb(trial, untie=untie)
    before, after = logits_of(model, batch, call), logits_of(trial, batch, call)
    change = max_change(before, after)
    fine, data = precise(model, batch)
    if fine is model:
        moved, bound = change, 0.0 if exact else rounding_bound(before)
    else:  # half precision: what counts is whether the same happens in float64
        other = copy.deepcopy(fine)
        absorb(other, untie=untie)
        reference = logits_of(fine, data, call)
        moved, bound = max_change(reference, logits_of(other, data, call)), rounding_bound(reference)
    if moved > bound or (exact and change > 0.0):
        raise ExactnessError(
            f"absorbing would move the output by {max(moved, change):.3g}: a weight is also used outside the "
            "modules that were given as fields, or a reader does not read the field directly"
        )
    return change


def _untie(model: nn.Module, fold: Fold, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give a field that shares a weight a copy of its own, known to the optimizer."""
    for _, path, _ in shared_weights(model, [fold]):
        name = path.rpartition(".")[2]
        old: nn.Parameter = getattr(fold.module, name)
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        setattr(fold.module, name, new)
        for each in optimizers:
            add_twin(each, old, new, path)
