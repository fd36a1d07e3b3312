"""Where exposed communication goes: by a count of every nanosecond, and on several ranks' traces made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.events.timeline import Kind, Timeline, Window
from refshard.tracing.analysis import Analysis, analyse, join
from refshard.tracing.exposure import exposure_of, split
from refshard.tracing.figures import CommunicationFigures, PeerWait
from refshard.tracing.skew import Entered
from tests.tracing.builder import COMPUTE_STREAM, GATHER_STREAM, REDUCE_STREAM, Trace, Work

LENGTH = 60


@st.composite
def _works(draw: st.DrawFn) -> tuple[list[Work], dict[int, Entered]]:
    """Compute on one stream, collectives on two others, and how long each collective waited for which rank."""
    works: list[Work] = []
    for stream, kind in ((COMPUTE_STREAM, Kind.COMPUTE), (GATHER_STREAM, Kind.COMM), (REDUCE_STREAM, Kind.COMM)):
        cuts = sorted(draw(st.sets(st.integers(0, LENGTH), max_size=8)))
        for start, end in zip(cuts[::2], cuts[1::2]):
            op = "all_gather" if kind is Kind.COMM else None
            works.append(work(start, end - start, stream=stream, op=op))
    collectives = sorted((w for w in works if w.op), key=lambda w: (w.start, w.start + w.ns))
    entered = {}
    for number, one in enumerate(collectives):
        if draw(st.booleans()):
            waited = draw(st.integers(0, one.ns))
            peer = draw(st.sampled_from([1, 2])) if waited else None
            entered[number] = Entered(
                waited_ns=waited, rank=peer, shortest_ns=one.ns - waited, is_complete=draw(st.booleans())
            )
    return works, entered


def work(
    start: int, ns: int, *, stream: int = COMPUTE_STREAM, op: str | None = None, numel: int = 1 << 20,
    launch: int | None = None, step: int = 0,
) -> Work:  # fmt: skip
    name = f"ncclDevKernel_{op}" if op else "gemm"
    return Work(
        kind=Kind.COMM if op else Kind.COMPUTE, name=name, operator=f"c10d::{op}" if op else "aten::mm", stream=stream,
        start=start, ns=ns, launch=start - 20 if launch is None else launch, step=step, op=op, numel=numel,
    )  # fmt: skip


@given(_works(), st.integers(1, LENGTH - 1))
def test_every_exposed_nanosecond_is_counted_once_and_under_the_right_head(
    made: tuple[list[Work], dict[int, Entered]], cut: int
) -> None:
    works, entered = made
    timeline = Trace(works=works).timeline() if works else None
    if timeline is None:
        return
    base = int(timeline.spans.starts.min()) - min(w.start for w in works)
    starts, ends = np.array([0, 0, cut]) + base, np.array([LENGTH, cut, LENGTH]) + base
    exposure = exposure_of(timeline, [None, 0, 1], starts, ends)
    begins = [c.start for c in timeline.collectives]
    for found, (first, last) in zip(
        split(exposure, np.array(begins, np.int64), entered), ((0, LENGTH), (0, cut), (cut, LENGTH))
    ):
        exposed, waiting, transfer, for_rank = _counted(works, entered, first, last)
        assert (found.exposed_ns, found.waiting_ns or 0, found.transfer_ns or 0) == (exposed, waiting, transfer)
        assert found.undivided_ns == exposed - waiting - transfer
        assert {peer.rank: peer.waited_ns for peer in found.waits_for} == for_rank
        assert (found.waiting_ns is None) == (not entered)
        assert (found.transfer_ns is None) == (not any(one.is_complete for one in entered.values()))


def _counted(
    works: list[Work], entered: dict[int, Entered], first: int, last: int
) -> tuple[int, int, int, dict[int, int]]:
    """The same by looking at each nanosecond."""
    collectives = sorted((w for w in works if w.op), key=lambda w: (w.start, w.start + w.ns))
    exposed = waiting = transfer = 0
    for_rank: dict[int, int] = {}
    for t in range(first, last):
        running = [n for n, w in enumerate(collectives) if w.start <= t < w.start + w.ns]
        if not running or any(w.start <= t < w.start + w.ns for w in works if not w.op):
            continue
        exposed += 1
        owner = running[0]
        one = entered.get(owner)
        if one is not None and t < collectives[owner].start + one.waited_ns:
            waiting += 1
            assert one.rank is not None
            for_rank[one.rank] = for_rank.get(one.rank, 0) + 1
        elif one is not None and one.is_complete:
            transfer += 1
    return exposed, waiting, transfer, for_rank


def timeline_of(*works: Work, end: int) -> Timeline:
    return Trace(works=list(works), windows=[Window(step=0, start=0, end=end)]).timeline()


@pytest.mark.parametrize(
    ("launch", "told"),
    [
        (150, 100),  # launched in the gap of [100, 200): the host was late
        (97, 0),  # its call of 2 ns had returned before
        (99, 100),  # its call returned in the gap
    ],
)
def test_idle_time_before_a_collective_that_was_launched_late_is_launch(launch: int, told: int) -> None:
    timeline = timeline_of(
        work(0, 100), work(200, 50, op="all_gather", stream=GATHER_STREAM, launch=launch), work(300, 50), end=350
    )
    windows = timeline.windows
    exposure = exposure_of(timeline, [0], np.array([windows[0].start]), np.array([windows[0].end]))
    assert (exposure.launch, exposure.no_launch) == ((told,), None)


def test_an_unknown_launch_makes_launch_unknown() -> None:
    timeline = timeline_of(work(0, 100), work(200, 50, op="all_gather", stream=GATHER_STREAM), end=250)
    spans = timeline.spans
    unknown = replace(timeline, spans=replace(spans, queued=np.array([80, -1]), launches=np.array([80, -1])))
    window = (np.array([timeline.windows[0].start]), np.array([timeline.windows[0].end]))
    some = exposure_of(unknown, [0], *window)
    assert (some.launch, some.no_launch) == ((None,), "some collectives have no launch in the trace")
    none = exposure_of(replace(unknown, spans=replace(unknown.spans, launches=np.array([-1, -1]))), [0], *window)
    assert none.launch == (None,)
    assert none.no_launch == "the trace has no launches; record CPU activities too"
    cpu = exposure_of(replace(timeline, on_device=False), [0], *window)
    assert cpu.no_launch == "nothing is launched on a CPU"


STEP = 1000
ENTER = {0: (100, 300, 600), 1: (100, 340, 600)}
"""When in a step each rank enters its three gathers; all leave 50 after the last has entered."""


def job(folder: Path, *, leftover: bool = False, dropped: bool = False, clock: int = 777) -> list[Analysis]:
    """Two ranks of two steps, with clocks of their own; rank 1 enters the second gather 40 late.

    Each gather is exposed but for the last, beside which compute runs. Rank 0 may have one that is ``leftover`` from
    before the steps, and miss the third of its first step, ``dropped``.
    """
    found = []
    for rank in (0, 1):
        works = []
        if leftover and rank == 0:
            works.append(work(20, 60, op="all_gather", stream=GATHER_STREAM, numel=4096, launch=5, step=-1))
        for step in (0, 1):
            base = 200 + step * STEP + rank * clock
            for number in range(3):
                if dropped and (rank, step, number) == (0, 0, 2):
                    continue
                enter, left = ENTER[rank][number], max(ENTER[r][number] for r in (0, 1)) + 50
                works.append(
                    work(base + enter, left - enter, op="all_gather", stream=GATHER_STREAM, numel=4096 << number,
                         launch=base + enter - 50, step=step)
                )  # fmt: skip
            works += [
                work(base + 10, 40, launch=base + 2, step=step),
                work(base + 590, 300, launch=base + 500, step=step),
            ]
        windows = [
            Window(step=s, start=200 + s * STEP + rank * clock, end=1190 + s * STEP + rank * clock) for s in (0, 1)
        ]
        path = Trace(rank=rank, works=works, windows=windows).write(folder / f"rank{rank}.json")
        found.append(analyse(path, keep_timeline=False))
    return list(join(found))


@pytest.mark.parametrize("leftover", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_two_ranks_of_which_one_is_late(tmp_path: Path, leftover: bool, dropped: bool) -> None:
    first, second = (one.figures for one in job(tmp_path, leftover=leftover, dropped=dropped))
    assert [(wait.rank, wait.waited_ns, wait.collectives) for wait in first.waits_for] == [(1, 80, 2)]
    assert second.waits_for == ()
    told, other = (_told(one.communication) for one in (first, second))
    assert [(s.step, s.exposed_ns, s.transfer_ns, s.waiting_ns, s.undivided_ns) for s in told.steps] == [
        (0, 140, 100, 40, 0), (1, 140, 100, 40, 0),
    ]  # fmt: skip
    assert [s.waits_for for s in told.steps] == [(PeerWait(rank=1, waited_ns=40),)] * 2
    assert [(s.exposed_ns, s.transfer_ns, s.waiting_ns) for s in other.steps] == [(100, 100, 0)] * 2
    # Before the first two gathers of a step nothing runs for 50 and 150 or 190, and each was launched 50 before it.
    assert [s.launch_ns for s in told.steps] == [50 + 150, 50 + 150]
    unmatched = leftover + dropped
    for one in (first, second):
        assert [w.count for w in one.warnings if w.code == "collectives_differ"] == [unmatched] * bool(unmatched)


def _told(communication: CommunicationFigures | None) -> CommunicationFigures:
    assert communication is not None
    return communication


def test_parts_add_up_to_what_the_step_exposes(tmp_path: Path) -> None:
    for one in job(tmp_path, leftover=True, dropped=True):
        told = _told(one.figures.communication)
        for part, step in zip(
            (told.whole, *told.steps), (one.figures.whole, *(s.breakdown for s in one.figures.steps))
        ):
            assert part.exposed_ns == step.exposed_ns
            assert (part.transfer_ns or 0) + (part.waiting_ns or 0) + part.undivided_ns == part.exposed_ns


def test_a_rank_alone_divides_nothing(tmp_path: Path) -> None:
    job(tmp_path)
    (one,) = join([analyse(tmp_path / "rank0.json")])
    told = _told(one.figures.communication)
    assert [(s.transfer_ns, s.waiting_ns, s.undivided_ns) for s in told.steps] == [(None, None, 140)] * 2
    assert told.missing == "the traces of the other ranks are not here"


def test_sequence_numbers_are_read_from_the_file(tmp_path: Path) -> None:
    """With ``Seq`` in the arguments, what lies outside of the steps is matched too."""
    job(tmp_path, leftover=True)
    analyses = []
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.json"
        trace = json.loads(path.read_text())
        number = 10 if rank == 0 else 11
        for event in trace["traceEvents"]:
            if event["cat"] == "kernel" and "Collective name" in event["args"]:
                event["args"]["Seq"] = number
                number += 1
        path.write_text(json.dumps(trace))
        analyses.append(analyse(path, keep_timeline=False))
    first, second = (one.figures for one in join(analyses))
    assert [c.sequence for c in first.collectives] == [10, 11, 12, 13, 14, 15, 16]
    assert [c.sequence for c in second.collectives] == [11, 12, 13, 14, 15, 16]
    assert [(wait.rank, wait.waited_ns) for wait in first.waits_for] == [(1, 80)]
    assert [w.count for w in first.warnings if w.code == "collectives_differ"] == [1]
