"""A busy machine is named where it drifted by more than the difference that is told."""

from dataclasses import replace

import msgspec
import pytest

from refshard.analysis.busy import drift_over, within_launch
from refshard.analysis.evidence import gather
from refshard.records import Load, Run
from refshard.report.run.compare import against
from refshard.report.run.trust import trust
from refshard.report.run.verdict import findings
from tests.analysis.test_evidence import later, quicker
from tests.report.runs import CASES, run

PAIR = CASES[1:3]
"""ddp at 50 ms and fsdp2 at 60 ms: 20 %."""


def load(before: float = 0.05, after: float = 0.05, others: float | None = 0.0) -> Load:
    return Load(probe_before_s=before, probe_after_s=after, other_cores=others, cores=2)


def loaded(made: Run, **of: Load) -> Run:
    """The run, every launch of which saw a quiet machine but for those of the strategies that are given."""
    cases = [msgspec.structs.replace(record, load=of.get(record.case.job.strategy, load())) for record in made.launches]
    return msgspec.structs.replace(made, launches=tuple(cases))


def busy(made: Run) -> str:
    (finding,) = findings(gather(made))
    assert (finding.busy in finding.sentences) == bool(finding.busy)
    return finding.busy


def test_a_quiet_machine_and_one_that_was_not_watched_are_not_named() -> None:
    assert busy(loaded(run(PAIR, failed=False))) == busy(run(PAIR, failed=False)) == ""


def test_a_drift_within_a_launch_that_exceeds_the_lead_is_named_with_its_figure() -> None:
    assert busy(loaded(run(PAIR, failed=False), fsdp2=load(0.05, 0.07))) == (
        "The machine was busy: its compute probe went from 50.0 ms to 70.0 ms within a launch of fsdp2, 2 ranks "
        "(40.0 %). That is more than the difference in step time (20.0 %)."
    )


def test_a_drift_below_the_lead_is_not() -> None:
    assert busy(loaded(run(PAIR, failed=False), fsdp2=load(0.05, 0.055))) == ""


def test_a_drift_between_the_sides_is_named() -> None:
    assert "its compute probe went from 50.0 ms to 65.0 ms between the two cases (30.0 %)" in busy(
        loaded(run(PAIR, failed=False), fsdp2=load(0.065, 0.065))
    )


def test_what_other_processes_took_of_one_side_is_named() -> None:
    assert "other processes used 0.0 of 2 cores in one case, 0.6 in the other (30.0 %)" in busy(
        loaded(run(PAIR, failed=False), ddp=load(others=0.6))
    )


@pytest.mark.parametrize("rounds", [1, 2])
def test_point_estimates_of_a_busy_machine_say_so_too(rounds: int) -> None:
    made = loaded(run(PAIR, rounds=rounds, failed=False), ddp=load(0.05, 0.09))
    assert busy(made).startswith("The machine was busy: its compute probe went from 50.0 ms to 90.0 ms within a launch")


def test_a_tie_on_a_busy_machine_is_named_and_a_drift_under_a_percent_is_not() -> None:
    """The same step times: any drift is more than the difference, but one that is no news."""
    even = [PAIR[0], replace(PAIR[1], step_time=PAIR[0].step_time)]
    made = run(even, failed=False)
    assert "That is more than the difference in step time (0.0 %)." in busy(loaded(made, fsdp2=load(0.05, 0.06)))
    assert busy(loaded(made, fsdp2=load(0.05, 0.0504))) == ""


def test_a_dry_run_has_no_machine() -> None:
    assert busy(run(PAIR, rounds=1, failed=False, fidelity="dryrun")) == ""


def test_a_comparison_with_a_baseline_says_so() -> None:
    before = loaded(run(PAIR, failed=False))
    now = later(loaded(quicker(before, 1.1), ddp=load(0.08, 0.08)), "now")
    told = against(gather(now), gather(before)).sentences
    assert told[1] == (
        "The machine was busy: its compute probe went from 50.0 ms to 80.0 ms between the two cases (60.0 %). That is "
        "more than the difference in step time (10.0 %)."
    )
    assert not [s for s in against(gather(later(quicker(before, 1.1), "now")), gather(before)).sentences if "busy" in s]


def test_drifts_are_those_of_common_rounds() -> None:
    """Two launches of ddp without a partner in their rounds do not count between the sides."""
    made = loaded(run(PAIR, failed=False))
    alone = [msgspec.structs.replace(made.launches[place], load=load(5.0, 5.0)) for place in (2, 4)]
    first, second = gather(msgspec.structs.replace(made, launches=(*made.launches[:2], *alone))).cases
    assert drift_over(first, second, 0.001) is None
    assert drift_over(first, second, 0.0) is None


def test_the_trust_strip_shows_the_largest_drift() -> None:
    found = {fact.label: fact for fact in trust(gather(loaded(run(PAIR, failed=False), ddp=load(0.05, 0.06, 0.4))))}
    assert found["Machine drift"].value == "up to 20.0 %"
    assert "other processes used at most 0.4 of 2 cores" in found["Machine drift"].detail
    assert {fact.label: fact for fact in trust(gather(run(PAIR)))}["Machine drift"].value == "not recorded"
    assert within_launch(gather(run(PAIR)).cases[0]) is None
