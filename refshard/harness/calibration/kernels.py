"""What a rank computes, timed: matrix products, attention, elementwise kernels, an optimizer's step, tiny operations.

The shapes are those of Llama's blocks, forward and backward. Operands rotate over more memory than a cache holds, and
results are allocated each time, as in training.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from refshard.harness.calibration.samples import Timed
from refshard.harness.calibration.stopwatch import Call, Stopwatch
from refshard.models.llama import Block, rotary_tables
from refshard.quantities import MIB
from refshard.specs.hardware import ELEMENT_BYTES, AttentionPoint, Dtype
from refshard.specs.model import ModelSpec

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CACHES_BYTES = 96 * MIB
"""More than the caches of a rank hold."""
_TINY = ModelSpec(
    dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=16, vocab=16, norm_eps=1e-5, rope_theta=1e4, tied=True,
    params=1072, source="as small as can be",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What to measure. Products are (tokens, width, feed-forward width), attention (head dimension, tokens)."""

    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int], ...]
    heads: int
    moved_bytes: tuple[int, ...]
    optimizer_numel: int
    operation_repeats: int


def shapes(device: str, *, quick: bool) -> Shapes:
    """What a device of this type meets in training."""
    if device == "cuda":
        return _shapes_on_cuda(quick=quick)
    widths = [(256, 256), (512, 1280)] if quick else [(256, 256), (256, 704), (512, 512), (512, 1280), (1024, 2816)]
    return Shapes(
        products=tuple((t, *w) for t, w in product((64, 256) if quick else (64, 256, 1024), widths)),
        attention=tuple(product((64,) if quick else (32, 64, 128), (128, 512) if quick else (128, 256, 512, 1024))),
        heads=4,
        moved_bytes=(MIB,) if quick else (MIB, 2 * MIB, 4 * MIB),
        optimizer_numel=1_000_000 if quick else 8_000_000,
        operation_repeats=10 if quick else 60,
    )


def _shapes_on_cuda(*, quick: bool) -> Shapes:
    widths = [(4096, 4096)] if quick else [(1024, 4096), (4096, 4096), (4096, 14336), (8192, 8192)]
    return Shapes(
        products=tuple((t, *w) for t, w in product((512, 4096) if quick else (512, 2048, 8192), widths)),
        attention=tuple(product((128,) if quick else (64, 128), (2048,) if quick else (512, 2048, 8192))),
        heads=32,
        moved_bytes=(64 * MIB, 256 * MIB),
        optimizer_numel=50_000_000,
        operation_repeats=20,
    )


def _sets(nbytes: float, device: torch.device) -> int:
    """How many sets of operands of ``nbytes`` no cache holds together."""
    held = _CACHES_BYTES if device.type == "cpu" else 4 * _CACHES_BYTES
    return min(max(2, -(-held // max(int(nbytes), 1))), 400)


def time_products(stopwatch: Stopwatch, dtype: Dtype, wanted: Shapes, device: torch.device) -> list[Timed]:
    """A linear layer's three products for each shape: forward, and the gradients of its input and its weight."""
    found = []
    for tokens, width, wide in wanted.products:
        numel = tokens * width + width * wide + tokens * wide
        nbytes, flops = float(numel * ELEMENT_BYTES[dtype]), 2.0 * tokens * width * wide
        layers = [
            tuple(_random(shape, dtype, device) for shape in ((tokens, width), (wide, width), (tokens, wide)))
            for _ in range(_sets(nbytes, device))
        ]
        for call in (_forward, _input_gradient, _weight_gradient):
            seconds = stopwatch.seconds(_rotating(call, layers))
            found.append(Timed(dtype=dtype, flops=flops, bytes=nbytes, seconds=seconds))
    return found


def _forward(x_TD: Tensor, weight_FD: Tensor, _: Tensor) -> Tensor:
    return torch.mm(x_TD, weight_FD.t())


def _input_gradient(_: Tensor, weight_FD: Tensor, gradient_TF: Tensor) -> Tensor:
    return torch.mm(gradient_TF, weight_FD)


def _weight_gradient(x_TD: Tensor, _: Tensor, gradient_TF: Tensor) -> Tensor:
    return torch.mm(gradient_TF.t(), x_TD)


def time_attention(stopwatch: Stopwatch, dtype: Dtype, wanted: Shapes, device: torch.device) -> list[AttentionPoint]:
    """Causal attention as torch picks its kernel, with half as many key-value heads as query heads."""
    found = []
    for head_dim, seq_len in wanted.attention:
        heads = (wanted.heads, wanted.heads // 2, wanted.heads // 2)
        inputs = [
            tuple(_random((1, h, seq_len, head_dim), dtype, device).requires_grad_() for h in heads) for _ in range(3)
        ]
        outputs = [(_attend(*qkv), qkv) for qkv in inputs]
        gradient = torch.ones_like(outputs[0][0])
        scores = wanted.heads * seq_len**2 / 2
        found.append(
            AttentionPoint(
                dtype=dtype,
                head_dim=head_dim,
                seq_len=seq_len,
                forward_s=stopwatch.seconds(_rotating(_attend, inputs)) / scores,
                backward_s=stopwatch.seconds(_rotating(partial(_attend_backward, gradient), outputs)) / scores,
            )
        )
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _attend_backward(gradient: Tensor, output: Tensor, qkv: tuple[Tensor, ...]) -> None:
    torch.autograd.grad(output, qkv, gradient, retain_graph=True)


def time_moves(stopwatch: Stopwatch, wanted: Shapes, device: torch.device) -> tuple[list[Timed], list[Timed]]:
    """Elementwise kernels that memory bounds, and one (SiLU) that exponentials may."""
    moves, transcendentals = [], []
    factor = _random((), "fp32", device)
    for size in wanted.moved_bytes:
        numel = size // 4
        pairs = [
            (_random((numel,), "fp32", device), _random((numel,), "fp32", device))
            for _ in range(_sets(2 * size, device))
        ]
        for arrays, call in ((3, torch.add), (2, partial(_scale, factor)), (2, _copy)):
            moves.append(
                Timed(dtype="fp32", bytes=float(arrays * size), seconds=stopwatch.seconds(_rotating(call, pairs)))
            )
        seconds = stopwatch.seconds(_rotating(_silu, pairs))
        transcendentals.append(Timed(dtype="fp32", bytes=2.0 * size, transcendentals=numel, seconds=seconds))
    return moves, transcendentals


def _scale(factor: Tensor, x: Tensor, _: Tensor) -> Tensor:
    return x * factor


def _copy(x: Tensor, y: Tensor) -> Tensor:
    return y.copy_(x)


def _silu(x: Tensor, _: Tensor) -> Tensor:
    return F.silu(x)


def _rotating(call: Callable[..., object], operands: Sequence[tuple[Any, ...]]) -> Call:
    return lambda index: call(*operands[index % len(operands)])


def time_operations(stopwatch: Stopwatch, wanted: Shapes, device: torch.device) -> tuple[float, float]:
    """Seconds of a kernel however small, and of the host for each that it launches, forward and backward alike."""
    block = _TinyBlock(device)
    if device.type == "cpu":
        operation = block.operation_s(stopwatch, wanted.operation_repeats)
        return operation, operation
    taken: list[float] = []
    for _ in range(wanted.operation_repeats):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        block.run()
        taken.append(time.perf_counter() - started)
    tiny = torch.ones(16, device=device)
    return stopwatch.seconds(lambda _: torch.add(tiny, tiny)), median(taken) / block.kernels


class _TinyBlock:
    """A decoder layer whose tensors are so small that only its operations cost anything."""

    def __init__(self, device: torch.device) -> None:
        self._block = Block(_TINY).to(device)
        self._x_BTD = torch.randn(1, 4, _TINY.dim, device=device, requires_grad=True)
        self._tables = rotary_tables(_TINY, 4, self._x_BTD)
        self._large = torch.ones(2, 8 * MIB, device=device)
        with _CountKernels() as counted:  # type: ignore[no-untyped-call]
            self.run()
        self.kernels: int = counted.count

    def run(self) -> None:
        """Forward and backward."""
        y_BTD = self._block(self._x_BTD, *self._tables)
        torch.autograd.grad(y_BTD.sum(), (self._x_BTD, *self._block.parameters()))

    def operation_s(self, stopwatch: Stopwatch, repeats: int) -> float:
        """Seconds per kernel, on caches that something large has filled before, as between a model's products."""

        def fill_caches(_: int) -> None:
            torch.add(*self._large, out=self._large[0])
            torch.mm(self._large[0, :MIB].view(1024, -1), self._large[1, : MIB // 2].view(1024, -1))

        return stopwatch.seconds_after(fill_caches, lambda _: self.run(), repeats) / self.kernels


class _CountKernels(TorchDispatchMode):
    """Counts operations that compute something: not those that only look at a tensor in another way."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += not (func.is_view or "view" in str(func) or "detach" in str(func))
        return func(*args, **(kwargs or {}))


def time_optimizer(stopwatch: Stopwatch, wanted: Shapes, device: torch.device) -> float:
    """Seconds of a step of fused AdamW per parameter."""
    count = 40
    parameters = [torch.nn.Parameter(_random((wanted.optimizer_numel // count,), "fp32", device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    optimizer.step()
    return stopwatch.seconds(lambda _: optimizer.step()) / sum(p.numel() for p in parameters)


def time_first_touch(stopwatch: Stopwatch, device: torch.device) -> float:
    """Seconds per byte that writing to new memory takes beyond writing to memory that is there; 0 on a GPU."""
    if device.type != "cpu":
        return 0.0
    numel = 16 * MIB  # 64 MiB: no allocator of a C library keeps as much for the next time
    kept = torch.zeros(numel)
    fresh = stopwatch.seconds(lambda _: torch.empty(numel).zero_())
    return max(fresh - stopwatch.seconds(lambda _: kept.zero_()), 0.0) / kept.nbytes


def _random(shape: tuple[int, ...], dtype: Dtype, device: torch.device) -> Tensor:
    """Values as in training: products of zeros are faster on a GPU, which draws less power for them."""
    return torch.randn(shape, device=device).to(DTYPES[dtype])
