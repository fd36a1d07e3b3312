"""What a trace says of an operator's inputs."""

import pytest

from refshard.timeline import Inputs
from refshard.tracing.inputs import inputs_of


@pytest.mark.parametrize(
    ("dims", "types", "expected"),
    [
        (b"[[2, 3], [3, 4]]", b'["float", "float"]', Inputs("[2,3]x[3,4]", "fp32")),
        (b"[[4], [2, 3], [3, 4], [], []]", b'["c10::Half", "c10::Half", "c10::Half", "Scalar", "Scalar"]',
         Inputs("[4]x[2,3]x[3,4]", "fp16")),
        (b"[[2], [2]]", b'["float", "c10::BFloat16"]', Inputs("[2]x[2]", "fp32,bf16")),
        (b"[[[2], [3]], []]", b'["TensorList", ""]', Inputs("[[2],[3]]", "")),
        (b"[[2]]", b"", Inputs("[2]", "")),
        (b"[[2]]", b'{"a": 1}', Inputs("[2]", "")),
        (b'[[2], "x"]', b'["c10::Float8_e4m3fn", 7]', Inputs('[2]x"x"', "fp8_e4m3")),
        (b'"none"', b'["float"]', Inputs("", "")),
    ],
)  # fmt: skip
def test_inputs_are_the_tensors_among_the_arguments(dims: bytes, types: bytes, expected: Inputs) -> None:
    assert inputs_of(dims, types) == expected
