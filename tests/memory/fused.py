"""CUDA's way of computing a norm and attention, on the CPU: the same tensors made and saved, by kernels of no speed.

CUDA has one kernel for an RMSNorm, which saves its input and a reciprocal root per token, and a flash kernel whose
backward sums in fp32 and expands grouped heads (torch 2.13, ``derivatives.yaml`` and ``flash_api.cpp``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class FusedNorm(torch.autograd.Function):
    """An RMSNorm's output and reciprocal roots, each as one op's result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        output, rstd = torch.empty_like(x), torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Flash(torch.autograd.Function):
    """Attention whose tensors lie (B, T, H, Q), as the kernel's do, whatever the order of their axes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, sums = torch.empty_like(query), torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, sums = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        inside = [torch.empty_like(sums), torch.empty_like(query, dtype=torch.float32)]
        if key.shape[1] < query.shape[1]:
            inside += [torch.empty_like(query), torch.empty_like(query)]
        return of_query, of_key, of_value


def computes_as_on_cuda(module: nn.Module) -> None:
    """Let ``module`` use the norms and the attention above, also where a checkpoint computes it again. Lengths and
    widths of heads must need no rounding.
    """
    module.forward = partial(_as_on_cuda, module.forward)


def _as_on_cuda(forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with _Kernels():
        return forward(*args)


class _Kernels(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.rms_norm:
            return FusedNorm.apply(args[0], kwargs["weight"])
        if func is F.scaled_dot_product_attention:
            return Flash.apply(*args)
        return func(*args, **(kwargs or {}))
