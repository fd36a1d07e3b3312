"""Launches joined into cases, and cases sorted into settings."""

import msgspec
import pytest

from refshard.analysis.cases import BREAKDOWN
from refshard.analysis.evidence import gather
from refshard.records import StepTrace
from tests.report.runs import CASES, FAILED, STRATEGIES, run, with_record


def test_the_worst_state_counts_whatever_the_order() -> None:
    made = with_record(run(failed=False), 0, state="timeout", error="too slow")
    made = with_record(made, len(CASES), state="oom", error="too large")
    worst = gather(made).cases[0]
    assert (worst.state, worst.error) == ("timeout", "too slow")


def test_other_metrics_are_medians_over_the_rounds_that_ended_ok() -> None:
    made = run(rounds=3, failed=False)
    for round_, peak in enumerate((100.0, 900.0, 200.0)):
        place = round_ * len(CASES)
        metrics = {**made.launches[place].metrics, "peak_memory_bytes": peak}
        made = with_record(made, place, metrics=metrics)
    assert gather(made).cases[0].metrics["peak_memory_bytes"] == 200.0
    made = with_record(made, 0, state="failed")
    assert gather(made).cases[0].metrics["peak_memory_bytes"] == 550.0


def test_a_repeated_launch_replaces_the_earlier_one() -> None:
    made = run(failed=False)
    repeated = msgspec.structs.replace(made.launches[1], state="oom")
    case = gather(msgspec.structs.replace(made, launches=(*made.launches, repeated))).cases[1]
    assert [launch.state for launch in case.launches] == ["oom", "ok", "ok"]


def test_a_row_of_traced_figures_adds_up_over_rounds() -> None:
    """Medians of each would not: they come from different rounds, and could give negative compute alone."""
    made = run(rounds=3, failed=False)
    for round_, (compute, comm) in enumerate(((1.0, 0.9), (9.0, 8.9), (9.1, 0.1))):
        place = round_ * len(CASES) + 1
        changed = {"compute_s": compute, "comm_s": comm, "exposed_comm_s": comm / 2, "idle_s": 0.5}
        made = with_record(made, place, metrics={**made.launches[place].metrics, **changed})
    case = gather(made).cases[1]
    parts = case.breakdown
    assert parts is not None
    assert sum(parts.values()) == pytest.approx((1.45 + 13.45 + 9.15) / 3 + 0.5)
    assert case.metrics["overlap_ratio"] == pytest.approx(0.5)
    assert parts["exposed communication"] == case.metrics["exposed_comm_s"] == pytest.approx((0.9 + 8.9 + 0.1) / 6)


@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_rates_and_the_step_time_of_a_row_add_up(rounds: int) -> None:
    """The median of rates is not the rate of the median, of an even number of rounds."""
    made = run(rounds=rounds, failed=False)
    for round_ in range(rounds):
        place, time = round_ * len(CASES) + 1, (1.0, 3.0, 2.0, 7.0)[round_]
        rates = {"step_time_s": time, "tokens_per_s_gpu": 1024 / time, "tflops": 0.002 / time, "mfu": 0.016 / time}
        metrics = {**made.launches[place].metrics, **rates}
        made = with_record(made, place, step_times_s=((time,),) * 2, metrics=metrics)
    metrics = gather(made).cases[1].metrics
    assert metrics["step_time_s"] == {2: 2.0, 3: 2.0, 4: 2.5}[rounds]
    for name, work in (("tokens_per_s_gpu", 1024), ("tflops", 0.002), ("mfu", 0.016)):
        assert (metrics[name] or 0) * (metrics["step_time_s"] or 0) == pytest.approx(work)


def test_traced_figures_have_the_range_of_their_steps() -> None:
    """Two ranks and two steps a launch, of which the ranks' mean counts."""
    made = run(CASES[1:2], rounds=2, failed=False)
    for place, exposed in enumerate(((2, 4), (6, 10))):
        steps = tuple(
            StepTrace(rank=r, step=s, span_ns=0, compute_ns=7, comm_ns=20, exposed_ns=ns + r, idle_ns=0)
            for s, ns in enumerate(exposed)
            for r in range(2)
        )
        made = with_record(made, place, steps=steps)
    found = gather(made).cases[0].traced_range
    assert found["exposed_comm_s"] == pytest.approx((2.5e-9, 10.5e-9))
    assert found["overlap_ratio"] == pytest.approx((1 - 10.5 / 20, 1 - 2.5 / 20))
    one = with_record(run(CASES[1:2], rounds=1, failed=False), 0, steps=made.launches[0].steps[:2])
    assert gather(one).cases[0].traced_range == {}


def test_a_failed_launch_gives_the_state_and_a_plain_error() -> None:
    made = with_record(run(), -1, error="\x1b[1mbold\x1b[0m")
    backwards = gather(msgspec.structs.replace(made, launches=tuple(reversed(made.launches)))).cases
    assert [case.strategy for case in backwards] == list(STRATEGIES)
    assert {case.strategy: case.error for case in backwards if case.state == "failed"} == {FAILED: "bold"}
    assert [launch.round for launch in backwards[0].launches] == [0, 1, 2]
    assert [case.number for case in backwards] == list(range(6))


def test_parts_of_a_traced_step_add_up_to_it_if_there_is_a_trace() -> None:
    ddp = gather(run()).cases[1]
    assert ddp.breakdown == pytest.approx(dict(zip(BREAKDOWN, (0.029, 0.011, 0.009, 0.002))))
    assert ddp.exposed_share == pytest.approx(0.009 / 0.051)
    bare = with_record(run(CASES[1:2], rounds=1, failed=False), 0, metrics={"comm_s": None})
    assert (gather(bare).cases[0].breakdown, gather(bare).cases[0].exposed_share) == (None, None)
