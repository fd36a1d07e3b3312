"""bitsandbytes on the fake device: its own Python code, and launches where it calls its CUDA library.

bitsandbytes allocates with torch and gives its library pointers and sizes. :func:`install` puts a :class:`_Library` in
place of that library: each call becomes one launch in the recording, with the tensors that the kernel reads and writes.
Nothing is computed. Paged optimizers ask the library for managed memory, which gets addresses on the host but no pages.
"""

# ruff: noqa: ARG001  (functions take the arguments of C functions)
import ctypes
import math
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_ITEM_BYTES = {"fp32": 4, "int32": 4, "fp16": 2, "bf16": 2, "int8": 1, "uint8": 1}
_CODES = 256
"""Entries of a table of codes, also for 4 bits."""
_STATE_BLOCK = 256
"""Elements of 8-bit optimizer state with one scale; also scales of 4-bit weights with one scale of their own."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

_managed: list[tuple[mmap.mmap, int]] = []


class _Part(NamedTuple):
    """A tensor that a kernel touches; an address of 0 is a tensor that was not given."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    reads: bool = True
    writes: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class _Call(NamedTuple):
    """A launch of the operator ``name`` on ``stream``."""

    name: str
    stream: int
    parts: tuple[_Part, ...]


def install(ext: ModuleType) -> None:
    """Let bitsandbytes load a :class:`_Library`; ``ext`` is the fake device's extension."""
    if not ext.is_dry():
        return
    load = ctypes.cdll.LoadLibrary

    def load_library(path: str) -> Any:
        if not (found := re.match(r"libbitsandbytes_cuda\d+(\.\w+)$", Path(path).name)):
            return load(path)
        return _Library(ext, load(str(Path(path).with_name(f"libbitsandbytes_cpu{found[1]}"))))

    ctypes.cdll.LoadLibrary = load_library  # type: ignore[assignment, method-assign]


def managed_bytes() -> int:
    """Bytes of managed memory that paged optimizers have asked for."""
    return sum(size for _, size in _managed)


class _Library:
    """bitsandbytes' CUDA library: kernels that are launched but compute nothing, and functions of its CPU library."""

    def __init__(self, ext: ModuleType, cpu: ctypes.CDLL) -> None:
        self._ext, self._cpu = ext, cpu
        self._others: dict[str, Callable[..., Any]] = {
            "get_context": lambda: 1,
            "cget_managed_ptr": _managed_memory,
            "cprefetch": lambda *_: None,
        }

    def __getattr__(self, name: str) -> Any:
        if "_cpu" in name:
            return getattr(self._cpu, name)
        other = self._others.get(name)
        found = next(((m, make) for pattern, make in _KERNELS if (m := re.fullmatch(pattern, name))), None)

        def call(*arguments: Any) -> Any:
            plain = [getattr(value, "value", value) or 0 for value in arguments]  # ctypes' integers, and null pointers
            if other is not None:
                return other(*plain)
            if found is None:
                raise NotImplementedError(f"the fake CUDA device does not support bitsandbytes' function {name}()")
            match, make = found
            self._launch(make(match, *plain))
            return 0

        setattr(self, name, call)
        return call

    def _launch(self, call: _Call) -> None:
        parts = [part for part in call.parts if part.address]
        signature = " ".join(str(part) for part in parts if part.reads)
        made = " ".join(str(part) for part in parts if not part.reads)
        self._ext.launch_at(
            f"bitsandbytes::{call.name}", f"{signature} -> {made}" if made else signature, call.stream,
            [(part.address, part.nbytes, part.reads, part.writes) for part in parts],
        )  # fmt: skip


def _managed_memory(size: int) -> int:
    """An address of as many bytes as paged optimizer state takes; they are zero, and take no memory until written."""
    made = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    _managed.append((made, size))
    return ctypes.addressof(ctypes.c_char.from_buffer(made))


def _written(address: int, dtype: str, *shape: int) -> _Part:
    return _Part(address, dtype, shape, reads=False, writes=True)


def _updated(address: int, dtype: str, *shape: int) -> _Part:
    return _Part(address, dtype, shape, writes=True)


def _quantize(
    kind: re.Match[str], code: int, a: int, absmax: int, out: int, blocksize: int, n: int, stream: int = 0
) -> _Call:
    bits = 4 if kind["four"] else 8
    return _Call("quantize_4bit" if bits == 4 else "quantize_blockwise", stream, (
        _Part(a, kind["dtype"], (n,)), _Part(code, "fp32", (_CODES,)), _written(out, "uint8", -(-n * bits // 8)),
        _written(absmax, "fp32", -(-n // blocksize)),
    ))  # fmt: skip


def _dequantize(
    kind: re.Match[str], code: int, a: int, absmax: int, out: int, blocksize: int, n: int, stream: int = 0
) -> _Call:
    bits = 4 if kind["four"] else 8
    return _Call("dequantize_4bit" if bits == 4 else "dequantize_blockwise", stream, (
        _Part(a, "uint8", (-(-n * bits // 8),)), _Part(absmax, "fp32", (-(-n // blocksize),)),
        _Part(code, "fp32", (_CODES,)), _written(out, kind["dtype"], n),
    ))  # fmt: skip


def _gemm_4bit(
    kind: re.Match[str], a: int, b: int, absmax: int, absmax_8bit: int, absmax_code: int, absmax_offset: int, out: int,
    bias: int, m: int, n: int, k: int, blocksize: int, quant_type: int, stream: int,
) -> _Call:  # fmt: skip
    scales = -(-n * k // blocksize)
    return _Call("gemm_4bit", stream, (
        _Part(a, kind["dtype"], (m, k)), _Part(b, "uint8", (n * k // 2,)),
        _Part(absmax, "fp32", (-(-scales // _STATE_BLOCK) if absmax_8bit else scales,)),
        _Part(absmax_8bit, "uint8", (scales,)), _Part(absmax_code, "fp32", (_CODES,)),
        _Part(absmax_offset, "fp32", ()), _Part(bias, kind["dtype"], (n,)), _written(out, kind["dtype"], m, n),
    ))  # fmt: skip


def _gemv_4bit(
    kind: re.Match[str], m: int, n: int, k: int, a: int, b: int, absmax: int, code: int, out: int, lda: int, ldb: int,
    ldc: int, blocksize: int, stream: int,
) -> _Call:  # fmt: skip
    return _Call("gemv_4bit", stream, (
        _Part(a, kind["dtype"], (n, k)), _Part(b, "uint8", (m * k // 2,)),
        _Part(absmax, "fp32", (-(-m * k // blocksize),)), _Part(code, "fp32", (16,)),
        _written(out, kind["dtype"], n, m),
    ))  # fmt: skip


def _int8_matmul(
    kind: re.Match[str], context: int, m: int, n: int, k: int, a: int, b: int, c: int, row_scale: int, lda: int,
    ldb: int, ldc: int, stream: int,
) -> _Call:  # fmt: skip
    return _Call("int8_linear_matmul", stream, (
        _Part(b, "int8", (n, k)), _Part(a, "int8", (m, k)), _written(c, "int32", n, m),
    ))  # fmt: skip


def _int8_dequantize(
    kind: re.Match[str], a: int, row_stats: int, col_stats: int, out: int, bias: int, rows: int, cols: int,
    stream: int,
) -> _Call:  # fmt: skip
    return _Call("int8_mm_dequant", stream, (
        _Part(a, "int32", (rows, cols)), _Part(row_stats, "fp32", (rows,)), _Part(col_stats, "fp32", (cols,)),
        _Part(bias, "fp16", (cols,)), _written(out, "fp16", rows, cols),
    ))  # fmt: skip


def _int8_quantize(
    kind: re.Match[str], a: int, out: int, row_stats: int, threshold: float, rows: int, cols: int, stream: int
) -> _Call:  # fmt: skip
    return _Call("int8_vectorwise_quant", stream, (
        _Part(a, "fp16", (rows, cols)), _written(out, "int8", rows, cols), _written(row_stats, "fp32", rows),
    ))  # fmt: skip


def _optimizer_32bit(kind: re.Match[str], g: int, p: int, state1: int, state2: int, unorm: int, *others: Any) -> _Call:
    n, dtype = others[-1], _dtype(kind)
    return _Call("optimizer_update_32bit", 0, (
        _Part(g, dtype, (n,)), _updated(p, dtype, n), _updated(state1, "fp32", *_momenta(kind), n),
        _updated(state2, "fp32", n), _updated(unorm, "fp32", 1),
    ))  # fmt: skip


def _optimizer_8bit(
    kind: re.Match[str], p: int, g: int, state1: int, state2: int, beta1: float, beta2: float, beta3: float,
    alpha: float, eps: float, step: int, lr: float, qmap1: int, qmap2: int, absmax1: int, absmax2: int, *others: Any,
) -> _Call:  # fmt: skip
    n, dtype, momenta = others[-1], _dtype(kind), _momenta(kind)
    blocks = -(-n // _STATE_BLOCK)
    return _Call("optimizer_update_8bit_blockwise", 0, (
        _Part(g, dtype, (n,)), _updated(p, dtype, n), _updated(state1, "uint8", *momenta, n),
        _updated(state2, "uint8", n), _Part(qmap1, "fp32", (_CODES,)), _Part(qmap2, "fp32", (_CODES,)),
        _updated(absmax1, "fp32", *momenta, blocks), _updated(absmax2, "fp32", blocks),
    ))  # fmt: skip


def _momenta(kind: re.Match[str]) -> tuple[int, ...]:
    """AdEMAMix keeps two momenta in its first state."""
    return (2,) if kind["rule"] == "ademamix" else ()


def _dtype(kind: re.Match[str]) -> str:
    return {"32": "fp32", "16": "fp16"}.get(kind["dtype"], kind["dtype"])


def _fill(kind: re.Match[str], a: int, b: int, value: float, n: int) -> _Call:
    return _Call("fill", 0, (_written(a, kind["dtype"], n),))


_FLOAT = "(?P<dtype>fp32|fp16|bf16|32|16)"
_RULE = "(?P<rule>[a-z]+)"
_KERNELS: tuple[tuple[str, Callable[..., _Call]], ...] = (
    (f"cquantize_blockwise_{_FLOAT}(?P<four>_nf4|_fp4)?", _quantize),
    (f"cdequantize_blockwise_{_FLOAT}(?P<four>_nf4|_fp4)?", _dequantize),
    (f"cgemm_4bit_{_FLOAT}", _gemm_4bit),
    (f"cgemm_4bit_inference_naive_{_FLOAT}", _gemv_4bit),
    ("cigemmlt_32", _int8_matmul),
    ("cdequant_mm_int32_fp16", _int8_dequantize),
    ("cint8_vector_quant", _int8_quantize),
    (f"c{_RULE}32bit_grad_{_FLOAT}", _optimizer_32bit),
    (f"c{_RULE}_8bit_blockwise_grad_{_FLOAT}", _optimizer_8bit),
    ("cfill_(?P<dtype>fp32|uint8)", _fill),
)
"""bitsandbytes' functions by name, and what a call of each launches, from its arguments in their order."""
