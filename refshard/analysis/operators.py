"""Times of operators and kernels, their slowdown during communication, and how close they come to the peaks.

FLOPs and bytes of an operator's call follow from the sizes of its arguments. A multiplication and an addition are two
FLOPs, as torch.utils.flop_counter counts them. Bytes are a lower bound: each operand is read once and each result
written once, as if nothing were cached and nothing read again.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis.attribution import phases_of
from refshard.analysis.figures import (
    CLASSES,
    ClassFigures,
    Contention,
    KernelFigures,
    OperatorClass,
    OperatorFigures,
    OperatorReport,
    OperatorTotal,
    Slowdown,
)
from refshard.analysis.kineto import COMPUTE_OP, IN_GRAPH, device_order, main_thread
from refshard.analysis.labels import Nesting, column_at, named, nested_order, whole_problems
from refshard.analysis.names import OTHERS, SURE, class_of_kernel, class_of_operator, dtype_named, short_kernel_names
from refshard.analysis.windows import host_steps, step_at
from refshard.events.table import ANNOTATION, HOST, KERNEL, Operands, TraceFile
from refshard.events.timeline import (
    KINDS,
    UNKNOWN,
    Intervals,
    Ints,
    Kind,
    Mask,
    Meaning,
    Nanoseconds,
    Rows,
    Spans,
    Timeline,
    grouped,
    rows_of,
    sums,
)
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
    """The arguments of a call by place: tensors (None if not a tensor), and values as text ("" for tensors)."""

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
    factors = call.tensors[_FIRST_FACTOR.get(name.removeprefix("aten::").rstrip("_"), 0) :]
    first = next((tensor for tensor in factors if tensor is not None), None)
    return Work(shapes=shapes, dtype=first.dtype if first else dtype, flops=flops, bytes=size)


def _call(operands: Operands) -> _Call:
    """Arguments by place. Lists of tensors do not count as tensors: traces do not give their types."""
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
        return (lambda call: (None, call.bytes + call.tensor(0).bytes)) if in_place else _elementwise
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
    """Bytes of an element of a product: fp8 and integers are accumulated into at least two bytes."""
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
    """The requested gradients of input and weight, each as many FLOPs as forward."""
    grad, x, w = (call.shape(place) for place in range(3))
    flags = re.findall(r"True|False", call.values[10])
    if len(flags) != 3:
        raise _UnknownError
    wanted = [flag == "True" for flag in flags[:2]]
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


def _broadcast(shapes: Sequence[Shape]) -> int:
    """Elements of the shape that all of these are broadcast to."""
    most = max(map(len, shapes))
    padded = [(1,) * (most - len(shape)) + shape for shape in shapes]
    return prod(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded))


def _same_size(call: _Call) -> tuple[None, int]:
    """All operands are read and a result of the first one's size is written."""
    return None, call.bytes + prod(call.shape(0)) * call.tensor(0).element_bytes


CAUSAL = {
    "_scaled_dot_product_flash_attention": 4, "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6, "_scaled_dot_product_fused_attention_overrideable": 5,
    "_scaled_dot_product_flash_attention_for_cpu": 4, "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11, "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_fused_attention_overrideable_backward": 13,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
}  # fmt: skip
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
    "copy_": lambda call: (None, call.bytes),  # the first is written, the second read
    "_softmax": _same_size, "_log_softmax": _same_size, "native_layer_norm": _same_size,
    "_fused_rms_norm": _same_size, "native_group_norm": _same_size, "native_batch_norm": _same_size,
    "cudnn_batch_norm": _same_size, "miopen_batch_norm": _same_size,
    "split_with_sizes_copy": lambda call: (None, 2 * call.tensor(0).bytes), "_fused_rms_norm_backward": _same_size,
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
"""Name patterns of kernels that round fp32 operands to TF32 for the tensor cores."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """A device's data sheet: FLOP/s of products by their operands' type, and bytes/s of memory (None: unknown).

    ``good`` are the shares of these that good kernels reach: by kind and type of operands, and of memory.
    """

    profile: str
    flops: dict[str, float]
    memory: float | None
    good: dict[tuple[str, str], float]
    good_memory: float | None


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
    fastest = max(spec.attention_kernels.values(), default=1.0)
    good: dict[tuple[str, str], float] = {("GEMM", dtype): rate.efficiency for dtype, rate in spec.matmul.items()}
    good |= {("attention", dtype): min(1.0, rate.efficiency * fastest) for dtype, rate in spec.attention.items()}
    good |= {(kind, "fp16"): rate for (kind, dtype), rate in good.items() if dtype == "bf16"}
    memory = spec.memory_peak_bytes_per_s or None
    good_memory = min(1.0, spec.memory_bytes_per_s / memory) if memory else None
    return Peaks(profile=name, flops=flops, memory=memory, good=good, good_memory=good_memory)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launched:
    """A row for each piece of work: a device span, or a CPU operator less the operators that it calls.

    ``spans`` are rows of :class:`~refshard.events.timeline.Spans` (on a CPU :data:`UNKNOWN`), ``calls`` the rows of
    :class:`HostEvents` of the operator that the work is for, or :data:`UNKNOWN`. ``names``
    index :attr:`TraceFile.names`, the work's own name where there is no operator, ``operands``
    :attr:`TraceFile.operands`.
    ``at`` is when the host was there, ``steps`` in which step, each :data:`UNKNOWN` where the trace does not say.
    """

    spans: Rows
    ns: Rows
    calls: Rows
    names: Ints
    operands: Ints
    steps: Ints
    at: Rows


def launched_work(trace: TraceFile, timeline: Timeline) -> Launched:
    """All work of a trace, and the operator that each piece is for, by the rule of :mod:`refshard.analysis.labels`.

    On a CPU the main thread's operators count as compute, each less the time of the operators that it calls and of the
    collectives that it issues, so their sum is their union.
    """
    host, spans = trace.host, timeline.spans
    if timeline.on_device:
        calls = spans.calls.astype(np.int64)
        return Launched(
            spans=np.arange(len(spans)), ns=spans.ends - spans.starts, calls=calls, names=spans.operators,
            operands=column_at(host.operands, calls), steps=spans.steps, at=spans.launches,
        )  # fmt: skip
    main, computes = main_thread(trace, host_steps(trace)[1]), named(trace, COMPUTE_OP)
    is_mine = np.isin(host.categories, (HOST, ANNOTATION)) & (host.threads == main)
    rows = np.flatnonzero(is_mine & (computes | named(trace, IN_GRAPH)) & (host.ends > host.starts))
    rows = rows[nested_order(host.starts[rows], host.ends[rows])]
    own = Nesting.of(host.starts[rows], host.ends[rows]).own()
    rows, own = rows[computes[rows]], own[computes[rows]]
    whole = whole_problems(trace, rows)
    calls = np.where(whole == UNKNOWN, rows, whole)
    return Launched(
        spans=np.full(len(rows), UNKNOWN, np.int64), ns=own, calls=calls, names=host.names[calls],
        operands=host.operands[calls], steps=step_at(host.starts[rows], timeline.host_windows), at=host.starts[rows],
    )  # fmt: skip


def same_work(spans: Spans, rows: Rows, operands: Ints) -> Rows:
    """A number for each of the kernels ``rows``; those of one number do the same work. :data:`UNKNOWN`: who knows.

    Kernels do the same work if their names, grids and blocks are the same, and their operators' ``operands`` too.
    Where the trace has no operands, grid and block are not enough: kernels that loop over their data have one grid
    for many sizes. There, runs also need the same place in the same sequence of kernels: of a unit's forward,
    backward or optimizer step, as layers of one kind have, or of the whole step's for kernels of no unit.
    """
    found, shaped = np.full(len(rows), UNKNOWN, np.int64), operands != UNKNOWN
    found[shaped] = grouped(spans.signatures[rows[shaped]], operands[shaped])[1]
    placed = np.flatnonzero(spans.launches[rows] != UNKNOWN)
    if not len(placed):
        return found
    mine = rows[placed]
    blocks = (spans.steps[mine], spans.units[mine], phases_of(spans)[mine])
    order = np.lexsort((spans.launches[mine], *blocks))
    first = np.append(True, np.any([np.diff(column[order]) != 0 for column in blocks], axis=0))
    starts, block = np.flatnonzero(first), np.cumsum(first) - 1
    position = np.arange(len(mine)) - starts[block]
    # A sequence's fingerprint: equal ones have equal sums, others only by a chance of 2^-64.
    random = np.random.default_rng(0).integers(0, 2**64, len(spans.signature_names), np.uint64)
    tokens = random[spans.signatures[mine[order]]] * (2 * position.astype(np.uint64) + np.uint64(1))
    sequences = np.unique(np.add.reduceat(tokens, starts), return_inverse=True)[1]
    places = np.empty(len(mine), np.int64)
    places[order] = sequences[block] * len(mine) + position
    known = np.array([name.endswith("]") for name in spans.signature_names] or [False])  # grid and block
    usable = ~shaped[placed] & known[spans.signatures[mine]]
    found[placed[usable]] = places[usable] + found.max(initial=UNKNOWN) + 1
    return found


ENOUGH = 3
"""So many runs of each sort are needed before they are compared."""
SIGNIFICANT = 1.96
"""A difference of ranks beyond this many standard deviations is significant at 5 %."""
_MOST = 50


def find_contention(
    timeline: Timeline, rows: Rows, classes: npt.NDArray[np.int8], operands: Ints,
    shorts: Mapping[int, str],
) -> Contention | None:  # fmt: skip
    """Compare the spans ``rows``, of these ``classes`` and ``operands``; ``shorts`` are their kernels' names by code.

    A run is during communication if more than half of it overlaps any, and alone if none of it does. None if no run is
    during communication.
    """
    spans, comm, works = timeline.spans, timeline.busy(Kind.COMM), same_work(timeline.spans, rows, operands)
    lengths = spans.ends[rows] - spans.starts[rows]
    within = comm.within(spans.starts[rows], spans.ends[rows])
    beside = 2 * within > lengths
    if not beside.any():
        return None
    mine = np.flatnonzero((beside | (within == 0)) & (works != UNKNOWN))
    sample, group = grouped(works[mine], classes[mine], spans.names[rows[mine]])
    found = _Comparison.of(group, beside[mine], lengths[mine], len(sample))
    enough, sample = found.enough, mine[sample]
    kinds = classes[sample].astype(np.int64)
    by_kernel = spans.names[rows[sample]] * len(CLASSES) + kinds

    def slowdowns(by: Rows, label: Mapping[int, str] | None) -> tuple[Slowdown, ...]:
        known = []
        for code in np.unique(by[enough]).tolist():
            kind = CLASSES[code % len(CLASSES)]
            name = kind if label is None else label[code // len(CLASSES)]
            known.append(found.over(enough & (by == code), name, kind))
        return tuple(sorted(known, key=lambda one: (-one.lost_ns, -one.beside_ns)))

    compared = np.zeros(len(rows), np.bool_)
    compared[mine] = beside[mine] & enough[group]
    return Contention(
        classes=slowdowns(kinds, None), kernels=slowdowns(by_kernel, shorts)[:_MOST],
        compared_ns=int(lengths[compared].sum()), beside_ns=int(lengths[beside].sum()),
        shapeless_ns=int(lengths[beside & ~compared & (operands == UNKNOWN)].sum()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Comparison:
    """Per group: whether it has enough runs of both kinds, how many are ``beside``, both medians, and the excess of the
    rank sum of ``beside`` over its expectation, and its variance, as :meth:`over` weighs them.
    """

    enough: Mask
    runs: Rows
    slow: npt.NDArray[np.float64]
    plain: npt.NDArray[np.float64]
    excess: npt.NDArray[np.float64]
    variance: npt.NDArray[np.float64]

    @classmethod
    def of(cls, group: Rows, beside: Mask, lengths: Nanoseconds, count: int) -> "_Comparison":
        runs, alone = (np.bincount(group[which], minlength=count) for which in (beside, ~beside))
        ranks, ties = _ranks(group, lengths, count)
        every = np.maximum(2, runs + alone)  # of one run nothing is said
        excess = np.bincount(group[beside], ranks[beside], minlength=count) - runs * (every + 1) / 2
        variance = runs * alone / 12 * (every + 1 - ties / (every * (every - 1)))
        weights = 1 / (every + 1)
        return cls(
            enough=(runs >= ENOUGH) & (alone >= ENOUGH), runs=runs,
            slow=runs * _medians(group[beside], lengths[beside], count),
            plain=runs * _medians(group[~beside], lengths[~beside], count),
            excess=excess * weights, variance=variance * weights**2,
        )  # fmt: skip

    def over(self, groups: Mask, name: str, kind: OperatorClass) -> Slowdown:
        """All of some groups.

        Whether it is a slowdown is decided by Wilcoxon's rank sums, joined over the groups as by van Elteren (1960).
        """
        excess, variance = self.excess[groups].sum(), self.variance[groups].sum()
        slow, plain = round(self.slow[groups].sum()), round(self.plain[groups].sum())
        return Slowdown(
            name=name, kind=kind, runs=int(self.runs[groups].sum()), beside_ns=slow, alone_ns=plain,
            slower=bool(slow > plain and excess >= SIGNIFICANT * np.sqrt(variance) and variance > 0),
        )  # fmt: skip


def _ranks(groups: Rows, values: Nanoseconds, count: int) -> tuple[npt.NDArray[np.float64], Rows]:
    """Each value's rank in its group, from 1, equal ones sharing their mean; and of each group the sum of t³ - t over
    its t equal values.
    """
    order = np.lexsort((values, groups))
    first = np.append(True, (np.diff(groups[order]) != 0) | (np.diff(values[order]) != 0))[: len(order)]
    starts, run = np.flatnonzero(first), np.cumsum(first) - 1
    equal = np.diff(np.append(starts, len(order)))
    sizes = np.bincount(groups, minlength=count)
    begins = (np.cumsum(sizes) - sizes)[groups[order]]
    ranks = np.empty(len(order), np.float64)
    ranks[order] = starts[run] - begins + (equal[run] + 1) / 2
    ties = np.zeros(count, np.int64)
    np.add.at(ties, groups[order][starts], equal**3 - equal)
    return ranks, ties


def _medians(groups: Rows, values: Nanoseconds, count: int) -> npt.NDArray[np.float64]:
    """The median of each group's values; 0 of a group without any."""
    order = np.lexsort((values, groups))
    sizes = np.bincount(groups, minlength=count)
    first = np.cumsum(sizes) - sizes
    ranked = np.append(values[order], 0)
    low, high = first + np.maximum(0, sizes - 1) // 2, first + sizes // 2
    last = len(ranked) - 1
    return np.where(sizes > 0, (ranked[np.minimum(low, last)] + ranked[np.minimum(high, last)]) / 2, 0.0)


MOST = 60
"""Most operators, and kernels, in a report."""
_MOST_HELD = 3000
"""Most operators, by name and shapes, with FLOPs and bytes counted."""
_LACKS = "no shapes of its arguments"
_OVER_LINK = "it copies from or to the host: the link bounds it, not the device's memory"
_TO_OR_FROM_HOST = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")
_COMMUNICATION, _OPTIMIZER, _COPIES = map(CLASSES.index, ("communication", "optimizer", "copies"))


def operator_report(trace: TraceFile, timeline: Timeline, device: str) -> OperatorReport | None:
    """The operators and kernels of a trace's steps, by what they take; None of a trace that holds no work."""
    work, spans = launched_work(trace, timeline), timeline.spans
    steps = [window.step for window in timeline.host_windows if window.step is not None]
    work = rows_of(work, work.steps != UNKNOWN) if steps else work
    if not len(work.ns):
        return None
    classes = classes_of(trace, timeline, work)
    computes = classes != _COMMUNICATION
    mine, its = rows_of(work, computes), classes[computes]
    work_ns, shorts, contention, kernels = int(mine.ns.sum()), dict[int, str](), None, list[KernelFigures]()
    if timeline.on_device:
        names = spans.names[mine.spans]
        codes = np.unique(names).tolist()
        shorts = dict(zip(codes, short_kernel_names([spans.name_table[code] for code in codes])))
        # Kernels only: how long a copy takes depends on its bytes, which are unknown here.
        is_kernel = (trace.device.categories[device_order(trace)] == KERNEL)[mine.spans]
        contention = find_contention(timeline, mine.spans[is_kernel], its[is_kernel], mine.operands[is_kernel], shorts)
        sample, group = grouped(names, its)
        totals, counts = sums(group, mine.ns, len(sample)).tolist(), np.bincount(group, minlength=len(sample)).tolist()
        for place in np.argsort(-np.array(totals, np.int64), kind="stable").tolist():
            code, ns = int(names[sample[place]]), totals[place]
            kernels.append(
                KernelFigures(
                    name=spans.name_table[code], short=shorts[code], kind=CLASSES[its[sample[place]]],
                    count=counts[place], ns=ns, share=ns / work_ns if work_ns else 0.0,
                )
            )  # fmt: skip
    operators, peaks = _operators(trace, timeline, mine, its, device, shorts), peaks_of(device)
    of_class = []
    for code in np.unique(classes).tolist():
        ns, count = int(work.ns[classes == code].sum()), int((classes == code).sum())
        share = None if code == _COMMUNICATION or not work_ns else ns / work_ns
        held = [one for one in operators if one.kind == CLASSES[code] and one.of_roofline is not None]
        of_class.append(
            ClassFigures(
                name=CLASSES[code], count=count, ns=ns, share=share, known_ns=sum(one.ns for one in held),
                gain_ns=sum(one.gain_ns(1.0) for one in held), good_gain_ns=sum(one.gain_ns(one.good) for one in held),
            )
        )  # fmt: skip
    by_name: dict[tuple[str, OperatorClass], list[OperatorFigures]] = {}
    for one in operators:
        by_name.setdefault((one.name, one.kind), []).append(one)
    every = []
    for (name, kind), members in by_name.items():
        counted = [one for one in members if one.flops and one.flops_per_s]
        held, peaked = ([o for o in members if getattr(o, key) is not None] for key in ("of_roofline", "of_peak"))
        every.append(
            OperatorTotal(
                name=name, kind=kind, calls=sum(one.calls for one in members), shapes=len(members),
                ns=sum(one.ns for one in members), share=sum(one.share for one in members),
                known_ns=sum(one.ns for one in held), flops_per_s=_mean(counted, "flops_per_s"),
                of_peak=_mean(peaked, "of_peak"), of_roofline=_mean(held, "of_roofline"),
            )
        )  # fmt: skip
    return OperatorReport(
        steps=len(steps) or 1, work_ns=work_ns,
        classes=tuple(sorted(of_class, key=lambda one: (one.share is None, -one.ns))),
        totals=tuple(sorted(every, key=lambda one: -one.ns)[:MOST]), total_count=len(every),
        operators=tuple(operators[:MOST]), operator_count=len(operators), kernels=tuple(kernels[:MOST]),
        kernel_count=len(kernels), contention=contention, hardware=peaks.profile if peaks else None,
        has_shapes=len(trace.operands) > 0, flops=sum(one.flops * one.calls for one in operators if one.flops),
    )  # fmt: skip


def _mean(over: Sequence[OperatorFigures], key: str) -> float | None:
    """Weighted by time, so that it is all the work over all the time; None of none."""
    total = sum(one.ns for one in over)
    return sum(one.ns * (getattr(one, key) or 0.0) for one in over) / total if total else None


def classes_of(trace: TraceFile, timeline: Timeline, work: Launched) -> npt.NDArray[np.int8]:
    """The class of each piece of work: by its operator, or else by its kernel.

    Work launched in an optimizer's step is the optimizer's, except products, attention and convolutions.
    """
    found = _by_name(trace.names, work.names, class_of_operator)
    is_copy = np.zeros(len(found), np.bool_)
    if timeline.on_device:
        spans = timeline.spans
        own = _by_name(spans.name_table, spans.names[work.spans], class_of_kernel)
        # An operator that stands for none is a kernel by its own name.
        found = np.where((found == OTHERS) | (work.calls == UNKNOWN), own, found)
        kinds = spans.kinds[work.spans]
        is_copy = kinds == KINDS.index(Kind.COPY)
        found = np.where(found == _COMMUNICATION, own, found)
        found = np.where(kinds == KINDS.index(Kind.COMM), _COMMUNICATION, found)
    of_optimizer = [(label.start, label.end) for label in timeline.labels if label.meaning & Meaning.OPTIMIZER]
    optimizes = Intervals.of(of_optimizer).within(work.at, work.at + 1) > 0
    is_sure = np.isin(found, (*SURE, _COMMUNICATION))
    found = np.where(~is_sure & is_copy, _COPIES, found)
    return np.where(~is_sure & optimizes, _OPTIMIZER, found).astype(np.int8)


def _by_name(table: Sequence[str], codes: Ints, class_of: Callable[[str], int]) -> npt.NDArray[np.int8]:
    """Classes of names by code; each name that occurs is looked at once."""
    used, group = np.unique(codes, return_inverse=True)
    return np.array([class_of(table[code]) for code in used.tolist()], np.int8)[group]


def _operators(
    trace: TraceFile, timeline: Timeline, work: Launched, classes: npt.NDArray[np.int8], device: str,
    shorts: Mapping[int, str],
) -> list[OperatorFigures]:  # fmt: skip
    """All operators by their arguments' shapes, the longest first, with rates of the first ones."""
    sample, group = grouped(work.names, work.operands, classes)
    totals, work_ns = sums(group, work.ns, len(sample)), int(work.ns.sum())
    # Number of calls behind the work of each group; work without a known call counts as one call each.
    order = np.lexsort((work.calls, group))
    ordered, own = group[order], work.calls[order]
    is_new = np.ones(len(group), np.bool_)
    is_new[1:] = (ordered[1:] != ordered[:-1]) | (own[1:] != own[:-1]) | (own[1:] == UNKNOWN)
    counts, peaks = np.bincount(ordered[is_new], minlength=len(sample)), peaks_of(device)
    tf32, over_link = np.zeros((2, len(sample)), np.bool_)
    for found, pattern in ((tf32, TF32_KERNEL), (over_link, _TO_OR_FROM_HOST)) if timeline.on_device else ():
        holds = np.array([bool(pattern.search(name)) for name in timeline.spans.name_table] or [False])
        found[group[holds[timeline.spans.names[work.spans]]]] = True
    figures = []
    for rank, place in enumerate(np.argsort(-totals, kind="stable").tolist()):
        row = int(sample[place])
        code, calls, ns = int(work.names[row]), int(counts[place]), int(totals[place])
        name = shorts.get(code, trace.names[code]) if work.calls[row] == UNKNOWN else trace.names[code]
        known = Work(shapes="", dtype=None, reason=_LACKS)
        if work.operands[row] != UNKNOWN and rank < _MOST_HELD:
            known = work_of(name, trace.operands[work.operands[row]])
        if over_link[place]:
            known = replace(known, flops=None, bytes=None, reason=_OVER_LINK)
        rates: dict[str, Any] = {"reason": known.reason or "it takes no time"}
        if not known.reason and ns:
            flops, size = (None if each is None else each * calls for each in (known.flops, known.bytes))
            held = roofline(
                peaks, device, dtype=known.dtype, flops=flops, size=size, seconds=ns / 1e9, tf32=bool(tf32[place])
            )
            rates = {"flops_per_s": flops / (ns / 1e9) if flops else None, **msgspec.structs.asdict(held)}
            if peaks is not None and held.bound:
                kind = CLASSES[classes[row]], known.dtype or ""
                rates["good"] = peaks.good_memory if held.bound == "memory" else peaks.good.get(kind)
        figures.append(
            OperatorFigures(
                name=name, kind=CLASSES[classes[row]], shapes=known.shapes or None, dtype=known.dtype, calls=calls,
                ns=ns, share=ns / work_ns if work_ns else 0.0, flops=known.flops, bytes=known.bytes, **rates,
            )
        )  # fmt: skip
    return figures
