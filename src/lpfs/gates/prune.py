"""prune: the physically smaller model, verified to predict the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpfs._validation import check_name
from lpfs.errors import AbsenceError, ExactnessError, FieldError, InputError, StateError
from lpfs.gates.hooks import ConstantFactors, check_not_wrapped, hooks_on
from lpfs.gates.module import ATTRIBUTE
from lpfs.gates.optimizer_state import KeptIndices, check_state, optimizer_list, transfer_optimizer
from lpfs.gates.rebuild import batch_converter, compact_embedding, find_builder, rebuild
from lpfs.gates.sites import GatedLinear, ResolvedSite, check_reader, is_inside, zero_is_a_value
from lpfs.gates.verification import (
    ForwardCall,
    InputPath,
    check_batch,
    check_leaks,
    compute_logits,
    copy_model,
    declared_inputs,
    float64_copies,
    max_abs_difference,
    rounding_bound,
)
from lpfs.schema import Selection


@dataclass(frozen=True)
class Certificate:
    """Result of the verification of a pruned model; ``print`` shows it in one line.

    Attributes:
        max_logit_change: max |Δ| of the output on the batch; None if no batch was given.
        bound: the largest allowed value: 0.0 if pruning is bitwise equal, a bound of rounding if columns were
            removed.
        checked: dropped fields whose raw values were replaced without changing one bit of the output.
        unchecked: dropped fields that could not be checked.
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
            return "not certified: no batch was given; pass batch="
        change = f"max |Δlogit| {self.max_logit_change:.3g} (bound {self.bound:.3g})"
        if self.unchecked:
            some = ", ".join(self.unchecked[:5]) + (", …" if len(self.unchecked) > 5 else "")
            return f"not certified: {change}, but leaks of {some} could not be checked; pass inputs="
        return f"certified: {change}, {len(self.checked)} dropped fields have no effect on the output"


@dataclass(frozen=True)
class Pruned:
    """Result of ``prune``: a new model and optimizer; the arguments are not changed. ``print`` shows it in one line.

    Attributes:
        parameters: number of parameters before and after.
        reason: why the model did not get smaller; empty if it did.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer | None] | None
    certificate: Certificate
    parameters: tuple[int, int] = (0, 0)
    reason: str = ""

    def __str__(self) -> str:
        before, after = self.parameters
        size = f"nothing got smaller: {self.reason}" if self.reason else f"parameters {before:,} -> {after:,}"
        return f"{size}; {self.certificate}"


class Zeros(nn.Module):
    """Replacement of a dropped table: zeros of the same shape, without a lookup."""

    like: Tensor

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("like", like.detach().new_empty(0), persistent=False)  # for dtype and device

    def zeros(self, *leading: int) -> Tensor:
        """Return zeros (…, *shape)."""
        return torch.zeros(*leading, *self.shape, dtype=self.like.dtype, device=self.like.device)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros (…, *shape) for ids of any shape."""
        return self.zeros(*input.shape)

    def extra_repr(self) -> str:
        """Return the shape."""
        return f"{tuple(self.shape)}"


class ZeroBags(Zeros):
    """Replacement of a dropped EmbeddingBag."""

    include_last_offset = False

    def forward(self, input: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros (bags, D)."""
        bags = input.shape[0] if offsets is None else offsets.shape[0] - int(self.include_last_offset)
        return self.zeros(bags)


class ZeroBranch(Zeros):
    """Replacement of a dropped branch: zeros whose leading dimensions are those of its first tensor."""

    leading = 1

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros (B, …, *shape)."""
        first = _first_tensor(args, kwargs)
        if first is None:
            raise ExactnessError("a dropped branch is called without a tensor: it cannot be replaced by zeros")
        return self.zeros(*first.shape[: self.leading])


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def prune(
    model: nn.Module,
    selection: Selection,
    *,
    batch: Any = None,
    inputs: Mapping[str, InputPath] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    cut: bool = False,
    call: ForwardCall | None = None,
    by: Any = None,
) -> Pruned:
    """Return the physically smaller model: dropped tables, lookups and branches are removed.

    First, on the batch and in eval mode, the raw values of every dropped field are replaced: if one bit of the
    output changes, the field bypasses its gate, and an error is raised. A model that can build a smaller version
    of itself (:class:`~lpfs.gates.rebuild.Rebuilds`) does so; in any other model zeros replace the removed
    modules.

    Args:
        model: a model whose gates were absorbed; it is not changed.
        selection: the result of ``absorb``.
        batch: a batch for the verification; without it the certificate says "not certified".
        inputs: field -> where its raw value is in the batch: a key, a path such as ``("ids", 3)`` that may end in
            a column of a tensor, or a function from a batch to one with other values in that field. Not needed
            for a model with a method ``inputs_of_fields()`` that returns such functions.
        optimizer: the model's optimizer, or several; new ones with their state are returned.
        cut: also remove the columns of the Linear that reads the fields, if it was given to ``attach``; then
            outputs agree up to rounding. Without it the dense part reads zeros, which is bitwise equal for any
            model.
        call: how to run the model on the batch (see :func:`absorb`).
        by: the builder of the smaller model, if the model cannot build it: an object with the methods of
            :class:`~lpfs.gates.rebuild.Rebuilds` with the model as first argument, for example an adapter.
    """
    check_not_wrapped(model, "prune")
    if hasattr(model, ATTRIBUTE):
        raise StateError("prune: this model still has gates; absorb them first")
    if not isinstance(selection, Selection):
        raise InputError(f"prune needs the Selection that absorb returned, found {type(selection).__name__}")
    optimizers = optimizer_list(optimizer)
    for model_optimizer in optimizers:
        check_state(model_optimizer)
    builder = find_builder(model, by)
    places = {} if builder else _dropped_places(model, selection)
    cuts = _columns_to_cut(model, selection, places) if cut and not builder else {}
    known = declared_inputs(model) if inputs is None else inputs
    if inputs is not None and not set(selection.dropped) <= inputs.keys():  # is one of them misspelt?
        for name in inputs:
            check_name(name, [*selection.kept, *selection.dropped], "field", "inputs", FieldError)
    if batch is not None:
        check_batch("prune", model, batch, call)
    checked = () if batch is None else check_leaks(model, selection.dropped, batch, known, call)
    if builder:
        smaller, kept = rebuild(model, selection, cut, builder)
    else:
        smaller, kept = _replace_with_zeros(model, places, cuts, batch, call)

    rounds = cut if builder else bool(cuts)
    change, bound = None, 0.0
    if batch is not None:
        convert = batch_converter(model, smaller, builder)
        change, bound = _compare(model, smaller, batch, call, rounds, convert, _site_modules(selection))
    unchecked = tuple(name for name in selection.dropped if name not in checked)
    certificate = Certificate(change, bound, checked, unchecked)
    carried = [_carry_optimizer(model_optimizer, model, smaller, kept) for model_optimizer in optimizers]
    counts = tuple(sum(weight.numel() for weight in part.parameters()) for part in (model, smaller))
    reason = "" if counts[1] < counts[0] else _why_not_smaller(model, selection, places)
    if reason and any(_has_weights(model, several) for several in places.values()):
        warnings.warn(f"prune: nothing got smaller: {reason}", stacklevel=2)
    single = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    result = (carried[0] if carried else None) if single else carried
    return Pruned(smaller, result, certificate, (counts[0], counts[1]), reason)


def _has_weights(model: nn.Module, places: Sequence[ResolvedSite]) -> bool:
    """Return whether a field is the output of a module with weights, not only a part of the inputs."""
    return any(True for place in places for _ in model.get_submodule(place.module).parameters())


def _why_not_smaller(model: nn.Module, selection: Selection, places: Mapping[str, Sequence[ResolvedSite]]) -> str:
    """Return why a pruned model has as many parameters as before."""
    if not selection.dropped:
        return f"no field was dropped, all {len(selection.kept)} gates are non-zero"
    shared = [
        name
        for name, several in places.items()
        if _has_weights(model, several) and not any(place.whole or place.rows for place in several)
    ]
    if shared:
        return (
            f"{shared[0]!r} is a part of the output of {places[shared[0]][0].module!r}, whose weights other fields "
            "use too; attach the table of each field, or describe one table of all fields with lpfs.Fused"
        )
    return f"the weights of {', '.join(selection.dropped[:5])} are used elsewhere too, or there are none"


def _replace_with_zeros(
    model: nn.Module,
    places: Mapping[str, Sequence[ResolvedSite]],
    cuts: Mapping[str, Sequence[ResolvedSite]],
    batch: Any,
    call: ForwardCall | None,
) -> tuple[nn.Module, dict[str, KeptIndices]]:
    """Return a copy of any model with zeros instead of dropped modules, and what is kept of each cut weight."""
    removed = {place.module for several in places.values() for place in several if place.whole}
    narrow = {place.module for several in cuts.values() for place in several}
    branches = _dropped_branches(model, removed, batch, call)
    memo: dict[int, Any] = {}
    for path in removed:
        module = model.get_submodule(path)
        memo[id(module)] = _zeros_for(module, branches.get(path), empty=path in narrow)
    empty = {place for several in cuts.values() for place in several}
    fused = {}
    for path, dropped in _fused(places).items():
        compacted = compact_embedding(model, path, dropped, empty)
        if compacted is not None:
            fused[path] = compacted
    memo |= {id(model.get_submodule(path)): table for path, (table, _) in fused.items()}
    smaller = copy_model(model, memo)
    _remove_unused_factors(smaller)
    columns = {path: _kept_columns(model, path, several) for path, several in cuts.items()}
    for path, index in columns.items():
        _cut_linear(smaller, path, index)

    kept: dict[str, KeptIndices] = {path: {1: index} for path, index in columns.items()}
    kept |= {path: {0: rows} for path, (_, rows) in fused.items()}
    return smaller, {f"{path}.weight" if path else "weight": index for path, index in kept.items()}


def _fused(places: Mapping[str, Sequence[ResolvedSite]]) -> dict[str, list[ResolvedSite]]:
    """Return the dropped parts of fused tables, by table."""
    by_table: dict[str, list[ResolvedSite]] = {}
    for place in (place for several in places.values() for place in several if place.rows is not None):
        by_table.setdefault(place.module, []).append(place)
    return by_table


def _carry_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, smaller: nn.Module, kept: Mapping[str, KeptIndices]
) -> torch.optim.Optimizer | None:
    """Return the optimizer of the smaller model; weights are matched by name."""
    after = dict(smaller.named_parameters(remove_duplicate=False))
    replaced: dict[nn.Parameter, nn.Parameter | None] = {}
    parts: dict[nn.Parameter, KeptIndices] = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        if path in after or weight not in replaced:
            replaced[weight] = after.get(path)
        if path in kept:
            parts[weight] = kept[path]
    return transfer_optimizer(optimizer, replaced, parts)


def _dropped_places(model: nn.Module, selection: Selection) -> dict[str, tuple[ResolvedSite, ...]]:
    """Return the sites of the dropped fields, after checking them against the model."""
    places = {}
    for name in selection.dropped:
        if name not in selection.sites:
            raise FieldError(f"the selection has no site for field {name!r}; pass the Selection that absorb returned")
        places[name] = tuple(ResolvedSite.from_json(site) for site in selection.sites[name])
        for place in places[name]:
            try:
                model.get_submodule(place.module)
            except AttributeError:
                raise FieldError(f"field {name!r}: the model has no module {place.module!r}") from None
    return places


@dataclass(frozen=True)
class _Branch:
    """The output of a dropped branch, for its type and width, and how many leading dimensions it has from its input."""

    output: Tensor
    leading: int = 1


def _dropped_branches(
    model: nn.Module, paths: Iterable[str], batch: Any, call: ForwardCall | None
) -> dict[str, _Branch]:
    """Return what is known of dropped branches: by running the model, or from their last Linear."""
    branches = {
        path: module
        for path in sorted(paths)
        if not isinstance(module := model.get_submodule(path), nn.Embedding | nn.EmbeddingBag)
    }
    result: dict[str, _Branch] = {}
    if not branches:
        return result
    if batch is None:
        for path, module in branches.items():
            linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
            if not linears:
                raise InputError(f"prune needs a batch to find the shape of the output of {path!r}; pass batch=")
            result[path] = _Branch(linears[-1].weight.new_empty(0, linears[-1].out_features))
        return result

    def record(path: str, module: nn.Module) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            result[path] = _Branch(output, _leading_dims(path, _first_tensor(args, kwargs), output))

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [record(path, module) for path, module in branches.items()]
    try:
        compute_logits(model, batch, call)
    finally:
        for handle in handles:
            handle.remove()
    return result


def _leading_dims(path: str, input: Tensor | None, output: Tensor) -> int:
    """Return how many leading dimensions of an output are those of the input: all but the last, or the rows alone."""
    leading = output.ndim - 1
    if input is not None and leading > 1 and output.shape[:-1] == input.shape[:leading]:
        return leading
    if leading == 1 or (input is not None and leading > 1 and output.shape[:1] == input.shape[:1]):
        return 1
    shape = None if input is None else tuple(input.shape)
    raise AbsenceError(
        f"zeros cannot replace the dropped branch {path!r}: its output has shape {tuple(output.shape)} for an input of "
        f"shape {shape}, so that its shape for other batches is unknown. Put the gate on modules whose output has the "
        "rows of their input"
    )


def _zeros_for(module: nn.Module, branch: _Branch | None, empty: bool) -> Zeros:
    """Return the module that returns zeros instead of a dropped one, in the same mode."""
    result: Zeros
    if isinstance(module, nn.EmbeddingBag):
        result = ZeroBags((0 if empty else module.embedding_dim,), module.weight)
        result.include_last_offset = module.include_last_offset
    elif isinstance(module, nn.Embedding):
        result = Zeros((0 if empty else module.embedding_dim,), module.weight)
    else:
        if branch is None:
            raise InputError("a dropped branch did not run on this batch: its shape is unknown; pass another batch")
        shape = branch.output.shape[branch.leading :]
        result = ZeroBranch((*shape[:-1], 0 if empty else shape[-1]), branch.output)
        result.leading = branch.leading
    return result.train(module.training)


def _remove_unused_factors(model: nn.Module) -> None:
    """Remove constants that no module uses any more."""
    used = {id(hook.source) for module in model.modules() for hook in hooks_on(module)}
    for name, child in list(model._modules.items()):
        if isinstance(child, ConstantFactors) and id(child) not in used:
            del model._modules[name]


def _columns_to_cut(
    model: nn.Module, selection: Selection, places: Mapping[str, Sequence[ResolvedSite]]
) -> dict[str, list[ResolvedSite]]:
    """Return the dropped sites whose columns can be removed, by reader."""
    cuts: dict[str, list[ResolvedSite]] = {}
    for name, several in places.items():
        for place in several:
            if (place.whole or place.rows is not None) and place.reader is not None:
                linear = check_reader(model, name, place.reader)
                if isinstance(linear, GatedLinear):
                    raise InputError(
                        f"columns of {place.reader!r} cannot be removed: gates remained there as constants, because "
                        "its weight is shared or it has hooks; prune with cut=False"
                    )
                names = [path for path, weight in model.named_parameters(remove_duplicate=False)
                         if weight is linear.weight]  # fmt: skip
                if len(names) > 1:
                    raise InputError(f"columns cannot be removed: the weight of {place.reader!r} is shared: {names}")
                cuts.setdefault(place.reader, []).append(place)
    if places and not cuts:
        layer = _layer_where_zero_counts(model, _site_modules(selection))
        raise InputError(
            "columns cannot be removed: no dropped field is read by a Linear that is known; attach with reader=, or "
            "prune with cut=False" + (f", which is needed if {layer} and is between the fields and it" if layer else "")
        )
    return cuts


def _kept_columns(model: nn.Module, path: str, places: Sequence[ResolvedSite]) -> Tensor:
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
    call: ForwardCall | None,
    cut: bool,
    convert: Callable[[Any], Any],
    fields: Sequence[str],
) -> tuple[float, float]:
    """Return the largest change of the output and its bound; raise an error if the change is larger.

    ``fields`` are the modules whose outputs are fields.
    """
    before = compute_logits(model, batch, call)
    bound = rounding_bound(before) if cut else 0.0
    precise, data = float64_copies(model, batch)
    converted, converted_data = convert(batch), convert(data)
    try:
        change = max_abs_difference(before, compute_logits(smaller, converted, call))
        moved, limit = change, bound
        if cut and precise is not model:  # half precision: compare in float64
            reference = compute_logits(precise, data, call)
            moved, limit = (
                max_abs_difference(reference, compute_logits(float64_copies(smaller, batch)[0], converted_data, call)),
                rounding_bound(reference),
            )
    except (RuntimeError, AttributeError, TypeError) as error:
        problem = "columns cannot be removed" if cut else "cannot prune: a dropped module cannot be replaced by zeros"
        raise AbsenceError(f"{problem}{_possible_reason(smaller, fields) if cut else ''} ({error})") from error
    if moved > limit:
        if cut:
            problem = f"columns cannot be removed, the output would change by {moved:.3g}"
            raise AbsenceError(f"{problem}{_possible_reason(smaller, fields)}")
        raise ExactnessError(f"prune would change the output by {moved:.3g}; nothing was changed")
    return change, bound


def _possible_reason(model: nn.Module, fields: Sequence[str]) -> str:
    """Return why the output of a model changes if columns are removed, as the end of a message."""
    return f", perhaps because {_layer_where_zero_counts(model, fields) or 'a layer before the Linear changes zeros'}"


def _site_modules(selection: Selection) -> list[str]:
    """Return the paths of the modules whose outputs are fields."""
    return [site["module"] for several in selection.sites.values() for site in several]


def _layer_where_zero_counts(model: nn.Module, fields: Sequence[str]) -> str | None:
    """Describe a layer behind the fields that treats a zero as a value, not as absence; None if there is none."""
    for path, module in model.named_modules():
        if zero_is_a_value(module) and not is_inside(path, fields):
            kind = type(module).__name__
            return f"{path!r} is a {kind}, which treats a zero as a value, not as absence"
    return None
