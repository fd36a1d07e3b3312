"""``refshard compare``: strategies of one run, two runs, and what cannot be compared."""

from pathlib import Path

import msgspec
import pytest

from refshard.commands.compare import compare
from refshard.errors import SpecError, StoreError
from refshard.records import Run
from refshard.report.blocks import Answer, Marked
from tests.report.printed import as_csv, as_json, notes, rows, tables, text, verdict
from tests.report.runs import CASES, later, quicker, run, unfinished, write

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(run(), tmp_path / "run")


def test_ratios_of_two_strategies_or_of_all_with_one(folder: Path) -> None:
    """The step times and memories that the run was made of: ddp 50 ms and 440 MiB, yafsdp 40 ms and 240 MiB."""
    found = compare("refshard-yafsdp", ["ddp"], folder)
    assert tables(found)[0].rows[0][2] == Marked("1.25 (1.25 to 1.25)", "bad")
    assert verdict(found) == [
        "Use refshard-yafsdp: 200 MiB (45 %) less memory than ddp, which takes 25.0 % longer.",
        "ddp, 2 ranks against refshard-yafsdp: step time 25.0 % longer; peak memory 83.3 % more.",
    ]
    assert found.status == 0
    (back,) = tables(compare("ddp", ["refshard-yafsdp"], folder))
    assert back.rows[0][2] == Marked("0.80 (0.80 to 0.80)", "good")
    every = compare("ddp", [], folder)
    assert [row["strategy"] for row in rows(tables(every)[0])] == ["fsdp2", "refshard-fsdp", "refshard-yafsdp"]
    (ddp,) = as_json(found)["cases"]
    assert (ddp["strategy"], ddp["against"], as_json(found)["a"]) == ("ddp", "refshard-yafsdp", "refshard-yafsdp")
    assert ddp["step_time_ratio_low"] <= ddp["step_time_ratio"] <= ddp["step_time_ratio_high"]
    assert (ddp["step_time_ratio"], ddp["peak_memory_ratio"]) == pytest.approx((1.25, 440 / 240), rel=1e-4)
    assert float(as_csv(found)[0]["step_time_ratio"]) == ddp["step_time_ratio"]


def test_one_launch_of_each_has_no_interval_and_no_rank(tmp_path: Path) -> None:
    found = compare("ddp", ["fsdp2"], write(run(rounds=1, failed=False), tmp_path / "run"))
    (row,) = rows(tables(found)[0])
    assert row["step time / ddp (95 % interval, paired by round)"] == "1.20 (n = 1: no interval)"
    assert verdict(found) == [
        "No verdict: n = 1: no interval (3 launches of each give one).",
        "fsdp2, 2 ranks against ddp: step time 20.0 % longer, not decided: n = 1: no interval; peak memory 31.8 % "
        "less.",
    ]
    assert found.status == 3
    assert (as_json(found)["cases"][0]["step_time_ratio_low"], as_csv(found)[0]["step_time_ratio_low"]) == (None, "")
    assert "inf" not in text(found, verbose=True)


def test_an_interval_that_includes_1_is_a_tie(tmp_path: Path) -> None:
    """The same case a second time, its rounds alternately 1 % quicker and slower."""
    made = run(CASES[1:3], rounds=4, failed=False)
    of_ddp = {record.round: record.step_times_s for record in made.launches if record.case.job.strategy == "ddp"}
    launches = []
    for record in made.launches:
        factor = 1.0 if record.case.job.strategy == "ddp" else 0.99 if record.round % 2 else 1.01
        times = tuple(tuple(factor * time for time in rank) for rank in of_ddp[record.round])
        launches.append(msgspec.structs.replace(record, step_times_s=times))
    folder = write(msgspec.structs.replace(made, launches=tuple(launches)), tmp_path / "run")
    found = compare("ddp", ["fsdp2"], folder)
    assert verdict(found)[0] == "Use fsdp2: 140 MiB (32 %) less memory than ddp; their step times tie."
    assert verdict(found)[1].startswith("fsdp2, 2 ranks against ddp: a tie in step time; ")
    cell = tables(found)[0].rows[0][2]
    assert isinstance(cell, Marked)
    assert cell.style == "plain"


def test_calculated_times_have_a_ratio_and_no_interval(tmp_path: Path) -> None:
    made = run(rounds=1, failed=False, fidelity="dryrun")
    found = compare("ddp", ["fsdp2"], write(made, tmp_path / "run"))
    assert rows(tables(found)[0])[0]["step time / ddp"] == "1.20"
    assert "step time 20.0 % longer (dry run); " in verdict(found)[1]
    (case,) = as_json(found)["cases"]
    assert (case["step_time_ratio"], case["step_time_ratio_low"]) == (pytest.approx(1.2, rel=1e-4), None)


def test_a_strategy_that_is_alone_has_nothing_to_be_compared_with(folder: Path) -> None:
    found = compare("single", [], folder)
    assert text(found) == "No verdict: no other case with the same number of ranks as single ended ok."
    assert found.status == 3
    assert as_json(found)["cases"] == as_csv(found) == []


def test_a_strategy_that_the_run_lacks_suggests_the_nearest(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no case of strategy 'refshard-yafsd'; did you mean 'refshard-yafsdp'\?"):
        compare("ddp", ["refshard-yafsd"], folder)
    with pytest.raises(SpecError, match="this run has no case yet, so none of strategy 'ddp'"):
        compare("ddp", [], write(unfinished(0), tmp_path / "none"))


def two(tmp_path: Path, before: Run, after: Run) -> Answer:
    return compare(str(write(before, tmp_path / "before")), [str(write(after, tmp_path / "after"))], None)


def test_two_runs_are_compared_case_by_case_b_over_a(tmp_path: Path) -> None:
    made = run(failed=False)
    found = two(tmp_path, made, later(quicker(made, 1.5), "slower"))
    assert rows(tables(found)[0])[1]["B / A (95 % interval)"].startswith("1.500 (")
    assert "Both runs have the same machine and software." in notes(found)
    (first, *_) = as_json(found)["cases"]
    assert (as_json(found)["a"], as_json(found)["b"]) == (["made"], ["slower"])
    assert (first["step_time_ratio"], first["time"]) == (pytest.approx(1.5, rel=1e-3), "slower")
    assert len(as_csv(found)) == len(made.launches) / 3
    assert list(as_csv(found)[0])[:-1] == list(found.columns) == list(first)


def test_runs_of_other_machines_say_what_differs_and_compare_no_times(tmp_path: Path) -> None:
    made = run(failed=False)
    found = two(tmp_path, made, later(quicker(made, 0.5), "there", id="other", cpu="Other CPU", torch="2.12.0"))
    differing = as_json(found)["machines_differ_in"]
    assert [("2.12.0" in text, "Other CPU" in text) for text in sorted(differing)] == [(False, True), (True, False)]
    assert {f"{text}." for text in differing} <= set(notes(found))
    assert {row["why_not_compared"] for row in as_json(found)["cases"]} == {"another machine"}


def test_runs_without_a_common_case_say_so(tmp_path: Path) -> None:
    found = two(tmp_path, run(CASES[:1], failed=False), run(CASES[1:2], failed=False))
    assert verdict(found) == ["No verdict: no case is also in made."]
    assert (tables(found), as_csv(found)) == ([], [])


@pytest.mark.parametrize(
    ("b", "given", "message"),
    [
        (["ddp"], None, "give two runs, or strategies of one run, got .*run ddp; for strategies of one run, name it"),
        ([], None, "give two runs, or strategies of one run"),
        (["run", "run"], None, "give two runs, or strategies of one run"),
        (["run"], "run", "--run is for strategies of one run; leave it out to compare two runs"),
    ],
)
def test_runs_and_strategies_do_not_mix(folder: Path, b: list[str], given: str | None, message: str) -> None:
    others = [str(folder) if name == "run" else name for name in b]
    with pytest.raises(SpecError, match=message):
        compare(str(folder), others, None if given is None else folder)


def test_a_mistyped_run_suggests_the_nearest(folder: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no such run; did you mean 'run'\?"):
        compare(str(folder), [str(folder.with_name("rum"))], None)
    with pytest.raises(StoreError, match=r"there is no such run; did you mean 'run'\?"):
        compare("ddp", [], folder.with_name("rum"))
