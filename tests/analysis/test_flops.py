"""FLOPs and bytes of operators by their shapes: against torch's own counter, and worked by hand."""

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from refshard.analysis.operators import Work, work_of
from refshard.events.table import Operands

BF16, FP32 = "c10::BFloat16", "float"


def work(name: str, dims: list[Any], kind: str = BF16, *, values: Any = (), strides: Any = ()) -> Work:
    """A call whose arguments with dimensions are tensors of one type."""
    types = [kind if shape else "Scalar" for shape in dims]
    texts = [json.dumps(column).encode() for column in (dims, list(strides), types, list(values))]
    return work_of(name, Operands(*texts))


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as mode:
        run()
    return int(mode.get_total_flops())


def meta(*shape: int, **options: Any) -> torch.Tensor:
    return torch.empty(shape, device="meta", **options)


def test_products_have_the_flops_that_torch_counts() -> None:
    a, b, bias = meta(48, 96), meta(96, 80), meta(80)
    batch, other, whole = meta(5, 48, 96), meta(5, 96, 80), meta(5, 48, 80)
    assert work("aten::mm", [[48, 96], [96, 80]]).flops == counted(lambda: a @ b) == 2 * 48 * 96 * 80
    assert work("aten::addmm", [[80], [48, 96], [96, 80], [], []]).flops == counted(lambda: torch.addmm(bias, a, b))
    assert work("aten::bmm", [[5, 48, 96], [5, 96, 80]]).flops == counted(lambda: torch.bmm(batch, other))
    assert work("aten::baddbmm", [[5, 48, 80], [5, 48, 96], [5, 96, 80]]).flops == counted(
        lambda: torch.baddbmm(whole, batch, other)
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_have_the_flops_that_torch_counts(transposed: bool, groups: int, stride: int) -> None:
    x, w = meta(3, 8, 30, 26), meta(8, 12 // groups, 5, 3) if transposed else meta(12, 8 // groups, 5, 3)
    given = (w, None, [stride, stride], [2, 1], [1, 1], transposed, [stride - 1, 0], groups)
    out = torch.ops.aten.convolution(x, *given)
    texts = [f"[{stride}, {stride}]", "[2, 1]", "[1, 1]", str(transposed), f"[{stride - 1}, 0]", str(groups)]
    dims = [list(x.shape), list(w.shape), [], *[[]] * 6]
    found = work("aten::convolution", dims, values=["", "", "", *texts])
    assert found.flops == counted(lambda: torch.ops.aten.convolution(x, *given))
    assert found.bytes == 2 * (x.numel() + w.numel() + out.numel())

    forward = found.flops
    for mask in ([True, True, False], [False, True, False]):
        backward = (x, w, [0], *given[2:], mask)
        dims = [list(out.shape), list(x.shape), list(w.shape), *[[]] * 8]
        found = work("aten::convolution_backward", dims, values=["", "", "", "", *texts, str(mask)])
        assert forward is not None
        assert found.flops == sum(mask) * forward
        if groups == 1:  # torch counts the weight's gradient as if there were no groups
            assert found.flops == counted(lambda b=backward: torch.ops.aten.convolution_backward(out, *b))


def test_attention_has_the_flops_that_torch_counts_and_half_if_causal() -> None:
    q, kv = (2, 8, 256, 64), (2, 8, 256, 64)
    shapes = [list(q), list(kv), list(kv), [], [], [], []]
    plain = ["", "", "", "0.", "False", "False", "0.125"]
    name = "aten::_scaled_dot_product_flash_attention"
    whole = work(name, shapes, values=plain)
    assert whole.flops == sdpa_flop_count(q, kv, kv)
    assert whole.bytes == 2 * 4 * 2 * 8 * 256 * 64
    plain[4] = "True"
    assert work(name, shapes, values=plain).flops == sdpa_flop_count(q, kv, kv) // 2

    back = [list(q), list(q), list(kv), list(kv), list(q), [2, 8, 256], *[[]] * 9]
    values = [""] * 15
    values[11] = "False"
    found = work(f"{name}_backward", back, values=values)
    assert found.flops == sdpa_backward_flop_count(q, q, kv, kv)


@pytest.mark.parametrize(("name", "place", "grads"), [
    ("_scaled_dot_product_flash_attention", "is_causal", 0),
    ("_scaled_dot_product_efficient_attention", "is_causal", 0),
    ("_scaled_dot_product_cudnn_attention", "is_causal", 0),
    ("_scaled_dot_product_fused_attention_overrideable", "is_causal", 0),
    ("_scaled_dot_product_flash_attention_for_cpu", "is_causal", 0),
    ("_scaled_dot_product_flash_attention_backward", "is_causal", 1),
    ("_scaled_dot_product_efficient_attention_backward", "is_causal", 1),
    ("_scaled_dot_product_cudnn_attention_backward", "is_causal", 1),
    ("_scaled_dot_product_fused_attention_overrideable_backward", "is_causal", 1),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "is_causal", 1),
])  # fmt: skip
def test_the_mask_is_read_where_torch_has_it(name: str, place: str, grads: int) -> None:
    arguments = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
    dims: list[Any] = [[] for _ in arguments]
    for n in range(3 + grads):
        dims[n] = [1, 2, 128, 64]
    flops = []
    for causal in ("False", "True"):
        values = ["False"] * len(arguments)
        values[arguments.index(place)] = causal
        flops.append(work(f"aten::{name}", dims, values=values).flops)
    assert flops[0] is not None
    assert flops[1] == flops[0] // 2


def test_causal_attention_of_other_lengths_counts_the_pairs_that_are_left() -> None:
    """The mask leaves key j to query i if j <= i: of 64 queries and 256 keys a triangle, of 256 and 64 all but one."""
    name = "aten::_scaled_dot_product_flash_attention"
    values = ["", "", "", "0.", "True", "False", ""]
    few = work(name, [[1, 1, 64, 32], [1, 1, 256, 32], [1, 1, 256, 32], [], [], [], []], values=values)
    assert few.flops == 4 * 32 * (64 * 64 // 2)
    many = work(name, [[1, 1, 256, 32], [1, 1, 64, 32], [1, 1, 64, 32], [], [], [], []], values=values)
    assert many.flops == 4 * 32 * (256 * 64 - 64 * 64 // 2)


def test_bytes_are_each_operand_once_and_the_result() -> None:
    assert work("aten::mm", [[48, 96], [96, 80]]).bytes == 2 * (48 * 96 + 96 * 80 + 48 * 80)
    assert work("aten::mm", [[48, 96], [96, 80], [48, 80]]).bytes == 2 * (48 * 96 + 96 * 80 + 48 * 80)  # out=
    assert work("aten::add", [[6, 5], [5], []], FP32).bytes == 4 * (30 + 5 + 30)
    assert work("aten::add_", [[6, 5], [6, 5], []], FP32).bytes == 4 * (30 + 30 + 30)
    assert work("aten::copy_", [[6, 5], [6, 5], []], FP32).bytes == 4 * 60
    assert work("aten::zero_", [[6, 5]], FP32).bytes == 4 * 30
    expanded = work("aten::mul", [[6, 5], [6, 5]], FP32, strides=[[5, 1], [0, 1]])
    assert expanded.bytes == 4 * (30 + 5 + 30)


def test_the_type_is_that_of_the_factors() -> None:
    types = json.dumps(["float", BF16, BF16]).encode()
    found = work_of("aten::addmm", Operands(b"[[8],[4,2],[2,8]]", b"", types, b""))
    assert found.dtype == "bf16"
    assert found.shapes == "[8], [4, 2], [2, 8]"


@pytest.mark.parametrize(("name", "dims"), [
    ("aten::mm", b"[[4,2],[3,8]]"), ("aten::mm", b"[[4,2]]"), ("aten::mm", b"nonsense"), ("aten::mm", b"{}"),
    ("aten::mm", b'[["a"],[null]]'), ("aten::convolution", b"[[1,3,8,8],[4,3,3,3],[4]]"),
    ("aten::_scaled_dot_product_flash_attention", b"[[1,2,8],[1,2,8],[1,2,8]]"),
    ("vllm::moe_forward", b"[[4,2],[3,8]]"),
])  # fmt: skip
def test_what_cannot_be_counted_says_why(name: str, dims: bytes) -> None:
    found = work_of(name, Operands(dims, b"", b'["float","float","float"]', b""))
    assert (found.flops, found.bytes) == (None, None)
    assert found.reason
