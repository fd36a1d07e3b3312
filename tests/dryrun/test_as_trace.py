"""Replays as the events of a trace: classes, units, steps, waits and memory, also after writing and reading a file."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from refshard.analysis.analyse import analyse
from refshard.analysis.figures import Stall
from refshard.analysis.kineto import device_order, timeline_of
from refshard.analysis.labels import meaning_of
from refshard.analysis.overlap import collectives_per_step, step_breakdowns
from refshard.dryrun.as_trace import LABELS, LEAVE, as_trace, purposes
from refshard.dryrun.device import Rates
from refshard.dryrun.memory import account_memory
from refshard.dryrun.price import Prices, price
from refshard.dryrun.recording import Flag, Phase, Recording
from refshard.dryrun.recording import Kind as Recorded
from refshard.dryrun.replay import NEVER, NS, Replayed, replay
from refshard.dryrun.steps import Step, steps_of
from refshard.events.reader import read_events
from refshard.events.table import TraceFile
from refshard.events.timeline import KINDS, UNKNOWN, Kind, Timeline
from refshard.events.writer import as_kineto
from refshard.specs.cluster import load_cluster
from tests.dryrun.made import COPIES_IN, GATHERS, REDUCES, Made, prices, sharded_step
from tests.events.spans import listed
from tests.report import dryruns

H100 = load_cluster("dgx-h100")


def trained(steps: int = 3, tokens: int = 512) -> tuple[Recording, Prices, Replayed]:
    made = Made()
    group = made.group(range(8), name="fsdp")
    for _ in range(steps):
        sharded_step(made, group, tokens=tokens)
    return replayed_on_h100(made)


def replayed_on_h100(made: Made) -> tuple[Recording, Prices, Replayed]:
    recording = made.recording()
    priced = price(recording, H100)
    return recording, priced, replay(recording, priced, Rates.of(H100))


def traced(recording: Recording, replayed: Replayed, steps: Sequence[Step] | None = None) -> TraceFile:
    return as_trace(recording, replayed, device="NVIDIA H100 80GB HBM3", steps=steps)


def timeline_of_steps(recording: Recording, replayed: Replayed, steps: Sequence[Step] | None = None) -> Timeline:
    return timeline_of(traced(recording, replayed, steps))


def rows(timeline: Timeline, kind: Kind) -> set[str]:
    return {span.name for span in listed(timeline.spans) if span.kind is kind}


def test_a_step_ends_with_its_mark() -> None:
    made = Made()
    made.launch()
    made.mark("begin")
    made.launch()
    made.launch()
    made.mark("step")
    made.launch()
    recording = made.recording()
    assert steps_of(recording) == (Step(number=0, first=0, end=2), Step(number=1, first=2, end=5))
    assert steps_of(recording, says="step") == (Step(number=0, first=0, end=5),)
    assert steps_of(recording, says="other") == (Step(number=0, first=0, end=6),)
    assert steps_of(Made().recording()) == ()


def test_each_event_is_of_the_class_that_a_trace_would_give_it() -> None:
    recording, _, replayed = trained()
    timeline = timeline_of_steps(recording, replayed)
    assert rows(timeline, Kind.COMM) == {"all_gather", "reduce_scatter", "all_reduce", "barrier"}
    assert rows(timeline, Kind.PREP) == {"aten::_chunk_cat", "aten::div_"}
    copies = {"aten::copy_", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_local_scalar_dense"}
    assert rows(timeline, Kind.COPY) == copies
    assert rows(timeline, Kind.COMPUTE) == {"aten::mm", "aten::embedding", "aten::_fused_adamw_"}
    streams = (0, COPIES_IN, GATHERS, REDUCES)
    assert timeline.spans.lane_names == tuple(f"stream {stream}" for stream in streams)
    assert timeline.spans.lane_names[timeline.spans.main_lane()] == "stream 0"


def test_a_kernel_on_another_stream_serves_what_waits_for_it() -> None:
    made = Made()
    group = made.group([0, 1])
    made.phase, made.module = Phase.BACKWARD, "layers.1.norm"
    for stream, op in ((5, "all_gather"), (6, "reduce_scatter"), (7, "broadcast")):
        made.launch("aten::copy_", stream=stream)
        made.wait(stream + 10, made.record(stream))
        made.collective(op, group, nbytes=8, stream=stream + 10)
    made.launch(stream=0)
    recording = made.recording()
    spans = timeline_of_steps(recording, replay(recording, prices(recording, {}, host_s=1e-6), Rates())).spans
    found = {(spans.lane_names[span], KINDS[kind]) for span, kind in zip(spans.lanes, spans.kinds)}
    assert found == {
        ("stream 5", Kind.COPY), ("stream 6", Kind.PREP), ("stream 7", Kind.COMPUTE), ("stream 0", Kind.COMPUTE),
        *((f"stream {stream}", Kind.COMM) for stream in (15, 16, 17)),
    }  # fmt: skip
    about = purposes(recording, 0)
    assert {about.unit_names[unit] for unit in about.units[recording.kinds < 2]} == {"layers.1"}


def test_what_moves_parameters_of_no_module_moves_the_roots() -> None:
    made = Made()
    made.launch("fsdp::split_with_sizes_copy")
    made.launch("aten::mm")
    made.phase = Phase.OPTIMIZER
    made.module = "layers.0"
    made.launch("aten::_fused_adamw_")
    about = purposes(made.recording(), 0)
    named = ["" if unit == UNKNOWN else about.unit_names[unit] for unit in about.units]
    assert named == ["(root)", "", ""]


def test_the_labels_are_those_that_readers_of_traces_know() -> None:
    for label in (*LABELS[1:], LEAVE):
        assert meaning_of(label.text("layers.0")) == (label.meaning, "layers.0" if label.of_unit else None)


def assert_same(ours: Any, read: Any, *, but: tuple[str, ...] = ()) -> None:
    """Two tables of a trace have equal columns."""
    for field in (field for field in fields(ours) if field.name not in but):
        mine, other = getattr(ours, field.name), getattr(read, field.name)
        assert np.array_equal(mine, other) if isinstance(mine, np.ndarray) else mine == other, field.name


def test_a_written_trace_reads_back_unchanged(tmp_path: Path) -> None:
    recording, _, replayed = replayed_on_h100(dryruns.trained())  # which allocates too
    for steps in (steps_of(recording), steps_of(recording)[1:]):
        ours = traced(recording, replayed, steps)
        assert all((len(ours.memory.times), len(ours.frames.starts), len(ours.host_args), len(ours.device_args)))
        path = tmp_path / "trace.json"
        path.write_text(as_kineto(ours))
        read = read_events(path)
        numbered = ("names", "operands", "lanes", "signatures")  # the reader numbers names in another order
        for table in ("host", "device", "syncs", "memory"):
            assert_same(getattr(ours, table), getattr(read, table), but=numbered)
        for table, column in (("host", "names"), ("device", "names"), ("device", "lanes"), ("device", "signatures")):
            names = [
                [getattr(one, column)[code] for code in getattr(getattr(one, table), column)] for one in (ours, read)
            ]
            assert names[0] == names[1]
        given = [[one.operands[code] if code >= 0 else None for code in one.host.operands] for one in (ours, read)]
        assert given[0] == given[1]
        assert_same(ours.frames, read.frames)
        for name in ("threads", "host_args", "device_args", "memory_devices", "skipped"):
            assert getattr(ours, name) == getattr(read, name)
        assert ours.metadata.items() <= read.metadata.items()
        mine, others = analyse(ours).figures, analyse(path).figures
        assert msgspec.structs.replace(mine, file=str(path), events=others.events) == others


def test_streams_wait_for_what_the_recording_says() -> None:
    recording, _, replayed = trained(steps=2)
    trace = traced(recording, replayed, steps_of(recording)[1:])
    exact, last, recorded, waiting = set[tuple[int, int]](), dict[int, int](), dict[int, int | None](), set[Any]()
    for row in range(steps_of(recording)[1].first, len(recording)):
        kind, stream, event = recording.kinds[row], int(recording.streams[row]), int(recording.subjects[row])
        if kind == Recorded.RECORD:
            recorded[event] = last.get(stream)
        elif kind == Recorded.WAIT:
            waiting.add((stream, recorded[event]))
        elif kind in (Recorded.LAUNCH, Recorded.COLLECTIVE):
            exact |= {(row, source) for waits, source in waiting if waits == stream and source is not None}
            waiting = {one for one in waiting if one[0] != stream}
            last[stream] = row
    calls, rows = timeline_of(trace).calls, trace.device.correlations[device_order(trace)] - 1
    assert calls is not None
    assert set(zip(rows[calls.waiting].tolist(), rows[calls.sources].tolist())) == exact
    assert len(exact) == 6 * 2 + 3 + 1
    what_if = analyse(trace).figures.what_if
    assert what_if is not None
    # Only that collectives of several streams take turns is inferred.
    assert (what_if.waits_recorded, what_if.waits_inferred, what_if.replay_error) == (16, 2, 0.0)


def test_the_figures_of_steps_are_the_replays() -> None:
    recording, priced, replayed = trained()
    found = analyse(traced(recording, replayed))
    figures = found.figures
    spans = [step.breakdown.span_ns for step in figures.steps]
    assert sum(spans) == replayed.ends.max() - replayed.starts[replayed.starts >= 0].min()
    assert figures.operators is not None
    products = next(one for one in figures.operators.totals if one.name == "aten::mm")
    flops = 2 * 512 * 5792**2 * 9
    mm = recording.names == recording.name_table.index("aten::mm")
    assert (products.calls, priced.flops[mm].sum()) == (3 * 9, 3 * flops)
    assert products.flops_per_s == pytest.approx(3 * flops / (products.known_ns / NS))
    assert products.of_peak is not None
    assert collectives_per_step(found.timeline)[0] == (
        ("all_gather", 6, 6 * 2**26), ("all_reduce", 1, 4), ("reduce_scatter", 3, 6 * 2**26)
    )  # fmt: skip
    assert [unit.unit for unit in figures.units] == ["layers.0", "layers.1", "layers.2"]
    assert figures.warnings == ()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_counts_half_if_causal(causal: bool) -> None:
    made = Made()
    heads = "bf16[1,32,8192,128]"
    signature = f"{heads} {heads} {heads} -> {heads} fp32[1,32,8192]"
    flags = Flag.CAUSAL if causal else Flag(0)
    made.launch("aten::_scaled_dot_product_flash_attention", signature=signature, flags=flags)
    recording = made.recording()
    report = analyse(
        traced(recording, replay(recording, prices(recording, {0: 1.0}, host_s=1e-6), Rates()))
    ).figures.operators
    assert report is not None
    (attention,) = report.operators
    assert attention.flops == 4 * 32 * 8192**2 * 128 // (2 if causal else 1)


def test_the_trace_says_which_waits_hold_the_gpu_up() -> None:
    recording, _, replayed = trained()
    found = analyse(traced(recording, replayed)).figures.host_stalls
    assert found is not None
    assert found.places is not None
    (one,) = found.places
    waits = recording.kinds == Recorded.SYNCHRONISE
    assert (one.kind, found.steps, one.count) == (Stall.ITEM, 3, np.sum(waits)) == (Stall.ITEM, 3, 3)
    assert (one.line, one.operator) == ("train.py(31): train", "aten::_local_scalar_dense")
    assert one.host_ns == np.sum((replayed.host_ends - replayed.host_starts)[waits])
    # Nothing runs from the end of a wait, which is for all that was launched, to the next kernel.
    ends = np.sort(replayed.host_ends[waits])
    kernels = np.sort(replayed.starts[replayed.starts >= 0])
    after = np.searchsorted(kernels, ends[:-1])
    assert one.followed_ns >= np.sum(kernels[after] - ends[:-1]) > 0
    assert 0 < one.idle_ns <= one.followed_ns


def test_a_late_host_is_seen() -> None:
    made = Made()
    kernels = [made.launch() for _ in range(4)]
    made.mark()
    recording = made.recording()
    priced = prices(recording, dict.fromkeys(kernels, 1.0), host_s=3.0)
    replayed = replay(recording, priced, Rates())
    timeline = timeline_of_steps(recording, replayed)
    (breakdown,) = step_breakdowns(timeline)
    assert (breakdown.idle_ns, breakdown.idle_host_ns) == (6e9, 6e9)
    assert breakdown.span_ns == 10e9


def test_what_came_before_a_step_is_not_in_its_figures() -> None:
    made = Made()
    made.launch("aten::record_stream", flags=Flag.HOST_ONLY)  # the device has nothing to do yet
    first = made.launch()
    made.mark()
    second = made.launch()
    made.mark()
    recording = made.recording()
    priced = prices(recording, {first: 1.0, second: 1.0}, host_s=5.0)
    replayed = replay(recording, priced, Rates())
    for steps, expected in ((steps_of(recording), [(1e9, 0), (5e9, 4e9)]), (steps_of(recording)[1:], [(1e9, 0)])):
        found = step_breakdowns(timeline_of_steps(recording, replayed, steps))
        assert [(one.span_ns, one.idle_host_ns) for one in found] == expected


def test_a_stream_that_waits_is_not_the_hosts_fault() -> None:
    made = Made()
    seconds = {made.launch(): 3.0}
    seconds[made.launch("aten::copy_", stream=9, flags=Flag.HOST_TO_DEVICE)] = 5.0
    made.wait(0, made.record(9))
    seconds[made.launch()] = 1.0
    made.mark()
    recording = made.recording()
    priced = prices(recording, seconds, host_s=0.01)
    replayed = replay(recording, priced, Rates())
    (found,) = step_breakdowns(timeline_of_steps(recording, replayed))
    assert (found.idle_host_ns, found.idle_ns) == (0, 0)


def test_a_trace_is_json_that_names_its_tracks() -> None:
    recording, _, replayed = trained(steps=1)
    trace = json.loads(as_kineto(traced(recording, replayed)))
    tracks = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and "thread" in e["name"]
    }
    assert tracks[0, 0] == "stream 0"
    assert {stream for _, stream in tracks} == {0, GATHERS, COPIES_IN, REDUCES}
    kernels = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    assert len(kernels) == (replayed.starts != NEVER).sum()
    (wait,) = [e for e in trace["traceEvents"] if e["name"] == "cudaStreamSynchronize"]
    (line,) = [e for e in trace["traceEvents"] if e.get("cat") == "python_function"]
    assert (line["name"], line["ts"], line["dur"]) == ("train.py(31): train", wait["ts"], wait["dur"])


def test_a_trace_says_what_the_allocator_holds() -> None:
    made = Made()
    kept = made.allocate(1024)
    made.launch()
    made.mark()
    other = made.allocate(512)
    made.launch()
    made.free(kept)
    made.free(other)
    made.free(12345)  # from before the recording
    made.mark()
    recording = made.recording()
    replayed = replay(recording, prices(recording, {}, host_s=1e-6), Rates())
    memory = analyse(traced(recording, replayed, steps_of(recording)[1:])).figures.memory
    found = [(point.device, point.ns, point.bytes) for point in memory]
    assert found == [("device 0", 0, 1536), ("device 0", 1000, 512), ("device 0", 1000, 0)]


def test_a_trace_says_where_blocks_are_and_what_is_reserved_so_that_its_reader_finds_who_holds_the_peak() -> None:
    """Forward keeps 1 KiB of 3, backward makes 4 KiB, of 16 MiB that are reserved."""
    made = Made()
    made.segment(16 << 20)
    made.allocate(512)
    made.mark()
    made.module, made.phase = "layers.0", Phase.FORWARD
    saved, passing = made.allocate(1024), made.allocate(2048)
    made.launch()
    made.free(passing)
    made.phase = Phase.BACKWARD
    made.allocate(4096)
    made.launch()
    made.free(saved)
    made.mark()
    recording = made.recording()
    is_block = np.isin(recording.kinds, (Recorded.ALLOCATE, Recorded.FREE))
    recording = replace(recording, reads=np.where(is_block, 512 * recording.subjects, recording.reads))
    replayed = replay(recording, prices(recording, {}, host_s=1e-6), Rates())
    (peak,) = analyse(traced(recording, replayed, steps_of(recording)[1:])).figures.memory_peaks
    account = account_memory(recording)
    assert peak.allocated_bytes == account.peak_bytes == 512 + 1024 + 4096
    assert peak.reserved_bytes == int(account.reserved[account.peak_at]) == 16 << 20
    assert {(one.category, one.unit, one.bytes) for one in peak.holders} == {
        ("before, kept", None, 512), ("activations", "layers.0", 1024), ("backward", "layers.0", 4096),
    }  # fmt: skip


def test_nothing_gives_an_empty_trace() -> None:
    recording = Made().recording()
    trace = traced(recording, replay(recording, prices(recording, {}), Rates()))
    assert (len(trace.host.starts), len(trace.device.starts), len(trace.memory.times)) == (0, 0, 0)
