"""Breakdowns of windows: against counting point by point, and of a training run known in closed form."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from refshard.analysis.analyse import analyse
from refshard.analysis.figures import Breakdown, Cause, LoneCopy
from refshard.analysis.overlap import breakdowns, collectives_per_step, lone_copies, mean_ratio, step_breakdowns
from refshard.errors import TraceError
from refshard.events.timeline import UNKNOWN, Collective, Kind, Meaning, Timeline, Window
from tests.analysis.builder import Training
from tests.analysis.handmade import event, step, write
from tests.analysis.small import Row, bounds, idle_gaps, points, rows, timeline_of, windows
from tests.events.spans import listed, spans_of

COMPUTE, COMM = Kind.COMPUTE, Kind.COMM


def counted(found: list[Row], start: int, end: int, first: int, last: int) -> Breakdown:
    """The breakdown of ``[start, end)``, point by point, of windows from ``first`` to ``last``."""
    window = set(range(start, end))
    of_kind = {kind: points(found, kind) & window for kind in Kind}
    busy = points(found, *Kind) & window
    others = set().union(*(of_kind[kind] for kind in Kind if kind is not COMM))
    exposed = of_kind[COMM] - of_kind[COMPUTE]
    copies = [row for row in found if row.kind is Kind.COPY and not row.under & (Meaning.COPY_IN | Meaning.COPY_OUT)]
    alone = set().union(*(row.points for row in copies)) - set().union(*(x.points for x in found if x not in copies))
    known = any(row.launch != UNKNOWN for row in found)
    idle: Counter[Cause] = Counter()
    for gap in idle_gaps(found, start, end, first, last):
        idle[gap.cause] += gap.end - gap.start
    return Breakdown(
        span_ns=len(window), busy_ns=len(busy), compute_ns=len(of_kind[COMPUTE]), comm_ns=len(of_kind[COMM]),
        prep_ns=len(of_kind[Kind.PREP]), copy_ns=len(of_kind[Kind.COPY]),
        unclassified_ns=len(of_kind[Kind.UNCLASSIFIED]), exposed_ns=len(exposed),
        exposed_any_ns=len(of_kind[COMM] - others),
        overlap_ratio=1 - len(exposed) / len(of_kind[COMM]) if of_kind[COMM] else None, idle_ns=len(window - busy),
        idle_launch_ns=idle[Cause.LAUNCH] if known else None, idle_call_ns=0 if known else None,
        idle_back_to_back_ns=idle[Cause.BACK_TO_BACK] if known else None,
        idle_dependency_ns=idle[Cause.DEPENDENCY] if known else None, idle_unknown_ns=idle[Cause.UNKNOWN],
        lone_copy_ns=len(alone & window),
    )  # fmt: skip


@given(rows, windows)
def test_every_window_is_broken_down_as_its_points_say(found: list[Row], inside: list[tuple[int, int]]) -> None:
    ends = min(start for start, _ in inside), max(end for _, end in inside)
    assert breakdowns(timeline_of(found), *bounds(inside)) == tuple(counted(found, *one, *ends) for one in inside)


def test_a_trace_without_launches_has_no_split() -> None:
    spans = Training(steps=1).trace().timeline().spans
    (found,) = breakdowns(Timeline(rank=0, windows=(), spans=spans_of(listed(spans))), *bounds([(0, 100)]))
    assert (found.idle_ns, found.idle_unknown_ns) == (100, 100)
    assert (found.idle_host_ns, found.idle_dependency_ns) == (None, None)


def test_no_windows_have_no_breakdowns() -> None:
    assert breakdowns(timeline_of([]), *bounds([])) == ()


@pytest.mark.slow
def test_many_steps_add_up_to_the_whole() -> None:
    """To the nanosecond: where one step ends within a gap, the next goes on with it."""
    plan = Training(layers=4, steps=1000)
    timeline = plan.trace().timeline()
    found = step_breakdowns(timeline)
    start, end = timeline.windows[0].start, timeline.windows[-1].end
    (whole,) = breakdowns(timeline, np.array([start]), np.array([end]))
    for name in ("span_ns", "busy_ns", "compute_ns", "comm_ns", "exposed_ns", "idle_ns", "idle_launch_ns"):
        assert sum(getattr(b, name) for b in found) == getattr(whole, name), name


def test_the_mean_ratio_weighs_steps_by_their_communication() -> None:
    first, second, silent = (
        Breakdown(span_ns=100, busy_ns=50, compute_ns=50, comm_ns=comm, prep_ns=0, copy_ns=0, unclassified_ns=0,
                  exposed_ns=exposed, exposed_any_ns=exposed, overlap_ratio=None, idle_ns=0, idle_launch_ns=None,
                  idle_call_ns=None, idle_back_to_back_ns=None, idle_dependency_ns=None, idle_unknown_ns=0)
        for comm, exposed in ((10, 10), (90, 0), (0, 0))
    )  # fmt: skip
    assert mean_ratio([first, second, silent]) == pytest.approx(0.9)
    assert mean_ratio([silent]) is None


def collective(step: int | None, size: int | None = 8, announced: bool = True) -> Collective:
    return Collective(op="all_gather", bytes=size, step=step, announced=announced)


def timeline_with(*collectives: Collective) -> Timeline:
    steps = tuple(Window(step=step, start=10 * step, end=10 * step + 10) for step in (0, 1))
    return replace(timeline_of([], windows=steps), collectives=collectives)


def test_only_what_the_host_announced_in_a_step_counts_for_it() -> None:
    timeline = timeline_with(collective(0), collective(0), collective(0, announced=False), collective(None))
    assert collectives_per_step(timeline) == {0: (("all_gather", 2, 16),), 1: ()}


def test_bytes_need_shapes_where_they_count() -> None:
    with pytest.raises(TraceError, match="does not hold the size of all_gather"):
        collectives_per_step(timeline_with(collective(1, size=None)))
    assert collectives_per_step(timeline_with(collective(None, size=None))) == {0: (), 1: ()}


@given(rows, windows)
def test_each_name_has_its_time_in_the_windows(found: list[Row], inside: list[tuple[int, int]]) -> None:
    timeline = timeline_of(found)
    copies = [row for row in found if row.kind is Kind.COPY and not row.under & (Meaning.COPY_IN | Meaning.COPY_OUT)]
    others = set().union(*(row.points for row in found if row not in copies))
    within = set().union(*(range(*window) for window in inside))
    ns, counts = Counter[str](), Counter[str]()
    for row in copies:
        alone = len((row.points - others) & within)
        name = timeline.spans.name_table[row.name]
        ns[name] += alone
        counts[name] += alone > 0
    told = lone_copies(timeline, *bounds(inside))
    assert {one.name: (one.ns, one.count) for one in told} == {name: (ns[name], counts[name]) for name in +ns}
    assert [one.ns for one in told] == sorted((one.ns for one in told), reverse=True)


def test_a_copy_beside_a_kernel_is_alone_for_the_rest(tmp_path: Path) -> None:
    """In 100 us a kernel takes 40, a copy to the device 50 of which 10 are beside the kernel, and a fill 5."""
    events = [
        step(0, 0, 100),
        *(event("cudaLaunchKernel", at, 1, cat="cuda_runtime", correlation=n) for n, at in enumerate((1, 2, 3), 1)),
        event("gemm", 10, 40, cat="kernel", tid=7, correlation=1, stream=7, device=0),
        event("Memcpy HtoD (Pageable -> Device)", 40, 50, cat="gpu_memcpy", tid=8, correlation=2, stream=8, device=0),
        event("Memset (Device)", 95, 5, cat="gpu_memset", tid=7, correlation=3, stream=7, device=0),
    ]
    figures = analyse(write(tmp_path / "trace.json", events)).figures
    assert figures.whole.lone_copy_ns == 45_000
    assert figures.lone_copies == (
        LoneCopy(name="Memcpy HtoD (Pageable -> Device)", ns=40_000, count=1),
        LoneCopy(name="Memset (Device)", ns=5_000, count=1),
    )
