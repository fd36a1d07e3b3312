"""Traces with a known answer: made by hand, and real ones of others with exact figures."""

import gzip
import json
from pathlib import Path

import pytest

from refshard.errors import TraceError
from refshard.timeline import Kind
from refshard.tracing.kineto import read_timeline
from refshard.tracing.overlap import StepOverlap, collectives_per_step, mean_ratio, step_overlaps
from tests.tracing.handmade import event, shaped, step, write

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"


def cpu_trace(path: Path) -> Path:
    """Two steps of 100 us on thread 1; gloo on threads 2 and 3.

    Step 1: compute [10, 40) and [50, 80), of which [60, 70) lies under a wait; gloo [30, 55) and [52, 75).
    """
    return write(
        path,
        [
            step(1, 0, 100),
            event("autograd::engine::evaluate_function: MmBackward0", 5, 90),
            event("aten::mm", 10, 30),
            event("aten::addmm", 12, 20),
            event("aten::mm", 50, 10),
            event("refshard::wait(layers.0)", 60, 10, cat="user_annotation"),
            event("aten::sum", 61, 8),
            event("aten::mm", 70, 10),
            event("c10d::_allgather_base_", 20, 1, **shaped([[64], [32], []], ["float", "float", ""])),
            event("gloo:all_gather", 30, 25, cat="user_annotation", tid=2, **shaped([[32]], ["float"])),
            event("aten::copy_", 55, 5, tid=2),
            event("c10d::allreduce_", 49, 1, **shaped([[[10, 2], [5]], []], ["TensorList", ""])),
            event("gloo:all_reduce", 52, 23, cat="user_annotation", tid=3, **shaped([[25]], ["double"])),
            step(2, 100, 100),
            event("aten::mm", 110, 40),
            event("c10d::allreduce_", 199.5, 0.5, **shaped([[[25]], []], ["TensorList", ""])),
        ],
        rank=3,
    )


def test_cpu_trace_by_hand(tmp_path: Path) -> None:
    timeline = read_timeline(cpu_trace(tmp_path / "t.json.gz"))
    assert timeline.rank == 3
    assert [w.step for w in timeline.windows] == [1, 2]
    assert step_overlaps(timeline) == (
        # communication [30, 75); compute [10, 40) + [50, 60) + [70, 80): exposed [40, 50) + [60, 70)
        StepOverlap(step=1, span=100_000, compute=50_000, comm=45_000, exposed=20_000, idle=30_000),
        StepOverlap(step=2, span=100_000, compute=40_000, comm=0, exposed=0, idle=60_000),
    )


def test_overlap_ratio_is_none_without_communication(tmp_path: Path) -> None:
    first, second = step_overlaps(read_timeline(cpu_trace(tmp_path / "t.json")))
    assert first.overlap_ratio == pytest.approx(25 / 45)
    assert second.overlap_ratio is None
    assert mean_ratio([first, second]) == pytest.approx(25 / 45)
    assert mean_ratio([second]) is None


def test_collectives_carry_the_bytes_of_the_unsharded_tensor(tmp_path: Path) -> None:
    timeline = read_timeline(cpu_trace(tmp_path / "t.json"))
    assert collectives_per_step(timeline) == {
        1: (("all_gather", 1, 64 * 4), ("all_reduce", 1, 25 * 8)),
        2: (("all_reduce", 1, 25 * 8),),
    }


def test_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [step(0, 0, 1), event("aten::mm", 0.001, 0.002), event("aten::mm", 0.004, 0.123)])
    (overlap,) = step_overlaps(read_timeline(path))
    assert overlap.compute == 2 + 123


def test_gpu_trace_by_hand(tmp_path: Path) -> None:
    """Kernels, copies and an nccl kernel on streams; host operators and sync events do not count."""
    path = write(
        tmp_path / "t.json",
        [
            step(5, 0, 100),
            event("aten::mm", 0, 90),
            event("ampere_sgemm", 10, 30, cat="kernel", stream=7),
            event("Memcpy HtoD", 35, 10, cat="gpu_memcpy", stream=7),
            event("ncclDevKernel_AllGather", 20, 40, cat="kernel", stream=20),
            event("my_comm", 60, 10, cat="kernel", stream=21, collective="allreduce"),
            event("Stream Wait Event", 70, 20, cat="cuda_sync", stream=20),
        ],
    )
    timeline = read_timeline(path)
    assert {(s.kind, s.lane) for s in timeline.spans} == {
        (Kind.COMPUTE, "stream 7"), (Kind.COPY, "stream 7"), (Kind.COMM, "stream 20"), (Kind.COMM, "stream 21"),
    }  # fmt: skip
    (overlap,) = step_overlaps(timeline)
    assert overlap == StepOverlap(step=5, span=100_000, compute=30_000, comm=50_000, exposed=30_000, idle=40_000)


def test_a_trace_without_shapes_cannot_prove_bytes(tmp_path: Path) -> None:
    timeline = read_timeline(write(tmp_path / "t.json", [step(0, 0, 9), event("c10d::allreduce_", 1, 1)]))
    with pytest.raises(TraceError, match="record the trace with record_shapes=True"):
        collectives_per_step(timeline)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a Kineto trace"),
        (b"[1, 2]", "not a Kineto trace"),
        (b'{"traceEvents": [', "not a Kineto trace"),
        (gzip.compress(b'{"traceEvents": []}' * 100)[:-20], "truncated or damaged gzip"),
        (b'{"traceEvents": []}', "holds no ProfilerStep; call profiler.step"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_timeline(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_timeline(tmp_path / "none.json")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED.name} traces of others are not here")
def test_real_gpu_traces_match_their_exact_figures() -> None:
    """Compute, communication, exposed and busy time over the whole trace, to the nanosecond."""
    manifest = json.loads((SHARED / "manifest.json").read_text())
    checked = 0
    for name, entry in manifest.items():
        exact = entry.get("exact_us") if isinstance(entry, dict) else None
        if not exact:
            continue
        try:
            timeline = read_timeline(SHARED / name)
        except TraceError:
            continue  # some of these hold no steps
        comm, compute = timeline.busy(Kind.COMM), timeline.busy(Kind.COMPUTE)
        found = {
            "compute": compute.length,
            "comm": comm.length,
            "exposed_vs_compute": (comm - compute).length,
            "busy": timeline.busy(*Kind).length,
        }
        assert found == {key: round(exact[key] * 1000) for key in found}, name
        checked += 1
    assert checked >= 3
