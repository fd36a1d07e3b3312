"""Attribution: every nanosecond has one owner, and what two traces differ by is what their owners differ by."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from refshard.analysis.attribution import Work, attribute
from refshard.analysis.figures import Cause
from refshard.analysis.overlap import knows_launches, step_breakdowns
from refshard.events.timeline import UNKNOWN, Collective, Kind, Timeline, Window
from tests.analysis.builder import Training
from tests.analysis.small import NAMES, Row, idle_gaps, rows, steps, timeline_of

PRIORITY = [Kind.COMPUTE, Kind.PREP, Kind.COPY, Kind.UNCLASSIFIED, Kind.COMM]


def with_collectives(found: list[Row], windows: tuple[Window, ...]) -> Timeline:
    """Some of the communication is of a collective, some of these of a unit."""
    return replace(timeline_of(found, windows=windows), collectives=tuple(
        Collective(op="all_gather", bytes=None, step=None, rows=(i,), unit="layers.0" if row.unit == 0 else None)
        for i, row in enumerate(found)
        if row.kind is Kind.COMM and row.operator == 1
    ))  # fmt: skip


def work(row: Row) -> Work:
    """These rows tell no phase, no inputs and no calls of operators."""
    unit = None if row.unit == UNKNOWN else f"layers.{row.unit}"
    if row.kind is Kind.COMM and row.operator == 1:
        return Work(kind="comm", operator="all_gather", unit="layers.0" if row.unit == 0 else None)
    by_name = row.kind is Kind.COMM or row.operator == UNKNOWN
    name = NAMES[row.name if by_name else row.operator]
    return Work(kind=row.kind.value, operator=name, unit=unit, by_name=by_name)


def counted(found: list[Row], windows: tuple[Window, ...]) -> dict[Work, tuple[int, int]]:
    """Nanoseconds and number of every owner, point by point."""
    ns: Counter[Work] = Counter()
    number: Counter[Work] = Counter()
    known = any(row.launch != UNKNOWN for row in found)
    for window in windows:
        inside = range(window.start, window.end)
        for t in inside:
            running = [(PRIORITY.index(r.kind), r.start, r.lane, i) for i, r in enumerate(found) if t in r.points]
            if running:
                ns[work(found[min(running)[-1]])] += 1
        number.update(work(row) for row in found if row.start in inside)
        for gap in idle_gaps(found, window.start, window.end, windows[0].start, windows[-1].end):
            after = Work(kind="", operator="the end") if gap.follower is None else work(found[gap.follower])
            bound = gap.cause.replace("_", " ") if known else None
            idle = Work(kind="idle", operator=after.operator, unit=after.unit, bound=bound)
            ns[idle] += gap.end - gap.start
            number[idle] += 1
    return {key: (ns[key], number[key]) for key in ns | number}


@given(rows, steps)
def test_every_nanosecond_has_the_owner_that_its_point_says(found: list[Row], windows: tuple[Window, ...]) -> None:
    attribution = attribute(with_collectives(found, windows))
    assert {o.work: (o.ns, o.count) for o in attribution.owners} == counted(found, windows)
    assert attribution.step_ns == tuple(w.end - w.start for w in windows)
    assert attribution.span_ns == sum(w.end - w.start for w in windows) == sum(o.ns for o in attribution.owners)
    for owner in attribution.owners:
        if owner.work.kind != "idle":
            assert sum(ns for _, ns in owner.kernels) == owner.ns


@given(rows, steps)
def test_the_longest_part_of_an_owner_is_one_of_its_spans_or_gaps(
    found: list[Row], windows: tuple[Window, ...]
) -> None:
    owned: Counter[int] = Counter()
    for t in (t for window in windows for t in range(window.start, window.end)):
        if running := [(PRIORITY.index(r.kind), r.start, r.lane, i) for i, r in enumerate(found) if t in r.points]:
            owned[min(running)[-1]] += 1
    for owner in attribute(with_collectives(found, windows)).owners:
        ns, start, end = owner.longest
        assert ns <= end - start
        assert ns <= owner.ns
        if owner.work.kind != "idle":
            mine = [(owned[i], r.start, r.end) for i, r in enumerate(found) if work(r) == owner.work]
            assert (ns, start, end) in mine
            assert ns == max(mine)[0]
        else:
            assert ns == end - start > 0


@given(rows, steps)
def test_idle_owners_add_up_to_the_breakdown(found: list[Row], windows: tuple[Window, ...]) -> None:
    timeline = with_collectives(found, windows)
    idle = [o for o in attribute(timeline).owners if o.work.kind == "idle"]
    steps = step_breakdowns(timeline)
    assert sum(o.ns for o in idle) == sum(b.idle_ns for b in steps)
    for cause in Cause:
        owned = sum(o.ns for o in idle if o.work.bound == cause.replace("_", " "))
        assert owned == sum(getattr(b, f"idle_{cause}_ns") or 0 for b in steps) or not knows_launches(timeline.spans)


def test_a_training_run_is_owned_as_it_was_laid_out() -> None:
    plan = Training(layers=3, steps=2)
    found = attribute(plan.trace().timeline())
    per_step: dict[tuple[str, str, str | None, str | None], tuple[int, int]] = {}
    for n in range(plan.layers):
        unit, last = f"layers.{n}", n == 0
        per_step |= {
            ("compute", "aten::gemm_forward", unit, "forward"): (plan.forward, 1),
            ("compute", "aten::gemm_backward", unit, "backward"): (plan.backward, 1),
            ("copy", "aten::split_with_sizes_copy", unit, "forward"): (plan.copy, 1),
            # Preparation and communication own only what lies beside no compute: the last unit's, and first gather.
            ("prep", "aten::cast", unit, "backward"): (plan.prep * last, 1),
            ("prep", "aten::chunk_cat", unit, "backward"): (plan.prep * last, 1),
            ("comm", "all_gather", unit, "forward"): (plan.gather * last, 1),
            ("comm", "reduce_scatter", unit, "backward"): (plan.reduce * last, 1),
        }
    per_step |= {
        ("compute", "aten::adam", None, None): (plan.optimizer, 1),
        ("idle", "aten::gemm_backward", "layers.2", "backward"): (plan.stall, 1),
    }
    # The tail of the first step ends with it, and is judged by what comes after; that of the last by nothing.
    begin, end = ("idle", "all_gather", "layers.0", "forward"), ("idle", "the end", None, None)
    expected = {key: (2 * ns, 2 * count) for key, (ns, count) in per_step.items()}
    expected |= {begin: (2 * plan.delay + plan.tail, 3), end: (plan.tail, 1)}
    assert {
        (o.work.kind, o.work.operator, o.work.unit, o.work.phase): (o.ns, o.count) for o in found.owners
    } == expected
    assert {o.work.bound for o in found.owners if o.work.operator == "the end"} == {"launch"}
    assert {o.work.bound for o in found.owners if o.work.phase == "backward" and o.work.kind == "idle"} == {
        "back to back"
    }
    assert found.span_ns == 2 * plan.step_ns
    assert [o.ns for o in found.owners] == sorted((o.ns for o in found.owners), reverse=True)


def test_of_spans_that_start_together_the_one_on_the_first_lane_owns() -> None:
    short = Row(kind=Kind.COMPUTE, lane=1, start=0, end=5, launch=0, operator=1)
    long = Row(kind=Kind.COMPUTE, lane=0, start=0, end=10, launch=0, operator=0)
    timeline = timeline_of([short, long], windows=(Window(step=0, start=0, end=10),))
    assert {o.work.operator: o.ns for o in attribute(timeline).owners} == {NAMES[0]: 10, NAMES[1]: 0}


def test_overlapping_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps must not overlap"):
        attribute(timeline_of([], windows=(Window(step=0, start=0, end=10), Window(step=1, start=9, end=20))))
