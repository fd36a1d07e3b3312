"""Each of Kineto's categories is read, or ignored on purpose: never taken for a kernel, and never a doubt."""

from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import analyse
from refshard.events.reader import read_events
from refshard.events.table import CATEGORIES, STREAM_SYNC
from tests.analysis.handmade import BASE_US, event, step, write

# libkineto/include/ActivityType.h at commit 114171df of August 2026; mtia_workloadd until June 2025.
ACTIVITY_TYPES = [
    "cpu_op", "user_annotation", "gpu_user_annotation", "gpu_memcpy", "gpu_memset", "kernel", "external_correlation",
    "cuda_runtime", "cuda_driver", "cpu_instant_event", "python_function", "overhead", "mtia_runtime",
    "mtia_ccp_events", "mtia_insight", "cuda_sync", "cuda_event", "mtia_counters", "glow_runtime",
    "cuda_profiler_range", "hpu_op", "xpu_runtime", "xpu_driver", "collective_comm", "privateuse1_runtime",
    "privateuse1_driver", "xpu_scope_profiler", "xpu_sync", "hardware_counters", "mtia_workloadd",
]  # fmt: skip

DEVICE: dict[str, Any] = {"stream": 7, "device": 0}
PLAIN = [
    step(1, 0, 100), event("aten::mm", 1, 9), event("cudaLaunchKernel", 2, 1, cat="cuda_runtime", correlation=1),
    event("gemm", 10, 50, cat="kernel", tid=7, correlation=1, **DEVICE),
]  # fmt: skip


def counter(cat: str, pid: int | str) -> dict[str, Any]:
    return {"ph": "C", "cat": cat, "name": "HBM", "pid": pid, "tid": 7, "ts": f"{BASE_US}+20", "args": {"": 3.5}}


def test_every_activity_type_of_kineto_is_known() -> None:
    assert [name for name in ACTIVITY_TYPES if name not in CATEGORIES] == []


@pytest.mark.parametrize("more", [
    event("allreduce", 12, 70, cat="collective_comm", tid=1, Communicator_id=1),
    event("zeCommandListAppendBarrier", 12, 70, cat="xpu_sync", tid=1, correlation=5, Type="HOST_FENCE"),
    event("cudaEventRecord", 61, 0.001, cat="cuda_event", tid=7, correlation=6, event_id=2, **DEVICE),
    # Without CUDA 12.8 there is no time of the record, and Kineto writes 0.
    event("cudaEventRecord", -1.6e15, 0.001, cat="cuda_event", tid=7, correlation=6, **DEVICE),
    counter("mtia_counters", 0), counter("hardware_counters", "GPU 0 Counters"), counter("xpu_scope_profiler", 0),
], ids=lambda one: one["cat"])  # fmt: skip
def test_what_other_categories_hold_is_ignored(tmp_path: Path, more: dict[str, Any]) -> None:
    with_it = analyse(write(tmp_path / "with.json", [*PLAIN, more])).figures
    without = analyse(write(tmp_path / "without.json", PLAIN)).figures
    assert with_it.whole == without.whole
    assert with_it.warnings == without.warnings


def test_a_wait_for_a_stream_has_the_stream_of_its_arguments(tmp_path: Path) -> None:
    """Kineto draws them in a row of their own since April 2026: the thread is not the stream."""
    sync = event("Stream Sync", 12, 48, cat="cuda_sync", tid=1007, correlation=3, **DEVICE)
    syncs = read_events(write(tmp_path / "t.json", [*PLAIN, sync])).syncs
    assert (syncs.kinds.tolist(), syncs.streams.tolist()) == ([STREAM_SYNC], [7])


@pytest.mark.parametrize("cat", ["mtia_ccp_events", "mtia_insight", "mtia_workloadd"])
def test_events_of_an_mtia_device_are_counted(tmp_path: Path, cat: str) -> None:
    """Since August 2026 its collectives name their process group; what else is there is not documented."""
    found = event("hccl::all_reduce", 5, 9, cat=cat, collective="allreduce", Group_size=2)
    figures = analyse(write(tmp_path / "t.json", [step(1, 0, 100), event("aten::mm", 1, 9), found])).figures
    assert "1 events of an MTIA device are not read" in (figures.unavailable or "")
