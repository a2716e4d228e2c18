"""Models inside DistributedDataParallel and the like: attach before wrapping, unwrap before absorb."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lpfs.errors import InputError, StateError

AROUND = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DistributedModelParallel")


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """Refuse a model inside a wrapper of several processes or devices, or with one in it, or in torch.compile."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{verb} needs an nn.Module, found {type(model).__name__}")
    kind = type(model).__name__
    if kind in AROUND:
        raise StateError(f"{verb} works on the model inside {kind}: use model.module (attach before wrapping)")
    if kind == "OptimizedModule":
        raise StateError(f"{verb} works on the model before torch.compile: attach first, then compile")
    for path, part in model.named_modules():
        if type(part).__name__ in AROUND:
            raise StateError(
                f"{verb}: the part {path!r} of the model is inside {type(part).__name__}. Put its own module back "
                "in its place first, and wrap again after it (attach before wrapping, unwrap before absorb)"
            )


def refuse_unshared(x: Tensor) -> None:
    """Refuse gates that a DistributedDataParallel around the model has never heard of: ranks would drift apart."""
    around = DistributedDataParallel._active_ddp_module
    if around is None or not x.requires_grad:
        return
    known = getattr(around, "_module_parameters", None)
    if known is not None and all(each is not x for each in known):
        raise StateError(
            "the gates were attached after DistributedDataParallel was put around the model, so that it does not "
            "add up their gradient: the ranks would drift apart. Attach first, then wrap: "
            "DistributedDataParallel(model) after lpfs.attach(model, …)"
        )
