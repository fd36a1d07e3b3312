"""Two sides compared: what was exact, what rounds tell, and what becomes of rounds that fail. Launchers are fakes."""

from pathlib import Path

import msgspec
import pytest

from refshard.commands.paired import Comparison, gone_and_come, shared, suite_in
from refshard.errors import SpecError
from refshard.measure.gate import PairedRounds, Side
from refshard.measure.launchers.base import LaunchOutcome
from refshard.report.gate.formats import GateCase
from refshard.specs.case import Case
from refshard.specs.gate import GateSpec
from refshard.specs.reading import convert
from tests.measure.fakes import CENSUS, ENVIRONMENT, FakeLauncher, Silent, good, make_suite, rank_result, write_rank

SUITE = make_suite(matrix={"strategy": ["ddp", "refshard-yafsdp"], "gpus": [2], "model": ["llama-tiny"]})
QUICK = convert({"times": {"screen_rounds": 6, "confirm_rounds": 6}}, GateSpec, where="gate")
YAFSDP = "refshard-yafsdp-w2-llama-tiny-b4x256"


class Side_(FakeLauncher):  # noqa: N801
    """A side whose yafsdp takes ``factor`` times as long, and dies in the series of these numbers, from 1."""

    def __init__(self, factor: float = 1.0, *, dies_in: range = range(0), extra_operator: bool = False) -> None:
        super().__init__(self._end)
        self._factor, self._dies_in, self._extra = factor, dies_in, extra_operator

    def _end(self, case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy != "refshard-yafsdp":
            return LaunchOutcome()
        if len(self.series) in self._dies_in:
            for rank in range(case.processes):
                write_rank(case, folder, rank, state="failed", error="ValueError: no")
            return LaunchOutcome(failed_rank=0)
        census = msgspec.structs.replace(CENSUS, operators=CENSUS.operators + self._extra)
        for rank in range(case.processes):
            noise = 1 + 0.001 * len(self.series)  # ties have no exact p
            times = tuple(self._factor * noise * t for t in rank_result(case, rank).step_times_s)
            names = ("aten.mm", *(("aten.clone",) if self._extra else ()), "aten.add")
            write_rank(case, folder, rank, step_times_s=times, census=census, operators=names)
        return LaunchOutcome()


def compared(folder: Path, before: FakeLauncher, after: FakeLauncher, *, exact: bool = False) -> dict[str, GateCase]:
    comparison = Comparison(spec=QUICK, strategies=None)
    sides = (
        Side(name="baseline", launcher=before, environment=ENVIRONMENT),
        Side(name="candidate", launcher=after, environment=ENVIRONMENT),
    )
    with PairedRounds(SUITE, folder, sides, Silent(), print) as held:
        comparison.hold(held, *shared((SUITE, SUITE), SUITE.cases()), exact=exact)
    return {case.name: case for case in comparison.cases}


def test_a_slow_down_is_confirmed_by_fresh_rounds_and_the_rest_passes(tmp_path: Path) -> None:
    after = Side_(1.2)
    found = compared(tmp_path, Side_(), after)
    assert [case.verdict for case in found.values()] == ["pass", "pass", "inconclusive"]
    time = found[YAFSDP].time
    assert time is not None
    assert time.suspect
    assert time.effect.ratio == pytest.approx(1.2, rel=0.01)
    assert len(after.series) == 12, "six rounds to screen, and as many fresh ones"
    assert [len(series) for series in after.series] == [2] * 6 + [1] * 6
    assert time.effect.p_slower == pytest.approx(1 / 64), "six rounds are too few to reject at 0.005"


def test_an_extra_operator_is_told_with_its_place(tmp_path: Path) -> None:
    found = compared(tmp_path, Side_(), Side_(extra_operator=True), exact=True)
    case = found[YAFSDP]
    assert case.verdict == "regressed"
    assert [(c.metric, c.before, c.after) for c in case.changes] == [("operators", 10, 11)]
    assert case.remark == "operator 2 is aten.clone and was aten.add"
    assert case.time is None
    assert found["single-w1-llama-tiny-b4x256"].verdict == "pass", "a reference is compared too"


def test_a_candidate_that_fails_in_rounds_has_regressed(tmp_path: Path) -> None:
    found = compared(tmp_path, Side_(), Side_(dies_in=range(3, 5)))
    assert found[YAFSDP].verdict == "regressed"
    assert found[YAFSDP].trouble == "in 2 of 6 rounds the candidate ended in state failed: rank 0: ValueError: no"


def test_rounds_that_fail_on_both_sides_are_inconclusive(tmp_path: Path) -> None:
    found = compared(tmp_path, Side_(dies_in=range(1, 9)), Side_(dies_in=range(1, 9)))
    assert found[YAFSDP].verdict == "inconclusive"
    assert found[YAFSDP].trouble == "only 0 of 6 rounds ended ok on both sides"


def test_what_one_sides_launch_cannot_do_alone_is_no_time(tmp_path: Path) -> None:
    def refusing(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy == "refshard-yafsdp":
            write_rank(case, folder, 0, state="failed", error="ValueError: no")
        return LaunchOutcome()

    found = compared(tmp_path / "a", FakeLauncher(refusing), FakeLauncher())
    assert (found[YAFSDP].verdict, found[YAFSDP].time) == ("not comparable", None)
    found = compared(tmp_path / "b", FakeLauncher(), FakeLauncher(refusing))
    assert (found[YAFSDP].verdict, found[YAFSDP].time) == ("regressed", None)


def test_cases_that_only_one_revision_has_are_removed_or_new() -> None:
    less = make_suite(matrix={"strategy": ["ddp", "fsdp2"], "gpus": [2], "model": ["llama-tiny"]})
    found = gone_and_come((SUITE, less), less.cases())
    assert {case.name.split("-w")[0]: case.verdict for case in found} == {
        "refshard-yafsdp": "removed", "fsdp2": "new",
    }  # fmt: skip
    references, both = shared((SUITE, less), less.cases())
    assert [case.job.strategy for case in (*references, *both)] == ["single", "ddp"]
    other = make_suite(matrix={"strategy": ["fsdp2"], "gpus": [4], "model": ["llama-mini"]})
    with pytest.raises(SpecError, match="no case in common"):
        shared((SUITE, other), other.cases())


def test_a_revision_is_asked_for_its_own_suite(tmp_path: Path) -> None:
    (tmp_path / "suites").mkdir()
    mine = tmp_path / "suites" / "gate.toml"
    mine.write_text('name = "mine"\n[matrix]\nstrategy = ["ddp"]\n[case]\nmodel = "llama-tiny"\ngpus = 2\n')
    mine.write_text(mine.read_text() + "global_batch = 2\n")
    assert suite_in(tmp_path, "gate").name == "mine"
    assert suite_in(tmp_path, "suites/gate.toml").name == "mine"
    assert suite_in(tmp_path / "nothing", "gate").name == "gate", "the one that ships"
