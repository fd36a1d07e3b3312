"""What a trace says of an operator's inputs."""

import numpy as np
import pytest

from refshard.analysis.kineto import input_table, inputs_of
from refshard.events.table import Operands
from refshard.events.timeline import UNKNOWN, Inputs


@pytest.mark.parametrize(("dims", "types", "expected"), [
    (b"[[2, 3], [3, 4]]", b'["float", "float"]', Inputs("[2,3]x[3,4]", "fp32")),
    (b"[[4], [2, 3], [3, 4], [], []]", b'["c10::Half", "c10::Half", "c10::Half", "Scalar", "Scalar"]',
     Inputs("[4]x[2,3]x[3,4]", "fp16")),
    (b"[[2], [2]]", b'["float", "c10::BFloat16"]', Inputs("[2]x[2]", "fp32,bf16")),
    (b"[[[2], [3]], []]", b'["TensorList", ""]', Inputs("[[2],[3]]", "")), (b"[[2]]", b"", Inputs("[2]", "")),
    (b"[[2]]", b'{"a": 1}', Inputs("[2]", "")),
    (b'[[2], "x"]', b'["c10::Float8_e4m3fn", 7]', Inputs('[2]x"x"', "fp8_e4m3")),
    (b'"none"', b'["float"]', Inputs("", "")),
])  # fmt: skip
def test_inputs_are_the_tensors_among_the_arguments(dims: bytes, types: bytes, expected: Inputs) -> None:
    assert inputs_of(dims, types) == expected


def test_operands_that_differ_in_strides_alone_are_the_same_inputs() -> None:
    def operands(dims: bytes, strides: bytes) -> Operands:
        return Operands(dims=dims, strides=strides, types=b'["float"]', values=b"")

    given = [(b"[[2, 3]]", b"[[3, 1]]"), (b"[[2, 3]]", b"[[1, 2]]"), (b"[[4]]", b""), (b"[]", b"")]
    table = input_table([operands(dims, strides) for dims, strides in given])
    assert table.names == (Inputs("[2,3]", "fp32"), Inputs("[4]", "fp32"))
    rows = table.at(np.array([2, 0, 1, 3, UNKNOWN], np.int32), np.array([0, 1, 2, 3, 4, UNKNOWN]))
    assert rows.tolist() == [1, 0, 0, UNKNOWN, UNKNOWN, UNKNOWN]
