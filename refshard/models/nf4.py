"""A linear layer in 4 bits that any sharding strategy can shard: QLoRA's NF4 with double quantisation.

:class:`Nf4Linear` keeps its whole weight, statistics included, in one frozen 1-D parameter. There is no tensor subclass
that flattening would lose, no other state that gathering would miss, no buffer that DDP would broadcast at each
forward. bitsandbytes quantises and dequantises, on a CPU and on CUDA.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes import functional as quantisation
from torch import Tensor, nn

from refshard.models.llama import Llama

BLOCK, NESTED_BLOCK = 64, 256
"""Weights that share a statistic, and statistics that share one of their own (QLoRA, arXiv 2305.14314)."""
PART_ALIGNMENT = 64
"""Bytes. A matrix library's products may round otherwise where a neighbour in a flat buffer starts off a cache line."""


class Nf4Linear(nn.Linear):
    """A frozen linear layer of 4-bit normal floats with doubly quantised statistics.

    ``weight`` holds, each part from a multiple of 64 bytes on: two codes a byte, a code of 8 bits for each block's
    largest magnitude, an fp32 scale for each 256 of those, and their fp32 offset. Its dtype is that of the original
    weight, since some strategies (FSDP1) flatten parameters of one dtype only; its numbers mean nothing, and must not
    be computed with, or cast. It is a :class:`nn.Linear` so that peft adapts it as one.
    """

    def __init__(self, weight_FD: Tensor) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight_FD.shape
        self.register_parameter("bias", None)
        codes, state = quantisation.quantize_4bit(
            weight_FD.detach().contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        parts = [codes, state.absmax, state.state2.absmax, state.offset.reshape(1)]
        packed = torch.zeros(sum(map(_padded, self._part_bytes())), dtype=torch.uint8, device=codes.device)
        at = 0
        for part, size in zip(parts, self._part_bytes(), strict=True):
            packed[at : at + size] = part.flatten().view(torch.uint8)
            at += _padded(size)
        self.weight = nn.Parameter(packed.view(weight_FD.dtype), requires_grad=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Multiply (B, T, D) with the weight as dequantised into the input's dtype."""
        out_BTF: Tensor = _FrozenLinear.apply(x_BTD, self.weight, self)  # type: ignore[no-untyped-call]
        return out_BTF

    def dequantised(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight (F, D) that ``packed``, this layer's unsharded parameter, stands for; a new tensor."""
        sizes = self._part_bytes()
        parts = packed.view(torch.uint8).split([*map(_padded, sizes)])
        codes, absmax, scales, offset = (part[:size] for part, size in zip(parts, sizes, strict=True))
        nested = quantisation.QuantState(
            scales.view(torch.float32), blocksize=NESTED_BLOCK, code=_nested_code(packed.device), dtype=torch.float32
        )
        state = quantisation.QuantState(
            absmax, shape=torch.Size((self.out_features, self.in_features)), blocksize=BLOCK, quant_type="nf4",
            dtype=dtype, offset=offset.view(torch.float32), state2=nested,
        )  # fmt: skip
        return quantisation.dequantize_4bit(codes.view(-1, 1), state)

    def _part_bytes(self) -> tuple[int, int, int, int]:
        numel = self.in_features * self.out_features
        blocks = -(-numel // BLOCK)
        return -(-numel // 2), blocks, 4 * -(-blocks // NESTED_BLOCK), 4


class _FrozenLinear(torch.autograd.Function):
    """``F.linear`` that keeps the packed weight for backward, and dequantises it there again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(packed)
        return F.linear(x, layer.dequantised(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ ctx.layer.dequantised(packed, gradient.dtype), None, None


def quantise(model: Llama) -> None:
    """Replace the linear layers of all blocks by 4-bit ones, in place; norms, embedding and head stay what they are."""
    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                layer.set_submodule(name, Nf4Linear(linear.weight))


@functools.cache
def _nested_code(device: torch.device) -> Tensor:
    """The 256 values of an 8-bit code of a statistic."""
    code: Tensor = quantisation.create_dynamic_map().to(device)
    return code


def _padded(size: int) -> int:
    return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT
