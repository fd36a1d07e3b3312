"""Exports of Nsight Systems: the same figures as of a Kineto trace of the same run, and what they cannot tell."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from refshard.analysis.analyse import Analysis, analyse
from refshard.analysis.windows import parse_window
from refshard.errors import TraceError
from refshard.events.reader import read_events
from tests.analysis.builder import BASE_NS, Training
from tests.events.nsys_export import SCHEMAS, SESSION_NS, Export, retold

VERSIONS = tuple(SCHEMAS)


def codes(one: Analysis) -> dict[str, str]:
    return {warning.code: warning.message for warning in one.figures.warnings}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_figures_are_those_of_a_kineto_trace_of_the_same_run(tmp_path: Path, version: str) -> None:
    kineto = Training().trace().write(tmp_path / "rank0.json")
    export = retold(kineto, version).write(tmp_path / "rank0.sqlite")
    ours, theirs = analyse(export).figures, analyse(kineto).figures
    origin = int(analyse(kineto).timeline.spans.starts.min()) - int(analyse(export).timeline.spans.starts.min())
    assert ours.whole == theirs.whole
    assert ours.whole.exposed_ns > 0
    assert ours.whole.prep_ns > 0
    assert (ours.giveway, ours.copies, ours.reduce_wait) == (theirs.giveway, theirs.copies, theirs.reduce_wait)
    assert ours.giveway.index is not None
    assert ours.steps == tuple(msgspec.structs.replace(s, start_ns=s.start_ns - origin) for s in theirs.steps)
    assert len(ours.steps) == Training().steps
    assert ours.units == theirs.units
    assert ours.device == "NVIDIA H100"
    assert ours.rank == 0  # by the file's name
    unknown = {"bytes": None, "group": None, "group_size": None, "dtype": None, "algorithm_bandwidth": None,
               "bus_bandwidth": None}  # fmt: skip
    assert ours.collectives == tuple(
        msgspec.structs.replace(one, start_ns=one.start_ns - origin, **unknown) for one in theirs.collectives
    )
    told = set(codes(analyse(export))) - {"no_rank"}
    assert told == {"no_process_group_metadata", "no_collective_sizes"}
    assert "payloads that are not read" in codes(analyse(export))["no_collective_sizes"]


def test_times_count_from_the_session_or_from_1970(tmp_path: Path) -> None:
    kineto = Training().trace().write(tmp_path / "rank0.json")
    export = retold(kineto, "2026.4")
    dated = analyse(export.write(tmp_path / "a.sqlite")).identity
    del export.rows["TARGET_INFO_SESSION_START_TIME"]
    undated = analyse(export.write(tmp_path / "b.sqlite")).identity
    assert (dated.start, undated.start) == (analyse(kineto).identity.start, SESSION_NS)
    assert dated.start >= BASE_NS


@pytest.mark.parametrize("version", VERSIONS)
def test_columns_are_those_of_a_kineto_trace(tmp_path: Path, version: str) -> None:
    kineto = Training(steps=1).trace().write(tmp_path / "rank0.json")
    ours, theirs = read_events(retold(kineto, version).write(tmp_path / "r.sqlite")), read_events(kineto)
    assert sorted(ours.names[code] for code in ours.device.names) == sorted(
        theirs.names[code] for code in theirs.device.names
    )
    assert sorted(ours.names[code] for code in ours.host.names) == sorted(
        theirs.names[code] for code in theirs.host.names
    )
    assert sorted(ours.lanes) == sorted(theirs.lanes)
    assert {ours.threads[thread] for thread in ours.host.threads.tolist()} == {("4242", "9")}
    assert len(set(ours.device.signatures.tolist())) == len(set(theirs.device.signatures.tolist()))
    assert ours.count == theirs.count


def test_ranges_of_any_name_are_windows(tmp_path: Path) -> None:
    export = Export("2026.4")
    for number, (name, start, ns) in enumerate((("prefill", 0, 30), ("decode", 100, 5), ("decode", 200, 7)), start=1):
        export.range(name, start, start + 50, kind=60)
        export.call("cudaLaunchKernel_v7000", start + 2, start + 4, number)
        export.kernel("gemm", start + 10, start + 10 + ns, number)
    path = export.write(tmp_path / "a.sqlite")
    windows = analyse(path, window=parse_window("^")).figures.windows
    assert windows is not None
    assert [(w.name, w.count, w.span_ns, w.compute_ns) for w in windows.groups] == [
        ("prefill", 1, 40, 30), ("decode", 2, 32, 12),
    ]  # fmt: skip
    told = codes(analyse(path))["no_steps"]
    assert told.startswith("no range ProfilerStep#")
    assert told.endswith("or use --window '^decode', which takes its 2 annotations as windows")


def two_processes(*devices: int) -> Export:
    """Two ranks of one host in one report: they use the same correlation ids, each for a kernel of its own length."""
    export = Export("2026.4")
    for rank, device in enumerate(devices):
        pid = 100 + rank
        export.range("ProfilerStep#3", rank * 1000, rank * 1000 + 500, pid=pid)
        export.call("cudaLaunchKernel_v7000", rank * 1000 + 10, rank * 1000 + 12, 1, pid=pid)
        export.kernel("gemm", rank * 1000 + 20, rank * 1000 + 30 + rank, 1, pid=pid, device=device)
    return export


@pytest.mark.parametrize(("devices", "names"), [((0, 1), ("0", "1")), ((0, 0), ("0/100", "0/101"))])
def test_one_device_of_a_report_on_several_ranks(tmp_path: Path, devices: tuple[int, ...], names: list[str]) -> None:
    path = two_processes(*devices).write(tmp_path / "a.sqlite")
    together = analyse(path)
    assert f"--gpu {names[0]} shows one alone" in codes(together)["several_devices"]
    assert together.timeline.spans.launches.tolist() == [10, 1010]
    for rank, name in enumerate(names):
        alone = analyse(path, device=name)
        (step,) = alone.figures.steps
        assert (step.step, step.breakdown.compute_ns) == (3, 10 + rank)
        assert alone.timeline.spans.launches.tolist() == [1000 * rank + 10]
        assert not {"several_devices", "steps_overlap"} & set(codes(alone))
    with pytest.raises(TraceError, match=f"--gpu 7 is not in the trace; its GPUs: {', '.join(names)}"):
        analyse(path, device="7")


def test_copies_and_memsets_are_named_as_kineto_names_them(tmp_path: Path) -> None:
    export = Export("2026.4")
    place = {"deviceId": 0, "streamId": 7, "globalPid": 0}
    copies = ((1, 0, 2), (2, 2, 1), (8, 2, 2), (99, 0, 99))
    for at, (kind, source, target) in enumerate(copies):
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=at, end=at + 1, copyKind=kind, srcKind=source, dstKind=target,
                   **place)  # fmt: skip
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", start=9, end=11, memKind=2, **place)
    export.range("step", 0, 20)
    trace = read_events(export.write(tmp_path / "a.sqlite"))
    assert [trace.names[code] for code in trace.device.names] == [
        "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memcpy DtoD (Device -> Device)",
        "Memcpy Unknown (Pageable -> Unknown)", "Memset (Device)",
    ]  # fmt: skip
    whole = analyse(trace.path).figures.whole
    assert (whole.copy_ns, whole.idle_ns, whole.idle_host_ns) == (6, 5, None)


def test_a_graph_traced_as_a_whole_is_not_called_compute(tmp_path: Path) -> None:
    export = Export("2026.4")
    export.call("cudaGraphLaunch_v10000", 0, 5, 3)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=10, end=40, deviceId=0, streamId=7, correlationId=3,
               globalPid=1 << 56 | 4242 << 24)  # fmt: skip
    found = analyse(export.write(tmp_path / "a.sqlite"))
    assert (found.figures.whole.compute_ns, found.figures.whole.unclassified_ns) == (0, 30)
    assert "--cuda-graph-trace=node" in codes(found)["graphs_as_a_whole"]


def test_nccls_own_ranges_name_what_a_kernel_does_not(tmp_path: Path) -> None:
    export = Export("2026.4")
    export.range("ncclAllReduce", 0, 10, domain=1)
    export.range("ncclGroupEnd", 3, 4, domain=1)
    export.call("cudaLaunchKernel_v7000", 5, 6, 1)
    export.kernel("ncclDevKernel_Generic(ncclDevComm*)", 20, 30, 1)
    (one,) = analyse(export.write(tmp_path / "a.sqlite")).figures.collectives
    assert (one.op, one.duration_ns, one.bytes) == ("all_reduce", 10, None)


def test_ranges_that_never_ended_and_times_that_make_no_sense_are_counted(tmp_path: Path) -> None:
    export = Export("2026.4")
    export.range("loop", 0, None)
    export.range("loop", 9, 3)
    export.kernel("gemm", 5, 3, 1)
    export.kernel("gemm", 5, 8, 2)
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", end=8, deviceId=0, streamId=7)
    trace = read_events(export.write(tmp_path / "a.sqlite"))
    assert trace.skipped == {"ranges_without_end": 1, "negative_durations": 2, "without_times": 1}
    assert (len(trace.device.starts), len(trace.host.starts)) == (1, 0)


def test_an_export_without_processes_or_names_of_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            'CREATE TABLE StringIds (id, value); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, "end", correlationId);'
            'CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, "end", correlationId, globalTid, nameId);'
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 9, 1);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (-3, 1, 1, 77, 55);"
        )
    found = analyse(path)
    assert found.timeline.spans.launches.tolist() == [-3]
    assert found.figures.whole.unclassified_ns == 4


@pytest.mark.parametrize(("sql", "message"), [
    ("CREATE TABLE t (a)", "an SQLite file, but no export of Nsight Systems (it has no table StringIds)"),
    ("CREATE TABLE StringIds (id, value)", "holds no kernels and copies of a GPU; record it with nsys profile"),
    ("CREATE TABLE StringIds (id, value); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (begin)", "no columns start and"),
    (
        'CREATE TABLE StringIds (id, value); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, "end");'
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('soon', 3)",
        "damaged: table CUPTI_ACTIVITY_KIND_KERNEL holds what is no integer",
    ),
])  # fmt: skip
def test_what_is_no_export_is_refused(tmp_path: Path, sql: str, message: str) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(sql)
    with pytest.raises(TraceError) as error:
        read_events(path)
    assert message in str(error.value)


def test_reports_and_damaged_files_are_refused(tmp_path: Path) -> None:
    report = tmp_path / "a.nsys-rep"
    report.write_bytes(b"anything")
    with pytest.raises(TraceError, match=r"export it first: nsys export --type sqlite a\.nsys-rep"):
        read_events(report)
    path = retold(Training().trace().write(tmp_path / "r.json"), "2026.4").write(tmp_path / "a.sqlite")
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(TraceError, match="damaged or truncated SQLite file"):
        read_events(path)


def test_the_file_is_not_touched(tmp_path: Path) -> None:
    path = retold(Training(steps=1).trace().write(tmp_path / "r.json"), "2026.4").write(tmp_path / "a.sqlite")
    before = path.read_bytes()
    path.chmod(0o400)
    read_events(path)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.sqlite", "r.json"]
