"""Folders of runs: a list of them, and what is said of one that is no run."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.folders import find_run, runs_in, state_of
from refshard.commands.show import show
from refshard.errors import StoreError
from refshard.records import State
from tests.report.printed import as_csv, as_json, notes, rows, tables
from tests.report.runs import later, run, unfinished, with_record, write


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs whose names are in another order than their starts, a damaged one, and a link to one of them."""
    made = run()
    write(later(run(failed=False), "late", hour=15), tmp_path / "a-late")
    write(later(unfinished(3, interrupted=True), "cut", hour=13), tmp_path / "b-cut")
    write(made, tmp_path / "c-early")
    (tmp_path / "d-damaged").mkdir()
    (tmp_path / "d-damaged" / "records.jsonl").write_text("no\n")
    (tmp_path / "latest").symlink_to(tmp_path / "a-late")
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_a_folder_of_runs_is_listed_with_the_latest_last(runs: Path) -> None:
    found = show(runs)
    shown = rows(tables(found)[0])
    assert [Path(row["run"]).name for row in shown] == ["d-damaged", "c-early", "b-cut", "a-late"]
    assert [row["state"] for row in shown] == ["damaged", "1 failed", "interrupted", "ok"]
    assert [row["launches"] for row in shown] == ["-", "18 of 18", "3 of 12", "15 of 15"]
    assert shown[-1]["started (UTC)"] == "2026-03-01 15:00"
    assert notes(found) == [f"`refshard show {runs / 'a-late'}` shows the latest."]


def test_programs_get_a_row_per_run(runs: Path) -> None:
    found = as_json(show(runs))["runs"]
    assert [(row["state"], row.get("launches"), row.get("planned")) for row in found] == [
        ("damaged", None, None), ("1 failed", 18, 18), ("interrupted", 3, 12), ("ok", 15, 15),
    ]  # fmt: skip
    assert "d-damaged" in found[0]["error"]
    assert [row["suite"] for row in as_csv(show(runs))] == ["", *["quickstart"] * 3]


@pytest.mark.parametrize(
    ("states", "told"),
    [(("ok", "unsupported", "skipped"), "ok"), (("oom", "ok", "oom"), "2 oom"), (("oom", "failed"), "1 oom, 1 failed")],
)
def test_the_state_of_a_finished_run_counts_what_did_not_end_well(states: tuple[State, ...], told: str) -> None:
    made = run(rounds=1, failed=False)
    for place, state in enumerate(states):
        made = with_record(made, place, state=state)
    assert state_of(made) == told
    assert state_of(msgspec.structs.replace(made, end=None)) == "not finished"


def test_a_run_itself_is_found_and_so_is_a_link_to_it(runs: Path) -> None:
    assert find_run(runs / "latest") == runs / "latest"
    assert [path.name for path in runs_in(runs)] == ["a-late", "b-cut", "c-early", "d-damaged"]
    assert as_json(show(runs / "latest")).keys() == {"verdict", "notes", "cases"}


def test_a_mistyped_run_suggests_the_nearest(runs: Path) -> None:
    with pytest.raises(StoreError, match=r"c-earlie: there is no such run; did you mean 'c-early'\?"):
        show(runs / "c-earlie")


@pytest.mark.parametrize(
    "words", [["report"], ["validate"], ["accept", "--reason", "why"], ["run", "--resume"], ["compare", "ddp", "--run"]]
)
def test_every_command_that_takes_a_run_suggests_the_nearest(runs: Path, words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, str(runs / "c-earlie")])
    assert isinstance(done.exception, StoreError)
    assert str(done.exception).endswith("c-earlie: there is no such run; did you mean 'c-early'?")


def test_a_folder_of_runs_where_one_is_needed_names_some(runs: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run but contains runs; name one of them: .* \(of 4\)"):
        find_run(runs)


def test_without_any_run_the_message_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such run; `refshard run` makes one"):
        show(tmp_path / "runs" / "latest")
    with pytest.raises(StoreError, match="there is no run in this folder; give the folder of a run"):
        show(tmp_path)
