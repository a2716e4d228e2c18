"""Gates on the columns of the Linear that reads the fields, instead of on the output of every field.

If e_f are the outputs of the fields and W_f the columns that read them, Σ_f (g_f e_f) W_fᵀ = Σ_f e_f (g_f W_f)ᵀ: one
product with the weight takes the place of one with the output of each field, and does not grow with the batch. Both
sides are the same only if nothing but this Linear reads the fields. The first forward pass with gradients checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import FieldError
from lpfs.gates.sites import ResolvedSite


class ScaleColumns:
    """Pre-forward hook of a Linear: its weight is multiplied by gates, column by column, during this call.

    The product is an attribute of the instance, which Python finds before the parameter of the same name; parameters
    and state dict do not change.
    """

    def __init__(self, source: Any, at: list[tuple[int, ResolvedSite]]) -> None:
        self.source, self.at = source, at
        self.ran = False
        self.index: Tensor | None = None
        self.check: ReaderCheck | None = None

    def __call__(self, module: nn.Linear, args: Any) -> None:
        """Set the product; the parameter stays in use while the gates are disabled."""
        source = self.source
        if source._disabled:
            return
        if not self.ran:
            self.ran = True
        if self.check is not None and source.live is not None:
            assert self.at[0][1].reader is not None
            self.check.compare(self.at[0][1].reader, args[0])
        weight: Tensor = module.weight  # the product of an earlier hook, or the parameter
        values = (source() if source.live is None else source.live[0]).to(weight.device)
        if self.index is None or self.index.device != values.device:
            with torch.inference_mode(False):
                self.index = self._index(module.in_features, len(values)).to(values.device)
        extended = torch.cat([values, values.new_ones(1)])  # the last entry is for what is not gated
        module.__dict__["weight"] = weight * extended.index_select(0, self.index).to(weight.dtype)

    def _index(self, columns: int, ungated: int) -> Tensor:
        index = torch.full((columns,), ungated)
        for number, place in self.at:
            assert place.columns is not None
            index[place.columns[0] : place.columns[1]] = number
        return index


class RestoreWeight:
    """Forward hook of a Linear, also after an error: the weight is its parameter again."""

    def __init__(self, scale: ScaleColumns) -> None:
        self.scale = scale

    @property
    def source(self) -> Any:
        """The gates or constants of the product."""
        return self.scale.source

    def __call__(self, module: nn.Linear, args: Any, output: Any) -> None:
        """Remove the product."""
        module.__dict__.pop("weight", None)
        if self.scale.check is not None and isinstance(output, Tensor):
            self.scale.check.reader_outputs.append(output)


class ReaderCheck:
    """Forward hook of a model: checks once that the readers read the fields in their columns, and nothing else does.

    Args:
        scales: the hook of each reader.
        places: field -> its sites.
    """

    def __init__(self, scales: list[ScaleColumns], places: Mapping[str, tuple[ResolvedSite, ...]]) -> None:
        self.places = [(name, place) for name, several in places.items() for place in several]
        self.scales = scales
        self.outputs: dict[str, Tensor] = {}  # of the modules of the fields, in this forward pass
        self.reader_outputs: list[Tensor] = []

    @property
    def source(self) -> Any:
        """The gates on the columns."""
        return self.scales[0].source

    def install(self, model: nn.Module) -> None:
        """Register this hook and those that it needs."""
        for scale in self.scales:
            scale.check = self
        for path in dict.fromkeys(place.module for _, place in self.places):
            model.get_submodule(path).register_forward_hook(RecordOutput(self, path))
        model.register_forward_hook(self, always_call=True)

    def remove(self, model: nn.Module) -> None:
        """Remove all hooks of the check."""
        for scale in self.scales:
            scale.check = None
        delete_hooks(model, lambda hook: isinstance(hook, ReaderCheck | RecordOutput) and hook.source is self.source)

    def compare(self, reader: str, value: Tensor) -> None:
        """Raise FieldError if the input of a reader does not have the outputs of the fields in their columns."""
        rows = value.detach().flatten(0, -2)
        for name, place in self.places:
            if place.reader != reader:
                continue
            output = self.outputs.get(place.module)
            if output is None:
                raise FieldError(f"field {name!r}: {place.module!r} did not run before {reader!r}; {ADVICE}")
            part = output.detach()
            if not place.whole:
                assert place.start is not None
                assert place.stop is not None
                part = part.narrow(place.dim, place.start, place.stop - place.start)
            assert place.columns is not None
            columns = rows[:, place.columns[0] : place.columns[1]]
            if part.numel() != columns.numel() or not torch.equal(part.reshape(columns.shape).to(columns), columns):
                raise FieldError(
                    f"field {name!r}: columns {place.columns} of the input of {reader!r} are not the output of "
                    f"{place.module!r}: give the fields in the order of the concatenation; or {ADVICE}"
                )

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Raise FieldError if the output depends on a field by another path than its reader; end the check."""
        outputs, stop = self.outputs, {tensor.grad_fn for tensor in self.reader_outputs}
        self.outputs, self.reader_outputs = {}, []
        ends = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not ends or not outputs or not stop:
            return  # without gradients, or after an error
        nodes = {tensor.grad_fn: path for path, tensor in outputs.items()}
        bypassed = {nodes[node] for node in reached_nodes(ends, stop) if node in nodes}
        for name, place in self.places:
            if place.module in bypassed:
                raise FieldError(
                    f"field {name!r}: the output of {place.module!r} is also used outside {place.reader!r}, where a "
                    f"gate on the columns has no effect; {ADVICE}"
                )
        self.remove(module)


class RecordOutput:
    """Forward hook of the module of a field: keeps its output for a check."""

    def __init__(self, check: ReaderCheck, path: str) -> None:
        self.check, self.path = check, path

    @property
    def source(self) -> Any:
        """The gates on the columns."""
        return self.check.source

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output, with a node in the autograd graph also if its weights are frozen."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise FieldError(f"{self.path!r} returns {type(output).__name__}, not one floating-point tensor; {ADVICE}")
        if torch.is_grad_enabled() and output.grad_fn is None:
            leaf = output.detach().requires_grad_()
            output = leaf.view_as(leaf)
        self.check.outputs[self.path] = output
        return output


ADVICE = "omit at='reader': gates on the outputs fit every model"


def delete_hooks(model: nn.Module, matches: Callable[[Any], bool]) -> None:
    """Remove the forward hooks of all modules that match."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if matches(hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def reached_nodes(ends: list[Tensor], stop: set[Any]) -> set[Any]:
    """Return the nodes of the autograd graph from which tensors are computed, not beyond the nodes in ``stop``."""
    left, found = [tensor.grad_fn for tensor in ends], set[Any]()
    while left:
        node = left.pop()
        if node is not None and node not in found and node not in stop:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
