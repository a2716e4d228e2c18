"""prune: the physically smaller model, with proof that it predicts the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import AbsenceError, ExactnessError, FieldError, InputError, StateError
from lpfs.gates.fewer_rows import fewer_rows
from lpfs.gates.hooks import Factors, hooks_of
from lpfs.gates.leak import Where, check_leaks, inputs_of
from lpfs.gates.logits import Call, logits_of, max_change, precise, rounding_bound
from lpfs.gates.module import NAME
from lpfs.gates.rebuild import builder_of, narrower, rebuild
from lpfs.gates.sites import Place, check_reader, is_not_absence
from lpfs.gates.state import Kept, as_list, carry_over, check_state
from lpfs.gates.wrapped import refuse_wrapped
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
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer | None] | None
    certificate: Certificate


class Zeros(nn.Module):
    """Stands where a dropped field was: zeros of the right shape, no table and no lookup."""

    like: Tensor

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("like", like.detach().new_empty(0), persistent=False)  # follows dtype and device

    def zeros(self, *leading: int) -> Tensor:
        """Return zeros (…, *shape)."""
        return torch.zeros(*leading, *self.shape, dtype=self.like.dtype, device=self.like.device)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros for ids of any shape, as nn.Embedding does."""
        return self.zeros(*input.shape)

    def extra_repr(self) -> str:
        """Show the shape."""
        return f"{tuple(self.shape)}"


class ZeroBags(Zeros):
    """Zeros where an EmbeddingBag was."""

    include_last_offset = False

    def forward(self, input: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros (bags, D)."""
        bags = input.shape[0] if offsets is None else offsets.shape[0] - int(self.include_last_offset)
        return self.zeros(bags)


class ZeroBranch(Zeros):
    """Zeros where a dense branch was: one row for every row of its first tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros (B, …)."""
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if first is None:
            raise ExactnessError("a dropped branch is called without any tensor: it cannot be replaced by zeros")
        return self.zeros(first.shape[0])


def prune(
    model: nn.Module,
    selection: Selection,
    *,
    batch: Any = None,
    inputs: Mapping[str, Where] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    cut: bool = False,
    call: Call | None = None,
    by: Any = None,
) -> Pruned:
    """Return the physically smaller model: dropped tables, lookups and branches are gone.

    First, on the batch and in eval mode, the raw values of every dropped field are replaced: if one bit of the
    output moves, the field leaks past its gate, and nothing is pruned. A model that can build a smaller one of
    itself (:class:`~lpfs.gates.rebuild.Rebuilds`) does so; in any other one zeros stand in for what is gone.

    Args:
        model: a model whose gates were absorbed; left as it was.
        selection: what ``absorb`` returned.
        batch: a batch to prove it on; without one the result says "not certified".
        inputs: field -> where its raw value is in the batch: a key, a path such as ``("ids", 3)`` that may end
            in a column of a tensor, or a function from a batch to one with other values in that field. A model
            with a method ``inputs_of_fields()``, which returns such functions, needs none.
        optimizer: the model's optimizer, or several; new ones with their state are returned.
        cut: also cut the columns of the Linear that reads the fields, where ``attach`` was told of it; then
            outputs agree to rounding. Without it the dense part reads zeros, which is bit-equal for any model.
        call: how to run the model on the batch (see :func:`absorb`).
        by: who builds the smaller model, where the model cannot itself: an object with the methods of
            :class:`~lpfs.gates.rebuild.Rebuilds`, which take the model first; an adapter, say.

    """
    refuse_wrapped(model, "prune")
    if hasattr(model, NAME):
        raise StateError("prune: this model still has gates; absorb them first")
    if not isinstance(selection, Selection):
        raise InputError(f"prune needs a Selection, such as absorb returns, found {type(selection).__name__}")
    optimizers = as_list(optimizer)
    for each in optimizers:
        check_state(each)
    builder = builder_of(model, by)
    places = {} if builder else _dropped_places(model, selection)
    cuts = _columns_to_cut(model, places) if cut and not builder else {}
    known = inputs_of(model) if inputs is None else inputs
    checked = () if batch is None else check_leaks(model, selection.dropped, batch, known, call)
    if builder:
        smaller, kept = rebuild(model, selection, cut, builder)
    else:
        smaller, kept = _with_stand_ins(model, places, cuts, batch, call)

    rounds = cut if builder else bool(cuts)
    change, bound = None, 0.0
    if batch is not None:
        change, bound = _compare(model, smaller, batch, call, rounds, narrower(model, smaller, builder))
    unchecked = tuple(name for name in selection.dropped if name not in checked)
    certificate = Certificate(change, bound, checked, unchecked)
    carried = [_carry(each, model, smaller, kept) for each in optimizers]
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return Pruned(smaller, carried[0] if carried else None, certificate)
    return Pruned(smaller, carried, certificate)


def _with_stand_ins(
    model: nn.Module,
    places: Mapping[str, Sequence[Place]],
    cuts: Mapping[str, Sequence[Place]],
    batch: Any,
    call: Call | None,
) -> tuple[nn.Module, dict[str, Kept]]:
    """Return a copy of any model with zeros where dropped modules were, and what stays of each cut weight."""
    removed = {place.module for several in places.values() for place in several if place.whole}
    narrow = {place.module for several in cuts.values() for place in several}
    outputs = _branch_outputs(model, removed, batch, call)
    memo: dict[int, Any] = {}
    for path in removed:
        module = model.get_submodule(path)
        memo[id(module)] = _stand_in(module, outputs.get(path), empty=path in narrow)
    empty = {place for several in cuts.values() for place in several}
    fused = {path: few for path, parts in _fused(places).items() if (few := fewer_rows(model, path, parts, empty))}
    memo |= {id(model.get_submodule(path)): few for path, (few, _) in fused.items()}
    smaller: nn.Module = copy.deepcopy(model, memo)
    _forget_factors(smaller)
    columns = {path: _kept_columns(model, path, several) for path, several in cuts.items()}
    for path, index in columns.items():
        _cut_linear(smaller, path, index)

    kept: dict[str, Kept] = {path: {1: index} for path, index in columns.items()}
    kept |= {path: {0: rows} for path, (_, rows) in fused.items()}
    return smaller, {f"{path}.weight" if path else "weight": index for path, index in kept.items()}


def _fused(places: Mapping[str, Sequence[Place]]) -> dict[str, list[Place]]:
    """Return the dropped parts of fused tables, by table."""
    found: dict[str, list[Place]] = {}
    for place in (place for several in places.values() for place in several if place.rows is not None):
        found.setdefault(place.module, []).append(place)
    return found


def _carry(
    optimizer: torch.optim.Optimizer, model: nn.Module, smaller: nn.Module, kept: Mapping[str, Kept]
) -> torch.optim.Optimizer | None:
    """Return the optimizer of the smaller model: its weights are found by their names."""
    after = dict(smaller.named_parameters(remove_duplicate=False))
    replaced: dict[nn.Parameter, nn.Parameter | None] = {}
    parts: dict[nn.Parameter, Kept] = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        if path in after or weight not in replaced:
            replaced[weight] = after.get(path)
        if path in kept:
            parts[weight] = kept[path]
    return carry_over(optimizer, replaced, parts)


def _dropped_places(model: nn.Module, selection: Selection) -> dict[str, tuple[Place, ...]]:
    """Return where the dropped fields enter, checked against the model."""
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


def _branch_outputs(model: nn.Module, paths: Iterable[str], batch: Any, call: Call | None) -> dict[str, Tensor]:
    """Return what dropped branches return, to know its shape: by running the model, else by their last Linear."""
    branches = {
        path: module
        for path in sorted(paths)
        if not isinstance(module := model.get_submodule(path), nn.Embedding | nn.EmbeddingBag)
    }
    outputs: dict[str, Tensor] = {}
    if not branches:
        return outputs
    if batch is None:
        for path, module in branches.items():
            linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
            if not linears:
                raise InputError(f"prune needs a batch to see what {path!r} returns")
            outputs[path] = linears[-1].weight.new_empty(0, linears[-1].out_features)
        return outputs

    def watch(path: str, module: nn.Module) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs[path] = output

        return module.register_forward_hook(hook)

    handles = [watch(path, module) for path, module in branches.items()]
    try:
        logits_of(model, batch, call)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _stand_in(module: nn.Module, output: Tensor | None, empty: bool) -> Zeros:
    """Return the module that gives zeros in place of a dropped one, in the same mode."""
    result: Zeros
    if isinstance(module, nn.EmbeddingBag):
        result = ZeroBags((0 if empty else module.embedding_dim,), module.weight)
        result.include_last_offset = module.include_last_offset
    elif isinstance(module, nn.Embedding):
        result = Zeros((0 if empty else module.embedding_dim,), module.weight)
    else:
        if output is None:
            raise InputError("a dropped branch did not run on this batch: its shape is not known")
        result = ZeroBranch((*output.shape[1:-1], 0 if empty else output.shape[-1]), output)
    return result.train(module.training)


def _forget_factors(model: nn.Module) -> None:
    """Drop constants that no module uses any more."""
    used = {id(hook.source) for module in model.modules() for hook in hooks_of(module)}
    for name, each in list(model._modules.items()):
        if isinstance(each, Factors) and id(each) not in used:
            del model._modules[name]


def _columns_to_cut(model: nn.Module, places: Mapping[str, Sequence[Place]]) -> dict[str, list[Place]]:
    """Return, for every reader, the dropped places that it can do without."""
    cuts: dict[str, list[Place]] = {}
    for name, several in places.items():
        for place in several:
            if (place.whole or place.rows is not None) and place.reader is not None:
                linear = check_reader(model, name, place.reader)
                names = [path for path, weight in model.named_parameters(remove_duplicate=False)
                         if weight is linear.weight]  # fmt: skip
                if len(names) > 1:
                    raise InputError(f"columns cannot be cut: the weight of {place.reader!r} is shared: {names}")
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
    model: nn.Module,
    smaller: nn.Module,
    batch: Any,
    call: Call | None,
    cut: bool,
    narrow: Callable[[Any], Any],
) -> tuple[float, float]:
    """Return how much the output moved and how much it may; refuse the smaller model if it is more."""
    before = logits_of(model, batch, call)
    bound = rounding_bound(before) if cut else 0.0
    fine, data = precise(model, batch)
    narrowed, narrowed_data = narrow(batch), narrow(data)
    try:
        change = max_change(before, logits_of(smaller, narrowed, call))
        moved, limit = change, bound
        if cut and fine is not model:  # half precision: what counts is whether the same happens in float64
            reference = logits_of(fine, data, call)
            moved, limit = (
                max_change(reference, logits_of(precise(smaller, batch)[0], narrowed_data, call)),
                rounding_bound(reference),
            )
    except (RuntimeError, AttributeError, TypeError) as error:
        odd = _not_absent(smaller) or "a module that was dropped is used in a way that zeros cannot stand in for"
        raise AbsenceError(f"{'columns cannot be cut' if cut else 'cannot prune'}: {odd} ({error})") from error
    if moved > limit:
        if cut:
            odd = _not_absent(smaller) or "a layer between the fields and the Linear changes zeros"
            raise AbsenceError(f"columns cannot be cut, the output would move by {moved:.3g}: {odd}")
        raise ExactnessError(f"pruning would move the output by {moved:.3g}; nothing was changed")
    return change, bound


def _not_absent(model: nn.Module) -> str | None:
    """Name the layers for which a zero is a value like any other."""
    for path, module in model.named_modules():
        if is_not_absence(module):
            kind = type(module).__name__
            return f"{path!r} is a {kind}, for which a zero is a value like any other and not absence"
    return None
