"""Every doubt is named, on a trace that gives reason for it; a trace that gives none has none."""

from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import analyse
from refshard.analysis.figures import TraceWarning
from refshard.report.trace.answer import as_objects, trace_answer
from refshard.report.trace.sections import steps as steps_table
from tests.analysis.handmade import event, note, shaped, step, write
from tests.report import traces
from tests.report.printed import as_json, notes, rows, tables, verdict


def launch(number: int, at: float, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event(name, at, 0.5, cat="cuda_runtime", correlation=number)


def kernel(number: int, start: float, duration: float = 5, name: str = "gemm", **args: Any) -> dict[str, Any]:
    device: dict[str, Any] = {"stream": 7, "device": 0, **args}
    return event(name, start, duration, cat="kernel", tid=7, correlation=number, **device)


CLEAN = [step(0, 0, 50), launch(1, 1), kernel(1, 10), launch(2, 2), kernel(2, 20), launch(3, 3), kernel(3, 30)]
GROUP: dict[str, Any] = {
    "Process Group Name": "0", "Group size": 2, "In msg nelems": 4, "Out msg nelems": 4, "dtype": "Float",
}  # fmt: skip


def warnings(path: Path, events: list[dict[str, Any]]) -> dict[str, TraceWarning]:
    found = analyse(write(path / "t.json", events)).figures.warnings
    assert len({warning.code for warning in found}) == len(found)
    return {warning.code: warning for warning in found}


def test_a_clean_trace_has_none(tmp_path: Path) -> None:
    nccl = kernel(4, 36, name="ncclDevKernel_AllReduce_Sum_f32", stream=9, collective="allreduce", **GROUP)
    assert warnings(tmp_path, [*CLEAN, launch(4, 4), nccl]) == {}


@pytest.mark.parametrize(("more", "code", "count", "ns"), [
    ([kernel(9, 36)], "launches_missing", 1, None), ([launch(4, 45), kernel(4, 40)], "kernels_before_launch", 1, 5000),
    ([launch(4, 45), kernel(4, 41, name="ncclDevKernel_AllGather", collective="allgather", **GROUP)],
     "collectives_before_launch", 1, 4000),
    ([launch(4, 0.2)], "kernels_dropped_at_start", 1, None),
    ([launch(4, 1.7), launch(5, 1.8)], "kernels_dropped", 2, None),
    ([launch(4, 9), launch(5, 9.5, "hipExtModuleLaunchKernel")], "kernels_cut_off", 2, None),
    ([launch(4, 4), kernel(4, 32)], "overlap_on_stream", 1, 3000),
    ([launch(4, 4), kernel(4, 40, name="")], "unclassified", 1, 5000),
    ([launch(4, 4), kernel(4, 40, device=1)], "several_devices", 2, None),
    ([step(1, 50, 10)], "steps_cut_off", 1, None), ([launch(4, 60), kernel(4, 61)], "outside_steps", 1, 5000),
    ([event("Activity Buffer Request", 12, 9, cat="overhead", tid=3)], "profiler_overhead", 1, 9000),
    ([launch(4, 4), kernel(4, 40, name="ncclDevKernel_AllReduce", **{**GROUP, "Process Group Name": None})],
     "no_process_group_metadata", 1, None),
    ([event("c10d::allreduce_", 5, 1, **shaped([[[4]], []], ["TensorList", ""]))],
     "collectives_without_execution", 1, None),
    ([kernel(4, -3, -1)], "negative_durations", 1, None),
])  # fmt: skip
def test_each_doubt_is_named(tmp_path: Path, more: list[dict[str, Any]], code: str, count: int, ns: int | None) -> None:
    found = warnings(tmp_path, [*CLEAN, *more])
    assert code in found, found
    assert (found[code].count, found[code].ns) == (count, ns)
    assert found[code].message


def without_rank(path: Path, events: list[dict[str, Any]], info: str = "{}", name: str = "t.json") -> Path:
    path = write(path / name, events)
    path.write_text(path.read_text().replace('{"rank": 0}', info).replace("{", '{"with_stack": 1, ', 1))
    return path


def test_a_trace_without_steps_says_so(tmp_path: Path) -> None:
    wait = note("FSDP::post_backward_rs_wait (a)", 2.5, 0.25)
    figures = analyse(without_rank(tmp_path, [*CLEAN[1:], wait])).figures
    assert {w.code for w in figures.warnings} == {"no_steps", "recorded_with_stacks"}
    assert figures.rank is None
    assert [s.step for s in figures.steps] == [None]
    assert figures.steps[0].breakdown == figures.whole
    assert figures.steps[0].reduce_wait == figures.reduce_wait
    assert figures.reduce_wait.host_ns == 250


NCCL = [launch(4, 4), kernel(4, 36, name="ncclDevKernel_AllReduce", stream=9, collective="allreduce", **GROUP)]
COPY = event("Memcpy PtoP (Device -> Device)", 40, 1, cat="gpu_memcpy", tid=7, stream=7)


@pytest.mark.parametrize(("info", "more", "warned"), [
    ("{}", [], False), ('{"world_size": 1}', [], False), ('{"world_size": 4}', [], True), ("{}", NCCL, True),
    ('{"world_size": 1}', NCCL, False), ("{}", [COPY], False), ('{"rank": 2, "world_size": 4}', NCCL, False),
])  # fmt: skip
def test_only_a_trace_that_has_peers_lacks_a_rank(
    tmp_path: Path, info: str, more: list[dict[str, Any]], warned: bool
) -> None:
    path = without_rank(tmp_path, [*CLEAN, *more], info)
    assert ("no_rank" in {w.code for w in analyse(path).figures.warnings}) == warned


def test_a_rank_from_the_files_name_is_told(tmp_path: Path) -> None:
    path = without_rank(tmp_path, [*CLEAN, *NCCL], name="trace_rank3.json")
    (told,) = [w.message for w in analyse(path).figures.warnings if w.code == "no_rank"]
    assert told.endswith("; 3 is taken from the file's name")


@pytest.mark.parametrize(("more", "cause"), [
    ([event("c10d::allreduce_", 3.5, 2), launch(4, 4), kernel(4, 36, name="ncclAllReduce")],
     "no operator has its shapes; record with record_shapes=True"),
    ([event("c10d::allreduce_", 3.5, 2, **shaped([[["x"]], []], ["TensorList", ""])), launch(4, 4),
      kernel(4, 36, name="ncclAllReduce")], "the shapes of their operators do not give it"),
    ([kernel(4, 36, name="ncclAllReduce")], "the launches of their kernels are not in the trace"),
    ([launch(4, 4), kernel(4, 36, name="ncclAllReduce")], "no c10d operator of theirs; the cause is unknown"),
    ([launch(4, 4), kernel(4, 36, name="cross_device_reduce_1stage")], "outside of torch's process groups"),
])  # fmt: skip
def test_the_cause_of_a_missing_size_is_what_the_trace_shows(
    tmp_path: Path, more: list[dict[str, Any]], cause: str
) -> None:
    warning = warnings(tmp_path, [*CLEAN, *more])["no_collective_sizes"]
    assert warning.count == 1
    assert warning.message.startswith("1 collectives have no size, so no bandwidth: ")
    assert cause in warning.message


def test_several_causes_are_counted(tmp_path: Path) -> None:
    three = [kernel(n, 36 + n, 1, name="ncclAllReduce") for n in (7, 8)] + [
        kernel(9, 40, 1, name="two_shot_all_reduce")
    ]
    told = warnings(tmp_path, [*CLEAN, *three])["no_collective_sizes"].message
    assert "2: the launches of their kernels are not in the trace" in told
    assert "; 1: kernels of their own kind" in told


def test_why_a_collective_names_no_group_is_what_the_trace_shows(tmp_path: Path) -> None:
    nameless = [launch(5, 5), kernel(5, 42, 1, name="ncclAllReduce", stream=9)]
    told = warnings(tmp_path, [*CLEAN, *nameless])["no_process_group_metadata"].message
    assert "(no event of this trace does): no bus bandwidth, and ranks are matched by order alone" in told
    told = warnings(tmp_path, [*CLEAN, *NCCL, *nameless])["no_process_group_metadata"].message
    assert "others of this trace do, but theirs lacks the event that names it" in told


HOST = [step(0, 0, 100), event("aten::mm", 1, 90)]


def call(name: str, at: float = 5, cat: str = "cuda_runtime") -> dict[str, Any]:
    return event(name, at, 1, cat=cat, correlation=int(at))


@pytest.mark.parametrize(("more", "told"), [
    ([call("cudaLaunchKernel"), call("cudaMemcpyAsync", 7)], "the host made 2 launches and copies, but"),
    ([call("hipExtModuleLaunchKernel")], "the host made 1 launches and copies, but"),
    ([call("hipGraphLaunch")], "the host made 1 launches and copies, but"),
    ([call("runFunction - job_prep_and_submit_for_execution", cat="mtia_runtime")], "the host made 1 launches"),
    ([event("dma_request", 3, 2, cat="mtia_ccp_events")], "1 events of an MTIA device are not read"),
    ([note("nccl:all_reduce", 3, 2)], "1 collectives ran over NCCL"),
    ([call("cudaStreamBeginCapture", 4), call("cudaLaunchKernel"), call("cudaStreamEndCapture", 8)],
     "all 1 launches of the trace were captured"),
])  # fmt: skip
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


@pytest.mark.parametrize("more", [[], [call("cudaGetDeviceCount")], [note("gloo:all_reduce", 3, 2, tid=4)]])
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
    assert verdict(answer)[0].startswith(
        "Mostly compute-bound (83 %), in part host-bound: a step would take 50.0 us if"
    )
    assert "Left out of this: rank 1." in notes(answer)
