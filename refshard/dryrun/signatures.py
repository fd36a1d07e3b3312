"""Reading the signatures of a recording: ``bf16[2,8] bf16[8,4] -> bf16[2,4]`` as shapes and dtypes."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

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

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; of a dtype that is not known, one byte each."""
        return self.numel * element_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors that an operator is given, in the order of its arguments, and those that it makes."""

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
