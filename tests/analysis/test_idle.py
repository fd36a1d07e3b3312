"""Why nothing runs: gaps laid out one by one, in microseconds, each with the cause that it was laid out for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from refshard.analysis.figures import Cause, IdleFigures
from refshard.analysis.kineto import timeline_of as read
from refshard.analysis.overlap import CAUSES, idle_figures, idle_gaps
from refshard.events.reader import read_events
from refshard.events.timeline import UNKNOWN, HostCalls, Kind, Window
from tests.analysis.handmade import event, write
from tests.analysis.small import LANES, NAMES, Row, timeline_of

US = 1000


def row(start: float, ns: float, launch: float, lane: int = 0, name: int = 0) -> Row:
    """A kernel; times in microseconds, its launch that of its call's begin and end."""
    at = [UNKNOWN if us == UNKNOWN else round(us * US) for us in (start, start + ns, launch)]
    return Row(kind=Kind.COMPUTE, lane=lane, start=at[0], end=at[1], launch=at[2], name=name, operator=name)


# Launched 6 us before it starts, into an empty queue: three times, so that the trace's latency is known.
ON_TIME = [row(0, 10, -20), row(106, 10, 100), row(206, 10, 200), row(306, 10, 300)]


def caused(*rows: Row, calls: HostCalls | None = None) -> list[tuple[float, Cause]]:
    """Length in microseconds and cause of every gap after those of ``ON_TIME``."""
    timeline = replace(timeline_of([*ON_TIME, *rows]), calls=calls)
    gaps = idle_gaps(timeline, 0, int(timeline.spans.ends.max()))
    found = [((e - s) / US, CAUSES[c]) for s, e, c in zip(gaps.starts, gaps.ends, gaps.causes) if e > s]
    assert [cause for _, cause in found[:3]] == [Cause.LAUNCH] * 3
    return found[3:]


@pytest.mark.parametrize(("launch", "start", "cause"), [
    (321, 330, Cause.LAUNCH),  # after the gap began at 316
    (309, 318, Cause.LAUNCH),  # 9 us before it starts: within 1.5 of the 6 us that a launch takes
    (308.9, 318, Cause.BACK_TO_BACK),  # longer before: it was in the queue
])  # fmt: skip
def test_a_launch_takes_as_long_as_launches_into_an_empty_queue_do(launch: float, start: float, cause: Cause) -> None:
    assert caused(row(start, 5, launch)) == [(start - 316, cause)]


@pytest.mark.parametrize(("launch", "start", "cause"), [
    (317, 327, Cause.LAUNCH),  # the host took 1 us of the gap since 316; 10 us more may be the launch's own
    (317, 327.1, Cause.UNKNOWN),  # longer
    (366, 416, Cause.LAUNCH),  # the host took half of the gap
    (365, 416, Cause.UNKNOWN),  # less
    (359, 463_000, Cause.UNKNOWN),  # a decoding server without requests
])  # fmt: skip
def test_a_late_launch_does_not_explain_what_comes_long_after_it(launch: float, start: float, cause: Cause) -> None:
    assert [found for _, found in caused(row(start, 5, launch))] == [cause]


@pytest.mark.parametrize(("gap", "cause"), [(1.5, Cause.BACK_TO_BACK), (2.0, Cause.BACK_TO_BACK), (40, Cause.UNKNOWN)])
def test_queued_kernels_of_one_stream_follow_each_other(gap: float, cause: Cause) -> None:
    assert caused(row(316 + gap, 5, 290)) == [(gap, cause)]


def test_how_far_queued_kernels_are_apart_is_read_off_the_trace() -> None:
    """Three times the lower quartile of 3 us: 9 us are ordinary here, 11 are not."""
    starts = [319, 327, 335, 343, 357, 373]
    rows = [row(start, 5, 250 + place) for place, start in enumerate(starts)]
    assert [length for length, _ in caused(*rows)] == [3, 3, 3, 3, 9, 11]
    assert [cause for _, cause in caused(*rows)] == [*[Cause.BACK_TO_BACK] * 5, Cause.UNKNOWN]


def test_what_starts_as_another_stream_falls_silent_waited_for_it() -> None:
    assert caused(row(317, 5, 290, lane=1)) == [(1, Cause.DEPENDENCY)]
    assert caused(row(336, 5, 290, lane=1)) == [(20, Cause.UNKNOWN)], "and not what starts much later"


def test_a_recorded_wait_explains_a_long_gap() -> None:
    calls = HostCalls(
        threads=np.zeros(5, np.int32), awaits=np.array([False] * 4 + [True]), starts=np.array([], np.int64),
        ends=np.array([], np.int64), callers=np.array([], np.int32), names=np.array([], np.int32),
    )  # fmt: skip
    assert caused(row(400, 5, 290, lane=1), calls=calls) == [(84, Cause.DEPENDENCY)]
    assert caused(row(417, 5, 290, lane=1), calls=calls) == [(101, Cause.UNKNOWN)], "but none over 100 us"


@pytest.mark.parametrize(
    ("thread", "until", "cause"), [(0, 370, Cause.CALL), (0, 340, Cause.LAUNCH), (1, 370, Cause.LAUNCH)]
)
def test_a_call_blocks_a_gap_if_the_launching_thread_stood_in_it_for_half_of_it(
    thread: int, until: int, cause: Cause
) -> None:
    calls = HostCalls(
        threads=np.zeros(5, np.int32), awaits=np.zeros(5, np.bool_), starts=np.array([300 * US]),
        ends=np.array([until * US]), callers=np.array([thread], np.int32), names=np.array([1], np.int32),
    )  # fmt: skip
    assert caused(row(416, 5, 410), calls=calls) == [(100, cause)]


def test_an_unknown_launch_is_bounded_by_the_next_on_its_lane() -> None:
    """A stream runs in the order of launches: what came before a span launched in time was launched in time."""
    assert caused(row(318, 5, UNKNOWN), row(323, 5, 300)) == [(2, Cause.BACK_TO_BACK)]
    assert caused(row(318, 5, UNKNOWN), row(323, 5, 317)) == [(2, Cause.LAUNCH)], "it may have been launched late"
    assert caused(row(318, 5, UNKNOWN)) == [(2, Cause.LAUNCH)]


def test_a_span_of_no_length_neither_ends_a_gap_nor_decides_it() -> None:
    assert caused(row(325, 0, 290, lane=1), row(330, 0, 290, lane=1), row(330, 5, 325)) == [(14, Cause.LAUNCH)]


def test_after_the_last_span_nothing_was_launched() -> None:
    timeline = timeline_of(ON_TIME)
    gaps = idle_gaps(timeline, 0, 400 * US)
    assert (CAUSES[gaps.causes[-1]], gaps.ends[-1] - gaps.starts[-1]) == (Cause.LAUNCH, 84 * US)


def test_a_launch_that_blocks_is_a_blocked_call(tmp_path: Path) -> None:
    """It began before the gap and returned after the kernel had started: the queue was empty all the while."""
    events = [
        event("cudaLaunchKernel", 0, 5, cat="cuda_runtime", correlation=1),
        event("first", 10, 20, cat="kernel", correlation=1, stream=7, device=0),
        event("cudaLaunchKernel", 6, 1_565_000, cat="cuda_runtime", correlation=2),
        event("second", 1_565_004, 10, cat="kernel", correlation=2, stream=7, device=0),
    ]
    timeline = read(read_events(write(tmp_path / "t.json", events)))
    assert idle_figures(timeline) == (
        IdleFigures(cause=Cause.CALL, what="cudaLaunchKernel", ns=1_564_974_000, count=1, longest_ns=1_564_974_000),
    )


def test_figures_sum_gaps_by_cause_and_what_was_waited_for() -> None:
    timeline = timeline_of([*ON_TIME, row(317, 5, 290, lane=1, name=1), row(324, 5, 291, lane=1)])
    windows = (Window(step=0, start=0, end=329 * US),)
    assert idle_figures(replace(timeline, windows=windows)) == (
        IdleFigures(cause=Cause.LAUNCH, what=NAMES[0], ns=276 * US, count=3, longest_ns=96 * US),
        IdleFigures(cause=Cause.BACK_TO_BACK, what="", ns=2 * US, count=1, longest_ns=2 * US),
        IdleFigures(cause=Cause.DEPENDENCY, what=f"{LANES[1]} waits for {LANES[0]}", ns=US, count=1, longest_ns=US),
    )
