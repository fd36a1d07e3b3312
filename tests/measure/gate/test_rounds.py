"""Paired rounds: both sides in every round, what their times say, and what is kept."""

import math
from pathlib import Path

import numpy as np
import pytest

from refshard.measure.gate import PairedRounds, Side
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.store import read_run
from refshard.records import LaunchRecord
from refshard.specs.case import Case
from refshard.specs.suite import SuiteSpec
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, good, make_suite, rank_result, write_rank


def scaled(factor: float, *, failing_in: frozenset[int] = frozenset()) -> FakeLauncher:
    """Every step takes ``factor`` times as long; series whose number is in ``failing_in`` fail."""

    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        for rank in range(case.processes):
            times = tuple(factor * t for t in rank_result(case, rank).step_times_s)
            write_rank(case, folder, rank, step_times_s=times)
        if len(launcher.series) in failing_in:
            write_rank(case, folder, 0, state="failed", error="ValueError: no")
        return LaunchOutcome()

    launcher = FakeLauncher(outcome)
    return launcher


def sides(baseline: FakeLauncher, candidate: FakeLauncher) -> tuple[Side, Side]:
    return (
        Side(name="baseline", launcher=baseline, environment=ENVIRONMENT),
        Side(name="candidate", launcher=candidate, environment=ENVIRONMENT),
    )


def split(suite: SuiteSpec) -> tuple[list[Case], list[Case]]:
    references = [case for case in suite.cases() if case == case.reference()]
    return references, [case for case in suite.cases() if case not in references]


@pytest.mark.slow
def test_each_round_launches_both_sides_in_random_order_and_cases_in_the_same(tmp_path: Path) -> None:
    order: list[str] = []

    def noting(name: str) -> FakeLauncher:
        def outcome(case: Case, folder: Path) -> LaunchOutcome:
            order.append(name)
            return good(case, folder)

        return FakeLauncher(outcome)

    suite, told = make_suite(), list[str]()
    references, timed = split(suite)
    a, b = noting("a"), noting("b")
    with PairedRounds(suite, tmp_path, sides(a, b), Silent(), told.append) as held:
        held.apart(references)
        order.clear()
        held.hold(timed, 12)
    assert a.launched == b.launched == references
    assert a.series == b.series, "both sides take the cases in the same order"
    assert {tuple(case.job.strategy for case in series) for series in a.series} == {
        ("ddp", "refshard-yafsdp"), ("refshard-yafsdp", "ddp"),
    }, "which is another one in other rounds"  # fmt: skip
    rounds = [tuple(order[index : index + 4]) for index in range(0, len(order), 4)]
    assert len(rounds) == 12
    assert set(rounds) == {("a", "a", "b", "b"), ("b", "b", "a", "a")}, "neither side always comes first"
    assert told[0].startswith("round 1/12 of 2 cases; ")
    assert not list(tmp_path.glob("*/cases/series*")), "only records are kept"


def test_cases_of_other_world_sizes_are_launched_apart(tmp_path: Path) -> None:
    suite = make_suite(matrix={"strategy": ["ddp", "fsdp2"], "gpus": [2, 4], "model": ["llama-tiny"]})
    references, timed = split(suite)
    launcher = FakeLauncher()
    with PairedRounds(suite, tmp_path, sides(launcher, FakeLauncher()), Silent(), print) as held:
        held.apart(references)
        held.hold(timed, 1)
    assert [[case.job.gpus for case in series] for series in launcher.series] == [[2, 2], [4, 4]]


def test_log_ratios_are_those_of_rounds_that_both_sides_ended_well(tmp_path: Path) -> None:
    suite = make_suite(matrix={"strategy": ["ddp"], "gpus": [2], "model": ["llama-tiny"]})
    references, timed = split(suite)
    pair = sides(scaled(1.0), scaled(1.1, failing_in=frozenset({2})))
    with PairedRounds(suite, tmp_path, pair, Silent(), print) as held:
        held.apart(references)
        held.hold(timed, 4)
        assert held.rounds == 5
        assert held.log_ratios(timed[0]) == pytest.approx(np.full(3, math.log(1.1)))
        assert len(held.log_ratios(timed[0], first_round=3)) == 2
        before, after = held.last(timed[0])
    assert (before.state, after.state, before.round) == ("ok", "ok", 4)
    for side, states in (("baseline", {"ok": 5}), ("candidate", {"ok": 4, "failed": 1})):
        run = read_run(tmp_path / side)
        assert run.end is not None
        assert (run.end.states, run.end.interrupted) == (states, False)
        assert all(proved(record) for record in run.launches if record.state == "ok")


def proved(record: LaunchRecord) -> bool:
    return record.proof is not None and record.proof.loss_parity is not None


def test_sides_may_be_two_strategies(tmp_path: Path) -> None:
    suite = make_suite(matrix={"strategy": ["ddp"], "gpus": [2], "model": ["llama-tiny"]})
    references, timed = split(suite)
    mine, theirs = sides(FakeLauncher(), FakeLauncher())
    other = Side(name="candidate", launcher=theirs.launcher, environment=ENVIRONMENT, strategy="refshard-yafsdp")
    with PairedRounds(suite, tmp_path, (mine, other), Silent(), print) as held:
        held.apart(references)
        held.hold(timed, 1)
        assert [record.case.job.strategy for record in held.last(timed[0])] == ["ddp", "refshard-yafsdp"]
        assert held.log_ratios(timed[0]) == pytest.approx([0.0])
    assert timed[0].changed(strategy="refshard-yafsdp") == other.case(timed[0])
    assert other.case(references[0]) == references[0]


def test_an_exception_closes_both_runs_as_interrupted(tmp_path: Path) -> None:
    suite, pair = make_suite(), sides(scaled(1), scaled(1))
    with pytest.raises(RuntimeError, match="enough"), PairedRounds(suite, tmp_path, pair, Silent(), print):
        raise RuntimeError("enough")
    for side in ("baseline", "candidate"):
        end = read_run(tmp_path / side).end
        assert end is not None
        assert end.interrupted
