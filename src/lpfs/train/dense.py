"""Dense layers with few kernels: Linear and ReLU as one function, in the steps that a CUDA graph captures.

The backward pass of torch reads the gradient of a layer once for ReLU and once more for the bias; with a large batch
these passes take as long as the matrix products in TF32. The parameters and their gradients are the same up to
rounding. The environment variable LPFS_FUSED_KERNELS=0 switches the kernels off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from lpfs._imports import fused_kernels_enabled
from lpfs.embeddings._backends import backend_for


def gpu_kernels(x: Tensor) -> Any:
    """Return the module of Triton kernels if they are enabled and support a tensor: float32 on a GPU; or None."""
    if not fused_kernels_enabled() or not x.is_cuda or x.dtype != torch.float32 or not x.numel():
        return None
    return import_module("lpfs.train._triton") if backend_for(x).__name__.endswith("._triton") else None


class LinearReLU(torch.autograd.Function):
    """A Linear layer (B, I) -> (B, O), and ReLU if requested; its backward pass uses the kernels for GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        product = torch._addmm_activation if relu else torch.addmm  # the first applies ReLU within the product
        out: Tensor = product(bias, x, weight.t())
        ctx.save_for_backward(x, weight, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, out = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: functions of torch, which can be differentiated again
            masked_grad = grad if out is None else grad * (out > 0)
            return masked_grad @ weight, masked_grad.t() @ x, masked_grad.sum(0), None
        masked, bias_grad = gpu_kernels(grad).relu_grad(grad[None], None if out is None else out[None])
        x_grad = torch.mm(masked[0], weight) if ctx.needs_input_grad[0] else None
        return x_grad, torch.mm(masked[0].t(), x), bias_grad[0], None


class _FusedSequential(nn.Sequential):
    """A Sequential of Linear and ReLU layers whose training pass on a GPU uses :class:`LinearReLU`."""

    def forward(self, input: Tensor) -> Tensor:
        autocast = torch.is_autocast_enabled(input.device.type)
        if not self.training or input.ndim != 2 or autocast or gpu_kernels(input) is None:
            result: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
            return result
        layers = tuple(self)
        for layer, following in zip_longest(layers, layers[1:]):
            if isinstance(layer, nn.Linear):
                arguments = layer.weight, layer.bias, isinstance(following, nn.ReLU)
                input = LinearReLU.apply(input, *arguments)  # type: ignore[no-untyped-call]
        return input


@contextmanager
def fused_layers(model: nn.Module) -> Iterator[None]:
    """Use fused layers in every Sequential of Linear layers, with ReLU between them, while the block runs."""
    fused = [module for module in model.modules() if _can_fuse(module)]
    for module in fused:
        module.__class__ = _FusedSequential
    try:
        yield
    finally:
        for module in fused:
            module.__class__ = nn.Sequential


def _can_fuse(module: nn.Module) -> bool:
    """Return whether a module is a Sequential whose layers have biases and no hooks, in which ReLU follows Linear."""
    if type(module) is not nn.Sequential or not len(module):
        return False
    layers = list(module)
    if type(layers[0]) is not nn.Linear or any(type(layer) not in (nn.Linear, nn.ReLU) for layer in layers):
        return False
    if any(type(first) is type(second) is nn.ReLU for first, second in pairwise(layers)):
        return False
    hooked = any(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        for layer in layers
    )
    return not hooked and all(layer.bias is not None for layer in layers if isinstance(layer, nn.Linear))
