"""Which operators and kernels take the time: by traces made by hand, by torch's own count, and by brute force."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, norm
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from refshard.analysis.analyse import analyse
from refshard.analysis.figures import CLASSES, Contention, OperatorReport, Slowdown
from refshard.analysis.operators import find_contention, same_work
from refshard.events.reader import read_events
from refshard.events.timeline import UNKNOWN, Kind
from tests.analysis.handmade import event, note, shaped, step, write
from tests.analysis.small import NAMES, Row, timeline_of

H100 = "NVIDIA H100 80GB HBM3"
BF16 = "c10::BFloat16"


class Gpu:
    """A trace in which each operator launches kernels, one after the other; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.count, self.host, self.device = 0, 0.0, 1000.0

    def operator(self, names: str | tuple[str, ...], *kernels: tuple[str, float], **args: Any) -> None:
        """Operators within each other, of which the innermost launches; ``args`` are the outermost one's."""
        names = (names,) if isinstance(names, str) else names
        for depth, name in enumerate(names):
            self.events.append(event(name, self.host + depth, 20 - 2 * depth, **(args if depth == 0 else {})))
        for place, (kernel, ns) in enumerate(kernels):
            self.count += 1
            self.events += [
                event("cudaLaunchKernel", self.host + 8 + place, 0.5, cat="cuda_runtime", correlation=self.count),
                event(kernel, self.device, ns, cat="kernel", tid=7, correlation=self.count, stream=7, device=0,
                      grid=[1, 1, 1], block=[128, 1, 1]),
            ]  # fmt: skip
            self.device += ns
        self.host += 30

    def report(self, path: Path, steps: int = 1, device: str = H100) -> OperatorReport:
        nccl = event("ncclDevKernel_AllReduce", self.device + 100, 50, cat="kernel", tid=9, stream=9, device=0)
        length = max(self.host, 1) / steps
        events = [*(step(n, n * length, length) for n in range(steps)), *self.events, nccl]
        write(path, events, deviceProperties=[{"id": 0, "name": device}])
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
    made.events.append(note("Optimizer.step#AdamW.step", made.host, 30))
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
    trace = read_events(write(tmp_path / "t.json", events))
    assert trace.host.operands.tolist() == [0, 0, -1, 1, 2]
    assert [json.loads(one.values or b"null") for one in trace.operands] == [None, ["", "[1, 1]"], ["", "[2, 2]"]]
    assert {json.dumps(json.loads(one.dims)) for one in trace.operands} == {"[[4, 4], []]"}


Run = tuple[int, int, int]
"""Of which operands a kernel ran, how long, and how much of that within communication."""


def compared(runs: list[Run]) -> Contention | None:
    """Runs of one kernel, one after the other."""
    rows, operands = [], []
    for n, (code, length, part) in enumerate(runs):
        rows.append(Row(kind=Kind.COMPUTE, lane=0, start=100 * n, end=100 * n + length, launch=0))
        operands.append(code)
        if part:
            rows.append(Row(kind=Kind.COMM, lane=1, start=100 * n, end=100 * n + part, launch=0, name=2))
    rows.sort(key=lambda row: (row.start, row.end, row.lane))
    timeline = timeline_of(rows)
    mine = np.flatnonzero(timeline.spans.of_kind(Kind.COMPUTE))
    classes = np.zeros(len(mine), np.int8)
    return find_contention(timeline, mine, classes, np.array(operands, np.int32), dict(enumerate(NAMES)))


def only(found: Contention | None) -> Slowdown:
    assert found is not None
    (one,) = found.kernels
    assert found.classes == (Slowdown(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "name": one.kind}),)
    return one


def rank_sums(groups: list[tuple[list[int], list[int]]]) -> float:
    """The one-sided chance of ranks as high beside, group by group as scipy has it, joined with weights 1 / (n + 1)."""
    excess = variance = 0.0
    for beside, alone in groups:
        count = len(beside) + len(alone)
        u, p = mannwhitneyu(beside, alone, use_continuity=False, alternative="greater", method="asymptotic")
        off = u - len(beside) * len(alone) / 2
        excess += off / (count + 1)
        if off:
            variance += (off / norm.isf(p) / (count + 1)) ** 2
        else:  # z is 0, so that p does not tell the spread
            _, ties = np.unique([*beside, *alone], return_counts=True)
            spread = count + 1 - float((ties**3 - ties).sum()) / (count * (count - 1))
            variance += len(beside) * len(alone) / 12 * spread / (count + 1) ** 2
    return 1.0 if variance == 0 else float(norm.sf(excess / variance**0.5))


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 9)).map(lambda r: (r[0], r[1], min(r[1:]))),
        max_size=40,
    )
)
def test_it_is_the_difference_of_medians_where_rank_sums_tell_one(runs: list[Run]) -> None:
    found = compared(runs)
    groups: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for code, length, part in runs:
        if 2 * part > length or not part:
            groups[code][part == 0].append(length)
    alike = [pair for pair in groups.values() if min(map(len, pair)) >= 3]
    everything = sum(length for _, length, part in runs if 2 * part > length)
    if not everything:
        assert found is None
        return
    assert found is not None
    assert (found.beside_ns, found.shapeless_ns) == (everything, 0)
    assert found.compared_ns == sum(sum(beside) for beside, _ in alike)
    if not alike:
        assert found.kernels == found.classes == ()
        return
    one = only(found)
    assert one.runs == sum(len(beside) for beside, _ in alike)
    assert one.beside_ns == round(sum(len(beside) * median(beside) for beside, _ in alike))
    assert one.alone_ns == round(sum(len(beside) * median(alone) for beside, alone in alike))
    if abs((chance := rank_sums(alike)) - 0.025) > 1e-6:
        assert one.slower == (one.beside_ns > one.alone_ns and chance < norm.sf(1.96))
    lost = one.beside_ns - one.alone_ns if one.slower else 0
    assert sum(part.lost_ns for part in found.classes) == one.lost_ns == lost


def test_a_run_is_beside_communication_if_more_than_half_of_it_is() -> None:
    """The median of 4 runs is half-way between the middle two. Of a run half within communication nothing is said."""
    alone = [(1, length, 0) for length in (10, 10, 12, 14)]
    one = only(compared([*alone, (1, 20, 11), (1, 20, 20), (1, 26, 20), (1, 30, 16), (1, 40, 20)]))
    assert (one.runs, one.beside_ns, one.alone_ns, one.lost_ns) == (4, 4 * 23, 4 * 11, 4 * 12)
    few = compared([*alone, (1, 20, 11), (1, 20, 20), (1, 20, 10)])
    assert few is not None
    assert (few.kernels, few.beside_ns, few.compared_ns) == ((), 40, 0)


@pytest.mark.parametrize(("beside", "alone", "lost"), [
    ((11, 12, 13), (8, 9, 10), 9),  # 3 above 3: z = 1.964
    ((11, 12, 9), (8, 10, 10), 0),  # mixed: chance
    ((8, 9, 10), (11, 12, 13), 0),  # faster: nothing is lost, and nothing won
    ((10, 10, 10), (10, 10, 10), 0),
])  # fmt: skip
def test_a_difference_within_noise_or_the_wrong_way_is_no_loss(
    beside: tuple[int, ...], alone: tuple[int, ...], lost: int
) -> None:
    one = only(compared([*((1, ns, ns) for ns in beside), *((1, ns, 0) for ns in alone)]))
    assert (one.lost_ns, one.slower, one.times is None) == (lost, lost > 0, lost == 0)


@pytest.mark.parametrize(("groups", "slower"), [
    ([((3, 3, 3, 4, 3), (2, 3, 3, 2, 2))], True),  # but for its ties z would be 1.87
    ([((1, 2, 4, 2), (1, 1, 1)), ((5, 3, 5), (4, 4, 3, 2, 3, 2, 4, 2, 3, 5, 5, 3))], True),  # unweighted 1.86
    ([((2,) * 12, (1,) * 12), ((80, 81, 82), (93, 94, 95))], False),  # most runs are slower, but all take less
])  # fmt: skip
def test_rank_sums_are_joined_over_shapes(groups: list[tuple[tuple[int, ...], tuple[int, ...]]], slower: bool) -> None:
    runs = [
        (code, ns, part and ns)
        for code, pair in enumerate(groups)
        for part, lengths in zip((1, 0), pair)
        for ns in lengths
    ]
    assert (rank_sums([(list(beside), list(alone)) for beside, alone in groups]) < norm.sf(1.96)) or not slower
    assert only(compared(runs)).slower is slower


def test_shapes_tell_runs_of_one_kernel_apart() -> None:
    """One kernel with two shapes, the longer only beside communication: nothing can be compared."""
    assert only(compared([*[(1, 1, 0)] * 3, *[(1, 5, 5)] * 3])).lost_ns == 12
    apart = compared([*[(1, 1, 0)] * 3, *[(2, 5, 5)] * 3])
    assert apart is not None
    assert (apart.kernels, apart.compared_ns, apart.beside_ns, apart.shapeless_ns) == ((), 0, 15, 0)
    shapeless = compared([*[(UNKNOWN, 1, 0)] * 3, *[(UNKNOWN, 5, 5)] * 3])
    assert shapeless is not None
    assert (shapeless.kernels, shapeless.shapeless_ns) == ((), 15), "one name alone does not say that work is the same"


class Layers:
    """Kernels of layers in steps, launched in turn: ``(step, unit, kernel)``, each by number."""

    def __init__(self, *kernels: tuple[int, int, int], geometry: str = " [8, 1, 1] [128, 1, 1]") -> None:
        rows = [
            Row(kind=Kind.COMPUTE, lane=0, start=n, end=n + 1, launch=n, unit=unit, name=name)
            for n, (_, unit, name) in enumerate(kernels)
        ]
        steps = np.array([step for step, _, _ in kernels], np.int32)
        signatures = tuple(name + geometry for name in NAMES)
        self.spans = replace(timeline_of(rows).spans, steps=steps, signature_names=signatures)

    def works(self, operands: list[int] | None = None) -> list[int]:
        """The works of the kernels, numbered by their first occurrence."""
        count = len(self.spans)
        codes = np.array(operands or [UNKNOWN] * count, np.int32)
        numbers: dict[int, int] = {UNKNOWN: UNKNOWN}
        found = same_work(self.spans, np.arange(count), codes).tolist()
        return [numbers.setdefault(code, len(numbers) - 1) for code in found]


N = UNKNOWN


@pytest.mark.parametrize(("kernels", "works"), [
    # Without shapes the same place in the same layer is the same work.
    ([(0, 0, 0), (0, 0, 3), (0, 0, 0), (0, 1, 0), (0, 1, 3), (0, 1, 0), (1, 0, 0), (1, 0, 3), (1, 0, 0)],
     [0, 1, 2, 0, 1, 2, 0, 1, 2]),
    # The second layer has one kernel more, or has them in another order.
    ([(0, 0, 0), (0, 0, 3), (0, 1, 0), (0, 1, 3), (0, 1, 3)], [0, 1, 2, 3, 4]),
    ([(0, 0, 0), (0, 0, 3), (0, 1, 3), (0, 1, 0)], [0, 1, 2, 3]),
    # Without units it is the same place in the same step.
    ([(0, N, 0), (0, N, 0), (1, N, 0), (1, N, 0)], [0, 1, 0, 1]), ([(0, N, 0), (0, N, 0), (1, N, 0)], [0, 1, 2]),
])  # fmt: skip
def test_kernels_at_the_same_place_do_the_same_work(kernels: list[tuple[int, int, int]], works: list[int]) -> None:
    assert Layers(*kernels).works() == works


def test_shapes_decide_where_they_are_known() -> None:
    kernels = ((0, N, 0), (0, N, 0), (1, N, 0), (1, N, 3))
    assert Layers(*kernels).works([5, 5, 5, 5]) == [0, 0, 0, 1]
    assert Layers(*kernels).works([5, 6, 6, N]) == [0, 1, 1, 2]
    assert Layers(*kernels, geometry="  ").works([5, 5, N, N]) == [0, 0, N, N]
