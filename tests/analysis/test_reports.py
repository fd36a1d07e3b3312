"""Public reports of what tools for traces got wrong, as small traces by hand, and what refshard says of each."""

from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import analyse
from refshard.errors import TraceError
from tests.analysis.handmade import event, step, write

Made = list[dict[str, Any]]
US = 1_000


def kernel(name: str, start: float, ns: float, number: int = 0, *, stream: int = 7, **args: Any) -> dict[str, Any]:
    return event(name, start, ns, cat="kernel", tid=stream, stream=stream, correlation=number, **args)


def call(start: float, number: int, name: str = "cudaLaunchKernel", cat: str = "cuda_runtime") -> dict[str, Any]:
    return event(name, start, 1, cat=cat, correlation=number)


def gemm(start: float = 10, length: float = 50) -> Made:
    """A step of 100 us whose one kernel was launched at its begin."""
    return [step(1, 0, 100), event("aten::mm", 0, 3), call(1, 1), kernel("gemm", start, length, 1)]


REPORTS: list[tuple[str, str, Made, dict[str, int | None]]] = [
    ("facebookresearch/HolisticTraceAnalysis issue 122", "ncclDevKernel_* counted as computation",
     [*gemm(), kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 40, 40, stream=20)],
     {"compute_ns": 50 * US, "comm_ns": 40 * US, "exposed_ns": 20 * US}),
    ("facebookresearch/HolisticTraceAnalysis pull request 162", "synchronisation hid communication as computation",
     [*gemm(), kernel("ncclDevKernel_AllReduce", 60, 20, stream=20),
      event("Stream Sync", 55, 40, cat="cuda_sync", stream=7)],
     {"compute_ns": 50 * US, "exposed_ns": 20 * US}),
    ("facebookresearch/HolisticTraceAnalysis pull request 149", "synchronisation filled idle time",
     [*gemm(), event("Event Sync", 60, 20, cat="cuda_sync", stream=7), kernel("gemm", 80, 10)],
     {"idle_ns": 20 * US, "busy_ns": 60 * US}),
    ("facebookresearch/HolisticTraceAnalysis issue 56", "overlap asked of a trace without communication",
     gemm(), {"comm_ns": 0, "overlap_ratio": None}),
    ("NVIDIA/nccl issue 739", "an all-reduce under a kernel's name for send and receive",
     [*gemm(), kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 60, 20, stream=20, collective="allreduce")],
     {"comm_ns": 20 * US, "exposed_ns": 20 * US}),
    ("intel/torch-xpu-ops issue 5384", "oneCCL's kernels have no arguments of a collective",
     [*gemm(), kernel("oneccl_reduce_base<float, 2, 16, 1, 1, 2>", 60, 20, stream=20)],
     {"comm_ns": 20 * US, "compute_ns": 50 * US}),
    ("pytorch/pytorch issue 130560", "kernels of AMD's GPUs without correlation ids",
     [step(1, 0, 100), event("aten::mm", 0, 3), event("hipLaunchKernel", 1, 1, cat="cuda_runtime"),
      event("Cijk_Alik", 10, 50, cat="kernel", tid=0), event("Cijk_Alik", 70, 10, cat="kernel", tid=0)],
     {"compute_ns": 60 * US, "idle_ns": 10 * US, "idle_launch_ns": None}),
]  # fmt: skip


@pytest.mark.parametrize(("made", "figures"), [one[2:] for one in REPORTS], ids=[one[0] for one in REPORTS])
def test_figures_are_right_where_a_tools_were_not(tmp_path: Path, made: Made, figures: dict[str, int | None]) -> None:
    found = analyse(write(tmp_path / "t.json", made)).figures.whole
    assert {name: getattr(found, name) for name in figures} == figures


WARNED: list[tuple[str, Made, str]] = [
    # 1,000 kernels have "ts": 0, which made a timeline of 51 years
    ("pytorch/kineto issue 109", [*gemm(), kernel("gemm", -1.6e15, 0)], "far_events"),
    ("pytorch/kineto pull request 646", [*gemm(), event("aten::add", 20, -7)], "negative_durations"),
    # The profiler drops the first kernels of each of its sessions without a word.
    ("pytorch/pytorch issue 192021", [*gemm(), call(0, 9)], "kernels_dropped_at_start"),
    # A duration reaches past the next kernel on its stream, by seconds.
    ("AMD-AGI/TraceLens issue 669", [*gemm(), kernel("add", 12, 1)], "overlap_on_stream"),
]


@pytest.mark.parametrize(("made", "code"), [one[1:] for one in WARNED], ids=[one[0] for one in WARNED])
def test_what_a_tool_took_at_its_word_is_warned_of(tmp_path: Path, made: Made, code: str) -> None:
    figures = analyse(write(tmp_path / "t.json", made)).figures
    assert code in [one.code for one in figures.warnings]
    assert figures.whole.compute_ns == 50 * US


HOST: Made = [step(1, 0, 100), event("aten::mm", 0, 3)]


@pytest.mark.parametrize(("made", "told"), [
    pytest.param([*HOST, call(1, 1)], "kernel. Record with ProfilerActivity.CUDA", id="pytorch/kineto issue 996"),
    pytest.param([*HOST, call(1, 1, "urEnqueueKernelLaunch", "xpu_runtime")],
                 "kernel. Record with ProfilerActivity.XPU", id="sgl-project/sglang-omni pull request 2054"),
    pytest.param([*HOST, event("synLaunch", 5, 9, cat="hpu_op")], "1 events of a Gaudi device are not read",
                 id="pytorch/kineto pull request 611"),
])  # fmt: skip
def test_a_device_that_is_not_in_the_trace_is_asked_for(tmp_path: Path, made: Made, told: str) -> None:
    figures = analyse(write(tmp_path / "t.json", made)).figures
    assert figures.host_only
    assert told in (figures.unavailable or "")


def test_events_without_a_category_are_refused(tmp_path: Path) -> None:
    """pytorch/pytorch issue 95460, and Ascend/pytorch issue 133: of the legacy profiler, and of torch_npu."""
    made = [{**one, "cat": ""} for one in gemm()]
    with pytest.raises(TraceError, match=r"4 events have no category \(cat\), as in Ascend's trace_view.json"):
        analyse(write(tmp_path / "trace_view.json", made))


def test_launches_on_an_xpu_count(tmp_path: Path) -> None:
    """Level Zero and the Unified Runtime have their own names for what launches and what waits."""
    names = ("urEnqueueKernelLaunchWithArgsExp", "zeCommandListAppendLaunchKernel", "urQueueFinish")
    made = [call(2.0 * n, n + 1, name, "xpu_runtime") for n, name in enumerate(names)]
    time = analyse(write(tmp_path / "t.json", [*HOST, *made, kernel("gemm", 10, 5, 1)])).figures.host_time
    assert time is not None
    assert (time.launches, [(part.kind, part.count) for part in time.parts if part.kind in ("launches", "waits")]) == (
        2, [("launches", 2), ("waits", 1)],
    )  # fmt: skip


def test_a_step_that_is_alone_begins_on_the_host(tmp_path: Path) -> None:
    """A step of which the host takes most before its first kernel is no compute-bound one."""
    figures = analyse(write(tmp_path / "t.json", [
        step(1, 0, 100), event("aten::mm", 59, 3), call(60, 1), kernel("gemm", 62, 38, 1),
    ])).figures  # fmt: skip
    assert [one.breakdown.span_ns for one in figures.steps] == [100 * US]
    assert figures.steps[0].breakdown.idle_launch_ns == 62 * US
    assert figures.whole.span_ns == 38 * US


def test_the_first_step_begins_when_earlier_work_is_done(tmp_path: Path) -> None:
    """Before, a copy on another stream that ran while the device was behind put 30 us of another step into it."""
    figures = analyse(write(tmp_path / "t.json", [
        kernel("before", 0, 40), step(1, 5, 50), event("Memcpy HtoD", 10, 1, cat="gpu_memcpy", stream=9, correlation=1),
        call(6, 1, "cudaMemcpyAsync"), call(8, 2), kernel("gemm", 41, 50, 2), step(2, 55, 50), call(60, 3),
        kernel("gemm", 92, 50, 3),
    ])).figures  # fmt: skip
    assert [one.breakdown.span_ns for one in figures.steps] == [51 * US, 51 * US]
