"""Who leads a ranking: one decision for sentences and tables."""

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.analysis.rankings import Ranking, rankings
from refshard.records import Run
from tests.report.runs import CASES, run


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
    assert ranking.runner_up.ratio == pytest.approx(1.2)
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
