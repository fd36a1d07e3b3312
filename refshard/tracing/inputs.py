"""What a trace says of the tensors that an operator was given, in words of its own."""

import msgspec

from refshard.timeline import Inputs

LONGEST_INPUTS = 512
"""Bytes of "Input Dims" that are kept: lists of hundreds of tensors would take more memory than they tell."""

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
