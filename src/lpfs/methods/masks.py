"""Masks: modules that other methods than LPFS train in the place of gates, while a search runs.

A :class:`FieldMask` is one factor per part (N,), multiplied in by the same taps as gates, so that wide weights are
covered too. A :class:`TokenMask` changes the embeddings (B, P, D) of a batch: factors per row, or other values.
:func:`apply_mask` puts a mask on a model and removes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lpfs.errors import InputError
from lpfs.gates.hooks import ClearValues, ComputeValues, install, remove_hooks
from lpfs.gates.module import ATTRIBUTE as GATES, ForwardValues
from lpfs.gates.sites import ResolvedSite, declared_sites, resolve_sites
from lpfs.methods.base import require_model
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.models.inputs import Inputs
from lpfs.train.evaluate import device_of

NAME = "lpfs_mask"  # name of the mask as a submodule of the model, so that checkpoints contain it
MEAN_DECAY = 0.99  # per step, of the mean weight of a field

Needs = Literal["parts", "fields", "all fields"]
_OBSERVERS: list[Callable[[Model], None]] = []  # called with the masked model at the end of a search


class Mask(nn.Module):
    """Base of all masks: names of the parts, in order, the current step, and random numbers that resume."""

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: Any = None) -> None:
        super().__init__()
        self.names, self.options = tuple(names), options
        self.steps, self.step = steps, 0
        self.draw = torch.Generator().manual_seed(seed)

    def set_step(self, step: int) -> None:
        """Set how many steps are done; temperatures depend on it, and never change in ``forward``.

        A captured step does not call it: what ``forward`` reads from it is a tensor that is filled here.
        """
        self.step = step

    def update_means(self) -> None:
        """Add the values of this step to running means and counts, after the parameters have changed."""

    def move_generator(self, device: torch.device) -> None:
        """Draw random numbers on a GPU from now on, with the same seed: they differ from those of the host."""
        if device.type == "cuda":
            self.draw = torch.Generator(device).manual_seed(self.draw.initial_seed())

    def uniform(self, *shape: int) -> Tensor:
        """Return random numbers from the open interval (0, 1)."""
        return torch.rand(shape, generator=self.draw, device=self.draw.device).clamp_(1e-6, 1 - 1e-6)

    def penalty(self, rows: int) -> Tensor | None:
        """Return the term that is added to the loss of a batch of ``rows``; None for no term."""
        return None

    def scores(self) -> Tensor:
        """Return the importance of every part (N,), higher is better."""
        raise NotImplementedError

    def selected(self) -> Tensor | None:
        """Return which parts the method itself keeps (N,); None if it only ranks."""
        return None


class FieldMask(Mask):
    """One factor per part: ``forward()`` returns (N,), a sample in training mode, without noise in evaluation mode."""

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: Any = None) -> None:
        super().__init__(names, steps, seed, options)
        self._disabled = False
        self.live: ForwardValues | None = None
        self.last: ForwardValues | None = None
        self.entered = False
        self.hooks: list[Any] = []


class TokenMask(Mask):
    """Replaced embeddings: ``forward(tokens, numbers, ids)`` returns what the rest of the model uses.

    ``tokens`` (B, P, D) are the embeddings of one module, ``numbers`` (P,) the index of each part,
    ``ids`` (B, I) the ids that the first I embeddings were looked up by; None if the module takes no batch.

    ``needs`` is what the model must have: ``parts`` anywhere; only ``fields``, no crosses; or ``all fields``
    side by side in one module.
    """

    needs: Needs = "parts"


class RowWeightMask(TokenMask):
    """Embeddings times weights (B, N) computed from the row; importance is the running mean weight of a field."""

    needs: Needs = "all fields"
    mean: Tensor
    mass: Tensor

    def __init__(self, names: Sequence[str], steps: int, seed: int, options: Any = None) -> None:
        super().__init__(names, steps, seed, options)
        self.register_buffer("mean", torch.zeros(len(names)))
        self.register_buffer("mass", torch.zeros(()))
        self.batch_mean: Tensor | None = None  # mean weights (N,) of the rows of this step

    def weights(self, tokens: Tensor) -> Tensor:
        """Return the weight of every field of every row (B, N) for embeddings (B, N, D)."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        weights = self.weights(tokens)
        if self.training:
            self.batch_mean = weights.detach().mean(0)
        return tokens * weights[:, :, None].to(tokens.dtype)

    def update_means(self) -> None:
        if self.batch_mean is not None:
            self.mean.lerp_(self.batch_mean.to(self.mean.dtype), 1 - MEAN_DECAY)
            self.mass.lerp_(torch.ones_like(self.mass), 1 - MEAN_DECAY)
            self.batch_mean = None

    def scores(self) -> Tensor:
        return self.mean / self.mass.clamp(min=1 - MEAN_DECAY)


@contextmanager
def apply_mask(model: Model, mask: FieldMask | TokenMask, method: str) -> Iterator[None]:
    """Apply a mask to the model while the block runs; afterwards only the trained weights differ."""
    places = resolve_sites(model, declared_sites(model))
    mask.to(device_of(model))
    mask.move_generator(device_of(model))
    if isinstance(mask, TokenMask):
        check_sites(model, places, mask.needs, method)
    model.add_module(NAME, mask)
    with ExitStack() as stack:
        stack.callback(model._modules.pop, NAME)
        if isinstance(mask, FieldMask):
            stack.callback(remove_hooks, model, mask)
            mask.hooks = list(install(model, mask, places, mask.names))
            model.register_forward_pre_hook(ComputeValues(mask))
            model.register_forward_hook(ClearValues(mask), always_call=True)
        else:
            for path, numbers in parts_by_module(places, mask.names).items():
                replace_output = ReplaceOutput(mask, numbers.to(device_of(model)))
                stack.callback(model.get_submodule(path).register_forward_hook(replace_output).remove)
        yield
        for observe in _OBSERVERS:
            observe(model)


@contextmanager
def observe_masked_model(observe: Callable[[Model], None]) -> Iterator[None]:
    """Call ``observe`` with every masked model right before its mask is removed, while the block runs."""
    _OBSERVERS.append(observe)
    try:
        yield
    finally:
        _OBSERVERS.remove(observe)


def check_maskable(model: nn.Module, method: str) -> Model:
    """Return a model that a mask can be applied to; raise InputError for any other."""
    if hasattr(model, GATES):
        raise InputError(f"{method} puts its mask in the place of gates, and this model has gates; detach them")
    return require_model(model, method)


def check_sites(model: Model, places: dict[str, tuple[ResolvedSite, ...]], needs: Needs, method: str) -> None:
    """Raise InputError if a model does not have what a mask needs."""
    paths = list(dict.fromkeys(place.module for several in places.values() for place in several))
    kind = type(model).__name__
    crossed = [path for path in paths if not isinstance(model.get_submodule(path), Inputs)]
    if needs != "parts" and crossed:
        raise InputError(
            f"{method} is defined on fields, and {kind} also selects crosses of fields ({crossed[0]!r}); "
            "choose another model, or another method"
        )
    if needs == "all fields" and paths != ["inputs"]:
        raise InputError(
            f"{method} weights all fields of a row together, and {kind} does not have them in one module "
            f"(they enter in {', '.join(paths)}); choose another model, or another method"
        )


def parts_by_module(places: dict[str, tuple[ResolvedSite, ...]], names: Sequence[str]) -> dict[str, Tensor]:
    """Return, for every module with parts, the indices of its parts in the module's order (P,)."""
    modules: dict[str, dict[int, int]] = {}
    for name, several in places.items():
        for place in several:
            assert place.start is not None
            modules.setdefault(place.module, {})[place.start] = names.index(name)
    return {path: torch.tensor([parts[start] for start in sorted(parts)]) for path, parts in modules.items()}


class ReplaceOutput:
    """Forward hook of a module of several parts: passes its embeddings through the mask."""

    def __init__(self, mask: Callable[[Tensor, Tensor, Tensor | None], Tensor], numbers: Tensor) -> None:
        self.mask, self.numbers = mask, numbers
        self.slots: Tensor | None = None  # of crosses

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the masked output, in the shape of the output; a mask may return several times as many rows."""
        assert isinstance(module, Inputs | Crosses)
        ids: Tensor | None = None
        if isinstance(module, Inputs):
            tokens, slots, columns = output, module.filled, module.id_columns
            ids = args[0].ids if columns is None else args[0].ids.index_select(1, columns)
        else:
            tokens = output.unflatten(1, (module.slots, module.dim))
            if self.slots is None and module.slots != module.parts:
                self.slots = torch.tensor(module.plan.places, device=output.device)
            slots = self.slots
        parts = tokens if slots is None else tokens.index_select(1, slots)
        masked: Tensor = self.mask(parts, self.numbers, ids)
        if slots is not None:
            rest = tokens if len(tokens) == len(masked) else tokens.new_zeros(len(masked), *tokens.shape[1:])
            masked = rest.index_copy(1, slots, masked)
        return masked if output.ndim == 3 else masked.flatten(1)
