"""The check of gates on the columns of readers: they must act as gates on the outputs of the fields."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.errors import FieldError, InputError
from lpfs.gates.hooks import ConstantFactors, GateTap, Multiply
from lpfs.gates.module import Gates
from lpfs.gates.sites import GatedLinear, ResolvedSite
from lpfs.gates.verification import compute_logits, map_tensors, max_abs_difference

FACTORS = (-2.0, 0.5, 4.0, -0.25)  # powers of two: the product with a weight or with an output is exact
ADVICE = "omit at='reader': gates on the outputs fit every model"


class ReaderCheck:
    """Pre-forward hook of a model: once, run a copy of it with factors on the columns, and on the outputs.

    Every bit must be equal. All factors are zero in one run; in the others two fields have different ones at least
    once, so that columns of another field are found. The outputs of the fields and the weights of the readers are
    random, so that it does not matter how they are initialized. The copy shares the parameters of the model; it runs
    in eval mode on copies of the arguments.
    """

    def __init__(self, gates: Gates) -> None:
        self.source = gates

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise FieldError if the outputs differ; the check stays if not all fields ran or had an effect."""
        gates = self.source
        is_captured = gates.x.is_cuda and torch.cuda.is_current_stream_capturing()
        is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        if gates._disabled or is_captured or is_traced:
            return
        try:
            is_done = self._compare(CheckedModel(gates, model), args, kwargs)
        except FieldError:
            raise
        except Exception as error:
            raise FieldError(
                f"gates at='reader' cannot be compared with gates on the outputs, {type(error).__name__}: {error}. The "
                f"comparison runs a copy of the model in eval mode, which must return float tensors; {ADVICE}"
            ) from error
        if is_done:
            gates.unverified = False
            for key in [key for key, hook in model._forward_pre_hooks.items() if hook is self]:
                model._forward_pre_hooks.pop(key, None)
                model._forward_pre_hooks_with_kwargs.pop(key, None)

    def _compare(self, checked: CheckedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether all fields were compared; raise FieldError if they differ."""

        def difference(values: Tensor) -> float:
            outputs, columns = (checked.run(values, args, kwargs, at_outputs=at) for at in (True, False))
            return max_abs_difference(outputs, columns)

        count = len(self.source.names)
        ones, zeros = torch.ones(count), torch.zeros(count)
        plain, again, without = (checked.run(values, args, kwargs, at_outputs=True) for values in (ones, ones, zeros))
        if max_abs_difference(plain, again) != 0.0:
            raise InputError("the model returns different outputs for the same batch in eval mode")
        digits = max(1, math.ceil(math.log(count, len(FACTORS))))  # of the number of a field, in base 4
        factors = [
            torch.tensor([FACTORS[number // len(FACTORS) ** digit % len(FACTORS)] for number in range(count)])
            for digit in range(digits)
        ]
        for values in (zeros, *factors):
            if difference(values) == 0.0:
                continue
            first, stop = 0, count  # factors of the first fields alone: equal for ``first`` of them, not for ``stop``
            while stop - first > 1:
                middle = (first + stop) // 2
                is_equal = difference(torch.where(torch.arange(count) < middle, values, 1.0)) == 0.0
                first, stop = (middle, stop) if is_equal else (first, middle)
            self._refuse(self.source.names[first])
        return checked.all_ran and max_abs_difference(plain, without) != 0.0

    def _refuse(self, name: str) -> None:
        places = self.source.places[name]
        columns = ", ".join(f"{place.columns} of {place.reader!r}" for place in places)
        modules = ", ".join(repr(place.module) for place in places)
        raise FieldError(
            f"field {name!r}: a gate on columns {columns} does not act as one on the output of {modules}. The columns "
            f"must be those of the field, in the order of the concatenation, and nothing else may read it; or {ADVICE}"
        )


class CheckedModel:
    """A copy of a model with the same parameters, without gates, and with random weights of its readers."""

    def __init__(self, gates: Gates, model: nn.Module) -> None:
        self.model: nn.Module = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        self.model._forward_pre_hooks.clear()
        self.model._forward_hooks.clear()
        self.gates = gates
        self.devices = {weight.device for weight in model.parameters() if weight.is_cuda}
        self.outputs: dict[str, list[tuple[int, ResolvedSite]]] = {}  # sites by the module that gives the output
        self.readers: dict[str, list[tuple[int, ResolvedSite]]] = {}
        for number, name in enumerate(gates.names):
            for place in gates.places[name]:
                assert place.reader is not None
                self.outputs.setdefault(place.module, []).append((number, place))
                self.readers.setdefault(place.reader, []).append((number, place))
        self.ran: set[str] = set()
        generator = torch.Generator().manual_seed(1)
        for path in self.readers:
            reader = self._reader(path)
            reader.__dict__.pop("forward", None)  # a function around the one of the model, which is not copied
            weight = torch.randn(reader.weight.shape, generator=generator) / reader.in_features**0.5
            reader.register_parameter("weight", nn.Parameter(weight.to(reader.weight)))

    def _reader(self, path: str) -> GatedLinear:
        reader = self.model.get_submodule(path)
        assert isinstance(reader, GatedLinear)
        return reader

    @property
    def all_ran(self) -> bool:
        """Whether all modules of fields and all readers were called."""
        return self.ran == {*self.outputs, *self.readers}

    def run(
        self, values: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, at_outputs: bool
    ) -> list[Tensor]:
        """Return the outputs of the model with factors (N,) on the outputs of the fields, or on the columns."""
        names, device = self.gates.names, self.gates.x.device
        factors = ConstantFactors(names, values.to(device))
        columns = ConstantFactors(names, torch.ones_like(factors.values)) if at_outputs else factors
        taps = {}
        for path, at in self.readers.items():
            reader = self._reader(path)
            reader.gate = taps[path] = GateTap(columns, at, reader.in_features)
        generator = torch.Generator().manual_seed(0)
        args, kwargs = map_tensors(
            lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), (args, dict(kwargs))
        )
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(list(self.devices)))
            for path, at in self.outputs.items():
                module = self.model.get_submodule(path)
                stack.callback(module.register_forward_hook(RandomOutput(path, generator, self.ran)).remove)
                if at_outputs:
                    stack.callback(module.register_forward_hook(Multiply(factors, at)).remove)
            outputs = compute_logits(self.model, None, lambda model, _: model(*args, **kwargs))
        self.ran |= {path for path, tap in taps.items() if tap.ran}
        return outputs


class RandomOutput:
    """Forward hook: random numbers in place of the output of a module, whose path is added to ``ran``."""

    def __init__(self, path: str, generator: torch.Generator, ran: set[str]) -> None:
        self.path, self.generator, self.ran = path, generator, ran

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor:
        """Return random numbers of the shape and dtype of the output."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise FieldError(f"{self.path!r} returns {type(output).__name__}, not one floating-point tensor; {ADVICE}")
        self.ran.add(self.path)
        return torch.randn(output.shape, generator=self.generator).to(output)
