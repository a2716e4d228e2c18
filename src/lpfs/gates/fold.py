"""Folds: where the gate of a field can go into a weight, and the multiplication itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lpfs.errors import InputError, SharedTableError
from lpfs.gates.module import Gates
from lpfs.gates.parts import TakesGates, overlapping, slices_of, takes_gates
from lpfs.gates.sites import Place, paths_by_module
from lpfs.gates.state import Part, part_of, rescale_state


@dataclass(frozen=True)
class Fold:
    """One multiplication of weights of a module by a gate: all of them, or a part of them.

    ``weights`` are names of parameters relative to the module; ``how`` is what the selection calls the fold.
    """

    field: str
    gate: float
    module: nn.Module
    weights: tuple[str, ...]
    how: str
    exact: bool
    part: Part | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights."""
        for name in self.weights:
            yield self.module.get_parameter(name)


def plan_folds(
    model: nn.Module, gates: Gates, values: dict[str, float]
) -> tuple[list[Fold], dict[str, tuple[Place, ...]]]:
    """Decide where every gate goes; what no weight can take in is left as a constant."""
    folds: list[Fold] = []
    left: dict[str, tuple[Place, ...]] = {}
    for name, places in gates.places.items():
        for place in places:
            gate = values[name]
            found = _of_parts(model, name, place, gate)
            if not found:
                fold = _own_weights(model, name, place, gate) or _reader(model, name, place, gate)
                found = [] if fold is None else [fold]
            folds += found
            if not found:
                left[name] = (*left.get(name, ()), place)
    _refuse_overlaps(folds, model, gates)
    return folds, left


def _of_parts(model: nn.Module, name: str, place: Place, gate: float) -> list[Fold]:
    """Return the folds into a module that takes gates itself; none if a part of the field has no weight."""
    module = model.get_submodule(place.module)
    if place.whole or not takes_gates(module):
        return []
    slices = [slices_of(module, part) for part in range(place.start or 0, place.stop or 0)]
    if not all(slices):
        return []
    return [
        Fold(name, gate, module, (each.parameter,), "part", each.exact, (each.dim, each.start, each.stop))
        for several in slices
        for each in several
    ]


def _refuse_overlaps(folds: list[Fold], model: nn.Module, gates: Gates) -> None:
    """Refuse a weight that two parts of one module claim, of which one at least would be multiplied."""
    for module in {fold.module for fold in folds if fold.how == "part"}:
        assert isinstance(module, TakesGates)
        gated = {
            part
            for several in gates.places.values()
            for place in several
            if model.get_submodule(place.module) is module
            for part in range(place.start or 0, place.stop or 0)
        }
        both = overlapping(module, gated)
        if both is not None:
            raise SharedTableError(
                f"parts {both[0]} and {both[1]} of {type(module).__name__} share numbers of {both[2]!r}: one gate "
                "cannot go in without the other. Let its part_weights return [] for them; they keep constants then"
            )


def _own_weights(model: nn.Module, name: str, place: Place, gate: float) -> Fold | None:
    """Return the fold into the field's own module, if its output is its weights times something."""
    if not place.whole and place.rows is None and place.table is None:
        return None
    module = model.get_submodule(place.module if place.table is None else place.table)
    if _altered(module, ours=1 if place.table is None else 0):
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


def _reader(model: nn.Module, name: str, place: Place, gate: float) -> Fold | None:
    """Return the fold into the columns of the Linear that reads the field, if it is declared."""
    if place.reader is None or place.columns is None:
        return None
    linear = model.get_submodule(place.reader)
    if not isinstance(linear, nn.Linear) or _altered(linear, ours=0):
        return None
    if len(paths_by_module(model)[linear]) > 1 or _used_elsewhere(model, linear, linear):
        return None
    return Fold(name, gate, linear, ("weight",), "reader", exact=False, part=(1, *place.columns))


def _altered(module: nn.Module, ours: int) -> bool:
    """Whether hooks, parametrizations or weight norms of others stand between a weight and its use."""
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    plain = "weight" in module._parameters or not hasattr(module, "weight")
    return hooks > ours or not plain


def shared_weights(model: nn.Module, folds: Sequence[Fold]) -> list[tuple[Fold, str, list[str]]]:
    """Return (fold, weight, other names of it) for every weight that other modules use too."""
    names: dict[int, list[str]] = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(path)
    paths = paths_by_module(model)
    result = []
    for fold in folds:
        inside = fold.weights
        if fold.how == "part":  # a module that takes gates may use its own weights as it likes
            inside = tuple(name for name, _ in fold.module.named_parameters(remove_duplicate=False))
        own = {f"{path}.{name}" if path else name for path in paths[fold.module] for name in inside}
        for weight in fold.parameters():
            several = names[id(weight)]
            others = [path for path in several if path not in own]
            if others:
                result.append((fold, next(path for path in several if path in own), others))
    return result


def refuse_overflow(folds: Sequence[Fold]) -> None:
    """Refuse a gate that makes a weight too large for its type."""
    for fold in folds:
        for weight in fold.parameters():
            part = part_of(weight.detach(), weight, fold.part)
            if part is not None and part.numel() and part.device.type != "meta":
                top = float(part.abs().amax()) * abs(fold.gate)
                if top > torch.finfo(weight.dtype).max:
                    raise InputError(f"field {fold.field!r}: its weights times its gate overflow {weight.dtype}")


@torch.no_grad()
def apply_fold(fold: Fold, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Multiply; the gate is cast to the weight's dtype, as it was in forward."""
    for weight in fold.parameters():
        part = part_of(weight, weight, fold.part)
        assert part is not None
        if fold.gate == 0:
            part.zero_()
        else:
            part.mul_(torch.tensor(fold.gate).to(weight.dtype).to(weight.device))
        for each in optimizers:
            rescale_state(each, weight, fold.gate, fold.part)
