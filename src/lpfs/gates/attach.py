"""attach: install gates on any model without changing its predictions; detach: remove them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lpfs.errors import FieldError, InputError, SharedTableError, StateError
from lpfs.gates.functions import GateFunction, gate_function
from lpfs.gates.hooks import (
    ClearValues,
    ComputeValues,
    check_not_compiled,
    check_not_wrapped,
    check_readers_are_free,
    install,
    remove_hooks,
)
from lpfs.gates.module import _ALL_GATES, ATTRIBUTE, Gates, Rescale
from lpfs.gates.optimizer import ProxSGD
from lpfs.gates.reader import ReaderCheck
from lpfs.gates.schedule import Preset, Schedule
from lpfs.gates.sites import Fields, Site, declared_sites, match_tables, registered_paths, resolve_sites


def attach(
    model: nn.Module,
    fields: Fields = None,
    *,
    steps: int | None = None,
    gate: str | GateFunction = "lpfs++",
    alpha: float | None = None,
    tau: float | None = None,
    epsilon: float | None = None,
    noise: float | None = None,
    schedule: Preset | Schedule = "scaled",
    rescale: Rescale = "epsilon",
    reader: nn.Module | str | None = None,
    at: Literal["output", "reader"] = "output",
    untie: bool = False,
    seed: int = 0,
) -> Gates:
    """Install one gate for every field of a model, in place; its predictions do not change by one bit.

    Args:
        model: any ``nn.Module``; its state dict keeps all its keys.
        fields: field name -> where it enters: an ``nn.Embedding``, an ``nn.EmbeddingBag``, any module that
            returns (B, d), a module path, a :class:`Site` for a part of a module's output, or a list of these
            if one field enters in several places (for example an embedding and a wide weight). Also an
            ``nn.ModuleDict``, patterns of paths of tables such as ``"emb.*"``, or None for every table. A model
            with a method ``sites()`` declares its fields itself: None selects all of them, a list of names only
            these.
        steps: number of training steps of the search, to which schedules are scaled; ``gates.optimizer`` needs it.
        gate: name of a gate function, or the result of :func:`gate_function`.
        alpha, tau, epsilon, noise: constants of the gate function, instead of its defaults.
        schedule: ``scaled`` to ``steps``, the paper's ``terabyte`` or ``industrial``, or a Schedule.
        rescale: ``epsilon``, the paper's ``rms``, or ``off`` (see :class:`Gates`).
        reader: the ``nn.Linear`` whose input is the concatenation of the fields in the given order, if there is
            one.
        at: where gates multiply: ``output``, the output of the module of each field, or ``reader``, the columns of the
            readers. That costs less, and is only allowed where nothing else reads the fields: the first forward pass
            of the model runs a copy of it to check that. Predictions then do not change by one bit if the weight of
            the reader is contiguous and its inputs are (B, columns), otherwise by rounding.
        untie: if one module is registered under several names for several fields, give each field a separate
            module; these still share the weight.
        seed: for noise and for breaking ties.
    """
    check_not_wrapped(model, "attach")
    check_not_compiled(model, "attach")
    if hasattr(model, ATTRIBUTE):
        raise StateError("this model already has gates; absorb or detach them first")
    empty = next((path for path, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise InputError(
            f"attach: the parameter {empty!r} is on the meta device, where it has no values. Call "
            "model.to_empty(device=…) and load the weights first"
        )
    function = gate_function(gate, alpha=alpha, tau=tau, epsilon=epsilon, noise=noise)
    _check_fields(fields)
    named = dict(fields.items()) if isinstance(fields, Mapping | nn.ModuleDict) else declared_sites(model, fields)
    if not isinstance(named, dict):
        named = match_tables(model, named)
    sites, copies = plan_untying(model, named, untie)
    if at not in ("output", "reader"):
        raise InputError(f"at must be 'output' or 'reader', found {at!r}")
    places = resolve_sites(model, sites, reader, copies, at_reader=at == "reader")
    check_readers_are_free(model, places)
    gates = Gates(tuple(places), function, steps, schedule, rescale, seed)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    gates.to(device)
    gates.places = {name: tuple(several) for name, several in places.items()}
    set_modules(model, copies)
    gates._owner = [model]
    model.add_module(ATTRIBUTE, gates)
    gates.hooks = install(model, gates, gates.places, gates.names)
    if at == "reader":
        gates.unverified = True
        model.register_forward_pre_hook(ReaderCheck(gates), with_kwargs=True)
    model.register_forward_pre_hook(ComputeValues(gates))
    model.register_forward_hook(ClearValues(gates), always_call=True)
    gates.train(model.training)
    _register_optimizer_check()
    return gates


def detach(model: nn.Module) -> Gates:
    """Remove the gates, in place, and return them; the model is then as it was before ``attach``."""
    gates = require_gates(model, "detach")
    remove_hooks(model, gates)
    del model._modules[ATTRIBUTE]
    gates._owner, gates.hooks = [], []
    return gates


def require_gates(model: nn.Module, verb: str) -> Gates:
    """Return the gates of a model; raise StateError if it has none."""
    check_not_wrapped(model, verb)
    gates = getattr(model, ATTRIBUTE, None)
    if not isinstance(gates, Gates):
        raise StateError(f"{verb}: this model has no gates; attach them first")
    return gates


# ------------------------------------------------------------------------- one module for several fields


def _check_fields(fields: object) -> None:
    """Raise FieldError unless fields is a mapping, a path or pattern, a list of these, or None."""
    if fields is None or isinstance(fields, str | Mapping | nn.ModuleDict):
        return
    items = list(fields) if isinstance(fields, Iterable) else [fields]
    wrong = next((item for item in items if not isinstance(item, str)), None)
    if wrong is not None:
        raise FieldError(
            f"fields: expected names or patterns of paths, found {type(wrong).__name__}; give modules with the names "
            "of their fields: {'user': model.user_table}"
        )


def plan_untying(
    model: nn.Module, fields: Mapping[str, Any], untie: bool
) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """Return the fields with a separate module for each field that shares one, and these modules by path."""
    paths = registered_paths(model)
    by_path = dict(model.named_modules(remove_duplicate=False))
    users: dict[nn.Module, list[str]] = {}
    for name, value in fields.items():
        site = value.module if isinstance(value, Site) and value.index is None else value
        module = by_path.get(site) if isinstance(site, str) else site
        if isinstance(module, nn.Module):
            users.setdefault(module, []).append(name)
    result, copies = dict(fields), {}
    for module, names in users.items():
        free = list(paths.get(module, []))
        if len(names) < 2 or len(free) < len(names):
            continue
        if not untie:
            raise SharedTableError(
                f"fields {names} share one module, registered as {free}: with one module they would share one "
                "gate. Pass untie=True to give each field a separate module with the same weight; if they are one "
                "field, give one of these names"
            )
        by_name = {
            name: next((path for path in free if path == fields[name] or path.rpartition(".")[2] == name), None)
            for name in names
        }
        rest = [path for path in free if path not in by_name.values()]
        for name in names:
            path = by_name[name] or rest.pop(0)
            result[name] = Site(path)
            if path != paths[module][0]:
                copies[path] = share_parameters(module)
    return result, copies


def set_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put modules at their paths."""
    for path, module in modules.items():
        parent, _, child = path.rpartition(".")
        model.get_submodule(parent)._modules[child] = module


def share_parameters(module: nn.Module) -> nn.Module:
    """Return a separate module with the same parameters."""
    result = copy.copy(module)
    for name, value in list(vars(result).items()):
        if isinstance(value, dict):
            result.__dict__[name] = copy.copy(value)
    return result


# ------------------------------------------------------------------ check of the optimizers of the model

_checked: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
_hook_registered = False


def _register_optimizer_check() -> None:
    global _hook_registered
    if not _hook_registered:
        register_optimizer_step_pre_hook(_check_optimizer_excludes_gates)
        _hook_registered = True


def _check_optimizer_excludes_gates(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise StateError at the first step of an optimizer that holds gates together with weights of the model."""
    if isinstance(optimizer, ProxSGD) or _checked.get(optimizer) == len(optimizer.param_groups):
        return
    gates = {id(gates.x) for gates in _ALL_GATES}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in gates:
                raise StateError(
                    f"{type(optimizer).__name__} holds the gates together with the model's weights: no gate would "
                    f"become exactly zero. Build it as {type(optimizer).__name__}(gates.model_parameters(), …)"
                )
    _checked[optimizer] = len(optimizer.param_groups)
