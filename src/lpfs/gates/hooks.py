"""Where gates meet a model: hooks that multiply outputs, and taps for modules that multiply by themselves.

They are objects, not closures: copy.deepcopy of a model then copies them together with its gates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lpfs.errors import FieldError
from lpfs.gates.module import Gates, Live, device_only
from lpfs.gates.parts import TakesGates, takes_gates
from lpfs.gates.sites import Place
from lpfs.gates.wrapped import refuse_unshared

FACTORS = "lpfs_factors"

# Kinds of output that hold their tensor inside: how to take it out, and how to put another in its place.
HOLDERS: dict[type, tuple[Callable[[Any], Tensor], Callable[[Any, Tensor], Any]]] = {}

_Self = TypeVar("_Self", bound=nn.Module)


class Source(Protocol):
    """What hooks and taps multiply by: gates, constants that remained of some, a mask of another method."""

    names: tuple[str, ...]
    _disabled: bool

    def __call__(self) -> Tensor:
        """Return the values (N,), with a gradient where they are learnt."""
        ...


class Shown(Source, Protocol):
    """A source whose values are computed once a forward of the model, for all hooks and taps."""

    live: Live | None
    last: Live | None
    entered: bool
    hooks: list[Any]


class Enter:
    """Before the model's forward: compute all gate values once, and one by one where a module has a gate alone."""

    def __init__(self, gates: Shown) -> None:
        self.gates = gates
        self.singly = any(place.whole for hook in gates.hooks for _, place in hook.at)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Put the values where the hooks and taps find them."""
        if not self.gates.entered and isinstance(self.gates, Gates):
            refuse_unshared(self.gates.x)
        values = self.gates()
        self.gates.live = (values, values.unbind() if self.singly else ())
        self.gates.entered = True


class Leave:
    """After the model's forward: forget them."""

    def __init__(self, gates: Shown) -> None:
        self.gates = gates

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take the values away, but remember them for a forward that is run again in backward."""
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

    def __init__(self, source: Source, at: list[tuple[int, Place]]) -> None:
        self.source = source
        self.at = at
        self.ran = False
        self.index: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the gated output; None, which leaves it as it is, while the gates are disabled."""
        if self.source._disabled:
            return None
        if type(output) in HOLDERS:
            take, put = HOLDERS[type(output)]
            return put(output, self(module, args, take(output)))
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise FieldError(
                f"{self.at[0][1].module!r} returns {type(output).__name__}, not one tensor of floats: "
                "gate a module that returns the embedding itself"
            )
        if not self.ran:
            self.ran = True
        live = _live(self.source)
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


class Tap:
    """What a module that takes gates itself calls in forward: the gate of each of its parts (parts,).

    Args:
        source: the gates, or constants that remained of some.
        at: number of a gate, and the parts that it is on.
        parts: how many parts there are; those without a gate get 1.0.
        before: a tap that was there before, of constants; its values are multiplied in.

    """

    def __init__(self, source: Source, at: list[tuple[int, Place]], parts: int, before: Tap | None = None) -> None:
        self.source = source
        self.at = at
        self.before = before
        self.ran = False
        self.index: Tensor | None = None
        total = len(source.names)
        numbers = [total] * parts
        for number, place in at:
            for part in range(place.start or 0, place.stop or 0):
                numbers[part] = number
        self.numbers = numbers
        self.direct = numbers == list(range(total))  # the parts are the gates, in order
        self.partial = total in numbers

    def __call__(self) -> Tensor | None:
        """Return the gates of the forward that is under way, with their gradient; None while they are disabled."""
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


def _live(source: Source) -> Live | None:
    """Return the values of the forward that is under way, if they are known."""
    live: Live | None = getattr(source, "live", None)
    if live is None and torch._C._current_graph_task_id() != -1:
        live = getattr(source, "last", None)  # a checkpointed forward that is run again in backward
    return live


def install(
    model: nn.Module, source: Source, places: dict[str, tuple[Place, ...]], names: tuple[str, ...]
) -> list[Multiply | Tap]:
    """Put one hook, or one tap, on every module in ``places``, and return them."""
    by_module: dict[str, list[tuple[int, Place]]] = {}
    for name, several in places.items():
        for place in several:
            by_module.setdefault(place.module, []).append((names.index(name), place))
    hooks: list[Multiply | Tap] = []
    for path, at in by_module.items():
        module = model.get_submodule(path)
        if takes_gates(module) and not at[0][1].whole:
            assert isinstance(module, TakesGates)
            before = module.gate if isinstance(module.gate, Tap) else None
            module.gate = tap = Tap(source, at, module.parts, before)
            hooks.append(tap)
        else:
            hook = Multiply(source, at)
            module.register_forward_hook(hook)
            hooks.append(hook)
    return hooks


def install_factors(
    model: nn.Module, places: dict[str, tuple[Place, ...]], values: list[float], device: torch.device
) -> None:
    """Register constants and their hooks, beside any that an earlier search left."""
    if not places:
        return
    number = sum(isinstance(each, Factors) for each in model.children())
    factors = Factors(tuple(places), torch.tensor(values, dtype=torch.float32, device=device))
    model.add_module(FACTORS + (str(number + 1) if number else ""), factors)
    install(model, factors, places, factors.names)


def hooks_of(module: nn.Module) -> list[Multiply | Tap]:
    """Return the hooks and taps, of gates and of constants, on one module."""
    found: list[Multiply | Tap] = [each for each in module._forward_hooks.values() if isinstance(each, Multiply)]
    tap = getattr(module, "gate", None)
    while isinstance(tap, Tap):
        found.append(tap)
        tap = tap.before
    return found


def remove_hooks(model: nn.Module, gates: Shown) -> None:
    """Remove every hook and tap of these gates from a model."""

    def ours(hook: Any) -> bool:
        of_model = isinstance(hook, Enter | Leave) and hook.gates is gates
        return of_model or (isinstance(hook, Multiply) and hook.source is gates)

    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if ours(hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
        tap = getattr(module, "gate", None)
        while isinstance(tap, Tap) and tap.source is gates:
            module.gate = tap = tap.before  # type: ignore[assignment]
