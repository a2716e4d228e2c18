"""Masks: what other methods put where gates stand, with a gradient, for the time of a search.

A :class:`FieldMask` is one factor a part (N,), multiplied in by the very taps that gates use, so that wide
weights are covered too. A :class:`TokenMask` changes what stands behind them, the embeddings (B, P, D) of a batch:
factors a row, or other values instead. ``worn`` puts a mask on a model and takes it off again without a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.gates.hooks import Enter, Leave, install, remove_hooks
from lpfs.gates.module import NAME as GATES
from lpfs.gates.module import Live
from lpfs.gates.sites import Place, declared_sites, find_places
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.models.inputs import Inputs
from lpfs.train.evaluate import device_of

NAME = "lpfs_mask"  # where it is registered on the model, so that checkpoints hold it

Needs = Literal["parts", "fields", "all fields"]
_LOOKING: list[Callable[[Model], None]] = []  # who wants to see a model with its mask on, when a search is done


class Mask(nn.Module):
    """What all masks have: names, a time that the training sets, and draws that resume.

    Args:
        names: the parts of the model, in order.
        steps: how many steps the search takes.
        seed: of what is drawn.

    """

    def __init__(self, names: Sequence[str], steps: int, seed: int) -> None:
        super().__init__()
        self.names = tuple(names)
        self.steps, self.step = steps, 0
        self.draw = torch.Generator().manual_seed(seed)

    def at(self, step: int) -> None:
        """Say how many steps are done; temperatures follow it, never ``forward``."""
        self.step = step

    def uniform(self, *shape: int) -> Tensor:
        """Return draws from (0, 1), both ends excluded."""
        drawn = torch.rand(shape, generator=self.draw).clamp_(1e-6, 1 - 1e-6)
        return drawn.to(device_of(self))

    def normal(self, *shape: int) -> Tensor:
        """Return draws from the standard normal distribution."""
        return torch.randn(shape, generator=self.draw).to(device_of(self))

    def penalty(self, rows: int) -> Tensor | None:
        """Return what is added to the loss of so many rows; None for nothing."""
        return None

    def scores(self) -> Tensor:
        """Return the importance of every part (N,), the more the better."""
        raise NotImplementedError

    def own(self) -> Tensor | None:
        """Return which parts the method itself would keep (N,); None if it only ranks."""
        return None


class FieldMask(Mask):
    """One factor a part: ``forward()`` returns (N,)."""

    def __init__(self, names: Sequence[str], steps: int, seed: int) -> None:
        super().__init__(names, steps, seed)
        self._disabled = False
        self.live: Live | None = None
        self.last: Live | None = None
        self.entered = False
        self.hooks: list[Any] = []


class TokenMask(Mask):
    """Other embeddings: ``forward(tokens, numbers, ids)`` returns what the rest of the model reads.

    ``tokens`` (B, P, D) are the embeddings of one module, ``numbers`` (P,) says which part each of them is,
    ``ids`` (B, I) are the ids that the first I of them were looked up by; None where the module reads no batch.

    ``needs`` is what a model must have: its ``parts``, wherever they enter; only ``fields``, no crosses; or
    ``all fields`` side by side in one place.
    """

    needs: Needs = "parts"


@contextmanager
def worn(model: Model, mask: FieldMask | TokenMask, method: str) -> Iterator[None]:
    """Within this block the model wears the mask; then it is as it was, but for what it has learnt."""
    places = find_places(model, declared_sites(model))
    mask.to(device_of(model))
    if isinstance(mask, TokenMask):
        refuse_misfit(model, places, mask.needs, method)
    model.add_module(NAME, mask)
    handles = []
    try:
        if isinstance(mask, FieldMask):
            mask.hooks = list(install(model, mask, places, mask.names))
            model.register_forward_pre_hook(Enter(mask))
            model.register_forward_hook(Leave(mask), always_call=True)
        else:
            for path, numbers in by_module(places, mask.names).items():
                module = model.get_submodule(path)
                handles.append(module.register_forward_hook(Replace(mask, numbers.to(device_of(model)))))
        yield
        for look in _LOOKING:
            look(model)
    finally:
        for handle in handles:
            handle.remove()
        if isinstance(mask, FieldMask):
            remove_hooks(model, mask)
        del model._modules[NAME]


@contextmanager
def looking(look: Callable[[Model], None]) -> Iterator[None]:
    """Within this block ``look`` gets every model that wears a mask, right before the mask comes off."""
    _LOOKING.append(look)
    try:
        yield
    finally:
        _LOOKING.remove(look)


def check_wearer(model: nn.Module, method: str) -> Model:
    """Return a model that can wear a mask, or say why it cannot."""
    if not isinstance(model, Model):
        raise InputError(f"{method} masks the fields of a model of lpfs.models; {type(model).__name__} is not one")
    if hasattr(model, GATES):
        raise InputError(f"{method} puts its mask where gates stand, and this model has gates; detach them first")
    return model


def refuse_misfit(model: Model, places: dict[str, tuple[Place, ...]], needs: Needs, method: str) -> None:
    """Refuse a mask on a model that does not have what it needs."""
    paths = list(dict.fromkeys(place.module for several in places.values() for place in several))
    kind = type(model).__name__
    crossed = [path for path in paths if not isinstance(model.get_submodule(path), Inputs)]
    if needs != "parts" and crossed:
        raise InputError(
            f"{method} is defined on fields, and {kind} selects crosses of fields too ({crossed[0]!r})"
        )
    if needs == "all fields" and paths != ["inputs"]:
        raise InputError(
            f"{method} weighs all fields of a row together, and {kind} does not have them in one place "
            f"(they enter in {', '.join(paths)}); choose another model, or another method"
        )


def by_module(places: dict[str, tuple[Place, ...]], names: Sequence[str]) -> dict[str, Tensor]:
    """Return, for every module with parts, the numbers of its parts in its own order (P,)."""
    found: dict[str, dict[int, int]] = {}
    for name, several in places.items():
        for place in several:
            assert place.start is not None
            found.setdefault(place.module, {})[place.start] = names.index(name)
    return {path: torch.tensor([parts[part] for part in sorted(parts)]) for path, parts in found.items()}


class Replace:
    """After the forward of a module of several parts: hand its embeddings to the mask."""

    def __init__(self, mask: TokenMask, numbers: Tensor) -> None:
        self.mask, self.numbers = mask, numbers

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return what the mask makes of the output, in the shape of the output."""
        assert isinstance(module, Inputs | Crosses)
        if isinstance(module, Inputs):
            tokens, slots = output, module.filled
        else:
            tokens = output.unflatten(1, (module.slots, module.dim))
            full = module.slots == module.parts
            slots = None if full else torch.tensor(module.plan.places, device=output.device)
        ids = self._ids(module, args[0]) if isinstance(module, Inputs) else None
        own = tokens if slots is None else tokens.index_select(1, slots)
        new: Tensor = self.mask(own, self.numbers, ids)
        new = new if slots is None else tokens.index_copy(1, slots, new)
        return new if output.ndim == 3 else new.flatten(1)

    @staticmethod
    def _ids(module: Inputs, batch: Batch) -> Tensor:
        columns = module.id_columns
        return batch.ids if columns is None else batch.ids.index_select(1, columns)
