"""Launches that were captured into a graph did not run and are not lost; a replay's kernels belong to one launch."""

import random
from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import analyse
from refshard.analysis.figures import Capture, Replays, TraceFigures
from refshard.report.trace.sections import sections_of
from tests.analysis.handmade import BASE_US, event, write
from tests.report.printed import opened


def call(name: str, at: float, correlation: int, tid: int = 1, duration: float = 0.5) -> dict[str, Any]:
    return event(name, at, duration, cat="cuda_runtime", tid=tid, correlation=correlation)


def kernel(correlation: int, start: float, duration: float = 5, name: str = "gemm") -> dict[str, Any]:
    return event(name, start, duration, cat="kernel", tid=7, correlation=correlation, stream=7, device=0)


def captured(start: float, first: int, launches: int, *, api: str = "cuda", tid: int = 1) -> list[dict[str, Any]]:
    """A capture of 10 us with this many launches."""
    return [
        call(f"{api}StreamBeginCapture", start, first, tid),
        *(call(f"{api}LaunchKernel", start + 1 + i / 10, first + 1 + i, tid, 0.05) for i in range(launches)),
        call(f"{api}StreamEndCapture", start + 10, first + 90, tid),
    ]


RAN = [call("cudaLaunchKernel", 0, 1), kernel(1, 2), call("cudaLaunchKernel", 200, 2), kernel(2, 205)]


def figures_of(path: Path, events: list[dict[str, Any]]) -> TraceFigures:
    return analyse(write(path / "t.json", [*RAN, *events])).figures


def codes(figures: TraceFigures) -> dict[str, int | None]:
    return {one.code: one.count for one in figures.warnings if one.code not in ("no_steps", "no_rank")}


@pytest.mark.parametrize("api", ["cuda", "hip"])
def test_captured_launches_are_not_lost(tmp_path: Path, api: str) -> None:
    figures = figures_of(tmp_path, captured(20, 100, 3, api=api) + captured(40, 300, 2, api=api))
    assert codes(figures) == {"launches_captured": 5}
    assert figures.graphs is not None
    base = BASE_US * 1000
    assert figures.graphs.captures == (
        Capture(start_ns=base + 20_500, end_ns=base + 30_000, launches=3),
        Capture(start_ns=base + 40_500, end_ns=base + 50_000, launches=2),
    )
    assert figures.graphs.replays == ()
    assert figures.unavailable is None


def test_launches_outside_of_the_capture_are_lost_as_before(tmp_path: Path) -> None:
    """Before it, after it, and beside it on a thread that launches what runs."""
    beside = [call("cudaLaunchKernel", 22, 501, 2), kernel(501, 60), call("cudaLaunchKernel", 23, 502, 2)]
    lost = [call("cudaLaunchKernel", 19, 500), call("cudaLaunchKernel", 31, 503)]
    assert codes(figures_of(tmp_path, [*captured(20, 100, 3), *beside, *lost])) == {
        "kernels_dropped": 3,
        "launches_captured": 3,
    }


def test_autograds_thread_is_captured_too(tmp_path: Path) -> None:
    backward = [call("cudaLaunchKernel", 22, 501, 2), call("cudaLaunchKernel", 23, 502, 2)]
    assert codes(figures_of(tmp_path, [*captured(20, 100, 3), *backward])) == {"launches_captured": 5}


def test_a_capture_without_its_end_or_start_goes_on(tmp_path: Path) -> None:
    begun = [one for one in captured(190, 100, 3) if "End" not in one["name"]]
    assert codes(figures_of(tmp_path, begun)) == {"launches_captured": 3}


def test_a_replays_kernels_belong_to_its_launch_and_its_capture(tmp_path: Path) -> None:
    replays = [
        call("cudaGraphLaunch", 60, 600), *(kernel(600, 70 + 6 * i) for i in range(3)),
        call("cudaGraphLaunch", 100, 601), *(kernel(601, 110 + 6 * i) for i in range(3)),
        call("cudaGraphLaunch", 140, 602), *(kernel(602, 150 + 6 * i, 4) for i in range(2)),
        call("cudaGraphLaunch", 170, 603), kernel(603, 180, 1),
    ]  # fmt: skip
    figures = figures_of(tmp_path, [*captured(20, 100, 3), *captured(40, 300, 2), *replays])
    assert codes(figures) == {"launches_captured": 5}
    assert figures.graphs is not None
    assert figures.graphs.replays == (
        Replays(count=2, events=3, busy_ns=30_000, capture=0),
        Replays(count=1, events=2, busy_ns=8000, capture=1),
        Replays(count=1, events=1, busy_ns=1000, capture=None),
    )
    (section,) = [opened(one) for one in sections_of(figures) if one.title == "Graphs"]
    assert [(row["graph"], row["replays"]) for row in section.rows] == [
        ("capture 1", "2"), ("capture 2", "1"), ("capture not in the trace", "1"),
    ]  # fmt: skip


def test_a_trace_that_is_mostly_capture_gets_no_verdict(tmp_path: Path) -> None:
    begin, end = call("cudaStreamBeginCapture", 6, 100), call("cudaStreamEndCapture", 190, 102)
    long = [begin, call("cudaLaunchKernel", 9, 101), end]
    figures = figures_of(tmp_path, long)
    assert figures.unavailable is not None
    assert figures.unavailable.startswith("Most of this trace is the capture of graphs (184 us, 88 %)")
    assert not figures.host_only


@pytest.mark.slow
def test_which_launches_are_captured_against_a_count_of_each(tmp_path: Path) -> None:
    """Random calls on three threads, told one by one."""
    chance = random.Random(7)
    for _ in range(40):
        events, expected, correlation = list[dict[str, Any]](), 0, 1000
        for tid in (1, 2, 3):
            inside, at = False, 0.0
            for _ in range(chance.randrange(12)):
                at, correlation = at + 1, correlation + 1
                what = chance.choice(("toggle", "launch", "run"))
                if what == "toggle":
                    name = "cudaStreamEndCapture" if inside else "cudaStreamBeginCapture"
                    inside = not inside
                    events.append(call(name, at, correlation, tid, 0.1))
                elif what == "run" and not inside:
                    events += [call("cudaLaunchKernel", at, correlation, tid, 0.1), kernel(correlation, 300 + at, 0.5)]
                elif inside:
                    events.append(call("cudaLaunchKernel", at, correlation, tid, 0.1))
                    expected += 1
        found = codes(figures_of(tmp_path, events))
        assert (found.get("launches_captured") or 0) == expected
        assert not {"kernels_dropped", "kernels_dropped_at_start", "kernels_cut_off"} & set(found)
