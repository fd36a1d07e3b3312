"""The give-way index: a planted effect is found with its exact size, and nothing is found where none is."""

from dataclasses import replace

import pytest

from refshard.analysis.collectives import give_ways
from refshard.analysis.figures import GiveWay
from refshard.events.timeline import UNKNOWN, Collective, Kind, Timeline
from tests.analysis.builder import Training, Work
from tests.analysis.small import LANES, Row, bounds, timeline_of


def of_steps(timeline: Timeline, calibration: Timeline | None = None) -> tuple[GiveWay, ...]:
    windows = [(w.start, w.end) for w in timeline.windows]
    return give_ways(timeline, *bounds([*windows, (windows[0][0], windows[-1][1])]), calibration)


@pytest.mark.parametrize("stretch", [1, 2, 6])
def test_a_planted_effect_is_found_with_its_exact_size(stretch: int) -> None:
    """All preparations but the last stretch beside compute; a factor of 1 is no effect, and reads exactly 0."""
    plan = Training(layers=4, steps=5, stretch=stretch)
    *steps, whole = of_steps(plan.trace().timeline())
    lost = (plan.layers - 1) * 2 * plan.prep * (stretch - 1)
    for step in steps:
        assert step == GiveWay(
            index=lost / plan.step_ns,
            lost_ns=lost,
            stretch=((plan.layers - 1) * stretch + 1) / plan.layers,
            reduces=plan.layers,
            samples=5,
            baseline="unaccompanied",
        )
    assert (whole.lost_ns, whole.index, whole.reduces) == (5 * lost, lost / plan.step_ns, 5 * plan.layers)


def test_under_five_undisturbed_runs_tell_nothing_and_name_the_kernel() -> None:
    step, *_ = of_steps(Training(steps=4).trace().timeline())
    assert (step.index, step.lost_ns, step.stretch, step.samples) == (None, None, None, 4)
    assert step.reason == "cast_kernel ran undisturbed 4 times; 5 are needed to tell how long it takes"


def test_a_calibration_pass_gives_the_undisturbed_durations() -> None:
    """One step would not do by itself; kernels are matched by name and geometry, whatever their codes are."""
    plan = Training(steps=1)
    calibration = Training(steps=5, layers=1).trace()
    calibration.works = [work for work in calibration.works if work.kind is Kind.PREP]
    step, _ = of_steps(plan.trace().timeline(), calibration.timeline())
    assert (step.lost_ns, step.samples) == ((plan.layers - 1) * 2 * plan.prep * (plan.stretch - 1), 5)
    assert step.baseline == "calibration"
    calibration.works = [replace(work, blocks=2) for work in calibration.works]
    step, _ = of_steps(plan.trace().timeline(), calibration.timeline())
    assert (step.index, step.samples) == (None, 0), "the same kernels over more blocks are others"


def test_one_unmeasured_kernel_leaves_only_the_windows_that_hold_it_without_an_index() -> None:
    trace = Training(steps=6).trace()
    odd = next(w for w in trace.works if w.name == "chunk_cat_kernel" and w.step == 2 and w.unit == "layers.1")
    name = "a_kernel_of_a_very_long_name_" * 4
    trace.works[trace.works.index(odd)] = replace(odd, name=name)
    *steps, whole = of_steps(trace.timeline())
    assert [step.index is None for step in steps] == [False, False, True, False, False, False]
    assert whole.index is None
    assert steps[2].reason is not None
    assert steps[2].reason.startswith(f"{name[:57]}... ran undisturbed 0 times")


def test_undisturbed_is_a_median() -> None:
    """One outlier among the undisturbed runs changes nothing."""
    plan = Training(steps=5)
    trace = plan.trace()
    last = next(w for w in trace.works if w.name == "chunk_cat_kernel" and w.unit == "layers.0" and w.step == 4)
    trace.works[trace.works.index(last)] = replace(last, ns=last.ns - 7)
    assert of_steps(trace.timeline())[0].lost_ns == of_steps(plan.trace().timeline())[0].lost_ns


def test_why_there_is_no_index() -> None:
    timeline = Training().trace().timeline()
    (empty,) = give_ways(timeline, *bounds([(0, 10)]))
    assert empty == GiveWay(reason="no reductions")
    cpu, *_ = of_steps(replace(timeline, on_device=False))
    assert cpu == GiveWay(reason="a CPU trace has no kernels that could give way")
    spans = replace(timeline.spans, launches=timeline.spans.launches * 0 + UNKNOWN)
    blind, *_ = of_steps(replace(timeline, spans=spans))
    assert blind == GiveWay(reason="the trace does not tell when kernels were launched")
    trace = Training().trace()
    trace.works = [work for work in trace.works if work.kind is not Kind.PREP]
    bare, *_ = of_steps(trace.timeline())
    assert bare == GiveWay(reason="no preparatory kernels before any of 4 reductions")


def lost(before_end: int = 0, launch: int = 0, gradient_end: int = 0, other: int = 0) -> int | None:
    """What one reduction loses that starts at 100 after a preparation in [90, 100), of 4 ns undisturbed.

    Compute runs in [50, 100); an earlier collective on its lane ends at ``before_end``, ``other`` on another lane does;
    the last gradient kernel ends at ``gradient_end``, and the preparation was launched at ``launch``.
    """
    prep = [Row(kind=Kind.PREP, lane=2, start=1000 + 10 * i, end=1004 + 10 * i, launch=900, name=3) for i in range(5)]
    found = [
        Row(kind=Kind.COMPUTE, lane=0, start=0, end=gradient_end, launch=1),
        Row(kind=Kind.COMPUTE, lane=0, start=50, end=100, launch=60),
        Row(kind=Kind.PREP, lane=2, start=90, end=100, launch=launch or 2, name=3),
        Row(kind=Kind.COMM, lane=2, start=100, end=110, launch=70, name=2),
        *prep,
    ]

    def collective(lane: int, start: int, end: int, launched: int, rows: tuple[int, ...] = ()) -> Collective:
        return Collective(op="reduce_scatter", bytes=None, step=None, lane=LANES[lane], launched=launched, start=start,
                          end=end, rows=rows)  # fmt: skip

    collectives = [collective(2, 100, 110, 70, rows=(3,))]
    if before_end:
        collectives.append(replace(collective(2, 0, before_end, 0), op="all_gather"))
    if other:
        collectives.append(replace(collective(1, 0, other, 0), op="all_gather"))
    timeline = replace(timeline_of(found), collectives=tuple(collectives))
    return give_ways(timeline, *bounds([(0, 200)]))[0].lost_ns


def test_the_delay_counts_from_the_latest_of_what_the_reduction_needed() -> None:
    assert lost() == 50 - 4, "compute ran all of [50, 100)"
    assert lost(before_end=70) == 30 - 4, "the collective before it held the lane"
    assert lost(other=70) == 50 - 4, "one on another lane did not"
    assert lost(gradient_end=80) == 20 - 4, "the gradient was not there"
    assert lost(launch=55) == 45 - 4, "the host had not launched the preparation"
    assert lost(before_end=70, gradient_end=80, launch=55) == 20 - 4
    assert lost(before_end=98) == 0, "never negative"


def test_a_kernel_launched_after_the_reduction_prepares_the_next() -> None:
    """Moving the last unit's preparation behind its reduction's launch leaves that reduction without any."""
    trace = Training(layers=2, steps=6).trace()

    def delayed(work: Work) -> Work:
        late = work.kind is Kind.PREP and work.unit == "layers.0" and work.step == 5
        return replace(work, launch=work.launch + 100) if late else work

    trace.works = [delayed(work) for work in trace.works]
    *_, last, whole = of_steps(trace.timeline())
    assert (last.reduces, whole.reduces) == (1, 11)


def test_what_follows_a_reduction_under_its_annotation_prepares_no_other() -> None:
    """A cast after each reduce-scatter, as a mixed-precision run has it, leaves the index where it was."""
    plan = Training(steps=5, stretch=1)
    trace = plan.trace()
    for first in [work for work in trace.works if work.op == "reduce_scatter"]:
        cast = replace(first, kind=Kind.PREP, name="cast_kernel", op=None, ns=plan.prep, launch=first.launch + 1)
        trace.works.append(replace(cast, start=first.start + first.ns))
    whole = of_steps(trace.timeline())[-1]
    assert (whole.lost_ns, whole.index, whole.stretch) == (0, 0.0, 1.0)


def test_the_second_leg_of_a_hybrid_waits_for_the_first_and_not_for_preparation() -> None:
    """Per unit a reduce-scatter, a division, and an all-reduce on another stream: nothing gives way to anything."""
    plan = Training(steps=5, stretch=1, reduce=4000)
    trace = plan.trace()
    for first in [work for work in trace.works if work.op == "reduce_scatter"]:
        end = first.start + first.ns
        divide = replace(first, kind=Kind.PREP, name="div_kernel", start=end, ns=500, launch=first.launch + 1, op=None)
        second = replace(first, name="nccl_all_reduce", op="all_reduce", stream=24, launch=first.launch + 2)
        trace.works += [divide, replace(second, start=end + 500)]
    timeline = trace.timeline()
    trace.works = [work for work in trace.works if work.kind is Kind.PREP]  # a pass in which nothing runs beside them
    whole = of_steps(timeline, trace.timeline())[-1]
    assert (whole.reduces, whole.lost_ns, whole.index) == (2 * plan.layers * plan.steps, 0, 0.0)
