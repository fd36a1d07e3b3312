"""``refshard history``: cases over the runs of a folder."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from refshard.commands.history import history
from refshard.errors import SpecError
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.run import run_suite
from refshard.measure.store import RunWriter, read_run
from refshard.specs.case import Case
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite, rank_result, write_rank
from tests.report.printed import as_csv, as_json, rows, tables

pytestmark = pytest.mark.slow


def write_run(folder: Path, day: int, factor: float) -> None:
    """A run that started on a day of its own, every step of which took ``factor`` times as long."""

    def outcome(case: Case, work: Path) -> LaunchOutcome:
        for rank in range(case.processes):
            times = tuple(factor * t for t in rank_result(case, rank).step_times_s)
            write_rank(case, work, rank, step_times_s=times)
        return LaunchOutcome()

    made = run_suite(make_suite(), folder / "made", FakeLauncher(outcome), Silent(), ENVIRONMENT)
    started = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day)).isoformat()
    header = msgspec.structs.replace(made.header, run_id=f"run{day}", started_at=started)
    with RunWriter(folder / f"run{day}") as writer:
        writer.append(header)
        for record in made.launches:
            writer.append(record)
    for path in sorted((folder / "made").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (folder / "made").rmdir()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen runs, of which the last seven are 1.2 times as slow; written in another order."""
    folder = tmp_path_factory.mktemp("runs")
    for day in (13, 9, 0, 5, 1, 12, 6, 2, 11, 7, 3, 8, 10, 4):
        write_run(folder, day, (1.2 if day >= 7 else 1.0) * (1 + day / 1000))
    return folder


def test_the_table_shows_each_cases_trend(runs: Path) -> None:
    (table,) = tables(history(runs, metric="step_time_s", suite=None))
    assert table.title == "step time (s)"
    assert [column.head for column in table.columns] == [
        "case", "first", "latest", "latest / first", "runs", "launches per run", "machine",
    ]  # fmt: skip
    (ddp,) = (row for row in rows(table) if row["case"] == "ddp-w2-llama-tiny-b4x256")
    assert (ddp["runs"], ddp["launches per run"], ddp["latest / first"]) == ("14", "1", "1.216")


def test_the_json_has_every_point_in_order_of_time(runs: Path) -> None:
    found = history(runs, metric="step_time_s", suite="fake")
    points = as_json(found)["points"]
    cases = dict.fromkeys(point["case"] for point in points)
    assert len(cases) == 3
    for case in cases:
        assert [point["run"] for point in points if point["case"] == case] == [f"run{day}" for day in range(14)]
    assert {point["launches"] for point in points} == {1}
    assert [float(row["value"]) for row in as_csv(found)] == [point["value"] for point in points]


def test_what_cannot_be_read_is_left_out_and_told(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good").symlink_to(runs / "run0")
    write_run(tmp_path, 1, 1.0)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "records.jsonl").write_text("no\n")
    points = as_json(history(tmp_path, metric="step_time_s", suite=None))["points"]
    assert [point["run"] for point in points] == ["run1"] * 3, "a link is the run that it points to, not another"
    assert "left out:" in capsys.readouterr().err
    assert len(read_run(tmp_path / "run1").launches) == 3


def test_no_such_metric_and_no_run_are_one_line(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="metric: unknown 'step_time'; did you mean 'step_time_s'"):
        history(runs, metric="step_time", suite=None)
    with pytest.raises(SpecError, match="no run there has a case with step_time_s"):
        history(tmp_path, metric="step_time_s", suite=None)
