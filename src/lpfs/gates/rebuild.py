"""Models that build a smaller version of themselves, and fused tables with fewer rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from lpfs.errors import ExactnessError, FieldError
from lpfs.gates.hooks import ConstantFactors, Multiply, hooks_on, install_factors
from lpfs.gates.optimizer_state import KeptIndices, take_kept
from lpfs.gates.sites import GatedLinear, ResolvedSite, resolve_sites, ungate_linear
from lpfs.gates.verification import copy_model
from lpfs.schema import Selection


@runtime_checkable
class Rebuilds(Protocol):
    """Protocol of a model that builds a smaller version of itself for ``prune``.

    For another model, a builder can implement it: ``prune(model, …, by=builder)``; its methods have the model as
    first
    argument: ``builder.sites(model)``, ``builder.smaller(model, kept, cut)``, ``builder.narrow(model, batch,
        smaller)``.
    """

    def sites(self) -> dict[str, Any]:
        """Return field -> where it enters: a Site, or a list of them."""
        ...

    def smaller(self, kept: Sequence[str], cut: bool) -> tuple[nn.Module, dict[str, dict[int, Tensor]]]:
        """Return a new model without the dropped fields, and what is kept of each parameter.

        Its weights need not be copied (they may be on the meta device). For a parameter of the new model the
        dictionary contains the kept indices of the old parameter of that name, per dim; {} or no entry: all of it.
        Without ``cut`` dense layers keep their shape and read zeros; with it, their columns are removed.
        """
        ...

    def narrow(self, batch: Any, smaller: Any) -> Any:
        """Return the batch in the form that the smaller model accepts."""
        ...


def find_builder(model: nn.Module, by: Any = None) -> Any:
    """Return the builder of the smaller model: ``by``, or its class; None if it does not implement Rebuilds."""
    builder = type(model) if by is None else by
    methods = ("sites", "smaller", "narrow")
    return builder if all(callable(getattr(builder, name, None)) for name in methods) else None


def batch_converter(model: nn.Module, smaller: nn.Module, builder: Any) -> Callable[[Any], Any]:
    """Return the function that converts a batch for the smaller model; without a builder it changes nothing."""
    if builder is None:
        return lambda batch: batch
    return lambda batch: builder.narrow(model, batch, smaller)


def copy_without_factors(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy without the constants that ``absorb`` left; ``rebuild`` installs the kept ones again.

    ``memo`` is that of ``copy.deepcopy``: id of a module -> its replacement.
    """
    result = copy_model(model, memo)
    for module in result.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, Multiply)]:
            del hooks[key]
        if isinstance(module, GatedLinear):
            ungate_linear(module)
    for name in [name for name, child in result.named_children() if isinstance(child, ConstantFactors)]:
        del result._modules[name]
    return result


def rebuild(
    model: nn.Module, selection: Selection, cut: bool, builder: Any
) -> tuple[nn.Module, dict[str, KeptIndices]]:
    """Return the smaller model with weights, buffers, constants and modes, and what is kept of each parameter."""
    declared = list(builder.sites(model))
    unknown = [name for name in selection.names if name not in declared]
    if unknown:
        raise FieldError(f"the model has no field {unknown[0]!r} of the selection; its fields are {declared}")
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
def _copy_weights(model: nn.Module, smaller: nn.Module, kept: Mapping[str, KeptIndices]) -> None:
    """Copy what is kept of every parameter, with its dtype, device and requires_grad."""
    old = dict(model.named_parameters(remove_duplicate=False))
    copied: dict[int, nn.Parameter] = {}
    for path, parameter in list(smaller.named_parameters(remove_duplicate=False)):
        if path not in old:
            raise ExactnessError(
                f"smaller() returned a model with a parameter {path!r} that the original does not have"
            )
        if id(parameter) not in copied:
            value = take_kept(old[path].detach(), kept.get(path, {}))
            if value.shape != parameter.shape:
                raise ExactnessError(
                    f"smaller() keeps shape {tuple(value.shape)} of the parameter {path!r}, but its new model "
                    f"has shape {tuple(parameter.shape)}"
                )
            if parameter.is_meta:
                copied[id(parameter)] = nn.Parameter(value, old[path].requires_grad)
            else:
                parameter.data = value
                parameter.requires_grad_(old[path].requires_grad)
                copied[id(parameter)] = parameter
        owner, _, name = path.rpartition(".")
        smaller.get_submodule(owner)._parameters[name] = copied[id(parameter)]


@torch.no_grad()
def _copy_buffers(model: nn.Module, smaller: nn.Module) -> None:
    """Copy persistent buffers that kept their shape; the others stay those of the new model, on the old device."""
    old = dict(model.named_buffers())
    saved = smaller.state_dict()
    first = next(iter(model.parameters()), None)
    for path, buffer in list(smaller.named_buffers()):
        original = old.get(path)
        value = buffer
        if original is not None and path in saved and original.shape == buffer.shape:
            value = original.clone()
        elif original is not None:
            value = buffer.to(original.device, original.dtype)
        elif first is not None:
            value = buffer.to(first.device)
        owner, _, name = path.rpartition(".")
        smaller.get_submodule(owner)._buffers[name] = value


def _carry_constants(model: nn.Module, smaller: nn.Module, builder: Any) -> None:
    """Install the constants of the kept fields, whose sites may have other indices in the smaller model."""
    sources = [child for child in model.children() if isinstance(child, ConstantFactors)]
    if not sources:
        return
    before, after = (resolve_sites(version, builder.sites(version)) for version in (model, smaller))
    hooks = [hook for module in model.modules() for hook in hooks_on(module)]
    for factors in sources:
        places: dict[str, tuple[ResolvedSite, ...]] = {}
        for number, name in enumerate(factors.names):
            if name not in before or (name in after and len(before[name]) != len(after[name])):
                raise ExactnessError(f"field {name!r} has a constant, but the smaller model declares no site for it")
            current = [place for hook in hooks if hook.source is factors for at, place in hook.at if at == number]
            at_reader = {replace(place, at_reader=False): place.at_reader for place in current}
            if name in after:
                pairs = zip(before[name], after[name], strict=True)
                places[name] = tuple(
                    replace(new, at_reader=at_reader[place]) for place, new in pairs if place in at_reader
                )
        values = dict(zip(factors.names, factors.values.tolist(), strict=True))
        install_factors(smaller, places, [values[name] for name in places], factors.values.device)


class CompactedEmbedding(nn.Module):
    """A fused ``nn.Embedding`` without the rows of dropped fields; it is called with the original ids.

    With removed blocks of rows [a₁, b₁), [a₂, b₂), … a kept id i is row i - Σ_{b_k ≤ i} (b_k - a_k) of the
    smaller weight. Dropped fields are not looked up: the output contains zeros for them, or omits them.

    Args:
        table: the original table.
        rows: the rows (R',) of its weight that are kept.
        blocks: the removed blocks of rows, in order.
        dropped: positions of the dropped fields along ``dim``.
        omitted: those of them that are omitted from the output.
        dim: the dimension of the ids that counts fields.
    """

    stops: Tensor
    removed: Tensor

    def __init__(
        self,
        table: nn.Embedding,
        rows: Tensor,
        blocks: Sequence[tuple[int, int]],
        dropped: Collection[int],
        omitted: Collection[int],
        dim: int,
    ) -> None:
        super().__init__()
        self.dim, self.dropped, self.omitted = dim, frozenset(dropped), frozenset(omitted)
        self.embedding_dim, self.sparse = table.embedding_dim, table.sparse
        self.scale_grad_by_freq = table.scale_grad_by_freq
        padding = [] if table.padding_idx is None else (rows == table.padding_idx).nonzero().flatten().tolist()
        self.padding_idx = padding[0] if padding else None
        self.weight = nn.Parameter(table.weight.detach().index_select(0, rows), table.weight.requires_grad)
        sizes = torch.tensor([0, *(stop - start for start, stop in blocks)]).cumsum(0)
        stops = torch.tensor([stop for _, stop in blocks])
        self.register_buffer("stops", stops.to(rows.device), persistent=False)
        self.register_buffer("removed", sizes.to(rows.device), persistent=False)
        self._cached: tuple[int, Tensor, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the kept fields, (…, F, …, D), with zeros or nothing for the others."""
        kept, positions, size = self._positions(input)
        ids = input.index_select(self.dim, kept)
        ids = ids - self.removed.to(ids.dtype)[torch.bucketize(ids, self.stops.to(ids.dtype), right=True)]
        rows = functional.embedding(
            ids, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )
        if size == kept.numel():
            return rows
        shape = list(rows.shape)
        shape[self.dim] = size
        return rows.new_zeros(shape).index_copy(self.dim, positions, rows)

    def _positions(self, input: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the kept fields of the input, their positions in the output, and the number of fields there."""
        size = input.shape[self.dim]
        if self._cached is None or self._cached[0] != size or self._cached[1].device != input.device:
            kept = [at for at in range(size) if at not in self.dropped]
            remaining = [at for at in range(size) if at not in self.omitted]
            positions = [number for number, at in enumerate(remaining) if at not in self.dropped]
            index = torch.tensor([kept, positions], dtype=torch.long, device=input.device)
            self._cached = (size, index[0], index[1])
        return self._cached[1], self._cached[2], size - len(self.omitted)

    def extra_repr(self) -> str:
        """Return the size and the dropped fields."""
        return f"{self.weight.shape[0]}, {self.embedding_dim}, dropped={sorted(self.dropped)}"


def compact_embedding(
    model: nn.Module, path: str, places: Sequence[ResolvedSite], cut: Collection[ResolvedSite]
) -> tuple[CompactedEmbedding, Tensor] | None:
    """Return a fused table without dropped rows, and its rows (R',); None if rows cannot be removed.

    They cannot if constants of gates are still on its output, if its weight is used by other modules too, or if
    it is not a plain table.
    """
    table = model.get_submodule(path)
    if type(table) is not nn.Embedding or table.max_norm is not None or hooks_on(table):
        return None
    if sum(weight is table.weight for _, weight in model.named_parameters(remove_duplicate=False)) > 1:
        return None
    keep = torch.ones(table.num_embeddings, dtype=torch.bool)
    blocks = sorted(place.rows for place in places if place.rows is not None)
    for start, stop in blocks:
        keep[start:stop] = False
    rows = keep.nonzero().flatten().to(table.weight.device)
    positions = {place: range(place.start or 0, place.stop or 0) for place in places}
    dropped = {at for several in positions.values() for at in several}
    omitted = {at for place, several in positions.items() if place in cut for at in several}
    return CompactedEmbedding(table, rows, blocks, dropped, omitted, places[0].dim).train(table.training), rows
