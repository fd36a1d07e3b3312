"""Which operators and kernels take the time: by traces made by hand, by torch's own count, and by brute force."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from refshard.events.reader import read_trace
from refshard.tracing.analysis import analyse
from refshard.tracing.figures import CLASSES, OperatorReport
from tests.tracing.handmade import event, shaped, step, write

H100 = "NVIDIA H100 80GB HBM3"
BF16 = "c10::BFloat16"


class Gpu:
    """A trace in which each operator launches kernels, one after the other; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.count = 0
        self.host = 0.0
        self.device = 1000.0

    def operator(self, names: str | tuple[str, ...], *kernels: tuple[str, float], **args: Any) -> None:
        """Operators within each other, of which the innermost launches; ``args`` are the outermost one's."""
        start, names = self.host, (names,) if isinstance(names, str) else names
        for depth, name in enumerate(names):
            self.events.append(event(name, start + depth, 20 - 2 * depth, **(args if depth == 0 else {})))
        for place, (kernel, ns) in enumerate(kernels):
            self.count += 1
            self.events.append(
                event("cudaLaunchKernel", start + 8 + place, 0.5, cat="cuda_runtime", correlation=self.count)
            )
            self.events.append(self._run(kernel, self.device, ns))
            self.device += ns
        self.host += 30

    def _run(self, name: str, start: float, duration: float, stream: int = 7) -> dict[str, Any]:
        return event(
            name, start, duration, cat="kernel", tid=stream, correlation=self.count, stream=stream, device=0,
            grid=[1, 1, 1], block=[128, 1, 1],
        )  # fmt: skip

    def report(self, path: Path, steps: int = 1, device: str = H100) -> OperatorReport:
        self.events.append(
            event("ncclDevKernel_AllReduce", self.device + 100, 50, cat="kernel", tid=9, stream=9, device=0)
        )
        length = max(self.host, 1)
        write(path, [*(step(n, n * length / steps, length / steps) for n in range(steps)), *self.events])
        properties = json.dumps([{"id": 0, "name": device}])
        path.write_text(
            path.read_text().replace('"schemaVersion"', f'"deviceProperties": {properties}, "schemaVersion"')
        )
        found = analyse(path).figures.operators
        assert found is not None
        return found


def test_rates_and_shares_of_the_roofline_by_hand(tmp_path: Path) -> None:
    """4096 cubed in bf16 is 137.4 GFLOP: in 200 us 687 TFLOPS, 69.5 % of an H100's 989. An addition moves 201 MB."""
    made = Gpu()
    made.operator(
        "aten::mm", ("nvjet_a", 190), ("splitK_reduce", 10), **shaped([[4096, 4096], [4096, 4096]], [BF16] * 2)
    )
    made.operator(
        "aten::add", ("elementwise_kernel", 100), **shaped([[8192, 4096], [8192, 4096], []], [BF16, BF16, "Scalar"])
    )
    report = made.report(tmp_path / "t.json")
    mm, add = report.operators
    assert (mm.name, mm.kind, mm.calls, mm.ns, mm.dtype) == ("aten::mm", "GEMM", 1, 200_000, "bf16")
    assert mm.flops == 2 * 4096**3
    assert mm.bytes == 3 * 2 * 4096**2
    assert mm.flops_per_s == pytest.approx(2 * 4096**3 / 200e-6)
    assert mm.of_peak == mm.of_roofline == pytest.approx(2 * 4096**3 / 200e-6 / 989e12)
    assert mm.bound == "compute"
    assert (add.flops, add.bytes, add.bound) == (None, 3 * 2 * 8192 * 4096, "memory")
    assert add.of_roofline == pytest.approx(3 * 2 * 8192 * 4096 / 100e-6 / 3.35e12)
    assert (mm.share, add.share, report.work_ns, report.hardware) == (200 / 300, 100 / 300, 300_000, "h100-sxm-80gb")


@pytest.mark.parametrize("copy", ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)"])
def test_a_copy_over_the_host_link_is_not_held_against_the_memory(tmp_path: Path, copy: str) -> None:
    """In 2 ms it moves 67 MB, at 33 GB/s: most of PCIe, and 1 % of an H100's memory."""
    made, dims = Gpu(), shaped([[8192, 4096], [8192, 4096]], [BF16] * 2)
    made.operator("aten::copy_", (copy, 2000), **dims)
    made.operator("aten::copy_", ("direct_copy_kernel", 100), **shaped([[4096, 4096], [4096, 4096]], [BF16] * 2))
    over_link, within = made.report(tmp_path / "t.json").operators
    assert (over_link.bytes, over_link.of_roofline, over_link.bound) == (None, None, None)
    assert over_link.reason == "it copies from or to the host: the link bounds it, not the device's memory"
    assert within.of_roofline == pytest.approx(2 * 2 * 4096**2 / 100e-6 / 3.35e12)


def test_a_device_without_a_profile_has_flops_and_no_share(tmp_path: Path) -> None:
    made = Gpu()
    made.operator("aten::mm", ("gemm", 100), **shaped([[64, 64], [64, 64]], [BF16] * 2))
    (mm,) = made.report(tmp_path / "t.json", device="Nonesuch 1").operators
    assert mm.flops_per_s == pytest.approx(2 * 64**3 / 100e-6)
    assert mm.of_peak is None
    assert mm.reason == "no hardware profile of Nonesuch 1"


@pytest.mark.parametrize(("kernel", "peak"), [("ampere_sgemm_128x64", 67e12), ("cutlass_tensorop_s1688gemm", 494.5e12)])
def test_fp32_is_held_against_what_its_kernel_uses(tmp_path: Path, kernel: str, peak: float) -> None:
    made = Gpu()
    made.operator("aten::mm", (kernel, 1000), **shaped([[1024, 1024], [1024, 1024]], ["float"] * 2))
    (mm,) = made.report(tmp_path / "t.json").operators
    assert mm.of_peak == pytest.approx(2 * 1024**3 / 1e-3 / peak)


def test_attention_and_convolutions_are_the_operators_that_were_given_the_whole(tmp_path: Path) -> None:
    made = Gpu()
    names = ("aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward")
    dims = [[1, 2, 64, 32]] * 3 + [[]] * 4
    values = ["", "", "", "0.", "False", "False", ""]
    types = [BF16] * 3 + ["Scalar"] * 4
    made.operator(names, ("flash_fwd_kernel", 40), ("fill", 2), **shaped(dims, types), Concrete_Inputs=values)
    made.operator(("aten::linear", "aten::addmm"), ("gemm", 30))
    made.operator(("aten::convolution", "aten::_convolution", "aten::cudnn_convolution"), ("fprop", 20))
    report = made.report(tmp_path / "t.json")
    assert [(one.name, one.kind, one.ns) for one in report.totals] == [
        ("aten::_scaled_dot_product_flash_attention", "attention", 42_000),
        ("aten::addmm", "GEMM", 30_000),
        ("aten::convolution", "convolution", 20_000),
    ]
    assert report.operators[0].flops == 4 * 2 * 64 * 64 * 32


def test_without_an_operator_a_kernel_goes_by_its_own_name(tmp_path: Path) -> None:
    made = Gpu()
    made.operator("autograd::engine::evaluate_function: MyBackward", ("void my::kernel<float>(int)", 5))
    report = made.report(tmp_path / "t.json")
    assert [(one.name, one.calls) for one in report.operators] == [("kernel<fp32>", 1)]


def test_of_several_steps_all_count_and_what_is_outside_does_not(tmp_path: Path) -> None:
    made = Gpu()
    for _ in range(4):
        made.operator("aten::mm", ("gemm", 10), **shaped([[8, 8], [8, 8]], [BF16] * 2))
    made.operator("aten::mul", ("elementwise", 3))
    made.host -= 30  # the last one is launched after the last step
    report = made.report(tmp_path / "t.json", steps=2)
    assert [(one.name, one.calls, one.ns) for one in report.totals] == [("aten::mm", 4, 40_000)]
    assert report.steps == 2


def test_classes_and_their_order(tmp_path: Path) -> None:
    made = Gpu()
    made.operator("aten::mul_", ("elementwise_kernel", 30))
    made.operator("aten::bmm", ("gemm", 40))
    made.operator("aten::native_layer_norm", ("vectorized_layer_norm", 20))
    made.events.append(event("Optimizer.step#AdamW.step", made.host, 30, cat="user_annotation"))
    made.operator("aten::mul_", ("elementwise_kernel", 10))
    made.operator("my::op", ("unknown", 5))
    report = made.report(tmp_path / "t.json")
    assert [(one.name, one.ns, one.count) for one in report.classes] == [
        ("GEMM", 40_000, 1), ("elementwise", 30_000, 1), ("normalisation", 20_000, 1), ("optimizer", 10_000, 1),
        ("others", 5_000, 1),
    ]  # fmt: skip
    assert [one.share for one in report.classes] == [40 / 105, 30 / 105, 20 / 105, 10 / 105, 5 / 105]
    assert [(one.name, one.kind) for one in report.totals if one.name == "aten::mul_"] == [
        ("aten::mul_", "elementwise"),
        ("aten::mul_", "optimizer"),
    ]


class Model(torch.nn.Module):
    """A convolution, attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 16, 4, stride=4)
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.convolution(x).flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_step_of_a_model_has_the_flops_that_torch_counts(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(2, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded, record_function("ProfilerStep#0"):
        model(x).sum().backward()
    recorded.export_chrome_trace(str(tmp_path / "t.json"))
    figures = analyse(tmp_path / "t.json").figures
    report = figures.operators
    assert report is not None
    counted = {kind: sum((o.flops or 0) * o.calls for o in report.operators if o.kind == kind) for kind in CLASSES}
    attention = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    assert counted["GEMM"] + counted["convolution"] == counter.get_total_flops() - attention
    heads, pairs, width = 2 * 2, 256 * 256, 8
    assert counted["attention"] == (4 + 10) * heads * pairs * width
    # On a CPU the operators' own times add up to what computes.
    assert report.work_ns == sum(one.breakdown.compute_ns for one in figures.steps)


def test_operands_are_kept_once_and_values_only_where_flops_depend_on_them(tmp_path: Path) -> None:
    same = shaped([[4, 4], []], [BF16, "Scalar"])
    events = [
        event("aten::mul", 0, 1, **same, Concrete_Inputs=["", "0.5"]),
        event("aten::mul", 2, 1, **same, Concrete_Inputs=["", "0.7"]),
        event("aten::view", 4, 1, **same),
        event("aten::convolution", 6, 1, **same, Concrete_Inputs=["", "[1, 1]"]),
        event("aten::convolution", 8, 1, **same, Concrete_Inputs=["", "[2, 2]"]),
    ]
    trace = read_trace(write(tmp_path / "t.json", events))
    assert trace.host.operands.tolist() == [0, 0, -1, 1, 2]
    assert [json.loads(one.values or b"null") for one in trace.operands] == [None, ["", "[1, 1]"], ["", "[2, 2]"]]
    assert {json.dumps(json.loads(one.dims)) for one in trace.operands} == {"[[4, 4], []]"}
