"""What an operator computes, from its name, its signature and its flags: its kind and its FLOPs.

FLOPs are the ones that run: attention under a causal mask counts half its scores, and what backward recomputes counts
again. A multiplication and an addition are two. Formulas are torch's own (``torch.utils.flop_counter``, where users
register those of their operators too) as far as shapes suffice for them, and written here where a formula needs more
than shapes: convolutions, grouped products, attention in other layouts, recurrent networks.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from refshard.dryrun.recording import Flag
from refshard.specs.hardware import AttentionKernel

_TENSOR = re.compile(r"([A-Za-z]\w*)\[([\d,]*)\]")
_BYTES = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a signature."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors that an operator gets, in the order of its arguments, and the tensors that it makes."""

    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


@lru_cache(maxsize=65536)
def parse(text: str) -> Signature:
    """Read one signature.

    >>> parse("bf16[2,8] bf16[8,4] -> fp32[]").results
    (Tensor(dtype='fp32', shape=()),)
    """
    inputs, _, results = text.partition("->")
    return Signature(_tensors(inputs), _tensors(results))


def element_bytes(dtype: str) -> int:
    """Bytes of an element; 1 for fp8 in all its forms, and for what is not known."""
    return _BYTES.get(dtype, 1)


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in _TENSOR.findall(text)
    )


TRITON = ("inductor::", "triton::")
"""What the names of Triton kernels begin with: generated ones, and those of the script."""
WorkKind = Literal["product", "attention", "optimizer", "move"]
_NO_FORMULA = "priced by its bytes: no FLOP formula; register one (torch.utils.flop_counter.register_flop_formula)"
_OWN_PRODUCTS = "priced by its bytes: a Triton kernel that multiplies matrices, and its FLOPs are not known"
_MASK_UNKNOWN = "its block mask was not computed, so half of the scores count"
_EVEN_LENGTHS = "sequences of one packed batch are taken to be equally long"

_FIRST_OPERAND = {
    "mm": 0, "bmm": 0, "mv": 0, "_int_mm": 0, "_scaled_mm": 0, "_scaled_mm_v2": 0, "_grouped_mm": 0,
    "_scaled_grouped_mm": 0, "_scaled_grouped_mm_v2": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "_addmm_activation": 1,
}  # fmt: skip
"""Products of two matrices, by the place of the first among the tensors; the second follows it."""
_HEAVY = re.compile(
    r"(^|_)(mm|bmm|gemm|matmul|conv|conv[1-3]d|convolution|attention|attn|rnn|gru|lstm|linalg|cholesky|svd|eigh?|lu|qr|"
    r"solve|fft|cdist)(_|$)"
)
_LIGHT = re.compile(r"^(_thnn_fused_|_fft_conj|linalg_(vector_norm|_powsum|cross|diagonal))")
"""Elementwise operators that :data:`_HEAVY` matches by name."""
_PACKED_WEIGHT = frozenset(("gemm_4bit", "gemv_4bit", "int8_linear_matmul"))
"""bitsandbytes' products with a quantised weight; it is unpacked within the kernel."""
_PLAIN_LIBRARIES = frozenset(("aten", "fsdp", "prims", "c10d", "_c10d_functional", "symm_mem", "bitsandbytes"))
"""Libraries of operators that are memory-bound unless a formula here or in torch says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of one attention: ``pairs`` of a query and a key that are computed, over all sequences and heads.

    ``length`` is that of the longer of queries and keys in one sequence, ``head_dim`` the mean of the keys' and the
    values'. ``kernel`` is the one that computes them.
    """

    pairs: float
    length: int
    head_dim: int
    backward: bool
    kernel: AttentionKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator computes.

    ``dtype`` is that of its operands, as signatures spell it. ``scores`` is there for attention only. ``doubt`` says
    what is uncertain about it, empty where nothing is.
    """

    kind: WorkKind
    flops: float = 0.0
    dtype: str = ""
    scores: Scores | None = None
    doubt: str = ""


def work_of(name: str, signature: str, flags: int = 0, flops: float = 0.0) -> Work:
    """The work of the operator ``name`` (``aten::mm``) with the signature and flags of its event.

    ``flops`` are those that the recording has of a generated kernel.
    """
    library, _, op = name.rpartition("::")
    found = parse(signature)
    if name.startswith(TRITON):
        return _generated(op, found, flags, flops)
    if re.match(r"_fused_(adamw?|sgd|adagrad)_?$", op):
        return Work(kind="optimizer", dtype=found.inputs[0].dtype if found.inputs else "")
    work = _attention(op, found, causal=bool(flags & Flag.CAUSAL))
    work = work or _convolution(op, found) or _recurrent(op, found) or _product(op, found)
    if work is not None:
        return work
    registered = _registered_flops(library, op, found)
    if registered is not None:
        return Work(kind="product", flops=registered, dtype=found.inputs[0].dtype if found.inputs else "")
    uncertain = library not in _PLAIN_LIBRARIES or (_HEAVY.search(op) is not None and not _LIGHT.match(op))
    return Work(kind="move", doubt=_NO_FORMULA if uncertain else "")


def _generated(op: str, found: Signature, flags: int, flops: float) -> Work:
    """A Triton kernel: pointwise operators and reductions, fused, or a template of inductor's."""
    if not flops:
        return Work(kind="move", doubt=_OWN_PRODUCTS if flags & Flag.PRODUCTS else "")
    if "flex_attention" not in op:
        return Work(kind="product", flops=flops, dtype=found.inputs[0].dtype)
    query, key, value = found.inputs[:3]
    backward, lengths = "backward" in op, (query.shape[2], key.shape[2])
    pairs = flops / _score_flops(1, key.shape[3], value.shape[3], backward=backward)
    scores = Scores(
        pairs=pairs, length=max(lengths), head_dim=(key.shape[3] + value.shape[3]) // 2, backward=backward,
        kernel="triton",
    )  # fmt: skip
    doubt = _MASK_UNKNOWN if flags & Flag.VALUE_UNKNOWN else ""
    return Work(kind="attention", flops=flops, dtype=query.dtype, scores=scores, doubt=doubt)


def _product(op: str, found: Signature) -> Work | None:
    """Matrix products; ``linear`` has its weight transposed."""
    if op == "linear" and len(found.inputs) > 1:
        given, weight = found.inputs[:2]
        return Work(kind="product", flops=2.0 * given.numel * weight.shape[0], dtype=given.dtype)
    if op in _PACKED_WEIGHT and found.inputs and found.results:
        given = found.inputs[0]
        return Work(kind="product", flops=2.0 * given.shape[-1] * found.results[0].numel, dtype=given.dtype)
    first = _FIRST_OPERAND.get(op)
    if first is None or len(found.inputs) < first + 2:
        return None
    flops = _registered_flops("aten", op, found)
    a, b = found.inputs[first : first + 2]
    return Work(kind="product", flops=_product_flops(a, b) if flops is None else flops, dtype=a.dtype)


def _product_flops(a: Tensor, b: Tensor) -> float:
    """FLOPs of ``a @ b``, batched, or grouped: each row (or column) of one belongs to one matrix of the other."""
    if len(b.shape) == 1:
        return 2.0 * a.numel
    if len(a.shape) == 3 and len(b.shape) == 2:
        return 2.0 * math.prod(a.shape[1:]) * b.shape[-1]
    return 2.0 * a.numel * b.shape[-1]


def _attention(op: str, found: Signature, *, causal: bool) -> Work | None:
    """Fused attention: torch's flash, memory-efficient and cuDNN kernels; key heads may be fewer than query heads."""
    if not re.match(r"_(scaled_dot_product_(?!.*_math)|flash_|efficient_|cudnn_)\w*attention", op):
        return None
    backward = op.endswith("_backward")
    tensors = found.inputs[1:] if backward else found.inputs
    if len(tensors) < 3 or any(len(tensor.shape) not in (3, 4) for tensor in tensors[:3]):
        return None
    query, key, value = tensors[:3]
    offsets = next((t for t in tensors[3:] if t.dtype == "int32" and len(t.shape) == 1 and t.shape[0] > 1), None)
    sequences, doubt = math.prod(query.shape[:-3]), ""
    if op.startswith("_scaled_dot_product") or (op.startswith("_cudnn") and len(query.shape) == 4):
        heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    else:
        heads, queries, keys = query.shape[-2], query.shape[-3], key.shape[-3]
        if offsets is not None:  # sequences packed one after the other; the offsets say where each begins
            packed, sequences, doubt = sequences, offsets.shape[0] - 1, _EVEN_LENGTHS
            queries, keys = -(-packed * queries // sequences), -(-packed * keys // sequences)
    pairs = float(sequences * heads) * _pairs(queries, keys, causal=causal)
    kernel: AttentionKernel = next((name for name in get_args(AttentionKernel) if name in op), "flash")
    scores = Scores(
        pairs=pairs, length=max(queries, keys), head_dim=(key.shape[-1] + value.shape[-1]) // 2, backward=backward,
        kernel=kernel,
    )  # fmt: skip
    flops = _score_flops(pairs, key.shape[-1], value.shape[-1], backward=backward)
    return Work(kind="attention", flops=flops, dtype=query.dtype, scores=scores, doubt=doubt)


def _score_flops(pairs: float, keys: int, values: int, *, backward: bool) -> float:
    """``keys`` and ``values`` are head dimensions.

    Forward multiplies queries with keys and scores with values. Backward does the first again, and has two products
    more for each of the two.
    """
    return pairs * 2 * (3 * keys + 2 * values if backward else keys + values)


def _pairs(queries: int, keys: int, *, causal: bool) -> float:
    """Pairs of one head in one sequence; a causal mask leaves each query the keys up to its own place."""
    if not causal:
        return float(queries * keys)
    shorter = min(queries, keys)
    return shorter**2 / 2 + (queries - shorter) * shorter


def _convolution(op: str, found: Signature) -> Work | None:
    """Convolutions, direct and transposed, in groups or not.

    The gradients of the input and of the weight take as much as the forward pass each.
    """
    if not re.search(r"conv(olution)?(_|[1-3]d|$)", op) or op.startswith(("conv_tbc", "_fft")):
        return None
    if "backward" in op:
        if len(found.inputs) < 3:
            return None
        result, given, weight = found.inputs[:3]
        gradients = sum(len(tensor.shape) > 1 for tensor in found.results) or 2
        return Work(kind="product", flops=gradients * _convolution_flops(given, weight, result), dtype=given.dtype)
    if len(found.inputs) < 2:
        return None
    given, weight = found.inputs[:2]
    result = found.results[0] if found.results else found.inputs[-1]
    return Work(kind="product", flops=_convolution_flops(given, weight, result), dtype=given.dtype)


def _convolution_flops(given: Tensor, weight: Tensor, result: Tensor) -> float:
    """A direct one meets its weight at each place of the result, a transposed one at each of what it is given.

    Where channels do not tell which of the two it is, it is the one that would take less: strides make the result of a
    direct one smaller, and of a transposed one larger.
    """
    direct = result.shape[1] == weight.shape[0]
    transposed = given.shape[1] == weight.shape[0]
    places_in, places_out = math.prod(given.shape[2:]), math.prod(result.shape[2:])
    at_each_place = 2.0 * given.shape[0] * weight.numel
    if direct == transposed:
        return at_each_place * min(places_in, places_out)
    return at_each_place * (places_in if transposed else places_out)


def _recurrent(op: str, found: Signature) -> Work | None:
    """Recurrent networks of cuDNN and MIOpen: each token meets each weight matrix once, in backward twice."""
    if not re.match(r"(_cudnn|miopen)_rnn(_backward)?$", op) or not found.inputs:
        return None
    given, *others = found.inputs
    weights = sum(tensor.numel for tensor in others if len(tensor.shape) == 2)
    tokens = math.prod(given.shape[:-1])
    return Work(kind="product", flops=2.0 * tokens * weights * (2 if "backward" in op else 1), dtype=given.dtype)


def _registered_flops(library: str, op: str, found: Signature) -> float | None:
    """What torch's registry says, None where it has no formula or this one needs more than shapes."""
    import torch
    from torch.utils.flop_counter import flop_registry

    packet = getattr(getattr(torch.ops, library or "aten"), op, None)
    formula: Callable[..., float] | None = flop_registry.get(packet) if packet is not None else None
    if formula is None:
        return None
    results = [list(tensor.shape) for tensor in found.results]
    made = results[0] if len(results) == 1 else results
    try:
        return float(formula(*(list(tensor.shape) for tensor in found.inputs), out_val=made))
    except (TypeError, ValueError, AssertionError, IndexError, AttributeError, KeyError):
        return None
