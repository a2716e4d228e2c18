"""absorb: multiply the gate values into the weights and remove the gates; restore: the same structure again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from lpfs.errors import ExactnessError, InputError, SharedTableError, StateError
from lpfs.gates.attach import detach, plan_untying, require_gates, set_modules
from lpfs.gates.hooks import ConstantFactors, check_not_compiled, check_not_wrapped, install_factors
from lpfs.gates.module import Gates
from lpfs.gates.optimizer_state import (
    WeightSlice,
    add_copied_parameter,
    check_part,
    check_state,
    optimizer_list,
    rescale_state,
    slice_of,
)
from lpfs.gates.sites import (
    GatedLinear,
    ResolvedSite,
    TakesGates,
    declared_sites,
    find_overlap,
    is_inside,
    part_slices,
    paths_by_module,
    resolve_sites,
    takes_gates,
)
from lpfs.gates.stepping import UNVERIFIED, check_all_used, check_finished
from lpfs.gates.verification import (
    ForwardCall,
    check_batch,
    compute_logits,
    copy_model,
    float64_copies,
    max_abs_difference,
    rounding_bound,
)
from lpfs.schema import Selection


def absorb(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    untie: bool = False,
    constants: bool = True,
    batch: Any = None,
    call: ForwardCall | None = None,
    partial: bool = False,
) -> Selection:
    """Multiply the gates into the weights and take them off, in place, all or nothing.

    A gate goes into the table of its field (bit-equal), into the field's own Linear or the last one of its branch,
    into the columns of the Linear that reads it (rounding; with ``at="reader"`` see ``attach``), or into the weights
    that a module which takes gates itself names for that part. If nothing can take it in, it stays as a constant, which
    is bit-equal too; without a batch also instead of the columns, unless the gate is on them or the model's own
    ``sites()`` names the reader.

    Args:
        model: a model with gates.
        optimizer: the model's optimizer, or several; their state is rescaled with the weights.
        untie: if a table is shared with another module, give the field a copy.
        constants: allow constants; with False an error is raised if one is needed.
        batch: inputs for a check: the model's output before and after is compared, on a copy first, and
            ``selection.made["max_logit_change"]`` is the largest difference. Without a batch nothing is compared:
            a weight that is also used outside of the modules given as fields is not found.
        call: how to run the model on the batch, ``call(model, batch)``; by default ``model(*batch)`` for a
            tuple or list, otherwise ``model(batch)``.
        partial: accept a search that is not finished.

    Returns:
        the Selection; ``made["absorbed"]`` names the location of each gate, ``made["exact"]`` says whether the
        output is bit-equal, None if it should be and no batch was given to compare.
    """
    gates = require_gates(model, "absorb")
    gates.check()
    check_all_used(gates)
    if not partial:
        check_finished(gates)
        if gates.unverified:
            raise StateError(f"absorb: {UNVERIFIED}")
    optimizers = optimizer_list(optimizer)
    for model_optimizer in optimizers:
        check_state(model_optimizer)
    plan = plan_folds(model, gates, into_readers=batch is not None)
    folds, left = plan
    shared = shared_weights(model, folds)
    for fold, path, others in shared:
        if fold.location in ("part", "rows") or not untie:
            advice = (
                f"A slice of it cannot be untied: give {type(fold.module).__name__} a separate weight"
                if fold.location in ("part", "rows")
                else "Pass untie=True to give the field a copy"
            )
            own = [place.module for place in gates.places[fold.field]]
            why = (
                "of the same field: its gate would be multiplied into it twice"
                if all(is_inside(other, own) for other in others)
                else "which has another gate or none"
            )
            raise SharedTableError(
                f"field {fold.field!r}: the weight {path!r} is also used as {', '.join(map(repr, others))}, {why}. "
                f"{advice}"
            )
    if left and not constants:
        read = any(place.reader is not None for places in left.values() for place in places)
        advice = " or, to compare the columns of a reader, batch=" if batch is None and read else ""
        raise ExactnessError(
            f"no weight can absorb the gate of {', '.join(map(repr, left))}; pass constants=True{advice}"
        )
    check_overflow(folds)
    for model_optimizer in optimizers:
        for fold in folds:
            for weight in fold.parameters():
                check_part(model_optimizer, weight, fold.part)
    exact = all(fold.exact for fold in folds)
    change = None if batch is None else _check_on_copy(model, batch, call, untie, exact)
    selection = gates.selection(
        partial=True,
        absorbed={**dict.fromkeys(left, "constant"), **{fold.field: fold.location for fold in folds}},
        constants={name: [place.to_json() for place in places] for name, places in left.items()},
        untied=sorted({path.rpartition(".")[0] for _, path, _ in shared}),
        exact=None if exact and folds and batch is None else exact,
        max_logit_change=change,
    )
    _apply_plan(model, plan, untie, optimizers)
    return selection


def restore(model: nn.Module, selection: Selection) -> None:
    """Give a new model the structure that ``absorb`` left, in place, so that its state dict can be loaded.

    Needed only if gates remained as constants or tables were untied; ``selection.made`` contains these.
    """
    check_not_wrapped(model, "restore")
    check_not_compiled(model, "restore")
    if any(isinstance(child, ConstantFactors) for child in model.children()):
        raise StateError("restore: this model already has constants; use a new model")
    sites = {name: [ResolvedSite.from_json(site) for site in several] for name, several in selection.sites.items()}
    whole = {name: several[0].module for name, several in sites.items() if len(several) == 1 and several[0].whole}
    set_modules(model, plan_untying(model, whole, untie=True)[1])  # as attach did
    for path in selection.made.get("untied", ()):
        module = model.get_submodule(path)
        old = module.weight
        assert isinstance(old, nn.Parameter)
        module.weight = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    left = {
        name: tuple(ResolvedSite.from_json(place) for place in places)
        for name, places in selection.made.get("constants", {}).items()
    }
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    install_factors(model, left, [selection.gates[name] for name in left], device)


def _apply_plan(model: nn.Module, plan: Plan, untie: bool, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
    """Multiply the gates into the weights, remove them, and leave constants for the others."""
    folds, left = plan
    for fold in folds:
        if untie:
            _untie(model, fold, optimizers)
        apply_fold(fold, optimizers)
    gates = detach(model)
    values = dict(zip(gates.names, gates.values.tolist(), strict=True))
    install_factors(model, left, [values[name] for name in left], gates.x.device)


def _check_on_copy(model: nn.Module, batch: Any, call: ForwardCall | None, untie: bool, exact: bool) -> float:
    """Absorb on a copy and return the largest change of its output; raise ExactnessError if it is too large."""
    before = check_batch("absorb", model, batch, call)  # before the copy, because the model may store activations
    trial = copy_model(model)
    _apply_plan(trial, plan_folds(trial, require_gates(trial, "absorb"), into_readers=True), untie)
    change = max_abs_difference(before, compute_logits(trial, batch, call))
    precise, data = float64_copies(model, batch)
    if precise is model:
        moved, bound = change, 0.0 if exact else rounding_bound(before)
    else:  # half precision: compare in float64
        other = copy_model(precise)
        _apply_plan(other, plan_folds(other, require_gates(other, "absorb"), into_readers=True), untie)
        reference = compute_logits(precise, data, call)
        moved, bound = max_abs_difference(reference, compute_logits(other, data, call)), rounding_bound(reference)
    if moved > bound or (exact and change > 0.0):
        raise ExactnessError(
            f"absorb would change the output by {max(moved, change):.3g}: a weight is also used outside the "
            "modules that were given as fields, or the input of a reader is not the output of the field"
        )
    return change


def _untie(model: nn.Module, fold: Fold, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give a field that shares a weight a copy, and add it to the optimizers."""
    for _, path, _ in shared_weights(model, [fold]):
        name = path.rpartition(".")[2]
        old: nn.Parameter = getattr(fold.module, name)
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        setattr(fold.module, name, new)
        for optimizer in optimizers:
            add_copied_parameter(optimizer, old, new, path)


# ------------------------------------------------------------------- where a gate can be multiplied into a weight


@dataclass(frozen=True)
class Fold:
    """One multiplication of weights of a module by a gate: whole weights, or a slice of them.

    ``weights`` are names of parameters relative to the module; ``location`` is the name of the fold in a Selection.
    """

    field: str
    gate: float
    module: nn.Module
    weights: tuple[str, ...]
    location: str
    exact: bool
    part: WeightSlice | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights."""
        for name in self.weights:
            yield self.module.get_parameter(name)


Plan: TypeAlias = tuple[list[Fold], dict[str, tuple[ResolvedSite, ...]]]


def plan_folds(model: nn.Module, gates: Gates, *, into_readers: bool) -> Plan:
    """Return the fold of every gate, and the sites whose gates no weight can absorb: these remain as constants.

    A gate on the output of a module is folded into the columns of a reader only with ``into_readers``, or if the
    model itself declares that reader: otherwise nothing but a comparison of outputs shows that the reader reads that
    output, and that nothing is between them.
    """
    sites = declared_sites(model)
    declared = {} if sites is None else resolve_sites(model, sites)
    values = dict(zip(gates.names, gates.values.tolist(), strict=True))
    folds: list[Fold] = []
    left: dict[str, tuple[ResolvedSite, ...]] = {}
    for name, places in gates.places.items():
        for place in places:
            gate = values[name]
            site_folds = _fold_parts(model, name, place, gate)
            if not site_folds:
                own = None if place.at_reader else _fold_own_weights(model, name, place, gate)
                may_fold = into_readers or place.at_reader or place in declared.get(name, ())
                fold = own or (_fold_reader(model, name, place, gate) if may_fold else None)
                site_folds = [] if fold is None else [fold]
            folds += site_folds
            if not site_folds:
                left[name] = (*left.get(name, ()), place)
    _check_overlaps(folds, model, gates)
    return folds, left


def _fold_parts(model: nn.Module, name: str, place: ResolvedSite, gate: float) -> list[Fold]:
    """Return the folds into a module that takes gates itself; [] if a part of the field has no weight."""
    module = model.get_submodule(place.module)
    if place.whole or place.at_reader or not takes_gates(module):
        return []
    slices = [part_slices(module, part) for part in range(place.start or 0, place.stop or 0)]
    if not all(slices):
        return []
    return [
        Fold(name, gate, module, (piece.parameter,), "part", piece.exact, (piece.dim, piece.start, piece.stop))
        for pieces in slices
        for piece in pieces
    ]


def _check_overlaps(folds: list[Fold], model: nn.Module, gates: Gates) -> None:
    """Raise SharedTableError if two parts of one module share a weight and at least one of them has a gate."""
    for module in {fold.module for fold in folds if fold.location == "part"}:
        assert isinstance(module, TakesGates)
        gated = {
            part
            for several in gates.places.values()
            for place in several
            if model.get_submodule(place.module) is module
            for part in range(place.start or 0, place.stop or 0)
        }
        overlap = find_overlap(module, gated)
        if overlap is not None:
            raise SharedTableError(
                f"parts {overlap[0]} and {overlap[1]} of {type(module).__name__} share entries of "
                f"{overlap[2]!r}: their gates cannot be absorbed separately. Let its part_weights return [] for "
                "them; their gates then remain as constants"
            )


def _fold_own_weights(model: nn.Module, name: str, place: ResolvedSite, gate: float) -> Fold | None:
    """Return the fold into the field's own module, if its output is linear in its weights."""
    if not place.whole and place.rows is None and place.table is None:
        return None
    module = model.get_submodule(place.module if place.table is None else place.table)
    if _has_foreign_hooks(module, own_hooks=1 if place.table is None else 0):
        return None
    if place.rows is not None:
        plain = type(module) is nn.Embedding and module.max_norm is None
        return Fold(name, gate, module, ("weight",), "rows", exact=True, part=(0, *place.rows)) if plain else None
    if type(module) is nn.Embedding and module.max_norm is None:
        return Fold(name, gate, module, ("weight",), "table", exact=True)
    if type(module) is nn.EmbeddingBag and module.max_norm is None:
        if module.mode == "max":
            return Fold(name, gate, module, ("weight",), "table", exact=True) if gate >= 0 else None
        return Fold(name, gate, module, ("weight",), "table", exact=False)
    last = _last_linear(module, gate)
    if last is None or _used_elsewhere(model, last, module):
        return None
    weights = ("weight",) if last.bias is None else ("weight", "bias")
    return Fold(name, gate, last, weights, "branch", exact=False)


def _used_elsewhere(model: nn.Module, linear: nn.Linear, gated: nn.Module) -> bool:
    """Return whether a Linear, or a weight of it, is also registered outside the module that has the gate."""
    inside = {id(module) for module in gated.modules()}
    parents = [module for module in model.modules() if any(child is linear for child in module.children())]
    if linear is not gated and any(id(module) not in inside for module in parents):
        return True
    weights = {id(weight) for weight in linear.parameters(recurse=False)}
    return any(
        id(weight) in weights
        for module in model.modules()
        if module is not linear
        for weight in module.parameters(recurse=False)
    )


def _last_linear(module: nn.Module, gate: float) -> nn.Linear | None:
    """Return the Linear whose output a branch returns, before layers that commute with a factor."""
    if type(module) is nn.Linear:
        return module
    if type(module) is not nn.Sequential:
        return None
    for layer in reversed(module):
        if _has_foreign_hooks(layer, own_hooks=0):
            return None
        if type(layer) is nn.Linear:
            return layer
        commutes = type(layer) in (nn.ReLU, nn.LeakyReLU) and gate >= 0
        if not commutes and type(layer) not in (nn.Identity, nn.Dropout, nn.Flatten):
            return None
    return None


def _fold_reader(model: nn.Module, name: str, place: ResolvedSite, gate: float) -> Fold | None:
    """Return the fold into the columns of the declared Linear that reads the field."""
    if place.reader is None or place.columns is None:
        return None
    linear = model.get_submodule(place.reader)
    if not isinstance(linear, nn.Linear) or _has_foreign_hooks(linear, own_hooks=0):
        return None
    if len(paths_by_module(model)[linear]) > 1 or _used_elsewhere(model, linear, linear):
        return None
    exact = place.at_reader and isinstance(linear, GatedLinear) and linear.is_exact
    return Fold(name, gate, linear, ("weight",), "reader", exact=exact, part=(1, *place.columns))


def _has_foreign_hooks(module: nn.Module, own_hooks: int) -> bool:
    """Return whether hooks other than those of lpfs, parametrizations or weight norms change a weight's effect."""
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    plain = "weight" in module._parameters or not hasattr(module, "weight")
    return hooks > own_hooks or not plain


def shared_weights(model: nn.Module, folds: Sequence[Fold]) -> list[tuple[Fold, str, list[str]]]:
    """Return (fold, weight, its other names) for every weight that other modules use too."""
    names: dict[int, list[str]] = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(path)
    paths = paths_by_module(model)
    result = []
    for fold in folds:
        inside = fold.weights
        if fold.location == "part":  # a module that takes gates may use its own weights in several places
            inside = tuple(name for name, _ in fold.module.named_parameters(remove_duplicate=False))
        expected = {f"{path}.{name}" if path else name for path in paths[fold.module] for name in inside}
        for weight in fold.parameters():
            all_paths = names[id(weight)]
            others = [path for path in all_paths if path not in expected]
            if others:
                result.append((fold, next(path for path in all_paths if path in expected), others))
    return result


def check_overflow(folds: Sequence[Fold]) -> None:
    """Raise InputError if a weight times its gate overflows its dtype."""
    for fold in folds:
        for weight in fold.parameters():
            part = slice_of(weight.detach(), weight, fold.part)
            if part is not None and part.numel() and part.device.type != "meta":
                top = float(part.abs().amax()) * abs(fold.gate)
                if top > torch.finfo(weight.dtype).max:
                    raise InputError(
                        f"field {fold.field!r}: its weights times its gate ({fold.gate:.3g}) overflow {weight.dtype}"
                    )


@torch.no_grad()
def apply_fold(fold: Fold, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Multiply the weights by the gate, which is cast to the weight's dtype as in the forward pass."""
    for weight in fold.parameters():
        part = slice_of(weight, weight, fold.part)
        assert part is not None
        if fold.gate == 0:
            part.zero_()
        else:
            part.mul_(torch.tensor(fold.gate, dtype=torch.float32).to(weight.dtype).to(weight.device))
        for optimizer in optimizers:
            rescale_state(optimizer, weight, fold.gate, fold.part)
