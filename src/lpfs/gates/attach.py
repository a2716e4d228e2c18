"""attach: put gates on a model that nobody here wrote, without changing one prediction."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lpfs.errors import FieldError, InputError, SharedTableError, StateError
from lpfs.gates.functions import GateFunction, gate_function
from lpfs.gates.module import ALL_GATES, NAME, Gates, Rescale, device_only
from lpfs.gates.optimizer import ProxSGD
from lpfs.gates.schedule import Preset, Schedule
from lpfs.gates.sites import Fields, Place, Site, find_places, paths_by_module

_Self = TypeVar("_Self", bound=nn.Module)


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
    if isinstance(fields, Mapping | nn.ModuleDict):
        fields = dict(fields.items())
    wanted, copies = _untied(model, fields, untie)
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
    model.register_forward_pre_hook(_Enter(gates))
    model.register_forward_hook(_Leave(gates), always_call=True)
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


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """Refuse a model inside DistributedDataParallel, DataParallel or torch.compile."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{verb} needs an nn.Module, found {type(model).__name__}")
    kind = type(model).__name__
    if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise StateError(f"{verb} works on the model inside {kind}: use model.module (attach before wrapping)")
    if kind == "OptimizedModule":
        raise StateError(f"{verb} works on the model before torch.compile: attach first, then compile")


# ------------------------------------------------------------------------------------------ hooks
# Hooks are objects, not closures: copy.deepcopy of a model then copies them together with its gates.


class _Enter:
    """Before the model's forward: compute all gate values once."""

    def __init__(self, gates: Gates) -> None:
        self.gates = gates

    def __call__(self, module: nn.Module, args: Any) -> None:
        values = self.gates()
        self.gates.live = (values, values.unbind())
        self.gates.entered = True


class _Leave:
    """After the model's forward: forget them."""

    def __init__(self, gates: Gates) -> None:
        self.gates = gates

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.gates.live, self.gates.last = None, self.gates.live


class Factors(nn.Module):
    """What remains of gates that no weight could take in: constants, nothing learnable."""

    values: Tensor

    def __init__(self, names: tuple[str, ...], values: Tensor) -> None:
        super().__init__()
        self.names = names
        self._disabled = False
        self.register_buffer("values", values)

    def forward(self) -> Tensor:
        """Return the constants (N,)."""
        return self.values

    def _apply(self: _Self, fn: Any, recurse: bool = True) -> _Self:
        super()._apply(device_only(fn), recurse)  # type: ignore[no-untyped-call]
        return self


class Multiply:
    """After a module's forward: multiply its output, or parts of it, by gates."""

    def __init__(self, source: Gates | Factors, at: list[tuple[int, Place]]) -> None:
        self.source = source
        self.at = at
        self.ran = False
        self.index: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the gated output; None, which leaves it as it is, while the gates are disabled."""
        if self.source._disabled:
            return None
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise FieldError(
                f"{self.at[0][1].module!r} returns {type(output).__name__}, not one tensor of floats: "
                "gate a module that returns the embedding itself"
            )
        if not self.ran:
            self.ran = True
        live = getattr(self.source, "live", None)
        if live is None and torch._C._current_graph_task_id() != -1:
            live = getattr(self.source, "last", None)  # a checkpointed forward that is run again in backward
        place = self.at[0][1]
        if place.whole:
            gate = self.source()[self.at[0][0]] if live is None else live[1][self.at[0][0]]
            return output * gate.to(output.device, output.dtype)
        values = (self.source() if live is None else live[0]).to(output.device)
        if not -output.ndim <= place.dim < output.ndim:
            raise FieldError(f"{place.module!r} returned {output.ndim} dimensions; there is no dim {place.dim}")
        size = output.shape[place.dim]
        if self.index is None or self.index.shape[0] != size or self.index.device != values.device:
            with torch.inference_mode(False):
                self.index = self._index(size, len(values)).to(values.device)
        extended = torch.cat([values, values.new_ones(1)])  # the last: what is not gated
        shape = [1] * output.ndim
        shape[place.dim] = size
        return output * extended.index_select(0, self.index).to(output.dtype).view(shape)

    def _index(self, size: int, ungated: int) -> Tensor:
        index = torch.full((size,), ungated)
        for number, place in self.at:
            assert place.stop is not None
            if place.stop > size:
                raise FieldError(
                    f"{place.module!r} returned {size} along dim {place.dim}, "
                    f"but a field is said to be at [{place.start}:{place.stop}]"
                )
            index[place.start : place.stop] = number
        return index


def install(
    model: nn.Module, source: Gates | Factors, places: dict[str, tuple[Place, ...]], names: tuple[str, ...]
) -> list[Multiply]:
    """Register one hook on every module in ``places``, and return the hooks."""
    by_module: dict[str, list[tuple[int, Place]]] = {}
    for name, several in places.items():
        for place in several:
            by_module.setdefault(place.module, []).append((names.index(name), place))
    hooks = [Multiply(source, at) for at in by_module.values()]
    for path, hook in zip(by_module, hooks, strict=True):
        model.get_submodule(path).register_forward_hook(hook)
    return hooks


def remove_hooks(model: nn.Module, gates: Gates) -> None:
    """Remove every hook of these gates from a model."""

    def ours(hook: Any) -> bool:
        of_model = isinstance(hook, _Enter | _Leave) and hook.gates is gates
        return of_model or (isinstance(hook, Multiply) and hook.source is gates)

    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if ours(hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


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
                copies[path] = _twin(module)
    return result, copies


def _twin(module: nn.Module) -> nn.Module:
    """Return a module of its own around the same parameters."""
    twin = copy.copy(module)
    for name, value in list(vars(twin).items()):
        if isinstance(value, dict):
            twin.__dict__[name] = copy.copy(value)
    return twin


# --------------------------------------------------------------------- an optimizer that holds both

_seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
_watching = False


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_refuse_gates)
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
