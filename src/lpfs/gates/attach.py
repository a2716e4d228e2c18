"""attach: put gates on a model that nobody here wrote, without changing one prediction."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lpfs.errors import SharedTableError, StateError
from lpfs.gates.functions import GateFunction, gate_function
from lpfs.gates.hooks import Enter, Leave, install, remove_hooks
from lpfs.gates.module import ALL_GATES, NAME, Gates, Rescale
from lpfs.gates.optimizer import PASSING_HOOKS, ProxSGD
from lpfs.gates.schedule import Preset, Schedule
from lpfs.gates.sites import Fields, Site, declared_sites, find_places, paths_by_module
from lpfs.gates.wrapped import refuse_wrapped


def attach(
    model: nn.Module,
    fields: Fields = None,
    *,
    steps: int = 20_000,
    gate: str | GateFunction = "lpfs++",
    alpha: float | None = None,
    tau: float | None = None,
    epsilon: float | None = None,
    noise: float | None = None,
    schedule: Preset | Schedule = "scaled",
    rescale: Rescale = "epsilon",
    reader: nn.Module | str | None = None,
    untie: bool = False,
    seed: int = 0,
) -> Gates:
    """Put one gate on every field of a model, in place; its predictions are bit-identical right after.

    Args:
        model: any ``nn.Module``; its state dict keeps all its keys.
        fields: field name -> where it enters: an ``nn.Embedding``, an ``nn.EmbeddingBag``, any module that
            returns (B, d), a module path, a :class:`Site` for a part of a module's output, or a list of these
            where one field enters in several places (an embedding and a wide weight, say). An
            ``nn.ModuleDict`` will do. Or patterns of paths of tables such as ``"emb.*"``; or None for every table.
            A model with a method ``sites()`` declares its fields itself: None is all of them, and a list of names
            is those.
        steps: how many training steps the search will take; schedules are scaled to it.
        gate: name of a gate function, or one made by :func:`gate_function`.
        alpha, tau, epsilon, noise: constants of the gate function, instead of its own.
        schedule: ``scaled`` to ``steps``, the paper's ``terabyte`` or ``industrial``, or a Schedule.
        rescale: ``epsilon``, the paper's ``rms``, or ``off`` (see :class:`Gates`).
        reader: the ``nn.Linear`` that reads the concatenation of the fields in the order given, if it does.
        untie: where one module is registered under several names for several fields, give each field a module
            of its own; they go on sharing the weight.
        seed: for noise and for parting ties.

    """
    refuse_wrapped(model, "attach")
    if hasattr(model, NAME):
        raise StateError("this model has gates already; absorb or detach them first")
    function = gate_function(gate, alpha=alpha, tau=tau, epsilon=epsilon, noise=noise)
    named = dict(fields.items()) if isinstance(fields, Mapping | nn.ModuleDict) else declared_sites(model, fields)
    wanted, copies = _untied(model, named, untie)
    places = find_places(model, wanted, reader, copies)
    gates = Gates(tuple(places), function, steps, schedule, rescale, seed)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    gates.to(device)
    gates.places = {name: tuple(several) for name, several in places.items()}
    for path, module in copies.items():
        parent, _, child = path.rpartition(".")
        model.get_submodule(parent)._modules[child] = module
    gates._owner = [model]
    model.add_module(NAME, gates)
    gates.hooks = install(model, gates, gates.places, gates.names)
    model.register_forward_pre_hook(Enter(gates))
    model.register_forward_hook(Leave(gates), always_call=True)
    gates.train(model.training)
    _watch_optimizers()
    return gates


def detach(model: nn.Module) -> Gates:
    """Take the gates off again, in place, and return them; the model is as it was, without any gate."""
    gates = gates_of(model, "detach")
    remove_hooks(model, gates)
    del model._modules[NAME]
    gates._owner, gates.hooks = [], []
    return gates


def gates_of(model: nn.Module, verb: str) -> Gates:
    """Return the gates of a model, or say that there are none."""
    refuse_wrapped(model, verb)
    gates = getattr(model, NAME, None)
    if not isinstance(gates, Gates):
        raise StateError(f"{verb}: this model has no gates; attach them first")
    return gates


# ------------------------------------------------------------------------- one module, many fields


def _untied(model: nn.Module, fields: Fields, untie: bool) -> tuple[Fields, dict[str, nn.Module]]:
    """Where fields name one module registered under several paths, plan a module for each of them."""
    if not isinstance(fields, dict):
        return fields, {}
    paths = paths_by_module(model)
    by_path = {path: module for module, several in paths.items() for path in several}
    users: dict[nn.Module, list[str]] = {}
    for name, given in fields.items():
        site = given.module if isinstance(given, Site) and given.index is None else given
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
                "gate. Pass untie=True to give each field a module of its own around the same weight"
            )
        own = {
            name: next((path for path in free if path == fields[name] or path.rpartition(".")[2] == name), None)
            for name in names
        }
        rest = [path for path in free if path not in own.values()]
        for name in names:
            path = own[name] or rest.pop(0)
            result[name] = Site(path)
            if path != paths[module][0]:
                copies[path] = twin(module)
    return result, copies


def twin(module: nn.Module) -> nn.Module:
    """Return a module of its own around the same parameters."""
    result = copy.copy(module)
    for name, value in list(vars(result).items()):
        if isinstance(value, dict):
            result.__dict__[name] = copy.copy(value)
    return result


# --------------------------------------------------------------------- an optimizer that holds both

_seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
_watching = False


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_refuse_gates)
        PASSING_HOOKS.append(_refuse_gates)
        _watching = True


def _refuse_gates(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the first step of an optimizer of the model that holds gates too."""
    if isinstance(optimizer, ProxSGD) or _seen.get(optimizer) == len(optimizer.param_groups):
        return
    gates = {id(each.x) for each in ALL_GATES}
    for group in optimizer.param_groups:
        for each in group["params"]:
            if id(each) in gates:
                raise StateError(
                    f"{type(optimizer).__name__} holds the gates beside the model's weights: exact zeros would "
                    f"never appear. Build it as {type(optimizer).__name__}(gates.model_parameters(), …)"
                )
    _seen[optimizer] = len(optimizer.param_groups)
