"""Forward hooks that multiply outputs by gates, and taps for modules that multiply by gates themselves.

They are objects, not closures, so that copy.deepcopy of a model copies them together with its gates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lpfs._imports import fused_kernels_enabled
from lpfs.errors import FieldError, InputError, StateError
from lpfs.gates.module import ForwardValues, Gates, keep_dtype
from lpfs.gates.sites import GatedLinear, ResolvedSite, TakesGates, gate_linear, takes_gates, ungate_linear
from lpfs.gates.stepping import count_update

FACTORS_ATTRIBUTE = "lpfs_factors"

# Types of output that contain the tensor to multiply: how to read it, and how to replace it.
OUTPUT_TYPES: dict[type, tuple[Callable[[Any], Tensor], Callable[[Any, Tensor], Any]]] = {}

# Wrappers of a model for several processes or devices.
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DistributedModelParallel")

_Self = TypeVar("_Self", bound=nn.Module)


class FactorSource(Protocol):
    """What hooks and taps multiply by: gates, constants left by ``absorb``, a mask of another method."""

    names: tuple[str, ...]
    live: ForwardValues | None  # the values of the current forward pass
    _disabled: bool

    def __call__(self) -> Tensor:
        """Return the values (N,), with a gradient if they are trained."""
        ...


class CachedFactorSource(FactorSource, Protocol):
    """A source whose values are computed once per forward pass of the model, for all hooks and taps."""

    last: ForwardValues | None
    entered: bool
    hooks: list[Any]


class ComputeValues:
    """Pre-forward hook of the model: compute all gate values once; unbind them for modules with one gate.

    What changes in every step is set by ``object.__setattr__``: that of ``nn.Module`` looks for parameters and modules.
    """

    def __init__(self, gates: CachedFactorSource) -> None:
        self.source = gates
        self.whole = [hook for hook in gates.hooks if isinstance(hook, Multiply) and hook.at[0][1].whole]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Store the values for the hooks and taps."""
        gates = self.source
        if isinstance(gates, Gates):
            if not gates.entered:
                check_known_to_ddp(gates.x)
            if gates.training:
                count_update(gates)
        values = gates()
        object.__setattr__(gates, "live", (values, self._parts(values) if self.whole else ()))
        if not gates.entered:
            gates.entered = True

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the value of each gate: (), or on a GPU expanded to the last shape of an output.

        The gradient of an expanded value is summed in one kernel for all gates, instead of one for each: without a
        CUDA graph the host needs longer to launch it than the GPU to run it.
        """
        shape = self.whole[0].shape if values.is_cuda else None
        if shape is None or not fused_kernels_enabled() or torch.compiler.is_compiling():
            return values.unbind()
        return values.view(-1, *[1] * len(shape)).expand(-1, *shape).unbind()


class ClearValues:
    """Forward hook of the model: clear the values."""

    def __init__(self, gates: CachedFactorSource) -> None:
        self.source = gates

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Clear the values, but keep them for a checkpointed forward pass that runs again in backward."""
        object.__setattr__(self.source, "last", self.source.live)
        object.__setattr__(self.source, "live", None)


class ConstantFactors(nn.Module):
    """Constants that remain of gates that could not be multiplied into a weight; not trainable."""

    values: Tensor
    live: ForwardValues | None = None

    def __init__(self, names: tuple[str, ...], values: Tensor) -> None:
        super().__init__()
        self.names = names
        self._disabled = False
        self.register_buffer("values", values)

    def forward(self) -> Tensor:
        """Return the constants (N,)."""
        return self.values

    def _apply(self: _Self, fn: Any, recurse: bool = True) -> _Self:
        super()._apply(keep_dtype(fn), recurse)  # type: ignore[no-untyped-call]
        return self


class Multiply:
    """Forward hook of a module: multiply its output, or parts of it, by gates."""

    shape: torch.Size | None = None  # of the last output of a module with one gate, on a GPU
    number: int | None = None  # of the gate of a module with one gate

    def __init__(self, source: FactorSource, at: list[tuple[int, ResolvedSite]]) -> None:
        self.source = source
        self.at = at
        self.number = at[0][0] if at[0][1].whole else None
        self.ran = False
        self.index: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the gated output; None, which leaves it unchanged, while the gates are disabled."""
        source = self.source
        if source._disabled:
            return None
        if self.number is not None and source.live is not None and type(output) is Tensor and output.is_cpu:
            # the common case on a CPU, where Python costs as much as the product: nothing but what it needs
            gate = source.live[1][self.number]
            if gate.dtype is output.dtype and gate.is_cpu:
                if not self.ran:
                    self.ran = True
                return output * gate
        if type(output) in OUTPUT_TYPES:
            get_tensor, replace_tensor = OUTPUT_TYPES[type(output)]
            return replace_tensor(output, self(module, args, get_tensor(output)))
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise FieldError(
                f"{self.at[0][1].module!r} returns {type(output).__name__}, not one floating-point tensor: "
                "give a module that returns the embedding itself"
            )
        if not self.ran:
            self.ran = True
        live = _live(source)
        place = self.at[0][1]
        if place.whole:
            gate = source()[self.at[0][0]] if live is None else live[1][self.at[0][0]]
            if gate.dtype == output.dtype and gate.device == output.device:
                self.shape = output.shape
                return output * (gate if gate.ndim == 0 or gate.shape == self.shape else gate[(0,) * gate.ndim])
            self.shape = None
            return output * gate[(0,) * gate.ndim].to(output.device, output.dtype)
        values = (source() if live is None else live[0]).to(output.device)
        if not -output.ndim <= place.dim < output.ndim:
            raise FieldError(f"{place.module!r} returned {output.ndim} dimensions, but its site has dim={place.dim}")
        size = output.shape[place.dim]
        if self.index is None or self.index.shape[0] != size or self.index.device != values.device:
            with torch.inference_mode(False):
                self.index = self._index(size, len(values)).to(values.device)
        extended = torch.cat([values, values.new_ones(1)])  # the last entry is for what is not gated
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
                    f"but the site of a field is [{place.start}:{place.stop}]"
                )
            index[place.start : place.stop] = number
        return index


class GateTap:
    """Callable for a module that takes gates itself: returns the gate of each of its parts, or columns, (parts,).

    Args:
        source: the gates, or constants left by ``absorb``.
        at: index of each gate, and its site.
        parts: number of parts, or columns; those without a gate get 1.0.
        before: an earlier tap, of constants; its values are multiplied in.
    """

    def __init__(
        self, source: FactorSource, at: list[tuple[int, ResolvedSite]], parts: int, before: GateTap | None = None
    ) -> None:
        self.source = source
        self.at = at
        self.before = before
        self.ran = False
        self.index: Tensor | None = None
        total = len(source.names)
        numbers = [total] * parts
        for number, place in at:
            for part in range(*(place.columns or (0, 0)) if place.at_reader else (place.start or 0, place.stop or 0)):
                numbers[part] = number
        self.numbers = numbers
        self.direct = numbers == list(range(total))  # the parts are the gates, in order
        self.partial = total in numbers

    def __call__(self) -> Tensor | None:
        """Return the gates of the current forward pass, with their gradient; None while they are disabled."""
        earlier = None if self.before is None else self.before()
        if self.source._disabled:
            return earlier
        if not self.ran:
            self.ran = True
        live = _live(self.source)
        values: Tensor = self.source() if live is None else live[0]
        if not self.direct:
            if self.index is None or self.index.device != values.device:
                with torch.inference_mode(False):
                    self.index = torch.tensor(self.numbers, device=values.device)
            extended = torch.cat([values, values.new_ones(1)]) if self.partial else values
            values = extended.index_select(0, self.index)
        return values if earlier is None else values * earlier


Hook: TypeAlias = Multiply | GateTap


def _live(source: FactorSource) -> ForwardValues | None:
    """Return the values of the current forward pass; None outside one."""
    live: ForwardValues | None = getattr(source, "live", None)
    if live is None and torch._C._current_graph_task_id() != -1:
        live = getattr(source, "last", None)  # a checkpointed forward pass that runs again in backward
    return live


def install(
    model: nn.Module, source: FactorSource, places: dict[str, tuple[ResolvedSite, ...]], names: tuple[str, ...]
) -> list[Hook]:
    """Install one hook or tap on every module in ``places``, or on their readers, and return them."""
    check_readers_are_free(model, places)
    _let_compiler_guard_hooks()
    by_module: dict[str, list[tuple[int, ResolvedSite]]] = {}
    for name, several in places.items():
        for place in several:
            path = place.reader if place.at_reader and place.reader is not None else place.module
            by_module.setdefault(path, []).append((names.index(name), place))
    hooks: list[Hook] = []
    for path, at in by_module.items():
        module = model.get_submodule(path)
        if at[0][1].at_reader:
            assert isinstance(module, nn.Linear)
            before = module.gate if isinstance(module, GatedLinear) else None
            gate_linear(module, tap := GateTap(source, at, module.in_features, before))
            hooks.append(tap)
        elif takes_gates(module) and not at[0][1].whole:
            assert isinstance(module, TakesGates)
            before = module.gate if isinstance(module.gate, GateTap) else None
            module.gate = tap = GateTap(source, at, module.parts, before)
            hooks.append(tap)
        else:
            hook = Multiply(source, at)
            module.register_forward_hook(hook)
            hooks.append(hook)
    return hooks


def check_readers_are_free(model: nn.Module, places: dict[str, tuple[ResolvedSite, ...]]) -> None:
    """Raise StateError if a reader already has gates on its columns."""
    for place in (place for several in places.values() for place in several if place.at_reader):
        assert place.reader is not None
        reader = model.get_submodule(place.reader)
        if isinstance(reader, GatedLinear) and not isinstance(reader.gate.source, ConstantFactors):
            raise StateError(f"{place.reader!r} already has gates on its columns; absorb or detach them first")


def _let_compiler_guard_hooks() -> None:
    """Let torch.compile compile again for other hooks, once per process.

    By default it ignores hooks when it looks for compiled code: a model with gates would run the code of a model of
    its class without gates, and the reverse. What was compiled before is dropped, because it has no such guards. The
    import takes seconds, but every optimizer of torch makes it too.
    """
    is_imported = "torch._dynamo" in sys.modules
    import torch._dynamo

    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        if is_imported:
            torch._dynamo.reset()


def install_factors(
    model: nn.Module, places: dict[str, tuple[ResolvedSite, ...]], values: list[float], device: torch.device
) -> None:
    """Register constants and their hooks, in addition to those of an earlier search."""
    if not places:
        return
    number = sum(isinstance(child, ConstantFactors) for child in model.children())
    factors = ConstantFactors(tuple(places), torch.tensor(values, dtype=torch.float32, device=device))
    model.add_module(FACTORS_ATTRIBUTE + (str(number + 1) if number else ""), factors)
    install(model, factors, places, factors.names)


def hooks_on(module: nn.Module) -> list[Hook]:
    """Return the hooks and taps, of gates and of constants, on one module."""
    hooks: list[Hook] = [hook for hook in module._forward_hooks.values() if isinstance(hook, Multiply)]
    tap = getattr(module, "gate", None)
    while isinstance(tap, GateTap):
        hooks.append(tap)
        tap = tap.before
    return hooks


def remove_hooks(model: nn.Module, gates: CachedFactorSource) -> None:
    """Remove every hook and tap of these gates from a model."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "source", None) is gates]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        tap = getattr(module, "gate", None)
        while isinstance(tap, GateTap) and tap.source is gates:
            module.gate = tap = tap.before  # type: ignore[assignment]
        if isinstance(module, GatedLinear) and module.gate is None:
            ungate_linear(module)


def check_not_wrapped(model: nn.Module, verb: str) -> None:
    """Raise an error if a model is inside a distributed wrapper or torch.compile, or contains such a wrapper."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{verb} needs an nn.Module, found {type(model).__name__}")
    kind = type(model).__name__
    if kind in WRAPPERS:
        raise StateError(f"{verb} needs the model inside {kind}: use model.module (attach before wrapping)")
    if kind == "OptimizedModule":
        raise StateError(f"{verb} needs the model before torch.compile: attach first, then compile")
    for path, part in model.named_modules():
        if type(part).__name__ in WRAPPERS:
            raise StateError(
                f"{verb}: the module {path!r} of the model is inside {type(part).__name__}. Unwrap it first and "
                "wrap it again afterwards (attach before wrapping, unwrap before absorb)"
            )


def check_not_compiled(model: nn.Module, verb: str) -> None:
    """Raise StateError if a model was compiled in place, by ``model.compile()``."""
    if model._compiled_call_impl is not None:
        raise StateError(f"{verb} needs the model before model.compile(): {verb} first, then compile")


def check_known_to_ddp(x: Tensor) -> None:
    """Raise StateError if a DistributedDataParallel around the model does not know the gates."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or not x.requires_grad:
        return
    known = getattr(wrapper, "_module_parameters", None)
    if known is not None and all(parameter is not x for parameter in known):
        raise StateError(
            "the gates were attached after the model was wrapped in DistributedDataParallel, so that their "
            "gradient is not averaged over the ranks. Attach first, then wrap: DistributedDataParallel(model) "
            "after lpfs.attach(model, …)"
        )
