"""Attribution: every nanosecond has one owner, and what two traces differ by is what their owners differ by."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.timeline import UNKNOWN, Collective, Kind, Timeline, Window
from refshard.tracing.diff import Attribution, Owner, attribute, difference
from refshard.tracing.figures import Cause
from refshard.tracing.idle import knows_launches
from refshard.tracing.overlap import step_breakdowns
from tests.tracing.builder import Training
from tests.tracing.small import NAMES, Row, idle_gaps, rows, steps, timeline_of

PRIORITY = [Kind.COMPUTE, Kind.PREP, Kind.COPY, Kind.UNCLASSIFIED, Kind.COMM]


def with_collectives(found: list[Row], windows: tuple[Window, ...]) -> Timeline:
    """Some of the communication is of a collective, some of these of a unit."""
    collectives = tuple(
        Collective(op="all_gather", bytes=None, step=None, rows=(i,), unit="layers.0" if row.unit == 0 else None)
        for i, row in enumerate(found)
        if row.kind is Kind.COMM and row.operator == 1
    )
    return replace(timeline_of(found, windows=windows), collectives=collectives)


def label(row: Row) -> str:
    if row.kind is Kind.COMM:
        name = "all_gather (layers.0)" if row.unit == 0 else "all_gather"
        return name if row.operator == 1 else NAMES[row.name]
    return NAMES[row.name if row.operator == UNKNOWN else row.operator]


def counted(found: list[Row], windows: tuple[Window, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    """Nanoseconds and number of every owner, point by point."""
    ns: Counter[tuple[str, str]] = Counter()
    number: Counter[tuple[str, str]] = Counter()
    known = any(row.launch != UNKNOWN for row in found)
    for window in windows:
        inside = range(window.start, window.end)
        for t in inside:
            running = [(PRIORITY.index(r.kind), r.start, r.lane, i) for i, r in enumerate(found) if t in r.points]
            if running:
                row = found[min(running)[-1]]
                ns[row.kind, label(row)] += 1
        number.update((row.kind.value, label(row)) for row in found if row.start in inside)
        for gap in idle_gaps(found, window.start, window.end, windows[0].start, windows[-1].end):
            name = "before " + ("the end" if gap.follower is None else label(found[gap.follower]))
            name += f" ({gap.cause.replace('_', ' ')})"
            name = name if known else name.rpartition(" (")[0]
            ns["idle", name] += gap.end - gap.start
            number["idle", name] += 1
    return {key: (ns[key], number[key]) for key in ns | number}


@given(rows, steps)
def test_every_nanosecond_has_the_owner_that_its_point_says(found: list[Row], windows: tuple[Window, ...]) -> None:
    attribution = attribute(with_collectives(found, windows))
    assert {(o.kind, o.label): (o.ns, o.count) for o in attribution.owners} == counted(found, windows)
    assert attribution.steps == len(windows)
    assert attribution.span_ns == sum(w.end - w.start for w in windows) == sum(o.ns for o in attribution.owners)


@given(rows, steps)
def test_idle_owners_add_up_to_the_breakdown(found: list[Row], windows: tuple[Window, ...]) -> None:
    timeline = with_collectives(found, windows)
    idle = [o for o in attribute(timeline).owners if o.kind == "idle"]
    steps = step_breakdowns(timeline)
    assert sum(o.ns for o in idle) == sum(b.idle_ns for b in steps)
    for cause in Cause:
        owned = sum(o.ns for o in idle if o.label.endswith(f"({cause.replace('_', ' ')})"))
        assert owned == sum(getattr(b, f"idle_{cause}_ns") or 0 for b in steps) or not knows_launches(timeline.spans)


def test_a_training_run_is_owned_as_it_was_laid_out() -> None:
    plan = Training(layers=3, steps=2)
    found = attribute(plan.trace().timeline())
    n = plan.layers
    per_step = {
        ("compute", "aten::gemm_forward"): (n * plan.forward, n),
        ("compute", "aten::gemm_backward"): (n * plan.backward, n),
        ("compute", "aten::adam"): (plan.optimizer, 1),
        ("copy", "aten::split_with_sizes_copy"): (n * plan.copy, n),
        # Preparation and communication own only what lies beside no compute: that of the last unit, and first gather.
        ("prep", "aten::cast"): (plan.prep, n),
        ("prep", "aten::chunk_cat"): (plan.prep, n),
        ("comm", "all_gather (layers.0)"): (plan.gather, 1),
        ("comm", "all_gather (layers.1)"): (0, 1),
        ("comm", "all_gather (layers.2)"): (0, 1),
        ("comm", "reduce_scatter (layers.0)"): (plan.reduce, 1),
        ("comm", "reduce_scatter (layers.1)"): (0, 1),
        ("comm", "reduce_scatter (layers.2)"): (0, 1),
        ("idle", "before aten::gemm_backward (back to back)"): (plan.stall, 1),
    }
    # The tail of the first step ends with it, and is judged by what comes after; that of the last by nothing.
    begin, end = ("idle", "before all_gather (layers.0) (launch)"), ("idle", "before the end (launch)")
    expected = {key: (2 * ns, 2 * count) for key, (ns, count) in per_step.items()}
    expected |= {begin: (2 * plan.delay + plan.tail, 3), end: (plan.tail, 1)}
    assert {(o.kind, o.label): (o.ns, o.count) for o in found.owners} == expected
    assert found.span_ns == 2 * plan.step_ns
    assert [o.ns for o in found.owners] == sorted((o.ns for o in found.owners), reverse=True)


def test_of_spans_that_start_together_the_one_on_the_first_lane_owns() -> None:
    short = Row(kind=Kind.COMPUTE, lane=1, start=0, end=5, launch=0, operator=1)
    long = Row(kind=Kind.COMPUTE, lane=0, start=0, end=10, launch=0, operator=0)
    timeline = timeline_of([short, long], windows=(Window(step=0, start=0, end=10),))
    assert {o.label: o.ns for o in attribute(timeline).owners} == {NAMES[0]: 10, NAMES[1]: 0}


def test_overlapping_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps must not overlap"):
        attribute(timeline_of([], windows=(Window(step=0, start=0, end=10), Window(step=1, start=9, end=20))))


def test_a_difference_names_what_changed_most_first() -> None:
    """A slower reduction shows as its exposed part, a faster forward as itself; what did not change, as nothing."""
    before = Training(layers=3, steps=2)
    after = replace(before, steps=4, reduce=before.reduce + 700, forward=before.forward - 100, numel=7)
    found = difference(attribute(before.trace().timeline()), attribute(after.trace().timeline()))
    first, second = found[:2]
    assert (first.kind, first.label, first.delta_ns) == ("comm", "reduce_scatter (layers.0)", 700)
    assert (second.kind, second.label, second.delta_ns) == ("compute", "aten::gemm_forward", -300)
    assert (first.a_count, first.b_count) == (1, 1)
    assert sum(c.delta_ns for c in found) == after.step_ns - before.step_ns
    idle_at_the_end = {c.label: c.delta_ns for c in found if c.kind == "idle"}
    # Of fewer steps, a greater share is the last.
    assert idle_at_the_end["before the end (launch)"] == before.tail / 4 - before.tail / 2


def test_a_difference_says_what_is_new_and_what_is_gone() -> None:
    trace = Training(layers=2, steps=1).trace()
    a = attribute(trace.timeline())
    trace.works = [replace(w, operator="aten::fused_adam") if w.operator == "aten::adam" else w for w in trace.works]
    found = {c.label: (c.a_ns, c.b_ns, c.new, c.gone) for c in difference(a, attribute(trace.timeline()))}
    ns = float(Training().optimizer)
    expected = {"aten::adam": (ns, 0, False, True), "aten::fused_adam": (0, ns, True, False)}
    assert {label: found[label] for label in expected} == expected
    assert not any(new or gone for label, (*_, new, gone) in found.items() if "adam" not in label)


owners = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 10**13))


@given(owners, st.integers(1, 999), owners, st.integers(1, 999))
def test_a_difference_adds_up(a: dict[str, int], a_steps: int, b: dict[str, int], b_steps: int) -> None:
    """To the rounding of floats: two divisions and a subtraction, each exact to 2**-53 of what it rounds."""

    def made(owned: dict[str, int], steps: int) -> Attribution:
        found = tuple(Owner(kind="compute", label=label, ns=ns, count=1) for label, ns in owned.items())
        return Attribution(steps=steps, span_ns=sum(owned.values()), owners=found)

    total = sum((Fraction(c.delta_ns) for c in difference(made(a, a_steps), made(b, b_steps))), Fraction(0))
    mean_a, mean_b = Fraction(sum(a.values()), a_steps), Fraction(sum(b.values()), b_steps)
    assert abs(total - (mean_b - mean_a)) <= (mean_a + mean_b) * 3 / 2**53


def test_a_trace_without_steps_has_no_mean_step() -> None:
    nothing = attribute(timeline_of([]))
    assert nothing == Attribution(steps=0, span_ns=0, owners=())
    with pytest.raises(ValueError, match="trace B has no step"):
        difference(attribute(Training(steps=1).trace().timeline()), nothing)
