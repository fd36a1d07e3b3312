"""What ifs: a replay with other times against the same program run again under other rules, and closed forms."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from refshard.analysis import figures as whatif
from refshard.analysis.analyse import analyse, join
from refshard.analysis.figures import WhatIfFigures
from refshard.analysis.graph import graph_of
from refshard.analysis.kineto import timeline_of
from refshard.analysis.whatif import what_ifs
from refshard.events.reader import read_events
from refshard.events.timeline import Intervals
from tests.analysis.builder import Training
from tests.analysis.handmade import event, note, shaped, write
from tests.analysis.programs import CALL, MAIN, PRELUDE, SIDE, Cpu, Launch, Program, Rules, Sync, Wait, events, run

US, MS = 1_000, 1_000_000


def found(path: Path) -> WhatIfFigures:
    figures = analyse(path).figures.what_if
    assert figures is not None
    return figures


def steps_of(figures: WhatIfFigures) -> dict[str, int]:
    return {one.what: one.step_ns for one in figures.what_ifs}


def of_program(program: Program, *, recorded: bool = True) -> WhatIfFigures:
    with TemporaryDirectory() as folder:
        return found(write(Path(folder) / "trace.json", events(run(program), recorded=recorded)))


def largest(program: Program) -> str:
    """The name of the compute kernels that take most time; of two alike, that of the first to start."""
    times: dict[str, int] = {}
    for op, _, start, end in sorted(run(program).kernels, key=lambda kernel: kernel[2]):
        if not op.communicates:
            times[op.name] = times.get(op.name, 0) + end - start
    return max(times, key=lambda name: times[name])


def run_again(program: Program, changes: list[str]) -> int:
    """How long the program takes under other rules."""
    course = run(program)
    rules = Rules(
        communication_free=whatif.OVERLAPPED in changes, launches_free=whatif.LAUNCHES in changes,
        host_fast=whatif.FAST_HOST in changes, no_sync=whatif.NO_SYNC in changes,
        fast=largest(program) if whatif.KERNEL in changes else "", since=course.start,
    )  # fmt: skip
    communication = Intervals.of([(start, end) for op, _, start, end in course.kernels if op.communicates]).length
    return max(run(program, rules).end - course.start, communication if rules.communication_free else 0)


def lingers(program: Program) -> bool:
    """Whether the host waits though the device is done: no GPU does, and a trace does not show what for."""
    course = run(program)
    ends = [(number, end) for _, number, _, end in course.kernels]
    return any(
        name == "cudaDeviceSynchronize" and end - begin > CALL and all(e <= begin for n, e in ends if n < number)
        for number, (name, begin, end) in enumerate(course.calls)
    )


ops = st.one_of(
    st.builds(
        Launch, st.sampled_from([MAIN, SIDE]), st.integers(1, 300).map(lambda n: n * US),
        st.sampled_from(["small", "gemm", "ncclKernel_AllReduce"]),
    ),
    st.builds(Cpu, st.integers(1, 200).map(lambda n: n * US)),
    st.sampled_from([Wait(MAIN, SIDE), Wait(SIDE, MAIN), Sync()]),
)  # fmt: skip


@pytest.mark.slow
@given(st.lists(ops, min_size=1, max_size=25))
def test_each_answer_is_what_the_program_takes_under_other_rules(program: list[Launch | Cpu | Wait | Sync]) -> None:
    """The trace records what waits for what, so that the replay must be exact."""
    whole = [*PRELUDE, *program]
    assume(not lingers(whole))
    figures = of_program(whole)
    assert figures.step_ns == run(whole).end - run(whole).start
    assert figures.replay_error == 0
    assert steps_of(figures) == {what: run_again(whole, [what]) for what in steps_of(figures)}
    done: list[str] = []
    for one in figures.order:
        done.append(one.what)
        assert one.step_ns == run_again(whole, done)


@given(st.lists(ops, min_size=1, max_size=40), st.booleans())
def test_nothing_is_slower_than_the_base_and_the_critical_path_is_as_long(
    program: list[Launch | Cpu | Wait | Sync], recorded: bool
) -> None:
    """Also where nothing tells what a dependency usually costs."""
    whole = [Launch(MAIN, 5 * US), *program]
    figures = of_program(whole, recorded=recorded)
    assert all(0 <= one.gain_ns == figures.step_ns - one.step_ns for one in figures.what_ifs)
    gains = [one.gain_ns for one in figures.what_ifs]
    assert gains == sorted(gains, reverse=True)
    assert sum(part.ns for part in figures.path.parts) == figures.step_ns
    assert all(part.ns > 0 for part in figures.path.parts)


TRAINING = Training(
    steps=1, delay=200 * US, gather=3 * MS, copy=500 * US, forward=8 * MS, stall=0, backward=20 * MS, prep=1 * MS,
    reduce=6 * MS, optimizer=4 * MS, tail=0,
)  # fmt: skip
"""A step at a real training's scale, launched at once; waits between streams are not recorded."""
STEP_NS = TRAINING.step_ns
"""The only one of its trace, it begins on the host."""
LAUNCH_NS = 10
"""The first copy-out was launched so much later than the gather, and is bound by that where the gather is gone."""


def test_training_with_inferred_waits(tmp_path: Path) -> None:
    """Exposed are the first gather and the last reduction. A backward twice as fast leaves the reduction's stream."""
    figures = found(TRAINING.trace().write(tmp_path / "trace.json"))
    plan, base = TRAINING, STEP_NS
    assert (figures.steps, figures.step_ns, figures.waits_recorded) == (1, base, 0)
    assert figures.replay_error == 0
    steps = steps_of(figures)
    assert steps[whatif.OVERLAPPED] == base - plan.gather - plan.reduce + LAUNCH_NS
    # Ten of backward, then each unit's preparation and reduction one after the other: 12, 12, 12, 8.
    reduced = plan.backward // 2 + 3 * (2 * plan.prep * plan.stretch + plan.reduce) + 2 * plan.prep + plan.reduce
    assert steps[whatif.KERNEL] == base - (plan.layers * plan.backward + 2 * plan.prep + plan.reduce - reduced)
    assert [one.what for one in figures.order][:2] == [whatif.KERNEL, whatif.OVERLAPPED]
    assert figures.what_ifs[0].detail == "aten::gemm_backward"


def test_a_stall_without_a_cause_is_unexplained_and_ranks_nothing(tmp_path: Path) -> None:
    """No change shortens it; from 3 % of the step on, no order is given."""
    plan = replace(TRAINING, stall=20 * MS)
    figures = found(plan.trace().write(tmp_path / "trace.json"))
    unexplained = next(part.ns for part in figures.path.parts if part.kind == "unexplained")
    assert plan.stall - 100 * US <= unexplained <= plan.stall
    assert figures.replay_error == pytest.approx(plan.stall / figures.step_ns, rel=0.02)
    assert figures.order == ()
    assert steps_of(figures)[whatif.OVERLAPPED] == figures.step_ns - plan.gather - plan.reduce + LAUNCH_NS


def test_a_step_takes_as_long_as_its_communication() -> None:
    """Nothing waits for 500 us of it, and 100 us of compute are hidden beside it, but it takes its time."""
    program: Program = [
        Launch(SIDE, 500 * US, "ncclKernel_AllGather"), Wait(SIDE, MAIN), Launch(MAIN, 100 * US, "gemm"),
    ]  # fmt: skip
    figures = of_program(program)
    assert figures.step_ns > 600 * US
    assert steps_of(figures)[whatif.OVERLAPPED] == 500 * US


def test_every_rank_on_time(tmp_path: Path) -> None:
    """Rank 0 stands 2 ms in each gather for rank 1, which enters last; only the first gather of a step is exposed."""
    late = replace(TRAINING, gather=5 * MS)
    paths = [late.trace(0).write(tmp_path / "rank0.json"), TRAINING.trace(1).write(tmp_path / "rank1.json")]
    first, second = (one.figures.what_if for one in join([analyse(path) for path in paths]))
    assert first is not None
    assert second is not None
    gains = {one.what: one.gain_ns for one in first.what_ifs}
    assert gains[whatif.ON_TIME] == 2 * MS
    assert whatif.ON_TIME not in steps_of(second)
    alone = found(paths[0])
    assert whatif.ON_TIME not in steps_of(alone)


def test_a_long_trace_is_represented_by_its_step_of_median_length(tmp_path: Path) -> None:
    """Its figures are those of the step alone, though it follows others."""
    trace = read_events(replace(TRAINING, steps=5).trace().write(tmp_path / "trace.json"))
    graph = graph_of(trace, timeline_of(trace), most_spans=50)
    assert graph is not None
    figures = what_ifs(graph)
    assert (figures.steps, figures.step_ns) == (1, TRAINING.step_ns)
    assert steps_of(figures)[whatif.OVERLAPPED] == TRAINING.step_ns - TRAINING.gather - TRAINING.reduce + LAUNCH_NS


def test_a_lead_of_the_host_is_used_up(tmp_path: Path) -> None:
    """A step of the device of 1 ms, of which half is communication, cannot become shorter than the host's 0.9 ms."""
    made = []
    for step in range(3):
        begin = step * 900
        made.append(note(f"ProfilerStep#{step}", begin, 900))
        for part in range(10):
            number = 10 * step + part + 1
            start = 5_000 + 100 * (number - 1)
            name = "gemm" if part % 2 else "ncclKernel_AllReduce"
            made.append(event("cudaLaunchKernel", begin + 99 * part, 5, cat="cuda_runtime", correlation=number))
            made.append(event(name, start, 100, cat="kernel", tid=MAIN, device=0, stream=MAIN, correlation=number))
    figures = found(write(tmp_path / "trace.json", made))
    assert figures.step_ns == 1000 * US
    # From the first call of three steps to the last call.
    assert steps_of(figures)[whatif.OVERLAPPED] == (2 * 900 + 9 * 99) * US // 3


def test_products_near_the_peak_are_not_twice_as_fast(tmp_path: Path) -> None:
    """Products of 4096 x 4096 take 139 us at an H100's peak of 989 TFLOPS; these take 174 us, or 348."""
    shapes = shaped([[4096, 4096]] * 2, ["c10::BFloat16"] * 2)
    for us, what, left in ((173.7, whatif.ROOFLINE, 138.97 / 173.7), (347.4, whatif.KERNEL, 0.5)):
        made = []
        for n in range(8):
            made += [
                event("aten::mm", 4 * n, 3, **shapes),
                event("cudaLaunchKernel", 4 * n + 1, 1, cat="cuda_runtime", correlation=n + 1),
                event("gemm", 10 + n * us, us, cat="kernel", tid=7, correlation=n + 1, device=0, stream=7),
            ]
        path = write(tmp_path / "t.json", made, deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
        (change,) = [one for one in found(path).what_ifs if one.what in (whatif.KERNEL, whatif.ROOFLINE)]
        assert (change.what, change.detail) == (what, "matrix product 4096x4096x4096, bf16")
        assert change.step_ns == pytest.approx(8 * us * US * left, rel=0.001)
