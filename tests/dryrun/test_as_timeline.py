"""Replays as timelines and as Kineto traces: classes, units and steps, and that both say the same."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.dryrun.as_kineto import as_kineto
from refshard.dryrun.as_timeline import as_timeline
from refshard.dryrun.device import Rates
from refshard.dryrun.figures import step_figures
from refshard.dryrun.memory import account_memory
from refshard.dryrun.price import Prices, price
from refshard.dryrun.purposes import LABELS, LEAVE, purposes
from refshard.dryrun.recording import Flag, Phase, Recording
from refshard.dryrun.recording import Kind as Recorded
from refshard.dryrun.replay import NEVER, NS, Replayed, replay
from refshard.dryrun.steps import Step, device_windows, steps_of
from refshard.specs.cluster import load_cluster
from refshard.timeline import KINDS, UNKNOWN, Kind, Span, Spans, Timeline, Window
from refshard.tracing import steps as tracing_steps
from refshard.tracing.analysis import analyse
from refshard.tracing.host.holdup_figures import Hold
from refshard.tracing.kineto import read_timeline
from refshard.tracing.labels import meaning_of
from refshard.tracing.overlap import collectives_per_step, step_breakdowns
from tests.dryrun.made import COPIES_IN, GATHERS, REDUCES, Made, prices, sharded_step

H100 = load_cluster("dgx-h100")


def trained(steps: int = 3, tokens: int = 512) -> tuple[Recording, Prices, Replayed]:
    made = Made()
    group = made.group(range(8), name="fsdp")
    for _ in range(steps):
        sharded_step(made, group, tokens=tokens)
    recording = made.recording()
    priced = price(recording, H100)
    return recording, priced, replay(recording, priced, Rates.of(H100))


def rows(timeline: Timeline, kind: Kind) -> set[str]:
    return {span.name for span in timeline.spans if span.kind is kind}


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


@given(
    st.lists(
        st.tuples(st.integers(-1, 3), st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=12,
    )
)
def test_the_device_lives_its_steps_as_traces_have_them(rows: list[tuple[int, str, int, int]]) -> None:
    rows.sort(key=lambda row: row[2:])
    made = Spans.of(Span(kind=Kind.COMPUTE, lane=lane, name="x", start=s, end=s + n) for _, lane, s, n in rows)
    order = np.lexsort(([start + length for *_, start, length in rows], [start for *_, start, _ in rows]))
    spans = replace(made, steps=np.array([rows[place][0] for place in order], np.int32))
    steps = tuple(Step(number=n, first=n, end=n + 1) for n in range(4))
    announced = tuple(Window(step=n, start=n, end=n + 1) for n in range(4))
    assert device_windows(steps, spans) == tracing_steps.device_windows(spans, announced)


def test_each_event_is_of_the_class_that_a_trace_would_give_it() -> None:
    recording, _, replayed = trained()
    timeline = as_timeline(recording, replayed)
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
    about = purposes(recording, 0)
    found = {(int(recording.streams[row]), KINDS[about.kinds[row]]) for row in np.flatnonzero(recording.kinds == 0)}
    assert found == {(5, Kind.COPY), (6, Kind.PREP), (7, Kind.COMPUTE), (0, Kind.COMPUTE)}
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


@pytest.mark.parametrize("tokens", [512, 16384])
def test_the_kineto_trace_reads_back_to_the_same_figures(tokens: int, tmp_path: Path) -> None:
    recording, _, replayed = trained(tokens=tokens)
    for steps in (steps_of(recording), steps_of(recording)[1:]):
        ours = as_timeline(recording, replayed, steps=steps)
        path = tmp_path / "trace.json"
        path.write_text(as_kineto(recording, replayed, steps=steps))
        read = read_timeline(path)
        assert len(read.spans) == len(ours.spans) > 0
        for column in ("starts", "ends", "kinds", "lanes", "launches", "steps", "under"):
            assert np.array_equal(getattr(read.spans, column), getattr(ours.spans, column)), column
        names, units = ([s.unit_names[u] if u >= 0 else "" for u in s.units] for s in (read.spans, ours.spans))
        assert names == units
        assert [span.name for span in read.spans] == [span.name for span in ours.spans]
        assert read.windows == ours.windows
        assert read.host_windows == ours.host_windows
        assert read.collectives == ours.collectives
        assert step_breakdowns(read) == step_breakdowns(ours)
        assert collectives_per_step(read) == collectives_per_step(ours)
        assert read.rank == ours.rank == 0


def test_what_the_steps_say(tmp_path: Path) -> None:
    recording, priced, replayed = trained()
    timeline = as_timeline(recording, replayed)
    ours = step_figures(recording, priced, replayed, timeline, steps_of(recording))
    for one, breakdown in zip(ours, step_breakdowns(timeline), strict=True):
        assert round(one.step_s * NS) == breakdown.span_ns
        assert round(one.compute_s * NS) == breakdown.compute_ns
        assert round(one.comm_s * NS) == breakdown.comm_ns
        assert round(one.exposed_comm_s * NS) == breakdown.exposed_ns
        assert round(one.idle_s * NS) == breakdown.idle_ns
    assert (
        sum(round(one.step_s * NS) for one in ours) == replayed.ends.max() - replayed.starts[replayed.starts >= 0].min()
    )
    flops = 2 * 512 * 5792**2 * 9
    for one in ours:
        found = {operator.name: operator for operator in one.operators}
        assert (found["aten::mm"].count, found["aten::mm"].flops) == (9, flops)
        assert found["all_gather"].count == 6
        assert one.tflops == pytest.approx(flops / 1e12 / one.step_s)
        assert [(wait.why, wait.site, wait.count) for wait in one.waits] == [("item", "train.py:31 in train", 1)]
        assert [operator.seconds for operator in one.operators] == sorted(
            (o.seconds for o in one.operators), reverse=True
        )
    path = tmp_path / "trace.json"
    path.write_text(as_kineto(recording, replayed))
    figures = analyse(path).figures
    assert collectives_per_step(timeline)[0] == (
        ("all_gather", 6, 6 * 2**26), ("all_reduce", 1, 4), ("reduce_scatter", 3, 6 * 2**26)
    )  # fmt: skip
    assert [unit.unit for unit in figures.units] == ["layers.0", "layers.1", "layers.2"]
    assert figures.warnings == ()


def test_the_trace_says_which_waits_hold_the_gpu_up(tmp_path: Path) -> None:
    recording, _, replayed = trained()
    path = tmp_path / "trace.json"
    path.write_text(as_kineto(recording, replayed))
    found = analyse(path).figures.holdups
    assert found is not None
    assert found.places is not None
    (one,) = found.places
    waits = recording.kinds == Recorded.SYNCHRONISE
    assert (one.kind, found.steps, one.count) == (Hold.SYNC, 3, np.sum(waits)) == (Hold.SYNC, 3, 3)
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
    timeline = as_timeline(recording, replayed)
    (breakdown,) = step_breakdowns(timeline)
    assert (breakdown.idle_ns, breakdown.idle_host_ns) == (6e9, 6e9)
    (figures,) = step_figures(recording, priced, replayed, timeline, steps_of(recording))
    assert (figures.step_s, figures.idle_s, figures.host_bound_s) == (10, 6, 6)


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
    found = step_figures(recording, priced, replayed, as_timeline(recording, replayed), steps_of(recording))
    assert [(one.step_s, one.host_bound_s) for one in found] == [(1, 0), (5, 4)]
    last = steps_of(recording)[1:]
    found = step_figures(recording, priced, replayed, as_timeline(recording, replayed, steps=last), last)
    assert [(one.step_s, one.host_bound_s) for one in found] == [(1, 0)]


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
    (figures,) = step_figures(recording, priced, replayed, as_timeline(recording, replayed), steps_of(recording))
    assert figures.host_bound_s == 0
    assert figures.idle_s == 0


def test_a_trace_is_json_that_names_its_tracks() -> None:
    recording, _, replayed = trained(steps=1)
    trace = json.loads(as_kineto(recording, replayed))
    tracks = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and "thread" in e["name"]
    }
    assert tracks[0, 0] == "stream 0 (computes most)"
    assert {stream for _, stream in tracks} == {0, GATHERS, COPIES_IN, REDUCES}
    kernels = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    assert len(kernels) == (replayed.starts != NEVER).sum()
    waits = [e["args"] for e in trace["traceEvents"] if e["name"] == "cudaStreamSynchronize"]
    assert waits == [{"why": "item", "site": "train.py:31 in train"}]


def test_a_trace_says_what_the_allocator_holds(tmp_path: Path) -> None:
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
    path = tmp_path / "trace.json"
    path.write_text(as_kineto(recording, replayed, steps=steps_of(recording)[1:]))
    found = [(point.device, point.ns, point.bytes) for point in analyse(path).figures.memory]
    assert found == [("device 0", 1000, 1536), ("device 0", 2000, 512), ("device 0", 2000, 0)]


def test_a_trace_says_where_blocks_are_and_what_is_reserved_so_that_its_reader_finds_who_holds_the_peak(
    tmp_path: Path,
) -> None:
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
    path = tmp_path / "trace.json"
    path.write_text(as_kineto(recording, replayed, steps=steps_of(recording)[1:]))
    (peak,) = analyse(path).figures.memory_peaks
    account = account_memory(recording)
    assert peak.allocated_bytes == account.peak_bytes == 512 + 1024 + 4096
    assert peak.reserved_bytes == int(account.reserved[account.peak_at]) == 16 << 20
    assert {(one.category, one.unit, one.bytes) for one in peak.holders} == {
        ("before, kept", None, 512), ("activations", "layers.0", 1024), ("backward", "layers.0", 4096),
    }  # fmt: skip


def test_nothing_gives_an_empty_timeline() -> None:
    recording = Made().recording()
    timeline = as_timeline(recording, replay(recording, prices(recording, {}), Rates()))
    assert (timeline.windows, len(timeline.spans), timeline.collectives) == ((), 0, ())
