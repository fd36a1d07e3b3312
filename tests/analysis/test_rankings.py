"""Who leads a ranking: one decision for sentences and tables."""

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.analysis.rankings import Ranking, leaders, rankings
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


def test_the_unsharded_reference_does_not_compete() -> None:
    ranking = only(run(failed=False))
    assert "single" in {case.strategy for case in gather(run(failed=False)).cases}
    assert "single" not in {case.strategy for case in ranking.candidates}


def test_modelled_times_within_the_models_error_are_tied_and_all_lead() -> None:
    ranking = only(modelled(1.0, 1.02, 1.2))
    assert [case.metrics["step_time_s"] for case in ranking.fastest] == [1.0, 1.02]
    assert ranking.runner_up is not None
    assert ranking.runner_up.ratio == pytest.approx(1.2)
    (setting,) = gather(modelled(1.0, 1.02, 1.2)).settings
    assert [{case.metrics["step_time_s"] for case in leaders(setting)[m]} for m in ("step_time_s", "mfu")] == [
        {1.0, 1.02}, {1.0, 1.02},
    ]  # fmt: skip


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
    (setting,) = gather(modelled(1.0)).settings
    assert leaders(setting) == {}


def test_what_did_not_end_ok_does_not_compete() -> None:
    made = modelled(1.0, 0.5)
    failed = msgspec.structs.replace(made.launches[1], state="oom")
    ranking = only(msgspec.structs.replace(made, launches=(made.launches[0], failed)))
    assert ranking.winner is not None
    assert (ranking.winner.metrics["step_time_s"], ranking.rivals) == (1.0, ())
