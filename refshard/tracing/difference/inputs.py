"""What a trace says of the tensors that an operator was given, in words of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.events.table import Operands
from refshard.events.timeline import UNKNOWN, Inputs

LONGEST_INPUTS = 512
"""Bytes of "Input Dims" that are spelled out: lists of hundreds of tensors tell nothing."""

_DTYPES = {
    "float": "fp32",
    "double": "fp64",
    "BFloat16": "bf16",
    "Half": "fp16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "Float8_e4m3fn": "fp8_e4m3",
    "Float8_e4m3fnuz": "fp8_e4m3",
    "Float8_e5m2": "fp8_e5m2",
    "Float8_e5m2fnuz": "fp8_e5m2",
}
"""What the profiler calls a type of element, without its namespace."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputTable:
    """The inputs of a trace, each once, and which of :attr:`TraceFile.operands` each is."""

    names: tuple[Inputs, ...]
    codes: npt.NDArray[np.int32]

    def at(self, operands: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The inputs of the host's events in these rows; :data:`UNKNOWN` where a row or its operands are."""
        if not len(operands):
            return np.full(len(rows), UNKNOWN, np.int32)
        of_row = np.where(rows == UNKNOWN, UNKNOWN, operands[rows])
        return np.append(self.codes, np.int32(UNKNOWN))[of_row]


def input_table(operands: Sequence[Operands]) -> InputTable:
    """What operands are in words; those that differ in strides or values alone are the same inputs."""
    numbers: dict[Inputs, int] = {}
    codes = [
        numbers.setdefault(inputs_of(one.dims, one.types), len(numbers)) if 2 < len(one.dims) <= LONGEST_INPUTS else -1
        for one in operands
    ]
    return InputTable(names=tuple(numbers), codes=np.array(codes, np.int32))


def inputs_of(dims: bytes, types: bytes) -> Inputs:
    """The tensors among an operator's arguments; scalars and absent arguments are left out.

    Both are JSON as the profiler writes "Input Dims" and "Input type": a list with an element per argument. What is no
    such list tells nothing.

    >>> inputs_of(b'[[8192, 4096], [4096, 14336], []]', b'["c10::BFloat16", "c10::BFloat16", "Scalar"]')
    Inputs(dims='[8192,4096]x[4096,14336]', dtype='bf16')
    """
    shapes, names = _list(dims), _list(types)
    found = [(shape, names[place] if place < len(names) else "") for place, shape in enumerate(shapes) if shape]
    dtypes = dict.fromkeys(_dtype(name) for _, name in found)
    return Inputs("x".join(_shape(shape) for shape, _ in found), ",".join(name for name in dtypes if name))


def _list(text: bytes) -> list[object]:
    try:
        return msgspec.json.decode(text, type=list[object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _shape(shape: object) -> str:
    """One tensor's sizes, or those of a list of tensors."""
    return msgspec.json.encode(shape).decode()


def _dtype(name: object) -> str:
    if not isinstance(name, str) or name in ("Scalar", "ScalarList", "TensorList", "GenericList"):
        return ""
    short = name.rpartition("::")[2]
    return _DTYPES.get(short, short)
