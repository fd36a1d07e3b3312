"""Traces in, figures out: one trace alone, and the ranks of a job together."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from refshard.analysis.attribution import Attribution, attribute
from refshard.analysis.collectives import collective_figures, copy_overhead, give_ways, reduce_waits, unit_figures
from refshard.analysis.exposure import Traffic, communication, exposure_of, links_of, rank_waits
from refshard.analysis.figures import MemoryPoint, StepFigures, TraceFigures
from refshard.analysis.graph import Graph, graph_of
from refshard.analysis.host_stalls import find_host_stalls
from refshard.analysis.host_time import host_time
from refshard.analysis.jobs import Identity, group, identity_of, rank_in_name
from refshard.analysis.kineto import Group, timeline_of
from refshard.analysis.lateness import OwnTime, lateness, own_time
from refshard.analysis.memory_peaks import allocated_over_time, memory_peaks
from refshard.analysis.operators import operator_report
from refshard.analysis.overlap import breakdowns, idle_figures, lone_copies
from refshard.analysis.quality import find_graphs, find_warnings, missing_device, mostly_capture
from refshard.analysis.whatif import what_ifs
from refshard.analysis.windows import WindowOptions, bounds, window_figures, window_warnings
from refshard.events.reader import read_events
from refshard.events.selection import only_device
from refshard.events.table import MemoryEvents, TraceFile
from refshard.events.timeline import Timeline, Window

_MEMORY_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """One trace analysed: its figures, what it says of its job, and what they were computed from, if that was kept.

    ``attribution`` says who owns the time of its steps, if requested; ``graph`` is of a GPU's trace, if it was
    kept. ``own`` is what the rank does around its collectives.
    """

    figures: TraceFigures
    identity: Identity
    kept: Timeline | None
    traffic: Traffic | None = None
    attribution: Attribution | None = None
    graph: Graph | None = None
    own: OwnTime | None = None

    @property
    def timeline(self) -> Timeline:
        """What the rank did; needs ``keep_timeline=True``."""
        assert self.kept is not None, "analyse with keep_timeline=True"
        return self.kept

    @property
    def path(self) -> Path:
        """The trace's file."""
        return self.identity.path


def analyse(
    source: Path | TraceFile,
    *,
    calibration: Timeline | None = None,
    keep_timeline: bool = True,
    keep_graph: bool = True,
    compare: bool = False,
    window: WindowOptions | None = None,
    device: str | None = None,
    communicating: Sequence["re.Pattern[str]"] = (),
) -> Analysis:
    """Analyse one trace, read from a file or made elsewhere.

    ``calibration`` is a trace in which preparatory kernels ran with nothing else running.
    ``window`` says what to take in place of the trace's steps, ``device`` which of several devices to look at. Device
    events with one of ``communicating`` in their names communicate, besides the known ones.

    A timeline takes 70 bytes a span: of hundreds of ranks, keep it only for what draws spans. To ``compare`` it with
    another, its attribution is enough. A graph takes up to 20 MB; it tells, when ranks are joined, what a step would
    take if all of them were on time.

    Raises:
        TraceError: the file is no trace, is damaged, or holds nothing that could be analysed.
    """
    trace = read_events(source) if isinstance(source, Path) else source
    if device is not None:
        trace = only_device(trace, device)
    timeline, identity = timeline_of(trace, window, communication=communicating), identity_of(trace)
    missing, graphs, name = missing_device(trace), find_graphs(trace, timeline), _device(trace, timeline)
    graph = graph_of(trace, timeline)
    whole, *steps = _per_window(timeline, calibration)
    report = None if missing is not None else operator_report(trace, timeline, name)
    traffic, collectives = _traffic(trace, timeline, name), collective_figures(timeline)
    figures = TraceFigures(
        file=str(trace.path), job=0, rank=identity.rank if identity.rank is not None else rank_in_name(trace.path),
        world_size=identity.world_size, backend=identity.backend, device=name, events=trace.count,
        whole=whole.breakdown, giveway=whole.giveway, copies=whole.copies, reduce_wait=whole.reduce_wait,
        steps=tuple(steps), units=unit_figures(timeline), collectives=collectives,
        communication=communication(traffic, collectives, {}, alone=True), idle=idle_figures(timeline),
        lone_copies=lone_copies(timeline, *bounds(timeline.windows)),
        memory=_memory(trace.memory, trace.memory_devices), memory_peaks=memory_peaks(trace),
        host_stalls=find_host_stalls(trace, timeline), host_time=host_time(trace, timeline),
        warnings=(*find_warnings(trace, timeline), *window_warnings(trace, timeline, window)),
        windows=None if window is None else window_figures(window, steps),
        unavailable=missing or mostly_capture(timeline, graphs), host_only=missing is not None, graphs=graphs,
        operators=report, what_if=None if graph is None else what_ifs(graph, (), report),
    )  # fmt: skip
    return Analysis(
        figures=figures, identity=identity, kept=timeline if keep_timeline else None, traffic=traffic,
        attribution=attribute(timeline) if compare else None, graph=graph if keep_graph else None,
        own=None if missing is not None else own_time(trace, timeline),
    )  # fmt: skip


def _per_window(timeline: Timeline, calibration: Timeline | None) -> list[StepFigures]:
    """Figures of the whole trace, and then of each of its steps."""
    first, last = _extent(timeline)
    windows = [Window(step=None, start=first, end=last), *timeline.windows]
    starts, ends = bounds(windows)
    # In the host's time, which may run ahead of the device's by whole steps.
    ever = Window(step=None, start=np.iinfo(np.int64).min, end=np.iinfo(np.int64).max)
    of_step = {window.step: window for window in timeline.host_windows}
    host_bounds = bounds([ever, *(of_step.get(window.step, ever) for window in timeline.windows)])
    columns = (
        breakdowns(timeline, starts, ends), give_ways(timeline, starts, ends, calibration),
        copy_overhead(timeline, starts, ends), reduce_waits(timeline, *host_bounds),
    )  # fmt: skip
    return [
        StepFigures(
            step=window.step, start_ns=window.start, breakdown=where, giveway=give, copies=copies, reduce_wait=wait,
            name=window.name,
        )
        for window, where, give, copies, wait in zip(windows, *columns)
    ]  # fmt: skip


def join(analyses: Sequence[Analysis], *, one_job: bool = False) -> tuple[Analysis, ...]:
    """The same analyses with the job that each belongs to, and with what its ranks waited for.

    Raises:
        TraceError: ``one_job``, but two traces name the same rank.
    """
    jobs = group([one.identity for one in analyses], one_job=one_job)
    members = defaultdict(list)
    for place, job in enumerate(jobs):
        members[job].append(place)
    figures = [msgspec.structs.replace(one.figures, job=job) for one, job in zip(analyses, jobs)]
    for places in members.values():
        if len(places) < 2:
            continue
        waits = rank_waits([figures[place] for place in places])
        for place, waits_for, entered in zip(places, waits.waits_for, waits.entered):
            traffic, graph, one = analyses[place].traffic, analyses[place].graph, figures[place]
            waited = [(one.collectives[n].start_ns, found.waited_ns) for n, found in entered.items() if found.waited_ns]
            text = None if traffic is None else communication(traffic, one.collectives, entered, alone=False)
            figures[place] = msgspec.structs.replace(
                one, waits_for=waits_for, warnings=(*one.warnings, *waits.warnings), communication=text,
                what_if=one.what_if if graph is None or not waited else what_ifs(graph, waited, one.operators),
            )  # fmt: skip
        late = lateness([figures[place] for place in places], [analyses[place].own for place in places], waits)
        for place, found in zip(places, late):
            figures[place] = msgspec.structs.replace(figures[place], lateness=found)
    return tuple(replace(one, figures=found) for found, one in zip(figures, analyses))


def _traffic(trace: TraceFile, timeline: Timeline, device: str) -> Traffic:
    """What the communication figures are made of."""
    windows = [Window(step=None, start=_extent(timeline)[0], end=_extent(timeline)[1])]
    windows += [window for window in timeline.windows if window.step is not None]
    groups = {
        one.group: Group(ranks=one.group_ranks, description=one.group_description)
        for one in timeline.collectives
        if one.group is not None
    }
    properties = trace.metadata.get("deviceProperties")  # of the devices that the recording process saw
    devices = len(properties) if isinstance(properties, list) and properties else None
    return Traffic(
        exposure=exposure_of(timeline, [window.step for window in windows], *bounds(windows)),
        groups=groups,
        links=links_of(device, devices),
    )


def _extent(timeline: Timeline) -> tuple[int, int]:
    """The whole trace: of a device, from its first event to its last; on a CPU, all its steps."""
    if timeline.on_device:
        return int(timeline.spans.starts.min()), int(timeline.spans.ends.max())
    return timeline.windows[0].start, max(window.end for window in timeline.windows)


def _device(trace: TraceFile, timeline: Timeline) -> str:
    """What the trace ran on, by the name that its recorder gives."""
    if not timeline.on_device and missing_device(trace) is None:
        return "cpu"
    properties = trace.metadata.get("deviceProperties")
    known = [device for device in properties if isinstance(device, dict)] if isinstance(properties, list) else []
    names = dict.fromkeys(str(device["name"]) for device in known if device.get("name"))
    if not timeline.on_device:
        return f"{next(iter(names))}, no device events" if len(names) == 1 else "no device events"
    number = trace.lanes[int(trace.device.lanes[0])][0].partition("/")[0]
    only = next(iter(names)) if len(names) == 1 else "gpu"  # the numbers may be another container's
    return next(
        (str(device["name"]) for device in known if str(device.get("id")) == number and device.get("name")), only
    )


def _memory(events: MemoryEvents, devices: Sequence[str]) -> tuple[MemoryPoint, ...]:
    """What the allocator holds over time, per device, thinned out to points that keep every peak.

    Traces before 2021's end do not tell what was held when recording began; their lowest point is taken as nothing.
    """
    found = []
    for code, device in enumerate(devices):
        rows = np.flatnonzero(events.devices == code)
        if not len(rows):  # none of its events has a usable time
            continue
        sizes, _ = allocated_over_time(events, rows)
        lowest = min(0, int(sizes.min()))
        every = -(-len(rows) // _MEMORY_POINTS)
        for first in range(0, len(rows), every):
            place = first + int(np.argmax(sizes[first : first + every]))
            found.append(
                MemoryPoint(device=device, ns=int(events.times[rows[place]]), bytes=int(sizes[place]) - lowest)
            )
    return tuple(found)
