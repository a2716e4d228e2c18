"""absorb: gate values, signs included, move into the weights; nothing learnable is left of the gates."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import ExactnessError, InputError, SharedTableError, StateError
from lpfs.gates.attach import Factors, detach, gates_of, install, refuse_wrapped
from lpfs.gates.logits import Call, logits_of, max_change, precise, rounding_bound
from lpfs.gates.module import Gates
from lpfs.gates.sites import Place, paths_by_module
from lpfs.gates.state import add_twin, as_list, check_columns, check_state, rescale_state
from lpfs.schema import Selection

FACTORS = "lpfs_factors"


@dataclass(frozen=True)
class _Fold:
    """One multiplication of weights by a gate: all of them, or some columns of a Linear."""

    field: str
    gate: float
    module: nn.Module
    weights: tuple[str, ...]
    how: str
    exact: bool
    columns: tuple[int, int] | None = None


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
    branch, or into the columns of the Linear that reads it (rounding). Where nothing can take it in, it stays
    as a constant, which is bit-equal too.

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
    folds, left = _plan(model, gates, values)
    shared = _shared(model, folds)
    if shared and not untie:
        field, path, others = shared[0]
        raise SharedTableError(
            f"field {field!r}: the weight {path!r} also serves {', '.join(map(repr, others))}, which has "
            "another gate or none. Pass untie=True to give the field a copy of its own"
        )
    if left and not constants:
        raise ExactnessError(
            f"no weight can take in the gate of {', '.join(map(repr, left))}; allow constants=True"
        )
    _refuse_overflow(folds)
    for each in optimizers:
        for fold in folds:
            check_columns(each, fold.module, fold.columns)
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
        _apply(fold, optimizers)
    detach(model)
    _install_factors(model, left, [values[name] for name in left], gates.x.device)
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
    _install_factors(model, left, [selection.gates[name] for name in left], device)


def _install_factors(
    model: nn.Module, places: dict[str, tuple[Place, ...]], values: list[float], device: torch.device
) -> None:
    """Register constants and their hooks, beside any that an earlier search left."""
    if not places:
        return
    number = sum(isinstance(each, Factors) for each in model.children())
    factors = Factors(tuple(places), torch.tensor(values, dtype=torch.float32, device=device))
    model.add_module(FACTORS + (str(number + 1) if number else ""), factors)
    install(model, factors, places, factors.names)


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


def _plan(
    model: nn.Module, gates: Gates, values: dict[str, float]
) -> tuple[list[_Fold], dict[str, tuple[Place, ...]]]:
    """Decide where every gate goes; what no weight can take in is left as a constant."""
    folds: list[_Fold] = []
    left: dict[str, tuple[Place, ...]] = {}
    for name, places in gates.places.items():
        for place in places:
            fold = _own_weights(model, name, place, values[name]) or _reader(model, name, place, values[name])
            if fold is None:
                left[name] = (*left.get(name, ()), place)
            else:
                folds.append(fold)
    return folds, left


def _own_weights(model: nn.Module, name: str, place: Place, gate: float) -> _Fold | None:
    """Return the fold into the field's own module, if its output is its weights times something."""
    if not place.whole:
        return None
    module = model.get_submodule(place.module)
    if _altered(module, ours=1):
        return None
    if type(module) is nn.Embedding and module.max_norm is None:
        return _Fold(name, gate, module, ("weight",), "table", exact=True)
    if type(module) is nn.EmbeddingBag and module.max_norm is None:
        if module.mode == "max":
            return _Fold(name, gate, module, ("weight",), "table", exact=True) if gate >= 0 else None
        return _Fold(name, gate, module, ("weight",), "table", exact=False)
    last = _last_linear(module, gate)
    if last is None or _used_elsewhere(model, last, module):
        return None
    weights = ("weight",) if last.bias is None else ("weight", "bias")
    return _Fold(name, gate, last, weights, "branch", exact=False)


def _used_elsewhere(model: nn.Module, linear: nn.Linear, gated: nn.Module) -> bool:
    """Whether a Linear, or a weight of it, is also registered outside the module that the gate is on."""
    inside = {id(each) for each in gated.modules()}
    parents = [each for each in model.modules() if any(child is linear for child in each.children())]
    if linear is not gated and any(id(each) not in inside for each in parents):
        return True
    own = {id(each) for each in linear.parameters(recurse=False)}
    return any(
        id(weight) in own
        for module in model.modules()
        if module is not linear
        for weight in module.parameters(recurse=False)
    )


def _last_linear(module: nn.Module, gate: float) -> nn.Linear | None:
    """Return the Linear whose output a branch returns, past layers that a factor may cross."""
    if type(module) is nn.Linear:
        return module
    if type(module) is not nn.Sequential:
        return None
    for each in reversed(module):
        if _altered(each, ours=0):
            return None
        if type(each) is nn.Linear:
            return each
        crosses_positive = type(each) in (nn.ReLU, nn.LeakyReLU) and gate >= 0
        if not crosses_positive and type(each) not in (nn.Identity, nn.Dropout, nn.Flatten):
            return None
    return None


def _reader(model: nn.Module, name: str, place: Place, gate: float) -> _Fold | None:
    """Return the fold into the columns of the Linear that reads the field, if it is declared."""
    if place.reader is None:
        return None
    linear = model.get_submodule(place.reader)
    if not isinstance(linear, nn.Linear) or _altered(linear, ours=0):
        return None
    if len(paths_by_module(model)[linear]) > 1 or _used_elsewhere(model, linear, linear):
        return None
    return _Fold(name, gate, linear, ("weight",), "reader", exact=False, columns=place.columns)


def _altered(module: nn.Module, ours: int) -> bool:
    """Whether hooks, parametrizations or weight norms of others stand between a weight and its use."""
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    plain = "weight" in module._parameters or not hasattr(module, "weight")
    return hooks > ours or not plain


def _shared(model: nn.Module, folds: list[_Fold]) -> list[tuple[str, str, list[str]]]:
    """Return (field, weight, other names of it) for every weight that others use too."""
    names: dict[int, list[str]] = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(path)
    paths = paths_by_module(model)
    result = []
    for fold in folds:
        own = {f"{path}.{name}" for path in paths[fold.module] for name in fold.weights}
        for name in fold.weights:
            several = names[id(getattr(fold.module, name))]
            others = [path for path in several if path not in own]
            if others:
                result.append((fold.field, next(iter(own & set(several))), others))
    return result


def _refuse_overflow(folds: list[_Fold]) -> None:
    for fold in folds:
        for name in fold.weights:
            weight: Tensor = getattr(fold.module, name)
            if weight.numel() and weight.device.type != "meta":
                top = float(weight.detach().abs().amax()) * abs(fold.gate)
                if top > torch.finfo(weight.dtype).max:
                    raise InputError(f"field {fold.field!r}: its weights times its gate overflow {weight.dtype}")


def _untie(model: nn.Module, fold: _Fold, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give a field that shares a weight a copy of its own, known to the optimizer."""
    for _, path, _ in _shared(model, [fold]):
        name = path.rpartition(".")[2]
        old: nn.Parameter = getattr(fold.module, name)
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        setattr(fold.module, name, new)
        for each in optimizers:
            add_twin(each, old, new, path)


@torch.no_grad()
def _apply(fold: _Fold, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Multiply; the gate is cast to the weight's dtype, as it was in forward."""
    for name in fold.weights:
        weight: nn.Parameter = getattr(fold.module, name)
        part = weight if fold.columns is None else weight[:, fold.columns[0] : fold.columns[1]]
        if fold.gate == 0:
            part.zero_()
        else:
            part.mul_(torch.tensor(fold.gate).to(weight.dtype).to(weight.device))
        for each in optimizers:
            rescale_state(each, weight, fold.gate, fold.columns)
