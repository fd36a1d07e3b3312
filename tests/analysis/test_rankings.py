"""Who leads a ranking, and what to use: one decision for sentences and tables."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.compare import Comparison
from refshard.analysis.evidence import gather
from refshard.analysis.rankings import Ranking, rankings
from refshard.analysis.ratios import Outcome, Ratio
from refshard.records import Load, Run
from refshard.specs.choice import EQUAL_MEMORY
from tests.report.runs import CASES, run, with_load


def modelled(*step_times_s: float) -> Run:
    """Dry runs of as many strategies, with these step times."""
    made = run(CASES[1:], rounds=1, failed=False, fidelity="dryrun")
    records = [
        msgspec.structs.replace(
            record,
            step_times_s=((time,),),
            metrics={**record.metrics, "step_time_s": time, "peak_reserved_bytes": None},
        )
        for record, time in zip(made.launches, step_times_s)
    ]
    return msgspec.structs.replace(made, launches=tuple(records))


def only(made: Run) -> Ranking:
    (ranking,) = rankings(gather(made))
    return ranking


def test_modelled_times_within_the_models_error_are_tied_and_all_lead() -> None:
    ranking = only(modelled(1.0, 1.02, 1.2))
    assert [case.metrics["step_time_s"] for case in ranking.fastest] == [1.0, 1.02]
    assert ranking.runner_up is not None
    assert ranking.runner_up.time == pytest.approx(1.2)
    assert ranking.leaders["step_time_s"] == ranking.leaders["mfu"] == ranking.fastest


def test_reserved_memory_decides_where_it_is_known_of_all() -> None:
    made = modelled(1.0, 1.1)
    reserved = [{**record.metrics, "peak_reserved_bytes": size} for record, size in zip(made.launches, (2e9, 1e9))]
    cases = [msgspec.structs.replace(record, metrics=metrics) for record, metrics in zip(made.launches, reserved)]
    ranking = only(msgspec.structs.replace(made, launches=tuple(cases)))
    assert ranking.memory_metric == "peak_reserved_bytes"
    assert [case.strategy for case in ranking.lowest_memory] == [made.launches[1].case.job.strategy]
    one = msgspec.structs.replace(cases[1], metrics={**cases[1].metrics, "peak_reserved_bytes": None})
    assert only(msgspec.structs.replace(made, launches=(cases[0], one))).memory_metric == "peak_memory_bytes"


def test_one_that_is_alone_does_not_lead() -> None:
    assert only(modelled(1.0)).leaders == {}


def interval(ratio: float, low: float, high: float) -> Comparison:
    return Comparison(ratio=ratio, low=low, high=high, launches=3, paired=True)


intervals = st.tuples(st.floats(1, 2), st.floats(0, 1), st.floats(0, 1)).map(
    lambda drawn: interval(drawn[0], drawn[0] / (1 + drawn[1]), drawn[0] * (1 + drawn[2]))
)
MEASURED = only(run(CASES[1:], failed=False))


def ranked(found: list[Comparison], sizes: tuple[float, ...]) -> Ranking:
    """A winner and as many rivals, with these ratios; the memory of all."""
    winner, *others = MEASURED.candidates
    rivals = [Ratio(peer=winner, case=case, step_time=one, calculated=None, peak_memory=None)
              for case, one in zip(others, sorted(found, key=lambda one: one.ratio))]  # fmt: skip
    peaks = dict(sorted(zip(MEASURED.candidates, sizes), key=lambda item: item[1]))
    return replace(MEASURED, winner=winner, rivals=tuple(rivals), peaks=peaks)


@given(st.lists(intervals, max_size=3), st.tuples(*[st.floats(1, 2)] * 4))
def test_what_is_slower_than_a_slower_one_is_slower(found: list[Comparison], sizes: tuple[float, ...]) -> None:
    """However the intervals overlap, the fastest are those before the first that is slower; one more rival that takes
    longer than all changes nothing.
    """
    ranking = ranked(found, sizes)
    inside, outside = ranking.unbeaten, ranking.rivals[len(ranking.unbeaten) :]
    assert max((one.time or 0 for one in inside), default=0) <= min((one.time or 0 for one in outside), default=9)
    assert all(one.outcome != "slower" for one in inside)
    assert not outside or outside[0].outcome == "slower"
    fewer = replace(ranking, rivals=ranking.rivals[:-1])
    assert fewer.fastest == tuple(case for case in ranking.fastest if case in fewer.fastest)


@given(st.lists(intervals, max_size=3), st.tuples(*[st.floats(1, 2)] * 4))
def test_the_one_to_use_needs_the_least_memory_of_those_that_tie(
    found: list[Comparison], sizes: tuple[float, ...]
) -> None:
    ranking = ranked(found, sizes)
    best, *other = ranking.choices
    unclear = {one.case for one in ranking.undecided}
    known = [case for case in ranking.fastest if case not in unclear]
    assert best in known
    assert ranking.peaks[best] <= (1 + EQUAL_MEMORY) * min(ranking.peaks[case] for case in known)
    least = min(ranking.peaks[case] for case in ranking.fastest)
    assert bool(other) == (ranking.peaks[best] > (1 + EQUAL_MEMORY) * least), "memory that may be had for nothing"


def load(before: float, after: float) -> Load:
    return Load(probe_before_s=before, probe_after_s=after, other_cores=0.0, cores=2)


@pytest.mark.parametrize(
    ("found", "drift", "outcome"),
    [
        (interval(1.05, 1.003, 1.10), 0.04, "slower"),
        (interval(1.05, 1.003, 1.10), 0.299, "not decided"),
        (interval(0.95, 0.91, 0.99), 0.299, "not decided"),
        (interval(0.95, 0.91, 0.99), 0.0, "faster"),
        (interval(1.05, 0.99, 1.12), 0.0, "tie"),
        (interval(1.05, 0.80, 1.38), 0.0, "not decided"),
        (interval(1.004, 1.003, 1.005), 0.0, "tie"),
        (interval(1.30, 1.20, 1.40), 0.0, "slower"),
        (interval(1.30, 0.0, float("inf")), 0.0, "not decided"),
    ],
)
def test_an_interval_a_tolerance_and_the_drift_decide_together(
    found: Comparison, drift: float, outcome: Outcome
) -> None:
    drifting = with_load(run(CASES[1:3], failed=False), {"fsdp2": load(0.05, 0.05 * (1 + drift))})
    a, b = gather(drifting).cases
    ratio = Ratio(peer=a, case=b, step_time=found, calculated=None, peak_memory=None)
    assert ratio.outcome == outcome
    assert bool(ratio.drift) == (drift == 0.299)
    if found.bounded:
        back = replace(ratio, step_time=interval(1 / found.ratio, 1 / found.high, 1 / found.low))
        opposite: dict[Outcome, Outcome] = {"slower": "faster", "faster": "slower"}
        assert back.outcome == opposite.get(outcome, outcome)


def test_calculated_times_tie_within_the_models_error() -> None:
    """In the order of their times; memory decides, and a peer comes before this project's own."""
    made = modelled(1.0, 1.029, 1.031, 1.02)
    found = only(made)
    assert [(one.case.strategy, one.outcome) for one in found.rivals] == [
        ("refshard-yafsdp", "tie"), ("fsdp2", "tie"), ("refshard-fsdp", "slower"),
    ]  # fmt: skip
    (used,) = found.choices
    assert used.strategy == "refshard-yafsdp", "240 MiB"
    even = dict.fromkeys(found.peaks, 300.0)
    assert [case.strategy for case in replace(found, peaks=even).choices] == ["ddp"]
