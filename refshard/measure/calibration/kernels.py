"""Timings of compute: matrix products, attention, elementwise kernels, an optimizer's step, tiny operations.

The shapes are those of Llama's blocks, forward and backward. Operands rotate over more memory than a cache holds, and
results are allocated each time, as in training.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from operator import itemgetter
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from refshard.costs import ADAMW_BYTES
from refshard.measure.calibration.samples import Operations, Pace, Shapes, Timed, TimedAttention
from refshard.models.llama import Block, rotary_tables
from refshard.quantities import MIB
from refshard.specs.hardware import ELEMENT_BYTES, Dtype
from refshard.specs.model import ModelSpec

Call = Callable[[int], object]
"""A call to time. It takes its number, to use other operands each time: in training none is in cache."""
Timing = Callable[[Call], float]
"""Returns the seconds of one call: a stopwatch's ``burst`` or ``sustained``."""
_LEAST_REPEATS, _MOST_REPEATS = 3, 40
_AGREEING, _SETTLED = 3, 0.01


def pace(device: str, *, quick: bool) -> Pace:
    """How long to time each kernel on a device of this type."""
    if device == "cuda":
        # A GPU's power is regulated within some 0.1 s, its temperature takes seconds.
        return Pace(rest_s=0.2, burst_s=0.02, window_s=0.05 if quick else 0.25, most_s=0.5 if quick else 3.0)
    return Pace(
        rest_s=0.0, burst_s=0.01 if quick else 0.03, window_s=0.01 if quick else 0.03, most_s=0.03 if quick else 0.15
    )


def settled(windows: Sequence[float]) -> bool:
    """Whether the last three windows agree within 1 %: then clocks are steady."""
    last = windows[-_AGREEING:]
    return len(last) == _AGREEING and max(last) <= (1 + _SETTLED) * min(last)


class Stopwatch(ABC):
    """Times calls on one device, in bursts and sustained, as its ``pace`` says."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def burst(self, call: Call) -> float:
        """Median seconds of one call of a few, made after a rest."""
        time.sleep(self._pace.rest_s)
        first_s = self._batch(call, 0, 1)
        together = self._together(first_s)
        affordable = int(self._pace.burst_s / max(first_s * together, 1e-9))
        repeats = min(max(affordable, _LEAST_REPEATS), _MOST_REPEATS)
        return median(self._batch(call, 1 + index * together, together) for index in range(repeats)) / together

    def sustained(self, call: Call) -> float:
        """Median seconds of one call, made without a pause until three windows in a row agree, or time is up."""
        together, number, passed_s = self._together(self._batch(call, 0, 1)), 1, 0.0
        windows: list[float] = []
        while not settled(windows) and passed_s < self._pace.most_s:
            batches: list[float] = []
            while sum(batches) < self._pace.window_s:
                batches.append(max(self._batch(call, number, together), 1e-9))
                number += together
            passed_s += sum(batches)
            windows.append(median(batches) / together)
        return median(windows[-_AGREEING:])

    def seconds_after(self, prepare: Call, call: Call, repeats: int) -> float:
        """Median seconds of one call, each after ``prepare``, which takes no part in it."""
        taken: list[float] = []
        for index in range(repeats):
            prepare(index)
            taken.append(self._batch(call, index, 1))
        return median(taken)

    @abstractmethod
    def _together(self, call_s: float) -> int:
        """How many calls take long enough to be timed together."""

    @abstractmethod
    def _batch(self, call: Call, first: int, count: int) -> float:
        """Seconds of ``count`` calls one after the other."""


class CpuStopwatch(Stopwatch):
    """On a CPU: by wall time, or by this thread's CPU time."""

    def __init__(self, pace: Pace, *, cpu_clock: bool) -> None:
        super().__init__(pace)
        self._cpu_clock = cpu_clock
        self._ran_s = self._passed_s = 0.0

    @property
    def busy(self) -> float:
        """The share of the time that this thread ran: less than 1 if other work had its core."""
        return min(self._ran_s / self._passed_s, 1.0) if self._passed_s else 1.0

    def _together(self, call_s: float) -> int:
        return max(1, min(1000, round(2e-4 / max(call_s, 1e-7))))

    def _batch(self, call: Call, first: int, count: int) -> float:
        passed_s, ran_s = time.perf_counter(), time.thread_time()
        for index in range(first, first + count):
            call(index)
        passed_s, ran_s = time.perf_counter() - passed_s, time.thread_time() - ran_s
        self._passed_s += passed_s
        self._ran_s += ran_s
        return ran_s if self._cpu_clock else passed_s


class CudaStopwatch(Stopwatch):
    """On a GPU: by its own clock, behind a wait that lets the host run ahead.

    The wait is some 30 us for each call: while calls of 1 ms or more are sustained, which draw the most power, the GPU
    is busy 97 % of the time.
    """

    def _together(self, call_s: float) -> int:
        return max(4, min(200, round(2e-3 / max(call_s, 1e-7))))

    def _batch(self, call: Call, first: int, count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(50_000 * count)  # cycles: some 30 us for each call to be launched
        begin.record()
        for index in range(first, first + count):
            call(index)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


_TORCH: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CACHES_BYTES = 96 * MIB
"""More than the caches of a rank hold."""
_TINY = ModelSpec(
    dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=16, vocab=16, norm_eps=1e-5, rope_theta=1e4, tied=True,
    params=1072, source="as small as can be",
)  # fmt: skip


def shapes(device: str, *, quick: bool) -> Shapes:
    """Shapes of training on a device of this type."""
    if device == "cuda":
        widths = [(4096, 4096)] if quick else [(1024, 4096), (4096, 4096), (4096, 14336), (8192, 8192)]
        return Shapes(
            products=tuple((t, *w) for t, w in product((512, 4096) if quick else (512, 2048, 8192), widths)),
            attention=tuple(product((128,) if quick else (64, 128), (2048,) if quick else (512, 2048, 8192))),
            heads=32,
            moved_bytes=(64 * MIB, 256 * MIB),
            optimizer_numel=50_000_000,
            operation_repeats=20,
        )
    widths = [(256, 256), (512, 1280)] if quick else [(256, 256), (256, 704), (512, 512), (512, 1280), (1024, 2816)]
    return Shapes(
        products=tuple((t, *w) for t, w in product((64, 256) if quick else (64, 256, 1024), widths)),
        attention=tuple(product((64,) if quick else (32, 64, 128), (128, 512) if quick else (128, 256, 512, 1024))),
        heads=4,
        moved_bytes=(MIB,) if quick else (MIB, 2 * MIB, 4 * MIB),
        optimizer_numel=1_000_000 if quick else 8_000_000,
        operation_repeats=10 if quick else 60,
    )


def _sets(nbytes: float, device: torch.device) -> int:
    """How many sets of operands of ``nbytes`` together exceed the caches."""
    held = _CACHES_BYTES if device.type == "cpu" else 4 * _CACHES_BYTES
    return min(max(2, -(-held // max(int(nbytes), 1))), 400)


def time_products(timing: Timing, dtype: Dtype, wanted: Shapes, device: torch.device) -> Iterator[Timed]:
    """A linear layer's three products for each shape: forward, and the gradients of its input and its weight."""
    for tokens, width, wide in wanted.products:
        numel = tokens * width + width * wide + tokens * wide
        nbytes, flops = float(numel * ELEMENT_BYTES[dtype]), 2.0 * tokens * width * wide
        with _at(f"{tokens} tokens, {width} x {wide}"):
            layers = [
                tuple(_random(shape, dtype, device) for shape in ((tokens, width), (wide, width), (tokens, wide)))
                for _ in range(_sets(nbytes, device))
            ]
        calls: tuple[Callable[..., Tensor], ...] = (
            lambda x_TD, weight_FD, _: torch.mm(x_TD, weight_FD.t()),
            lambda _, weight_FD, gradient_TF: torch.mm(gradient_TF, weight_FD),
            lambda x_TD, _, gradient_TF: torch.mm(gradient_TF.t(), x_TD),
        )
        for call in calls:
            with _at(f"{tokens} tokens, {width} x {wide}"):
                seconds = timing(_rotating(call, layers))
            yield Timed(dtype=dtype, flops=flops, bytes=nbytes, seconds=seconds)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Note the shape in errors."""
    try:
        yield
    except Exception as error:
        error.add_note(place)
        raise


def time_attention(timing: Timing, dtype: Dtype, wanted: Shapes, device: torch.device) -> Iterator[TimedAttention]:
    """Causal attention as torch picks its kernel, with half as many key-value heads as query heads.

    In fp32 torch may pick the kernel that stores all scores, so the shortest sequences come first.
    """
    for head_dim, seq_len in sorted(wanted.attention, key=itemgetter(1, 0)):
        with _at(f"{seq_len} tokens, head dimension {head_dim}"):
            forward_s, backward_s = _attention_seconds(timing, dtype, wanted.heads, head_dim, seq_len, device)
        scores = wanted.heads * seq_len**2 / 2
        yield TimedAttention(
            dtype=dtype,
            head_dim=head_dim,
            seq_len=seq_len,
            forward_s=forward_s / scores,
            backward_s=backward_s / scores,
        )


def _attention_seconds(
    timing: Timing, dtype: Dtype, query_heads: int, head_dim: int, seq_len: int, device: torch.device
) -> tuple[float, float]:
    heads = (query_heads, query_heads // 2, query_heads // 2)
    nbytes = sum(heads) * seq_len * head_dim * ELEMENT_BYTES[dtype]
    inputs = [
        tuple(_random((1, h, seq_len, head_dim), dtype, device).requires_grad_() for h in heads)
        for _ in range(min(_sets(nbytes, device), 3))
    ]
    forward_s = timing(_rotating(_attend, inputs))
    outputs = [(_attend(*qkv), qkv) for qkv in inputs]
    gradient = torch.ones_like(outputs[0][0])
    return forward_s, timing(
        _rotating(lambda output, qkv: torch.autograd.grad(output, qkv, gradient, retain_graph=True), outputs)
    )


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def time_moves(timing: Timing, wanted: Shapes, device: torch.device) -> Iterator[Timed]:
    """Elementwise kernels bound by memory, and one (SiLU) that may be bound by exponentials."""
    factor = _random((), "fp32", device)
    for size in wanted.moved_bytes:
        numel = size // 4
        pairs = [
            (_random((numel,), "fp32", device), _random((numel,), "fp32", device))
            for _ in range(_sets(2 * size, device))
        ]
        calls: tuple[tuple[int, Callable[..., Tensor]], ...] = (
            (3, torch.add), (2, lambda x, _: x * factor), (2, lambda x, y: y.copy_(x)),
        )  # fmt: skip
        for arrays, call in calls:
            yield Timed(dtype="fp32", bytes=float(arrays * size), seconds=timing(_rotating(call, pairs)))
        seconds = timing(_rotating(lambda x, _: F.silu(x), pairs))
        yield Timed(dtype="fp32", bytes=2.0 * size, transcendentals=numel, seconds=seconds)


def _rotating(call: Callable[..., object], operands: Sequence[tuple[Any, ...]]) -> Call:
    return lambda index: call(*operands[index % len(operands)])


def time_operations(stopwatch: Stopwatch, wanted: Shapes, device: torch.device) -> Iterator[Operations]:
    """The time of the smallest kernel, and the host's part of each launch, in forward and backward of a decoder layer
    with tensors so small that only launches cost time.
    """
    block, x_BTD = Block(_TINY).to(device), torch.randn(1, 4, _TINY.dim, device=device, requires_grad=True)
    tables = rotary_tables(_TINY, 4, x_BTD)

    def run(_: int = 0) -> None:
        torch.autograd.grad(block(x_BTD, *tables).sum(), (x_BTD, *block.parameters()))

    with _CountKernels() as counted:  # type: ignore[no-untyped-call]
        run()
    kernels: int = counted.count
    if device.type == "cpu":
        large = torch.ones(2, 8 * MIB)

        def fill_caches(_: int) -> None:  # with something large, as between products
            torch.add(*large, out=large[0])
            torch.mm(large[0, :MIB].view(1024, -1), large[1, : MIB // 2].view(1024, -1))

        operation = stopwatch.seconds_after(fill_caches, run, wanted.operation_repeats) / kernels
        yield Operations(kernel_s=operation, host_s=operation)
        return
    taken: list[float] = []
    for _ in range(wanted.operation_repeats):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    tiny = torch.ones(16, device=device)
    kernel_s = stopwatch.burst(lambda _: torch.add(tiny, tiny))
    yield Operations(kernel_s=kernel_s, host_s=median(taken) / kernels)


class _CountKernels(TorchDispatchMode):
    """Counts operations that compute something, not views."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += not (func.is_view or "view" in str(func) or "detach" in str(func))
        return func(*args, **(kwargs or {}))


def time_optimizer(timing: Timing, wanted: Shapes, device: torch.device) -> Iterator[Timed]:
    """A step of fused AdamW, with the bytes that it reads and writes."""
    count = 40
    parameters = [torch.nn.Parameter(_random((wanted.optimizer_numel // count,), "fp32", device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    optimizer.step()
    nbytes = float(ADAMW_BYTES * sum(p.numel() for p in parameters))
    yield Timed(dtype="fp32", bytes=nbytes, seconds=timing(lambda _: optimizer.step()))


def time_first_touch(stopwatch: Stopwatch) -> Iterator[Timed]:
    """The extra time of writing to new memory of the host; it may be 0."""
    numel = 16 * MIB  # 64 MiB: no allocator of a C library keeps as much for the next time
    kept = torch.zeros(numel)
    fresh = stopwatch.burst(lambda _: torch.empty(numel).zero_())
    beyond = max(fresh - stopwatch.burst(lambda _: kept.zero_()), 0.0)
    yield Timed(dtype="fp32", bytes=float(kept.nbytes), seconds=beyond)


def _random(shape: tuple[int, ...], dtype: Dtype, device: torch.device) -> Tensor:
    """Random values: products of zeros draw less power on a GPU, and are faster."""
    return torch.randn(shape, device=device).to(_TORCH[dtype])
