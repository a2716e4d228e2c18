"""prune: the physically smaller model, with proof that it predicts the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import AbsenceError, ExactnessError, FieldError, InputError, StateError
from lpfs.gates.absorb import FACTORS
from lpfs.gates.attach import Factors, Multiply, refuse_wrapped
from lpfs.gates.leak import Where, check_leaks
from lpfs.gates.logits import Call, logits_of, max_change, rounding_bound
from lpfs.gates.module import NAME
from lpfs.gates.sites import Place, check_reader, is_not_absence
from lpfs.gates.state import carry_over, check_state
from lpfs.schema import Selection


@dataclass(frozen=True)
class Certificate:
    """What was proved about a pruned model; ``print`` it for one readable line.

    Attributes:
        max_logit_change: max |Δ| of the output on the batch; None if no batch was given.
        bound: what it may be: 0.0 where pruning is bit-equal, rounding where columns were cut.
        checked: dropped fields whose raw values were replaced without moving one bit of the output.
        unchecked: dropped fields that nobody could check.

    """

    max_logit_change: float | None
    bound: float
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def certified(self) -> bool:
        """Whether the output was compared and every dropped field was checked for leaks."""
        return self.max_logit_change is not None and not self.unchecked

    def __str__(self) -> str:
        if self.max_logit_change is None:
            return "not certified: no batch was given to check on"
        change = f"max |Δlogit| {self.max_logit_change:.3g} (bound {self.bound:.3g})"
        if self.unchecked:
            some = ", ".join(self.unchecked[:5]) + (", …" if len(self.unchecked) > 5 else "")
            return f"not certified: {change}, but no one could check for leaks of {some}; pass inputs="
        return f"certified: {change}, {len(self.checked)} dropped fields have no way in"


@dataclass(frozen=True)
class Pruned:
    """What ``prune`` returns: new ones; its arguments are as they were."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    certificate: Certificate


class Zeros(nn.Module):
    """Stands where a dropped field was: zeros of the right shape, no table and no lookup."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.dtype = dtype

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return (…, width) zeros for ids of any shape."""
        return torch.zeros(*ids.shape, self.width, dtype=self.dtype, device=ids.device)

    def extra_repr(self) -> str:
        """Show the width."""
        return f"{self.width}"


class ZeroBags(Zeros):
    """Zeros where an EmbeddingBag was."""

    def __init__(self, width: int, dtype: torch.dtype, include_last_offset: bool) -> None:
        super().__init__(width, dtype)
        self.include_last_offset = include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Return (bags, width) zeros."""
        bags = ids.shape[0] if offsets is None else offsets.shape[0] - int(self.include_last_offset)
        return torch.zeros(bags, self.width, dtype=self.dtype, device=ids.device)


class ZeroBranch(Zeros):
    """Zeros where a dense branch was: (B, width) for its first tensor of B rows."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return (B, width) zeros."""
        first = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        return torch.zeros(first.shape[0], self.width, dtype=self.dtype, device=first.device)


def prune(
    model: nn.Module,
    selection: Selection,
    *,
    batch: Any = None,
    inputs: Mapping[str, Where] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    cut: bool = False,
    call: Call | None = None,
) -> Pruned:
    """Return the physically smaller model: dropped tables, lookups and branches are gone.

    First, on the batch and in eval mode, the raw values of every dropped field are replaced: if one bit of the
    output moves, the field leaks past its gate, and nothing is pruned.

    Args:
        model: a model whose gates were absorbed; left as it was.
        selection: what ``absorb`` returned.
        batch: a batch to prove it on; without one the result says "not certified".
        inputs: field -> where its raw value is in the batch: a key, a path such as ``("ids", 3)`` that may end
            in a column of a tensor, or a function from a batch to one with other values in that field.
        optimizer: the model's optimizer; a new one with its state is returned.
        cut: also cut the columns of the Linear that reads the fields, where ``attach`` was told of it; then
            outputs agree to rounding. Without it the dense part reads zeros, which is bit-equal for any model.
        call: how to run the model on the batch (see :func:`absorb`).

    """
    refuse_wrapped(model, "prune")
    if hasattr(model, NAME):
        raise StateError("prune: this model still has gates; absorb them first")
    places = _dropped_places(model, selection)
    if optimizer is not None:
        check_state(optimizer)
    cuts = _columns_to_cut(model, places) if cut else {}
    checked = () if batch is None else check_leaks(model, selection.dropped, batch, inputs or {}, call)

    removed, narrow = _removable(model, places), {place.module for each in cuts.values() for place in each}
    widths = _branch_shapes(model, [path for path, kind in removed.items() if kind is ZeroBranch], batch, call)
    memo: dict[int, Any] = {}
    for path in removed:
        module = model.get_submodule(path)
        memo[id(module)] = _stand_in(module, path, widths, empty=path in narrow)
    smaller: nn.Module = copy.deepcopy(model, memo)
    _forget_factors(smaller, set(selection.dropped), removed)
    columns = {path: _kept_columns(model, path, several) for path, several in cuts.items()}
    for path, index in columns.items():
        _cut_linear(smaller, path, index)

    change, bound = None, 0.0
    if batch is not None:
        before = logits_of(model, batch, call)
        bound = rounding_bound(before) if cuts else 0.0
        change = _compare(smaller, before, batch, call, cut, bound)
    unchecked = tuple(name for name in selection.dropped if name not in checked)
    certificate = Certificate(change, bound, checked, unchecked)
    if optimizer is None:
        return Pruned(smaller, None, certificate)
    return Pruned(smaller, _carry(optimizer, model, smaller, columns), certificate)


def _carry(
    optimizer: torch.optim.Optimizer, model: nn.Module, smaller: nn.Module, columns: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer of the smaller model: its weights are found by their names."""
    after = dict(smaller.named_parameters(remove_duplicate=False))
    replaced: dict[nn.Parameter, nn.Parameter | None] = {}
    kept: dict[nn.Parameter, Tensor] = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        if path in after or weight not in replaced:
            replaced[weight] = after.get(path)
        module, _, name = path.rpartition(".")
        if module in columns and name == "weight":
            kept[weight] = columns[module]
    return carry_over(optimizer, replaced, kept)


def _dropped_places(model: nn.Module, selection: Selection) -> dict[str, tuple[Place, ...]]:
    """Return where the dropped fields enter, checked against the model."""
    if not isinstance(selection, Selection):
        raise InputError(f"prune needs a Selection, such as absorb returns, found {type(selection).__name__}")
    places = {}
    for name in selection.dropped:
        if name not in selection.sites:
            raise FieldError(f"the selection does not say where field {name!r} enters the model")
        places[name] = tuple(Place.from_json(each) for each in selection.sites[name])
        for place in places[name]:
            try:
                model.get_submodule(place.module)
            except AttributeError:
                raise FieldError(f"field {name!r}: the model has no module {place.module!r}") from None
    return places


def _removable(model: nn.Module, places: Mapping[str, Sequence[Place]]) -> dict[str, type[Zeros]]:
    """Return the modules that can go: those that are a dropped field as a whole."""
    removed: dict[str, type[Zeros]] = {}
    for several in places.values():
        for place in several:
            if place.whole:
                module = model.get_submodule(place.module)
                kinds = {nn.Embedding: Zeros, nn.EmbeddingBag: ZeroBags}
                removed[place.module] = kinds.get(type(module), ZeroBranch)
    return removed


def _branch_shapes(
    model: nn.Module, paths: Sequence[str], batch: Any, call: Call | None
) -> dict[str, tuple[int, torch.dtype]]:
    """Return width and dtype of what branches return: by running the model, else by their last Linear."""
    shapes: dict[str, tuple[int, torch.dtype]] = {}
    if not paths:
        return shapes
    if batch is None:
        for path in paths:
            last = [each for each in model.get_submodule(path).modules() if isinstance(each, nn.Linear)]
            if not last:
                raise InputError(f"prune needs a batch to see what {path!r} returns")
            shapes[path] = (last[-1].out_features, last[-1].weight.dtype)
        return shapes

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            shapes[path] = (output.shape[-1], output.dtype)

        return model.get_submodule(path).register_forward_hook(hook)

    handles = [watch(path) for path in paths]
    try:
        logits_of(model, batch, call)
    finally:
        for handle in handles:
            handle.remove()
    return shapes


def _stand_in(module: nn.Module, path: str, widths: Mapping[str, tuple[int, torch.dtype]], empty: bool) -> Zeros:
    if type(module) is nn.Embedding:
        return Zeros(0 if empty else module.embedding_dim, module.weight.dtype)
    if type(module) is nn.EmbeddingBag:
        width = 0 if empty else module.embedding_dim
        return ZeroBags(width, module.weight.dtype, module.include_last_offset)
    width, dtype = widths[path]
    return ZeroBranch(0 if empty else width, dtype)


def _forget_factors(model: nn.Module, dropped: set[str], removed: Mapping[str, Any]) -> None:
    """Drop the constants of fields whose modules are gone."""
    factors = model._modules.get(FACTORS)
    if not isinstance(factors, Factors):
        return
    used = {number for module in model.modules() for hook in module._forward_hooks.values()
            if isinstance(hook, Multiply) for number, _ in hook.at}  # fmt: skip
    if not used:
        del model._modules[FACTORS]


def _columns_to_cut(model: nn.Module, places: Mapping[str, Sequence[Place]]) -> dict[str, list[Place]]:
    """Return, for every reader, the dropped places that it can do without."""
    cuts: dict[str, list[Place]] = {}
    for name, several in places.items():
        for place in several:
            if place.whole and place.reader is not None:
                check_reader(model, name, place.reader)
                cuts.setdefault(place.reader, []).append(place)
    if places and not cuts:
        odd = _not_absent(model)
        if odd:
            raise AbsenceError(f"columns cannot be cut: {odd}")
        raise InputError(
            "columns cannot be cut: no field says which Linear reads it; attach with reader=, or prune without cut"
        )
    return cuts


def _kept_columns(model: nn.Module, path: str, places: Sequence[Place]) -> Tensor:
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    keep = torch.ones(linear.in_features, dtype=torch.bool)
    for place in places:
        assert place.columns is not None
        keep[place.columns[0] : place.columns[1]] = False
    return keep.nonzero().flatten().to(linear.weight.device)


def _cut_linear(model: nn.Module, path: str, columns: Tensor) -> None:
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    weight = linear.weight
    linear.weight = nn.Parameter(weight.detach().index_select(1, columns).clone(), weight.requires_grad)
    linear.in_features = columns.numel()


def _compare(
    smaller: nn.Module, before: list[Tensor], batch: Any, call: Call | None, cut: bool, bound: float
) -> float:
    """Return how much the output moved; refuse the pruned model if it is more than the bound."""
    try:
        change = max_change(before, logits_of(smaller, batch, call))
    except RuntimeError as error:
        if not cut:
            raise
        odd = _not_absent(smaller) or "the fields do not reach the Linear as one concatenation"
        raise AbsenceError(f"columns cannot be cut: {odd} ({error})") from error
    if change > bound:
        if cut:
            odd = _not_absent(smaller) or "a layer between the fields and the Linear changes zeros"
            raise AbsenceError(f"columns cannot be cut, the output would move by {change:.3g}: {odd}")
        raise ExactnessError(f"pruning would move the output by {change:.3g}; nothing was changed")
    return change


def _not_absent(model: nn.Module) -> str | None:
    """Name the layers for which a zero is a value like any other."""
    for path, module in model.named_modules():
        if is_not_absence(module):
            kind = type(module).__name__
            return f"{path!r} is a {kind}, for which a zero is a value like any other and not absence"
    return None
