"""Models that can build a smaller one of themselves: the weights, constants and modes that go along."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lpfs.errors import ExactnessError, FieldError
from lpfs.gates.hooks import Factors, Multiply, hooks_of, install_factors
from lpfs.gates.sites import Place, find_places
from lpfs.gates.state import Kept, keep_of
from lpfs.schema import Selection


@runtime_checkable
class Rebuilds(Protocol):
    """What a model offers that can build a smaller one of itself; ``prune`` then needs no stand-ins.

    Somebody else can offer it for a model that does not: ``prune(model, …, by=builder)``, whose methods take the
    model first: ``builder.sites(model)``, ``builder.smaller(model, kept, cut)``,
    ``builder.narrow(model, batch, smaller)``.
    """

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


def builder_of(model: nn.Module, by: Any = None) -> Any:
    """Return who builds a smaller one of this model: ``by``, else its own class; None if neither can."""
    builder = type(model) if by is None else by
    return (
        builder if all(callable(getattr(builder, each, None)) for each in ("sites", "smaller", "narrow")) else None
    )


def narrower(model: nn.Module, smaller: nn.Module, builder: Any) -> Callable[[Any], Any]:
    """Return what makes a batch of the model one of the smaller model: nothing, unless it was rebuilt."""
    if builder is None:
        return lambda batch: batch
    return lambda batch: builder.narrow(model, batch, smaller)


def bare_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy without the constants that ``absorb`` left; ``rebuild`` puts those that stay in again.

    ``memo`` is that of ``copy.deepcopy``: id of a module -> what stands in its place.
    """
    result: nn.Module = copy.deepcopy(model, memo or {})
    for module in result.modules():
        hooks = module._forward_hooks
        for key in [key for key, each in hooks.items() if isinstance(each, Multiply)]:
            del hooks[key]
    for name in [name for name, each in result.named_children() if isinstance(each, Factors)]:
        del result._modules[name]
    return result


def rebuild(model: nn.Module, selection: Selection, cut: bool, builder: Any) -> tuple[nn.Module, dict[str, Kept]]:
    """Return the smaller model with weights, buffers, constants and modes, and what stays of each parameter."""
    declared = list(builder.sites(model))
    unknown = [name for name in selection.names if name not in declared]
    if unknown:
        raise FieldError(f"the selection has a field {unknown[0]!r} that the model does not declare: {declared}")
    fields = [name for name in declared if name not in selection.dropped]
    smaller, kept = builder.smaller(model, fields, cut)
    _copy_weights(model, smaller, kept)
    _copy_buffers(model, smaller)
    modes = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    for path, module in smaller.named_modules(remove_duplicate=False):
        module.training = modes.get(path, model.training)
    _carry_constants(model, smaller, builder)
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


def _carry_constants(model: nn.Module, smaller: nn.Module, builder: Any) -> None:
    """Install the constants of the fields that stay: their parts may have other numbers in the smaller model."""
    sources = [each for each in model.children() if isinstance(each, Factors)]
    if not sources:
        return
    before, after = (find_places(each, builder.sites(each)) for each in (model, smaller))
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
