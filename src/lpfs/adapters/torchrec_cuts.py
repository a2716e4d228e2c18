"""Which columns of TorchRec's own models read which feature, so that they can go with it.

The features of a model stand in the order of its collection; ``stay`` are the positions of those that stay. Each
function makes a copy of the model narrower, in place, and returns what stays of each weight, per dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpfs.adapters.need import package
from lpfs.adapters._torchrec_modules import ADVICE

_dlrm = package("torchrec.models.dlrm", "torchrec", ADVICE)
_deepfm = package("torchrec.models.deepfm", "torchrec", ADVICE)

Kept = dict[str, dict[int, Tensor]]


def narrow(linear: nn.Linear, gone: Sequence[slice]) -> Tensor:
    """Take columns off a Linear, whose weight is filled in later, and return those that stay."""
    keep = torch.ones(linear.in_features, dtype=torch.bool)
    for each in gone:
        keep[each] = False
    columns = keep.nonzero().flatten().to(linear.weight.device)
    shape = linear.out_features, columns.numel()
    linear.weight = nn.Parameter(torch.empty(shape, device="meta"), linear.weight.requires_grad)
    linear.in_features = columns.numel()
    return columns


def dlrm(model: Any, stay: Sequence[int]) -> Kept:
    """DLRM reads the dense token (D,) and the products of all pairs i < j of tokens, 0 being the dense one."""
    dim, tokens = model.sparse_arch.D, [0, *(at + 1 for at in stay)]
    first, second = (each.tolist() for each in model.inter_arch.triu_indices)
    pairs = [number for number, (i, j) in enumerate(zip(first, second, strict=True)) if not {i, j} <= set(tokens)]
    _fewer_features(model, stay)
    there = model.inter_arch.triu_indices
    model.inter_arch.triu_indices = torch.triu_indices(len(tokens), len(tokens), offset=1).to(there.device)
    columns = narrow(_first(model.over_arch), [slice(dim + at, dim + at + 1) for at in pairs])
    return {f"{OVER}.weight": {1: columns}}


def dlrm_dcn(model: Any, stay: Sequence[int]) -> Kept:
    """DLRM_DCN crosses all tokens side by side: x·(W V x + b) + x is zero where x is, in every layer."""
    gone = _gone_tokens(model, stay)
    _fewer_features(model, stay)
    columns = narrow(_first(model.over_arch), gone)
    index: Kept = {f"{OVER}.weight": {1: columns}}
    for name, dim in (("W_kernels", 0), ("V_kernels", 1), ("bias", 0)):
        kernels = getattr(model.inter_arch.crossnet, name)
        for number, kernel in enumerate(kernels):
            shape = list(kernel.shape)
            shape[dim] = columns.numel()
            kernels[number] = nn.Parameter(torch.empty(shape, device="meta"), kernel.requires_grad)
            index[f"inter_arch.crossnet.{name}.{number}"] = {dim: columns}
    return index


def dlrm_projection(model: Any, stay: Sequence[int]) -> Kept:
    """DLRM_Projection has two branches, each an MLP of all tokens side by side."""
    gone = _gone_tokens(model, stay)
    _fewer_features(model, stay)
    index: Kept = {}
    for branch in ("interaction_branch1", "interaction_branch2"):
        columns = narrow(getattr(model.inter_arch, branch).model._mlp[0]._linear, gone)
        index[f"inter_arch.{branch}.model._mlp.0._linear.weight"] = {1: columns}
    return index


def deepfm(model: Any, stay: Sequence[int]) -> Kept:
    """SimpleDeepFMNN has one Linear of all tokens side by side; zeros vanish in the sums of its second order."""
    inter = model.inter_arch
    linear = inter.deep_fm.dense_module[0]
    dim = linear.in_features // (len(inter.sparse_feature_names) + 1)
    gone = [
        slice(dim * (at + 1), dim * (at + 2)) for at in range(len(inter.sparse_feature_names)) if at not in stay
    ]
    inter.sparse_feature_names = [inter.sparse_feature_names[at] for at in stay]
    return {"inter_arch.deep_fm.dense_module.0.weight": {1: narrow(linear, gone)}}


OVER = "over_arch.model.0._mlp.0._linear"
CUTS: dict[type, Callable[[Any, Sequence[int]], Kept]] = {
    _dlrm.DLRM: dlrm,
    _dlrm.DLRM_DCN: dlrm_dcn,
    _dlrm.DLRM_Projection: dlrm_projection,
    _deepfm.SimpleDeepFMNN: deepfm,
}


def _first(over: Any) -> nn.Linear:
    linear: nn.Linear = over.model[0]._mlp[0]._linear
    return linear


def _gone_tokens(model: Any, stay: Sequence[int]) -> list[slice]:
    dim = model.sparse_arch.D
    return [slice(dim * (at + 1), dim * (at + 2)) for at in range(model.sparse_arch.F) if at not in stay]


def _fewer_features(model: Any, stay: Sequence[int]) -> None:
    sparse = model.sparse_arch
    sparse._sparse_feature_names = [sparse._sparse_feature_names[at] for at in stay]
    sparse.F = model.inter_arch.F = len(stay)
