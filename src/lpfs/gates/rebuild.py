"""Models that can build a smaller one of themselves: the weights, constants and modes that go along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lpfs.errors import ExactnessError, FieldError
from lpfs.gates.hooks import Factors, hooks_of, install_factors
from lpfs.gates.sites import Fields, Place, declared_sites, find_places
from lpfs.gates.state import Kept, keep_of
from lpfs.schema import Selection


@runtime_checkable
class Rebuilds(Protocol):
    """What a model offers that can build a smaller one of itself; ``prune`` then needs no stand-ins."""

    def sites(self) -> dict[str, Any]:
        """Return field -> where it enters: a Site, or a list of them."""
        ...

    def smaller(self, kept: Sequence[str], cut: bool) -> tuple[nn.Module, dict[str, dict[int, Tensor]]]:
        """Return a new model without the dropped fields, and what stays of each parameter.

        Its weights need not be copied (they may be on the meta device). For a parameter of the new model the
        dictionary says which indices of the old one of that name stay, per dim; {} or no entry: the whole.
        Without ``cut`` dense layers keep their shape and read zeros; with it, columns are gone.
        """
        ...

    def narrow(self, batch: Any, smaller: Any) -> Any:
        """Return the batch as the smaller model reads it."""
        ...


def rebuilds(model: nn.Module) -> bool:
    """Whether a model can build a smaller one of itself."""
    return all(callable(getattr(type(model), name, None)) for name in ("sites", "smaller", "narrow"))


def narrower(model: nn.Module, smaller: nn.Module) -> Callable[[Any], Any]:
    """Return what makes a batch of the model one of the smaller model: nothing, unless it rebuilt itself."""
    if rebuilds(model):
        assert isinstance(model, Rebuilds)
        narrow = model.narrow
        return lambda batch: narrow(batch, smaller)
    return lambda batch: batch


def rebuild(model: nn.Module, selection: Selection, cut: bool) -> tuple[nn.Module, dict[str, Kept]]:
    """Return the smaller model with weights, buffers, constants and modes, and what stays of each parameter."""
    assert isinstance(model, Rebuilds)
    declared = list(model.sites())
    unknown = [name for name in selection.names if name not in declared]
    if unknown:
        raise FieldError(f"the selection has a field {unknown[0]!r} that the model does not declare: {declared}")
    fields = [name for name in declared if name not in selection.dropped]
    smaller, kept = model.smaller(fields, cut)
    _copy_weights(model, smaller, kept)
    _copy_buffers(model, smaller)
    modes = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    for path, module in smaller.named_modules(remove_duplicate=False):
        module.training = modes.get(path, model.training)
    _carry_constants(model, smaller)
    return smaller, {name: dict(index) for name, index in kept.items() if index}


@torch.no_grad()
def _copy_weights(model: nn.Module, smaller: nn.Module, kept: Mapping[str, Kept]) -> None:
    """Give every parameter of the smaller model what stays of the old one, with its dtype, device and freezing."""
    old = dict(model.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for path, parameter in list(smaller.named_parameters(remove_duplicate=False)):
        if path not in old:
            raise ExactnessError(f"smaller() returned a model with a parameter {path!r} that this one has not")
        if id(parameter) not in made:
            value = keep_of(old[path].detach(), kept.get(path, {}))
            if value.shape != parameter.shape:
                raise ExactnessError(
                    f"smaller() keeps {tuple(value.shape)} of the parameter {path!r}, but its new model has "
                    f"{tuple(parameter.shape)} there"
                )
            if parameter.is_meta:
                made[id(parameter)] = nn.Parameter(value, old[path].requires_grad)
            else:
                parameter.data = value
                parameter.requires_grad_(old[path].requires_grad)
                made[id(parameter)] = parameter
        owner, _, name = path.rpartition(".")
        smaller.get_submodule(owner)._parameters[name] = made[id(parameter)]


@torch.no_grad()
def _copy_buffers(model: nn.Module, smaller: nn.Module) -> None:
    """Copy persistent buffers that kept their shape; the others are the new model's own, on the old device."""
    old = dict(model.named_buffers())
    saved = smaller.state_dict()
    anywhere = next(iter(model.parameters()), None)
    for path, buffer in list(smaller.named_buffers()):
        there = old.get(path)
        value = buffer
        if there is not None and path in saved and there.shape == buffer.shape:
            value = there.clone()
        elif there is not None:
            value = buffer.to(there.device, there.dtype)
        elif anywhere is not None:
            value = buffer.to(anywhere.device)
        owner, _, name = path.rpartition(".")
        smaller.get_submodule(owner)._buffers[name] = value


def _carry_constants(model: nn.Module, smaller: nn.Module) -> None:
    """Install the constants of the fields that stay: their parts may have other numbers in the smaller model."""
    sources = [each for each in model.children() if isinstance(each, Factors)]
    if not sources:
        return
    before, after = _places(model), _places(smaller)
    hooks = [hook for module in model.modules() for hook in hooks_of(module)]
    for factors in sources:
        places: dict[str, tuple[Place, ...]] = {}
        for number, name in enumerate(factors.names):
            if name not in before or (name in after and len(before[name]) != len(after[name])):
                raise ExactnessError(f"field {name!r} has a constant, but no place in the smaller model is known")
            held = [place for hook in hooks if hook.source is factors for at, place in hook.at if at == number]
            if name in after:
                pairs = zip(before[name], after[name], strict=True)
                places[name] = tuple(new for place, new in pairs if place in held)
        values = dict(zip(factors.names, factors.values.tolist(), strict=True))
        install_factors(smaller, places, [values[name] for name in places], factors.values.device)


def _places(model: nn.Module) -> dict[str, tuple[Place, ...]]:
    sites: Fields = declared_sites(model)
    return find_places(model, sites)
