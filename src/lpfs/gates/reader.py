"""The check of gates on the columns of readers: they must act as gates on the outputs of the fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import FieldError
from lpfs.gates.hooks import ConstantFactors, Multiply
from lpfs.gates.module import Gates
from lpfs.gates.sites import ResolvedSite
from lpfs.gates.verification import compute_logits, max_abs_difference

FACTORS = (-2.0, 0.5, 4.0, -0.25)  # powers of two: the product with a weight or with an output is exact
ADVICE = "omit at='reader': gates on the outputs fit every model"


class ReaderCheck:
    """Pre-forward hook of a model: once, run it with factors on the columns and with the same ones on the outputs.

    Every bit must be equal. Two fields have different factors in at least one of the runs, so that columns of another
    field are found, and the outputs of the fields are replaced by random numbers, so that it does not matter how they
    are initialized. The runs are in eval mode and draw the same random numbers; the generators are restored.
    """

    def __init__(self, gates: Gates) -> None:
        self.source = gates

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise FieldError if the outputs differ; end the check, unless they do not depend on the fields yet."""
        gates = self.source
        is_captured = gates.x.is_cuda and torch.cuda.is_current_stream_capturing()
        if gates._disabled or is_captured or torch.compiler.is_compiling():
            return
        run = CheckedRun(gates, model, args, kwargs)
        count = len(gates.names)
        plain = run(torch.ones(count), at_outputs=True)
        digits = max(1, math.ceil(math.log(count, len(FACTORS))))  # of the number of a field, in base 4
        for digit in range(digits):
            values = [FACTORS[number // len(FACTORS) ** digit % len(FACTORS)] for number in range(count)]
            outputs = run(torch.tensor(values), at_outputs=True)
            if not digit and max_abs_difference(plain, outputs) == 0.0:
                return  # an empty batch, or a last layer of zeros
            if max_abs_difference(outputs, run(torch.tensor(values), at_outputs=False)) > 0.0:
                self._refuse(run)
        gates.unverified = False
        for key in [key for key, hook in model._forward_pre_hooks.items() if hook is self]:
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)

    def _refuse(self, run: CheckedRun) -> None:
        """Raise FieldError with the first field that alone makes a difference."""
        names = self.source.names
        alone = torch.ones(len(names), len(names)).fill_diagonal_(FACTORS[0])
        wrong = (
            name
            for name, values in zip(names, alone, strict=True)
            if max_abs_difference(run(values, at_outputs=True), run(values, at_outputs=False)) > 0.0
        )
        name = next(wrong, names[0])
        place = self.source.places[name][0]
        raise FieldError(
            f"field {name!r}: a gate on columns {place.columns} of {place.reader!r} does not act as one on the output "
            f"of {place.module!r}. The columns must be those of the field, in the order of the concatenation, and "
            f"nothing else may read its output; or {ADVICE}"
        )


class CheckedRun:
    """Runs a model on one batch, with factors in place of the gates and random outputs of its fields."""

    def __init__(self, gates: Gates, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.gates, self.model, self.args, self.kwargs = gates, model, args, kwargs
        self.sites: dict[str, list[tuple[int, ResolvedSite]]] = {}  # by the module that gives the output
        for number, name in enumerate(gates.names):
            for place in gates.places[name]:
                self.sites.setdefault(place.module, []).append((number, place))

    def __call__(self, values: Tensor, *, at_outputs: bool) -> list[Tensor]:
        """Return the outputs of the model with factors (N,) on the outputs of the fields, or on the columns."""
        gates, device = self.gates, self.gates.x.device
        factors, random = ConstantFactors(gates.names, values.to(device)), RandomOutput()
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            torch.manual_seed(0)
            for path, at in self.sites.items():
                module = self.model.get_submodule(path)
                stack.callback(module.register_forward_hook(random).remove)
                if at_outputs:
                    stack.callback(module.register_forward_hook(Multiply(factors, at)).remove)
            if at_outputs:
                stack.enter_context(gates.disabled())
            else:
                stack.callback(object.__setattr__, gates, "live", gates.live)
                object.__setattr__(gates, "live", (factors.values, ()))
            return compute_logits(self.model, None, lambda model, _: model.forward(*self.args, **self.kwargs))


class RandomOutput:
    """Forward hook: random numbers in place of every output, the same in every run of a model."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor:
        """Return random numbers of the shape and dtype of the output."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise FieldError(f"{type(module).__name__} returns {type(output).__name__}, not one float tensor; {ADVICE}")
        return torch.randn(output.shape, generator=self.generator).to(output)
