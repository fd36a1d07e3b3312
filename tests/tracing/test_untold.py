"""A trace whose device is missing gives no verdict on losses, and no figures of the device."""

from pathlib import Path
from typing import Any

import pytest

from refshard.report.trace.answer import as_objects, trace_answer
from refshard.report.trace.tables import steps as steps_table
from refshard.tracing.analysis import analyse
from tests.report import traces
from tests.report.printed import as_json, notes, rows, tables, verdict
from tests.tracing.handmade import event, step, write

HOST = [step(0, 0, 100), event("aten::mm", 1, 90)]


def call(name: str, at: float = 5, cat: str = "cuda_runtime") -> dict[str, Any]:
    return event(name, at, 1, cat=cat, correlation=int(at))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([call("cudaLaunchKernel"), call("cudaMemcpyAsync", 7)], "the host made 2 launches and copies, but"),
        ([call("hipExtModuleLaunchKernel")], "the host made 1 launches and copies, but"),
        ([call("hipGraphLaunch")], "the host made 1 launches and copies, but"),
        ([call("runFunction - job_prep_and_submit_for_execution", cat="mtia_runtime")], "the host made 1 launches"),
        ([event("dma_request", 3, 2, cat="mtia_ccp_events")], "1 events of an MTIA device are not read"),
        ([event("nccl:all_reduce", 3, 2, cat="user_annotation")], "1 collectives ran over NCCL"),
        ([call("cudaStreamBeginCapture", 4), call("cudaLaunchKernel"), call("cudaStreamEndCapture", 8)],
         "all 1 launches of the trace were captured"),
    ],
)  # fmt: skip
def test_a_device_without_events_is_named(tmp_path: Path, more: list[dict[str, Any]], told: str) -> None:
    found = analyse(write(tmp_path / "t.json", [*HOST, *more]))
    figures = found.figures
    answer = trace_answer([found])
    assert figures.host_only
    assert told in verdict(answer)[0]
    assert "ecord" in verdict(answer)[0]
    assert not any("Try:" in note for note in notes(answer))
    assert figures.device == "no device events"
    (row,) = rows(tables(answer)[0])
    assert (row["compute"], row["comm."], row["exposed"], row["idle"]) == ("-", "-", "-", "-")
    assert row["per step"] == "100 us"
    (built,) = as_json(answer)["traces"]
    assert (built["span_ns"], built["compute_ns"], built["steps"][0]["idle_ns"]) == (100_000, None, None)
    assert "device_events_missing" in {one.code for one in figures.warnings}
    assert [str(row["span"]) for row in steps_table(figures)] == ["100 us", "100 us"]


@pytest.mark.parametrize(
    "more", [[], [call("cudaGetDeviceCount")], [event("gloo:all_reduce", 3, 2, cat="user_annotation", tid=4)]]
)
def test_a_cpu_trace_is_one(tmp_path: Path, more: list[dict[str, Any]]) -> None:
    figures = analyse(write(tmp_path / "t.json", [*HOST, *more])).figures
    assert (figures.host_only, figures.unavailable, figures.device) == (False, None, "cpu")
    assert as_objects([figures])[0]["compute_ns"] == 90_000


def test_ranks_with_a_device_keep_their_verdict(tmp_path: Path) -> None:
    launch = call("cudaLaunchKernel")
    whole = event("gemm", 10, 50, cat="kernel", tid=7, correlation=5, stream=7)
    figures = [
        analyse(write(tmp_path / f"{rank}.json", [*HOST, launch, *more], rank=rank)).figures
        for rank, more in enumerate([[whole], []])
    ]
    answer = trace_answer(list(map(traces.analysis, figures)))
    compute_bound = "Compute-bound: compute takes 100 % of a step. "
    assert verdict(answer)[0].startswith(f"{compute_bound}No loss reaches 1 % of a step of 50.0 us.")
    assert "Left out of this: rank 1." in notes(answer)
