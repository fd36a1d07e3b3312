"""FLOPs and bytes of an operator's call, by the sizes of its arguments, and the peaks that its rate is compared with.

A multiplication and an addition are two FLOPs, as torch.utils.flop_counter counts them. Bytes are a lower bound: each
operand is read once and each result written once, as if nothing were cached and nothing read again.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal

import msgspec

from refshard.analysis.names import dtype_named
from refshard.events.table import Operands
from refshard.specs.hardware import load_hardware, profile_of_device

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One operand: its sizes, elements and bytes; an expanded dimension is stored once."""

    shape: Shape
    dtype: str
    element_bytes: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call has to do; ``dtype`` is its operands'. ``reason`` says why ``flops`` and ``bytes`` are None."""

    shapes: str
    dtype: str | None
    flops: int | None = None
    bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The arguments of a call by place: tensors (None for what is none), and values as text ("" for tensors)."""

    tensors: tuple[Tensor | None, ...]
    values: tuple[str, ...]

    def shape(self, place: int) -> Shape:
        return self.tensor(place).shape

    def tensor(self, place: int) -> Tensor:
        found = self.tensors[place]
        if found is None:
            raise _UnknownError
        return found

    def is_true(self, place: int) -> bool:
        return self.values[place] == "True"

    def numbers(self, place: int) -> list[int]:
        return [int(text) for text in re.findall(r"-?\d+", self.values[place])]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors if tensor is not None)


class _UnknownError(Exception):
    """The trace does not hold what the formula needs."""


def work_of(name: str, operands: Operands) -> Work:
    """What a call of the operator ``name`` with these arguments does."""
    call = _call(operands)
    known = [tensor for tensor in call.tensors if tensor is not None]
    shapes = ", ".join(str(list(tensor.shape)) for tensor in known if tensor.shape)
    dtype = known[0].dtype if known else None
    formula = _formula(name)
    if formula is None:
        return Work(shapes=shapes, dtype=dtype, reason="no formula for this operator")
    try:
        flops, size = formula(call)
    except (_UnknownError, IndexError, ValueError):
        return Work(shapes=shapes, dtype=dtype, reason="the trace lacks arguments that its FLOPs depend on")
    first = next((tensor for tensor in _operands_of_product(name, call) if tensor is not None), None)
    return Work(shapes=shapes, dtype=first.dtype if first else dtype, flops=flops, bytes=size)


def _operands_of_product(name: str, call: _Call) -> tuple[Tensor | None, ...]:
    return call.tensors[_FIRST_FACTOR.get(name.removeprefix("aten::").rstrip("_"), 0) :]


def _call(operands: Operands) -> _Call:
    """Arguments by place. Lists of tensors, whose types the trace does not tell, are no tensors here."""
    try:
        dims, types = json.loads(operands.dims), json.loads(operands.types or b"[]")
        strides, values = json.loads(operands.strides or b"[]"), json.loads(operands.values or b"[]")
    except ValueError:
        return _Call(tensors=(), values=())
    if not all(isinstance(column, list) for column in (dims, types, strides, values)):
        return _Call(tensors=(), values=())
    count = len(dims)
    columns = [[*column, *[None] * (count - len(column))] for column in (types, strides, values)]
    return _Call(
        tensors=tuple(_tensor(*row) for row in zip(dims, *columns[:2])),
        values=tuple("" if value is None else str(value) for value in columns[2]),
    )


def _tensor(dims: Any, kind: Any, strides: Any) -> Tensor | None:
    """An argument, if it is a tensor of a known type. One of no dimensions may be: a scalar of the host has the type
    ``Scalar``, which none has that lies on a device.
    """
    known = dtype_named(kind)
    if known is None or not isinstance(dims, list):
        return None
    if not all(isinstance(size, int) and size >= 0 for size in dims):
        return None
    dtype, element = known[0].partition("_")[0], known[1]  # peaks are of fp8, of either kind
    steps = strides if isinstance(strides, list) and len(strides) == len(dims) else [1] * len(dims)
    stored = prod(size for size, step in zip(dims, steps) if step != 0)
    return Tensor(shape=tuple(dims), dtype=dtype, element_bytes=element, bytes=element * stored)


_Formula = Callable[[_Call], tuple[int | None, int]]


def _formula(name: str) -> _Formula | None:
    """FLOPs and bytes of calls of an operator; None where none is known."""
    base = name.removeprefix("aten::") if name.startswith("aten::") else None
    if base is None:
        return None
    if base in _FORMULAS:
        return _FORMULAS[base]
    in_place = base.endswith("_") and not base.startswith("_")
    plain = base.removesuffix("_") if in_place else base
    if in_place and plain in _FORMULAS and plain in _FIRST_FACTOR:
        return _FORMULAS[plain]
    if plain in _WRITTEN_ONLY:
        return lambda call: (None, call.tensor(0).bytes)
    if plain in _ELEMENTWISE:
        return _in_place if in_place else _elementwise
    return None


def _product(a: int, b: int) -> _Formula:
    """(..., m, k) by (k, n) or by (batch, k, n)."""

    def formula(call: _Call) -> tuple[int, int]:
        x, w = call.shape(a), call.shape(b)
        if len(x) < 2 or len(w) < 2 or x[-1] != w[-2]:
            raise _UnknownError
        rows, n = prod(x[:-1]), w[-1]
        read = sum(tensor.bytes for tensor in call.tensors[: b + 1] if tensor is not None)  # one more is the result
        return 2 * rows * x[-1] * n, read + rows * n * _out_bytes(call.tensor(a))

    return formula


def _grouped(call: _Call) -> tuple[int, int]:
    """Products of groups: (rows, k) by (groups, k, n), each row in one group, or (m, rows) by (rows, n), likewise."""
    x, w = call.shape(0), call.shape(1)
    if x[-1] != w[-2] or (len(x), len(w)) not in ((2, 3), (2, 2), (3, 3)):
        raise _UnknownError
    return 2 * prod(x) * w[-1], call.bytes + prod(x[:-1]) * w[-1] * _out_bytes(call.tensor(0))


def _vector(a: int, b: int) -> _Formula:
    def formula(call: _Call) -> tuple[int, int]:
        return 2 * prod(call.shape(a)), call.bytes + prod(call.shape(a)[:-1]) * _out_bytes(call.tensor(b))

    return formula


def _out_bytes(operand: Tensor) -> int:
    """Of an element of a product: fp8 and integers are accumulated into at least two bytes."""
    return max(2, operand.element_bytes)


def _convolution(call: _Call) -> tuple[int, int]:
    x, w = call.shape(0), call.shape(1)
    spatial = len(w) - 2
    stride, padding, dilation = (_each(call.numbers(place), spatial) for place in (3, 4, 5))
    transposed = call.is_true(6)
    extra = _each(call.numbers(7), spatial) if transposed else [0] * spatial
    groups = call.numbers(8)[0]
    sides = list(zip(x[2:], w[2:], stride, padding, dilation, extra))
    if len(x) != len(w) or len(sides) != spatial:
        raise _UnknownError
    if transposed:
        out = (x[0], w[1] * groups, *((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in sides))
    else:
        out = (x[0], w[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sides))
    size = call.bytes + prod(out) * call.tensor(0).element_bytes
    return _convolved(x if transposed else out, w), size


def _each(numbers: Sequence[int], spatial: int) -> list[int]:
    """One number for each spatial dimension."""
    return list(numbers) * spatial if len(numbers) == 1 else list(numbers)


def _convolved(out: Shape, w: Shape) -> int:
    """Each point outside of the kernel (of a transposed one: inside) takes part in a product with all of a filter."""
    return 2 * out[0] * prod(out[2:]) * prod(w)


def _convolution_backward(call: _Call) -> tuple[int, int]:
    """The gradients of input and weight, as far as they are asked for, each as many FLOPs as forward."""
    grad, x, w = (call.shape(place) for place in range(3))
    asked = re.findall(r"True|False", call.values[10])
    if len(asked) != 3:
        raise _UnknownError
    wanted = [is_asked == "True" for is_asked in asked[:2]]
    results = sum(call.tensor(place).bytes for place, is_wanted in zip((1, 2), wanted) if is_wanted)
    return sum(wanted) * _convolved(x if call.is_true(7) else grad, w), call.bytes + results


def _attention(name: str) -> _Formula:
    """Scores of (batch, heads, queries, width) with keys, and sums of values by these weights.

    Forward is two products. Backward is five: the scores are computed again, as flash attention does. A causal mask
    leaves min(queries, keys)**2 / 2 pairs fewer, which the kernels skip; other masks do not count.
    """
    q, products = (1, 5) if name.endswith("_backward") else (0, 2)  # backward is first given the output's gradient
    causal = CAUSAL[name]

    def formula(call: _Call) -> tuple[int, int]:
        queries, keys, values = (call.shape(q + n) for n in range(3))
        if len(queries) != 4 or queries[-1] != keys[-1] or keys[-2] != values[-2]:
            raise _UnknownError
        n, m = queries[-2], keys[-2]
        pairs_twice = 2 * n * m
        if call.is_true(causal):
            pairs_twice = min(n, m) ** 2 + 2 * max(0, n - m) * m
        heads, of_scores = prod(queries[:2]), queries[-1]
        widths = of_scores + values[-1] if products == 2 else 3 * of_scores + 2 * values[-1]
        out = heads * n * values[-1] * call.tensor(q).element_bytes
        results = out if products == 2 else sum(call.tensor(q + n).bytes for n in range(3))
        return heads * pairs_twice * widths, call.bytes + results

    return formula


def _elementwise(call: _Call) -> tuple[None, int]:
    """The result has the sizes that the operands are broadcast to; its type is taken to be the first one's."""
    known = [tensor for tensor in call.tensors if tensor is not None]
    if not known:
        raise _UnknownError
    return None, call.bytes + _broadcast([tensor.shape for tensor in known]) * known[0].element_bytes


def _in_place(call: _Call) -> tuple[None, int]:
    return None, call.bytes + call.tensor(0).bytes


def _broadcast(shapes: Sequence[Shape]) -> int:
    """Elements of the shape that all of these are broadcast to."""
    most = max(map(len, shapes))
    padded = [(1,) * (most - len(shape)) + shape for shape in shapes]
    return prod(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded))


def _same_size(call: _Call) -> tuple[None, int]:
    """All operands are read and a result of the first one's size is written."""
    return None, call.bytes + prod(call.shape(0)) * call.tensor(0).element_bytes


def _copied(call: _Call) -> tuple[None, int]:
    """The first is written, the second read."""
    return None, call.bytes


CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_fused_attention_overrideable": 5,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_fused_attention_overrideable_backward": 13,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
}
"""Operators of fused attention, and which of their arguments says that the mask is causal."""
_FIRST_FACTOR = {"addmm": 1, "baddbmm": 1, "addbmm": 1, "_addmm_activation": 1, "addmv": 1}
"""Where the operands of a product begin, and with them its type, if not with the first argument."""
_FORMULAS: dict[str, _Formula] = {
    "mm": _product(0, 1), "bmm": _product(0, 1), "_scaled_mm": _product(0, 1), "_int_mm": _product(0, 1),
    "addmm": _product(1, 2), "baddbmm": _product(1, 2), "_addmm_activation": _product(1, 2),
    "_grouped_mm": _grouped, "_scaled_grouped_mm": _grouped,
    "addmv": _vector(1, 2), "dot": _vector(0, 1),
    "convolution": _convolution, "convolution_backward": _convolution_backward,
    **{name: _attention(name) for name in CAUSAL},
    "copy_": _copied, "_softmax": _same_size, "_log_softmax": _same_size, "native_layer_norm": _same_size,
    "_fused_rms_norm": _same_size, "native_group_norm": _same_size, "native_batch_norm": _same_size,
    "cudnn_batch_norm": _same_size, "miopen_batch_norm": _same_size,
    "_softmax_backward_data": _same_size, "_log_softmax_backward_data": _same_size,
    "native_layer_norm_backward": _same_size, "native_dropout": _same_size,
}  # fmt: skip
"""By the name without ``aten::``; those in ``_FIRST_FACTOR`` also in place, with an underscore at the end.

None calls another of these, so that nothing counts twice: ``linear``, ``matmul`` and ``mv`` are what they call.
"""
_WRITTEN_ONLY = frozenset(("fill", "zero"))
_ELEMENTWISE = frozenset((
    "abs", "add", "addcdiv", "addcmul", "clamp", "clamp_min", "clamp_max", "cos", "div", "erf", "exp", "gelu",
    "gelu_backward", "hardtanh", "leaky_relu", "lerp", "log", "maximum", "minimum", "mul", "neg", "pow", "reciprocal",
    "relu", "rsqrt", "rsub", "sigmoid", "sigmoid_backward", "silu", "silu_backward", "sin", "softplus", "sqrt",
    "square", "sub", "tanh", "tanh_backward", "threshold_backward", "where", "masked_fill",
))  # fmt: skip


TF32_KERNEL = re.compile(r"tf32|tensorop_s1688|xf32", re.IGNORECASE)
"""Kernels whose names say that they round fp32 operands to TF32 for the tensor cores."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """A device's data sheet: FLOP/s of products by their operands' type, and bytes/s of memory (None: unknown)."""

    profile: str
    flops: dict[str, float]
    memory: float | None


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """How close some work comes to the peaks; ``reason`` says why that is unknown."""

    of_peak: float | None = None
    of_roofline: float | None = None
    bound: Literal["compute", "memory"] | None = None
    reason: str | None = None


@cache
def peaks_of(device: str) -> Peaks | None:
    """The peaks of the device of this name; None where no profile is of it."""
    name = profile_of_device(device)
    if name is None:
        return None
    spec = load_hardware(name)
    flops: dict[str, float] = {dtype: rate.peak for dtype, rate in spec.matmul.items()}
    if "bf16" in flops:
        flops["fp16"] = flops["bf16"]  # one rate on every device that has a profile
    if spec.tf32_peak:
        flops["tf32"] = spec.tf32_peak
    return Peaks(profile=name, flops=flops, memory=spec.memory_peak_bytes_per_s or None)


def roofline(
    peaks: Peaks | None, device: str, *, dtype: str | None, flops: int | None, size: int | None, seconds: float,
    tf32: bool,
) -> Roofline:  # fmt: skip
    """Hold work of ``flops`` and ``size`` bytes that took ``seconds`` against the peaks.

    A product of fp32 operands is held against TF32's peak if its kernel's name says so, or if it was faster than fp32
    can be.
    """
    if not seconds or (flops is None and size is None):
        return Roofline(reason="no formula for this operator")
    if peaks is None:
        return Roofline(reason=f"no hardware profile of {device}")
    peak = peaks.flops.get(dtype or "")
    if flops and dtype == "fp32" and peak and (tf32 or flops / seconds > peak):
        peak = peaks.flops.get("tf32")
    if flops and peak is None:
        return Roofline(reason=f"{peaks.profile} has no peak for {dtype}")
    of_peak = flops / seconds / peak if flops and peak else None
    if size is None or peaks.memory is None:
        return Roofline(of_peak=of_peak, reason=f"{peaks.profile} has no peak of memory")
    of_memory = size / seconds / peaks.memory
    bound: Literal["compute", "memory"] = "compute" if (of_peak or 0.0) > of_memory else "memory"
    return Roofline(of_peak=of_peak, of_roofline=max(of_peak or 0.0, of_memory), bound=bound)
