"""Collectives, units, copies and waits: against counting point by point, and of a training run in closed form."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.collectives import bus_factor, collective_figures, copy_overhead, reduce_waits, unit_figures
from refshard.analysis.figures import CollectiveFigures, CopyOverhead, ReduceWait, UnitFigures
from refshard.events.timeline import Collective, Kind, Label, Meaning
from tests.analysis.builder import BASE_NS, Training
from tests.analysis.small import LANES, Row, bounds, points, rows, timeline_of, windows

COMPUTE, COMM = Kind.COMPUTE, Kind.COMM


def test_the_collectives_of_a_training_run_are_as_laid_out() -> None:
    """The first gather and the last reduction are exposed; a gather's gap blocks where a forward runs on in it."""
    plan = Training(layers=3, steps=1, world_size=4)
    found = collective_figures(plan.trace().timeline())
    gathers, reduces = [[c for c in found if c.op == op] for op in ("all_gather", "reduce_scatter")]
    assert [c.start_ns for c in found] == sorted(c.start_ns for c in found)
    assert [c.exposed_ns for c in gathers] == [plan.gather, 0, 0]
    assert [c.exposed_ns for c in reduces] == [0, 0, plan.reduce]
    # The second starts with the first forward, after the copy-out; the third with the second forward.
    between = plan.forward + plan.copy - plan.gather
    assert [c.gap_ns for c in gathers] == [None, plan.copy, between]
    assert [c.gap_blocking for c in gathers] == [None, False, True]
    slow, alone = plan.backward - plan.reduce, plan.backward - plan.reduce - 2 * plan.prep * (plan.stretch - 1)
    assert [c.gap_ns for c in reduces] == [None, slow, alone]
    assert [c.gap_blocking for c in reduces] == [None, True, True]
    assert [c.unit for c in gathers] == ["layers.0", "layers.1", "layers.2"]
    # All is launched within a microsecond from delay / 2 on: 5 launches and labels a unit, 10 ns apart.
    assert gathers[1].queued_ns == plan.delay + plan.gather + plan.copy - (plan.delay // 2 + 5 * 10 + 2)
    for collective, ns in ((gathers[0], plan.gather), (reduces[0], plan.reduce)):
        assert collective.bytes == 4 * plan.numel
        assert collective.algorithm_bandwidth == pytest.approx(4 * plan.numel / ns * 1e9)
        assert collective.bus_bandwidth == pytest.approx(4 * plan.numel / ns * 1e9 * 3 / 4)


@pytest.mark.parametrize(("op", "size", "factor"), [
    ("all_gather", 8, 7 / 8), ("reduce_scatter", 8, 7 / 8), ("all_to_all", 8, 7 / 8), ("all_reduce", 8, 7 / 4),
    ("broadcast", 8, 1), ("reduce", 8, 1), ("send", None, 1), ("recv", None, 1), ("all_gather", None, None),
    ("barrier", 8, None), ("all_reduce", 1, 0),
])  # fmt: skip
def test_bus_factors_are_those_of_nccl_tests(op: str, size: int | None, factor: float | None) -> None:
    assert bus_factor(op, size) == factor


def collective(start: int, end: int, *, launched: int | None = 0, lane: int = 1, size: int | None = 8) -> Collective:
    return Collective(op="all_gather", bytes=size, step=None, lane=LANES[lane], launched=launched, start=start, end=end)


def figures_of(*collectives: Collective, compute: tuple[int, int] = (0, 0)) -> tuple[CollectiveFigures, ...]:
    row = Row(kind=COMPUTE, lane=0, start=compute[0], end=compute[1], launch=0)
    return collective_figures(replace(timeline_of([row]), collectives=collectives))


def test_what_a_gap_between_collectives_says() -> None:
    def blocking(launched: int | None, compute: tuple[int, int] = (12, 18)) -> bool | None:
        _, second = figures_of(collective(0, 10), collective(20, 30, launched=launched), compute=compute)
        assert second.gap_ns == 10
        return second.gap_blocking

    assert blocking(10) is True, "launched as the gap began"
    assert blocking(11) is False, "launched within the gap"
    assert blocking(None) is None
    assert blocking(5, compute=(20, 40)) is False, "no compute runs in the gap"
    assert blocking(5, compute=(0, 10)) is False


def test_gaps_are_of_one_lane_and_never_negative() -> None:
    found = figures_of(collective(0, 10), collective(5, 8), collective(6, 9, lane=2), collective(15, 20))
    assert [c.gap_ns for c in found] == [None, 0, None, 5]
    assert [c.gap_blocking for c in found] == [None, False, None, False]


def test_what_cannot_be_told_of_a_collective_is_none() -> None:
    (instant,) = figures_of(collective(5, 5))
    assert (instant.algorithm_bandwidth, instant.bus_bandwidth) == (None, None)
    (shapeless,) = figures_of(collective(5, 9, size=None, launched=None))
    assert (shapeless.bytes, shapeless.algorithm_bandwidth, shapeless.queued_ns) == (None, None, None)
    (ungrouped,) = figures_of(collective(5, 9, launched=7))
    assert ungrouped.algorithm_bandwidth == pytest.approx(2e9)
    assert ungrouped.bus_bandwidth is None
    assert ungrouped.queued_ns == 0, "clocks disagree; no wait is below nothing"
    assert figures_of(Collective(op="all_gather", bytes=8, step=None)) == ()


@given(rows)
def test_exposed_is_the_collective_without_compute(found: list[Row]) -> None:
    issued = tuple(collective(r.start, r.end) for r in found if r.kind is COMM)
    figures = collective_figures(replace(timeline_of(found), collectives=issued))
    compute = points(found, COMPUTE)
    others = points(found, *(kind for kind in Kind if kind is not COMM))
    assert [c.exposed_ns for c in figures] == [len(r.points - compute) for r in found if r.kind is COMM]
    assert [c.exposed_any_ns for c in figures] == [len(r.points - others) for r in found if r.kind is COMM]


@given(rows)
def test_units_are_unions_of_their_own_spans(found: list[Row]) -> None:
    issued = tuple(
        replace(collective(r.start, r.end), unit=f"layers.{r.unit}") for r in found if r.kind is COMM and r.unit >= 0
    )
    compute, others = points(found, COMPUTE), points(found, *(kind for kind in Kind if kind is not COMM))

    def counted(unit: int) -> UnitFigures:
        own = [r for r in found if r.unit == unit]
        return UnitFigures(
            unit=f"layers.{unit}", compute_ns=len(points(own, COMPUTE)), comm_ns=len(points(own, COMM)),
            prep_ns=len(points(own, Kind.PREP)), copy_ns=len(points(own, Kind.COPY)),
            exposed_ns=len(points(own, COMM) - compute), exposed_any_ns=len(points(own, COMM) - others),
            collectives=sum(r.kind is COMM for r in own),
        )  # fmt: skip

    units = dict.fromkeys(r.unit for r in found if r.unit >= 0)
    assert unit_figures(replace(timeline_of(found), collectives=issued)) == tuple(counted(unit) for unit in units)


@given(rows, windows)
def test_copies_are_counted_once_and_hidden_beside_other_compute(
    found: list[Row], inside: list[tuple[int, int]]
) -> None:
    moving = [r for r in found if r.kind is not COMM]
    into = [r for r in moving if r.under & Meaning.COPY_IN]
    out = [r for r in moving if r.under & Meaning.COPY_OUT and r not in into]
    beside = points([r for r in found if not r.under], COMPUTE)

    def counted(start: int, end: int) -> CopyOverhead:
        window = set(range(start, end))
        inward, outward = (points(rows, *Kind) & window for rows in (into, out))
        hidden = len(inward & beside) + len(outward & beside)
        total = len(inward) + len(outward)
        return CopyOverhead(
            copy_in_ns=len(inward), copy_out_ns=len(outward), exposed_ns=total - hidden, hidden_ns=hidden
        )

    assert copy_overhead(timeline_of(found), *bounds(inside)) == tuple(counted(*window) for window in inside)


def waits_of(found: list[Row], labels: list[tuple[int, int]], inside: list[tuple[int, int]]) -> list[ReduceWait]:
    made = tuple(Label(meaning=Meaning.REDUCE_WAIT, unit=None, start=a, end=b) for a, b in labels)
    other = Label(meaning=Meaning.WAIT, unit=None, start=0, end=100)
    return list(reduce_waits(replace(timeline_of(found), labels=(other, *made)), *bounds(inside)))


def compute(start: int, end: int, launch: int, lane: int = 0) -> Row:
    return Row(kind=COMPUTE, lane=lane, start=start, end=end, launch=launch)


def test_the_wait_in_a_training_run_is_its_stall() -> None:
    plan = Training(layers=3, steps=2)
    timeline = plan.trace().timeline()
    starts, ends = bounds([(w.start, w.end) for w in timeline.windows] + [(BASE_NS, BASE_NS + 2 * plan.step_ns)])
    once = ReduceWait(count=1, host_ns=plan.rs_wait, device_ns=plan.stall)
    both = ReduceWait(count=2, host_ns=2 * plan.rs_wait, device_ns=2 * plan.stall)
    assert reduce_waits(timeline, starts, ends) == (once, once, both)


def test_a_wait_stands_between_what_was_launched_before_and_after_it() -> None:
    """Lane 0 computes most; the span on lane 1 within the gap does not count."""
    found = [compute(10, 30, 1), compute(32, 33, 6, lane=1), compute(40, 50, 7)]
    assert waits_of(found, [(5, 9)], [(0, 60)]) == [ReduceWait(count=1, host_ns=4, device_ns=10)]
    assert waits_of(found, [(7, 9)], [(0, 60)]) == [ReduceWait(count=1, host_ns=2, device_ns=10)], (
        "launched as it began"
    )
    assert waits_of(found, [(5, 6), (6, 9)], [(0, 60)]) == [ReduceWait(count=2, host_ns=4, device_ns=10)], "one gap"
    assert waits_of(found, [(0, 1)], [(0, 60)]) == [ReduceWait(count=1, host_ns=1, device_ns=0)], "nothing before it"
    assert waits_of(found, [(8, 9)], [(0, 60)]) == [ReduceWait(count=1, host_ns=1, device_ns=0)], "nothing after it"
    overlapping = [compute(10, 30, 1), compute(20, 50, 7)]
    assert waits_of(overlapping, [(5, 9)], [(0, 60)]) == [ReduceWait(count=1, host_ns=4, device_ns=0)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)).map(lambda w: (w[0], w[0] + w[1]))), windows)
def test_waits_belong_whole_to_the_window_in_which_they_start(
    labels: list[tuple[int, int]], inside: list[tuple[int, int]]
) -> None:
    for wait, (start, end) in zip(waits_of([], labels, inside), inside):
        mine = [b - a for a, b in labels if start <= a < end]
        assert (wait.count, wait.host_ns) == (len(mine), sum(mine))


def test_a_cpu_trace_has_no_device_to_wait() -> None:
    timeline = replace(timeline_of([compute(0, 10, 0)]), on_device=False)
    assert reduce_waits(timeline, *bounds([(0, 60)])) == (ReduceWait(count=0, host_ns=0, device_ns=None),)
