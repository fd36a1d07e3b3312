"""Where exposed communication goes: by a count of every nanosecond, and on several ranks' traces made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.analyse import Analysis, analyse, join
from refshard.analysis.exposure import (
    Entered,
    Exposure,
    Links,
    Pieces,
    Traffic,
    communication,
    exposure_of,
    links_of,
    split,
)
from refshard.analysis.figures import CollectiveFigures, CommunicationFigures, MessageFigures, PeerWait
from refshard.analysis.kineto import Group
from refshard.events.timeline import Kind, Timeline, Window
from tests.analysis.builder import COMPUTE_STREAM, GATHER_STREAM, REDUCE_STREAM, Trace, Work

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


@pytest.mark.parametrize(("launch", "start", "told"), [
    (150, 200, 100),  # launched in the gap of [100, 200): the host was late
    (97, 200, 0),  # its call of 2 ns had returned before
    (99, 200, 100),  # its call returned in the gap
    (150, 10_152, 10_052),  # 10 us after the call returned
    (150, 10_153, 0),  # longer after it than the host was late: something else held it back
])  # fmt: skip
def test_idle_time_before_a_collective_that_was_launched_late_is_launch(launch: int, start: int, told: int) -> None:
    timeline = timeline_of(
        work(0, 100),
        work(start, 50, op="all_gather", stream=GATHER_STREAM, launch=launch),
        work(start + 100, 50),
        end=start + 150,
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


US, MIB = 1000, 2**20
H100, MI300X = "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"
NODE, PAIR, ACROSS = tuple(range(8)), (0, 1), tuple(range(16))


def ran(op: str, nbytes: int | None, ns: int, group: str = "0 [0-7]", size: int = 8) -> CollectiveFigures:
    factor = {"all_reduce": 2 * (size - 1) / size, "all_gather": (size - 1) / size}.get(op, 1.0)
    return CollectiveFigures(
        op=op, unit=None, step=None, group=group, group_size=size, dtype="Float", lane="stream 7", start_ns=0,
        duration_ns=ns, exposed_ns=ns, exposed_any_ns=ns, queued_ns=None, bytes=nbytes, algorithm_bandwidth=None,
        bus_bandwidth=None if nbytes is None else factor * nbytes / (ns * 1e-9), gap_ns=None, gap_blocking=None,
    )  # fmt: skip


def told(
    *collectives: CollectiveFigures, device: str = MI300X, devices: int | None = 8,
    shortest: dict[int, int] | None = None, ranks: tuple[int, ...] = NODE,
) -> CommunicationFigures:  # fmt: skip
    """The communication of collectives that follow one another, all exposed; ``shortest`` durations are the peers'."""
    ends = np.cumsum([one.duration_ns for one in collectives])
    starts = ends - [one.duration_ns for one in collectives]
    placed = [
        CollectiveFigures(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "start_ns": int(start)})
        for one, start in zip(collectives, starts)
    ]
    exposure = Exposure(
        pieces=Pieces(starts=starts, ends=ends, owners=np.arange(len(collectives))), steps=(None,),
        starts=starts[:1], ends=ends[-1:], launch=(0,), no_launch=None,
    )  # fmt: skip
    groups = {one.group: Group(ranks=ranks, description="mesh_tp") for one in placed if one.group is not None}
    entered = {
        number: Entered(
            waited_ns=placed[number].duration_ns - ns, rank=1 if placed[number].duration_ns > ns else None,
            shortest_ns=ns, is_complete=True,
        )
        for number, ns in (shortest or {}).items()
    }  # fmt: skip
    traffic = Traffic(exposure=exposure, groups=groups, links=links_of(device, devices))
    return communication(traffic, placed, entered, alone=not entered)


def test_messages_are_told_by_group_operation_and_size() -> None:
    found = told(
        ran("all_reduce", 16 * MIB, 100 * US), ran("all_reduce", 20 * MIB, 300 * US),
        ran("all_gather", 16 * MIB, 50 * US), ran("all_reduce", 2 * MIB, 10 * US),
        ran("all_reduce", 16 * MIB, 40 * US, group="1 [0-7]"),
    )  # fmt: skip
    rows = [(m.op, m.group, m.count, m.least_bytes, m.most_bytes, m.bytes, m.exposed_ns) for m in found.messages]
    assert rows == [
        ("all_reduce", "0 [0-7]", 2, 16 * MIB, 20 * MIB, 36 * MIB, 400 * US),
        ("all_gather", "0 [0-7]", 1, 16 * MIB, 16 * MIB, 16 * MIB, 50 * US),
        ("all_reduce", "1 [0-7]", 1, 16 * MIB, 16 * MIB, 16 * MIB, 40 * US),
        ("all_reduce", "0 [0-7]", 1, 2 * MIB, 2 * MIB, 2 * MIB, 10 * US),
    ]
    assert {m.description for m in found.messages} == {"mesh_tp"}
    assert sum(m.exposed_ns for m in found.messages) == found.whole.exposed_ns


def first(**given: object) -> MessageFigures:
    found: MessageFigures = told(ran("all_reduce", 16 * MIB, 200 * US), **given).messages[0]  # type: ignore[arg-type]
    return found


def test_bandwidth_without_waiting_is_that_of_the_rank_that_entered_last() -> None:
    alone, together = first(), first(shortest={0: 100 * US})
    assert alone.bus_bandwidth == together.bus_bandwidth == pytest.approx(1.75 * 16 * MIB / 200e-6)
    assert (alone.transfer_bandwidth, alone.waiting_ns) == (None, None)
    assert together.transfer_bandwidth == pytest.approx(1.75 * 16 * MIB / 100e-6)
    assert together.waiting_ns == 100 * US


@pytest.mark.parametrize(("device", "devices", "ranks", "nodes", "gb_per_s"), [
    (MI300X, 8, NODE, 1, 300),
    (H100, 8, NODE, 1, 350),
    (H100, 8, ACROSS, 2, 300),  # all eight adapters of a node
    (H100, 8, (0, 8), 2, 37.5),  # one of eight
    (H100, 4, NODE, 2, 300),  # nodes of four
    (H100, 1, NODE, None, None),  # a process that was shown one device
    (H100, None, NODE, None, None),
    ("NVIDIA GB200", 4, NODE, 1, 670),  # NVLink joins several hosts
    ("NVIDIA A100-PG509-200", 8, NODE, 1, None),  # no profile
    (H100, 8, (), None, None),  # a group whose ranks are not listed
])  # fmt: skip
def test_the_links_peak_is_the_profiles_and_depends_on_where_the_ranks_are(
    device: str, devices: int | None, ranks: tuple[int, ...], nodes: int | None, gb_per_s: float | None
) -> None:
    one = first(device=device, devices=devices, ranks=ranks)
    assert one.nodes == nodes
    assert one.link_bandwidth == (None if gb_per_s is None else pytest.approx(gb_per_s * 1e9, rel=0.01))


def test_an_operation_that_no_profile_prices_has_no_peak() -> None:
    assert told(ran("send", MIB, US)).messages[0].link_bandwidth is None
    assert Links(ranks_per_node=8).bandwidth("all_reduce", NODE) is None


def at(gb_per_s: float, nbytes: int = 512 * MIB) -> CollectiveFigures:
    """An all-reduce of 8 ranks at this bus bandwidth."""
    return ran("all_reduce", nbytes, round(1.75 * nbytes / gb_per_s))


@pytest.mark.parametrize(("collectives", "given", "bound"), [
    ((at(280),), {}, "bandwidth"),
    ((at(209),), {}, "below"),  # 70 % of 300 is 210
    ((at(211),), {}, "bandwidth"),
    ((at(3.5),), {}, "below"),
    ((at(3.5),), {"device": "NVIDIA A100-PG509-200"}, "unknown"),
    ((at(3.5),), {"devices": 1}, "unknown"),
    ((ran("all_reduce", None, US),), {}, "unknown"),
    # Half of the time waiting is skew, a little less is not.
    ((ran("all_reduce", 512 * MIB, 6000 * US),), {"shortest": {0: 3000 * US}}, "skew"),
    ((ran("all_reduce", 512 * MIB, 6000 * US),), {"shortest": {0: 3001 * US}}, "bandwidth"),
    # By the profile: 17 us to launch and 14 hops of 3.6 us are at least half of 100 us, and not of 200.
    ((ran("all_reduce", 4096, 100 * US),), {}, "latency"),
    ((ran("all_reduce", 4096, 200 * US),), {}, "below"),
    ((ran("all_reduce", 4096, 100 * US), at(280)), {}, "bandwidth"),
])  # fmt: skip
def test_bandwidth_latency_or_skew(
    collectives: tuple[CollectiveFigures, ...], given: dict[str, object], bound: str
) -> None:
    assert told(*collectives, **given).bound == bound  # type: ignore[arg-type]


def test_latency_is_read_off_the_traces_own_sizes_where_waiting_is_known() -> None:
    """80 us and 1 us per MiB: 64 MiB take longer to move than to start, 4 MiB do not."""
    own = [ran("all_reduce", size * MIB, (80 + size) * US) for size in (4, 40, 160, 640)]
    complete = {number: one.duration_ns for number, one in enumerate(own)}
    found = told(*own, device="a GPU without a profile", shortest=complete)
    assert {m.most_bytes: m.is_latency_bound for m in found.messages} == {
        4 * MIB: True, 160 * MIB: False, 640 * MIB: False,
    }  # fmt: skip
    # By one rank alone waiting may look the same, so without a profile nothing is said.
    alone = told(*own, device="a GPU without a profile")
    assert {m.is_latency_bound for m in alone.messages} == {None}


def test_latency_is_judged_by_the_duration_without_waiting() -> None:
    """Of 500 us the profile's 67 are no half, of the 100 that the last rank took they are."""
    assert told(ran("all_reduce", 4096, 500 * US)).messages[0].is_latency_bound is False
    assert told(ran("all_reduce", 4096, 500 * US), shortest={0: 100 * US}).messages[0].is_latency_bound is True


def test_nothing_bounds_what_is_not_exposed() -> None:
    hidden = communication(Traffic(exposure=Exposure(
        pieces=Pieces(starts=np.array([], np.int64), ends=np.array([], np.int64), owners=np.array([], np.int64)),
        steps=(None,), starts=np.array([0]), ends=np.array([10]), launch=(0,), no_launch=None,
    ), groups={}, links=Links()), [ran("all_reduce", MIB, US)], {}, alone=True)  # fmt: skip
    assert (hidden.bound, hidden.missing, hidden.whole.exposed_ns) == (None, None, 0)
