"""Traces with a known answer, made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import step_breakdowns
from refshard.errors import TraceError
from refshard.events.timeline import Kind
from tests.analysis.handmade import BASE_US, event, note, shaped, step, write
from tests.events.spans import listed


def cpu_trace(path: Path) -> Path:
    """Two steps of 100 us on thread 1; gloo on threads 2 and 3.

    Step 1: compute [10, 40) and [50, 80), of which [60, 70) lies under a wait; gloo [30, 55) and [52, 75).
    """
    return write(
        path,
        [
            step(1, 0, 100), event("autograd::engine::evaluate_function: MmBackward0", 5, 90),
            event("aten::mm", 10, 30), event("aten::addmm", 12, 20), event("aten::mm", 50, 10),
            note("refshard::wait(layers.0)", 60, 10), event("aten::sum", 61, 8), event("aten::mm", 70, 10),
            event("c10d::_allgather_base_", 20, 1, **shaped([[64], [32], []], ["float", "float", ""])),
            note("gloo:all_gather", 30, 25, tid=2, **shaped([[32]], ["float"])), event("aten::copy_", 55, 5, tid=2),
            event("c10d::allreduce_", 49, 1, **shaped([[[10, 2], [5]], []], ["TensorList", ""])),
            note("gloo:all_reduce", 52, 23, tid=3, **shaped([[25]], ["double"])), step(2, 100, 100),
            event("aten::mm", 110, 40),
            event("c10d::allreduce_", 199.5, 0.5, **shaped([[[25]], []], ["TensorList", ""])),
        ],
        rank=3,
    )  # fmt: skip


def test_cpu_trace_by_hand(tmp_path: Path) -> None:
    timeline = read_timeline(cpu_trace(tmp_path / "t.json.gz"))
    assert timeline.rank == 3
    assert [w.step for w in timeline.windows] == [1, 2]
    first, second = step_breakdowns(timeline)
    # communication [30, 75); compute [10, 40) + [50, 60) + [70, 80): exposed [40, 50) + [60, 70)
    # what runs under the wait, [61, 69), prepares nothing's compute: it is the collective's own arithmetic
    assert (first.span_ns, first.compute_ns, first.comm_ns, first.prep_ns) == (100_000, 50_000, 45_000, 8_000)
    assert (first.exposed_ns, first.exposed_any_ns) == (20_000, 12_000)
    # idle before compute is the host's doing, and so is the rest of a step after its last operator
    assert (first.idle_ns, first.idle_host_ns, first.idle_dependency_ns) == (30_000, 30_000, 0)
    assert (second.span_ns, second.compute_ns, second.comm_ns, second.exposed_ns) == (100_000, 40_000, 0, 0)
    assert second.idle_ns == 60_000


def test_gloo_spans_know_when_and_for_which_unit_they_were_announced(tmp_path: Path) -> None:
    """First in, first out per kind; a reduce-scatter of gloo's runs as an all-reduce."""

    def announced(name: str, unit: str, start: float) -> list[dict[str, Any]]:
        label = note(f"refshard::reduce_scatter({unit})", start, 2)
        return [label, event(name, start + 0.5, 1, **shaped([[8], [16]], ["float", "float"]))]

    timeline = read_timeline(write(tmp_path / "t.json", [
        step(0, 0, 100), note("gloo:all_reduce", 1, 4, tid=2, **shaped([[3]], ["float"])),
        *announced("c10d::_reduce_scatter_base_", "a", 10), *announced("c10d::_reduce_scatter_base_", "b", 20),
        note("gloo:all_reduce", 40, 9, tid=3, **shaped([[16]], ["float"])),
        note("gloo:all_reduce", 30, 9, tid=2, **shaped([[16]], ["float"])),
    ]))  # fmt: skip
    facts = [(c.op, c.unit, c.bytes, c.announced, c.start and c.start - BASE_US * 1000) for c in timeline.collectives]
    assert facts == [
        ("all_reduce", None, 12, False, 1_000),
        ("reduce_scatter", "a", 64, True, 30_000),
        ("reduce_scatter", "b", 64, True, 40_000),
    ]
    assert [launch - BASE_US * 1000 for launch in timeline.spans.launches[1:].tolist()] == [10_500, 20_500]
    assert [timeline.spans.unit_names[unit] for unit in timeline.spans.units[1:]] == ["a", "b"]


def test_emulated_spans_are_communication_and_run_by_their_own_names(tmp_path: Path) -> None:
    """Step [0, 100): compute [10, 50), a reduce-scatter [30, 70) that nothing calls an all-reduce."""
    timeline = read_timeline(write(tmp_path / "t.json", [
        step(0, 0, 100), event("aten::mm", 10, 40),
        event("c10d::_reduce_scatter_base_", 5, 1, cat="user_annotation",
              **shaped([[8], [16]], ["float", "float"])),
        note("c10d::allreduce_", 7, 1, **shaped([[[4]]], ["TensorList"])),
        note("emulated:all_reduce", 75, 5, tid=2, **shaped([[4]], ["double"])),
        note("emulated:reduce_scatter", 30, 40, tid=2, **shaped([[16]], ["float"])),
    ]))  # fmt: skip
    assert [(c.op, c.bytes, c.announced, c.lane) for c in timeline.collectives] == [
        ("reduce_scatter", 64, True, "emulated 2"), ("all_reduce", 32, True, "emulated 2"),
    ]  # fmt: skip
    (found,) = step_breakdowns(timeline)
    assert (found.comm_ns, found.exposed_ns, found.compute_ns) == (45_000, 25_000, 40_000)


def test_on_a_gpu_whatever_kernels_an_emulated_collective_runs_are_communication(tmp_path: Path) -> None:
    """It takes its link, copies and spins; a product that is launched beside it is none of it."""

    def launched(name: str, launch: float, start: float, duration: float, stream: int) -> list[dict[str, Any]]:
        number = int(launch * 10)
        return [
            event("cudaLaunchKernel", launch, 0.5, cat="cuda_runtime", correlation=number),
            event(name, start, duration, cat="kernel", stream=stream, correlation=number),
        ]

    timeline = read_timeline(write(tmp_path / "t.json", [
        step(0, 0, 100), note("c10d::_allgather_base_", 5, 5, **shaped([[16], [8]], ["float", "float"])),
        note("emulated:all_gather", 6, 3), *launched("refshard_emulated_start", 6, 20, 2, 9),
        *launched("elementwise_kernel", 7, 22, 8, 9), *launched("refshard_emulated_hold", 8, 30, 30, 9),
        *launched("gemm", 12, 25, 40, 7),
    ]))  # fmt: skip
    assert {(s.name, s.kind) for s in listed(timeline.spans)} == {
        ("refshard_emulated_start", Kind.COMM), ("elementwise_kernel", Kind.COMM),
        ("refshard_emulated_hold", Kind.COMM), ("gemm", Kind.COMPUTE),
    }  # fmt: skip
    (one,) = timeline.collectives
    assert (one.op, one.bytes, len(one.rows)) == ("all_gather", 64, 3)
    assert one.start is not None
    assert one.end is not None
    assert one.end - one.start == 40_000


def test_gpu_trace_by_hand(tmp_path: Path) -> None:
    """Kernels, copies and an nccl kernel on streams; host operators and sync events do not count."""
    timeline = read_timeline(write(tmp_path / "t.json", [
        step(5, 0, 100), event("aten::mm", 0, 90), event("ampere_sgemm", 10, 30, cat="kernel", stream=7),
        event("Memcpy HtoD", 35, 10, cat="gpu_memcpy", stream=7),
        event("ncclDevKernel_AllGather", 20, 40, cat="kernel", stream=20),
        event("my_comm", 60, 10, cat="kernel", stream=21, collective="allreduce"),
        event("Stream Wait Event", 70, 20, cat="cuda_sync", stream=20),
    ]))  # fmt: skip
    assert {(s.kind, s.lane) for s in listed(timeline.spans)} == {
        (Kind.COMPUTE, "stream 7"), (Kind.COPY, "stream 7"), (Kind.COMM, "stream 20"), (Kind.COMM, "stream 21"),
    }  # fmt: skip
    (found,) = step_breakdowns(timeline)
    # the only step lasts from its begin on the host to its last event on the device
    assert (found.span_ns, found.compute_ns, found.comm_ns) == (70_000, 30_000, 50_000)
    assert (found.copy_ns, found.exposed_ns, found.exposed_any_ns, found.idle_ns) == (10_000, 30_000, 25_000, 10_000)


def launched(name: str, at: float, start: float, duration: float, number: int, **args: Any) -> list[dict[str, Any]]:
    """A kernel, and its launch on the host at ``at``."""
    device: dict[str, Any] = {"stream": 7, **args}
    return [
        event("cudaLaunchKernel", at, 0.5, cat="cuda_runtime", correlation=number),
        event(name, start, duration, cat="kernel", tid=7, correlation=number, **device),
    ]


def test_a_kernel_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    """The device runs behind the host: the last kernel of step 1 runs in step 2, as the host counts."""
    timeline = read_timeline(write(tmp_path / "t.json", [
        step(1, 0, 20), step(2, 20, 20), step(3, 40, 20), *launched("a", 1, 5, 10, 1), *launched("b", 12, 18, 12, 2),
        *launched("ncclDevKernel_AllGather", 21, 22, 10, 3, stream=20), *launched("c", 25, 35, 10, 4),
        *launched("outside", 61, 62, 3, 5),
    ]))  # fmt: skip
    assert [(w.step, w.start - BASE_US * 1000, w.end - BASE_US * 1000) for w in timeline.windows] == [
        (1, 5_000, 30_000), (2, 30_000, 45_000),
    ]  # fmt: skip
    assert timeline.spans.steps.tolist() == [1, 1, 2, 2, -1]


def test_classes_stand_in_order_of_precedence(tmp_path: Path) -> None:
    """Communication, then what prepares a reduction, then copies, then compute; a name makes the difference."""

    def annotation(name: str, start: float) -> dict[str, Any]:
        return note(name, start, 9)

    memcpy = event("Memcpy DtoD", 26, 1, cat="gpu_memcpy", stream=7, correlation=6)
    spans = read_timeline(write(tmp_path / "t.json", [
        step(0, 0, 100), annotation("FSDP::post_backward_reduce (layers.1)", 0), *launched("chunk_cat", 1, 20, 1, 1),
        *launched("ncclDevKernel_ReduceScatter", 2, 21, 1, 2),
        event("cudaMemcpyAsync", 3, 1, cat="cuda_runtime", correlation=6), memcpy,
        annotation("FSDP::all_gather_copy_out (layers.0)", 10), *launched("split", 11, 22, 1, 3),
        *launched("gemm", 30, 31, 1, 4), *launched("", 32, 33, 1, 5),
    ])).spans  # fmt: skip
    assert [(s.name, s.kind) for s in listed(spans)] == [
        ("chunk_cat", Kind.PREP), ("ncclDevKernel_ReduceScatter", Kind.COMM), ("split", Kind.COPY),
        ("Memcpy DtoD", Kind.PREP), ("gemm", Kind.COMPUTE), ("", Kind.UNCLASSIFIED),
    ]  # fmt: skip
    units = [spans.unit_names[unit] if unit >= 0 else None for unit in spans.units]
    assert units == ["layers.1", "layers.1", "layers.0", "layers.1", None, None]


def test_a_correlation_of_another_numbering_launches_nothing(tmp_path: Path) -> None:
    """Traces of 2023 number kernels' external ids by correlation: an operator that was over launched none of them.

    What ran around the call did.
    """
    spans = read_timeline(write(tmp_path / "t.json", [
        step(0, 0, 100), event("aten::mm", 1, 2, External_id=5), event("aten::add", 10, 5, External_id=6),
        *launched("a", 8, 20, 1, 1, External_id=5), *launched("b", 12, 22, 1, 2, External_id=6),
        *launched("c", 13, 24, 1, 3, External_id=5),
    ])).spans  # fmt: skip
    assert [spans.name_table[code] for code in spans.operators] == ["a", "aten::add", "aten::add"]


def test_spans_know_the_operators_inputs_calls_and_whether_autograd_made_them(tmp_path: Path) -> None:
    """The innermost operator counts, by id or around the call; a step is none, though it was written as one in 2021."""
    shapes = shaped([[2, 3], [3, 4], []], ["c10::BFloat16", "c10::BFloat16", "Scalar"])
    spans = read_timeline(write(tmp_path / "t.json", [
        event("ProfilerStep#0", 0, 100, cat="operator"),
        event("aten::linear", 1, 9),
        event("aten::mm", 2, 7, External_id=5, **shapes),
        *launched("a", 3, 20, 1, 1, External_id=5), *launched("b", 4, 22, 1, 2),
        *launched("c", 9, 24, 1, 3), *launched("d", 12, 26, 1, 4),
        event("autograd::engine::evaluate_function: MmBackward0", 30, 10, External_id=9),
        event("aten::mm", 31, 5, **shapes), *launched("e", 32, 40, 1, 5),
    ])).spans  # fmt: skip
    assert [spans.name_table[code] for code in spans.operators] == ["aten::mm"] * 2 + ["aten::linear", "d", "aten::mm"]
    inputs = [spans.input_names[code] if code >= 0 else None for code in spans.inputs]
    both = ("[2,3]x[3,4]", "bf16")
    assert inputs == [both, both, None, None, both]
    assert spans.in_autograd.tolist() == [False] * 4 + [True]
    first, second, third, fourth, fifth = spans.calls.tolist()
    assert first == second
    assert len({first, third, fourth, fifth}) == 4
    assert fourth == -1


def test_inputs_too_long_to_keep_are_not_told(tmp_path: Path) -> None:
    spans = read_timeline(write(tmp_path / "t.json", [
        step(0, 0, 100), event("aten::_foreach_add_", 1, 5, **shaped([[[1024, 1024]] * 100], ["TensorList"])),
        *launched("a", 2, 20, 1, 1),
    ])).spans  # fmt: skip
    assert spans.inputs.tolist() == [-1]
    assert spans.input_names == ()


def test_the_harness_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no ProfilerStep; call"):
        read_timeline(write(tmp_path / "t.json", [event("aten::mm", 0, 9)]))


def test_a_trace_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no kernels and copies, no gloo"):
        read_timeline(write(tmp_path / "t.json", [event("main", 0, 9, cat="python_function")]))
    (idle,) = step_breakdowns(read_timeline(write(tmp_path / "t.json", [step(0, 0, 9)])))
    assert (idle.span_ns, idle.idle_ns, idle.busy_ns) == (9000, 9000, 0)


def windows_of(path: Path) -> list[tuple[int | None, int, int]]:
    base = BASE_US * 1000
    return [(w.step, w.start - base, w.end - base) for w in read_timeline(path).windows]


def test_steps_whose_numbers_repeat_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json",
        [step(0, 0, 10), step(1, 10, 10), step(0, 20, 10), step(1, 30, 10), event("aten::mm", 25, 3)],
    )
    assert [number for number, *_ in windows_of(path)] == [0, 1, 2, 3]
    assert read_timeline(path).spans.steps.tolist() == [2]


def test_steps_of_one_thread_count_and_none_within_another(tmp_path: Path) -> None:
    other = [{**step(n, at, 4), "tid": 9} for n, at in ((0, 3), (1, 40))]
    path = write(tmp_path / "t.json", [*other, step(0, 0, 10), step(1, 10, 10), step(2, 20, 10), step(7, 22, 3)])
    assert windows_of(path) == [(0, 0, 10_000), (1, 10_000, 20_000), (2, 20_000, 30_000)]


def test_a_step_without_compute_ends_before_the_next_computes(tmp_path: Path) -> None:
    copy = event("Memcpy HtoD", 30, 90, cat="gpu_memcpy", stream=9, correlation=2)
    path = write(tmp_path / "t.json", [
        step(0, 0, 10), step(1, 10, 10), step(2, 20, 10), *launched("a", 1, 5, 20, 1),
        event("cudaMemcpyAsync", 12, 1, cat="cuda_runtime", correlation=2), copy, *launched("b", 22, 40, 20, 3),
    ])  # fmt: skip
    assert windows_of(path) == [(0, 5_000, 25_000), (1, 25_000, 40_000), (2, 40_000, 120_000)]


def test_of_launches_with_one_correlation_the_last_before_the_kernel_counts_and_zero_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [
        step(0, 0, 50), step(1, 50, 50), *launched("a", 1, 5, 10, 4), *launched("b", 60, 65, 10, 4),
        event("cudaMalloc", 2, 1, cat="cuda_runtime", correlation=0),
        event("c", 80, 5, cat="kernel", stream=7, correlation=0),
    ])  # fmt: skip
    assert read_timeline(path).spans.steps.tolist() == [0, 1, -1]


def test_times_before_zero_are_times(tmp_path: Path) -> None:
    events = [{**step(0, 0, 0), "ts": -50, "dur": 40}]
    events += [{**e, "ts": at, "dur": 10} for e, at in zip(launched("a", 0, 0, 0, 1), (-45, -30))]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (window,) = read_timeline(path).windows
    assert (window.start, window.end) == (-50_000, -20_000)
