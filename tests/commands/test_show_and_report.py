"""``refshard show`` and ``refshard report`` on a run that was written by hand."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from refshard import resources
from refshard.cli import app
from refshard.commands.compare import compare
from refshard.commands.show import show
from refshard.records import Run
from refshard.report import forms
from refshard.specs.case import Fidelity
from tests.report.printed import as_csv, as_json, notes, tables, text, verdict, words
from tests.report.printed import rows as printed_rows
from tests.report.runs import CASES, HOSTILE, run, unfinished, with_record, write

RECORDED = sorted(path.parent for path in (resources.root() / "profiles" / "recorded").glob("*/*/records.jsonl"))


(NOISE,) = (resources.root() / resources.BASELINES).glob("*/gate.noise.json")


@pytest.fixture
def chdir() -> Iterator[Callable[[Path], None]]:
    """Changes this process's folder, for one test."""
    before = Path.cwd()
    yield os.chdir
    os.chdir(before)


def modelled(fidelity: Fidelity, steps: int | None = None) -> Run:
    """The cases that end ok, on a cluster; each with its first ``steps`` alone."""
    made = run(CASES, rounds=1, failed=False, fidelity=fidelity)
    cases = tuple(
        msgspec.structs.replace(record, step_times_s=tuple(times[:steps] for times in record.step_times_s))
        for record in made.launches
    )
    return msgspec.structs.replace(made, launches=cases)


def as_cell(value: Any) -> str:
    """A value of JSON as CSV has it."""
    if isinstance(value, list):
        return " | ".join(map(str, value))
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(run(), tmp_path / "run")


def test_show_prints_the_table_and_the_verdict_last(folder: Path) -> None:
    found = text(show(folder))
    assert found.startswith("llama-mini, global batch")
    assert (
        found.index("refshard-yafsdp")
        < found.index("failed in 1 of 3 rounds")
        < found.index("refshard-yafsdp is fastest at")
    )
    assert verdict(show(folder))[0].startswith("refshard-yafsdp is fastest at 40.0 ms per step.")
    assert words(show(folder)).endswith(verdict(show(folder))[-1])


def test_show_as_json_has_an_object_per_case(folder: Path) -> None:
    found = as_json(show(folder))
    assert [row["strategy"] for row in found["cases"]][:2] == ["single", "ddp"]
    assert found["cases"][1]["step_time_s"] == pytest.approx(0.05, rel=1e-4)
    assert found["verdict"] == verdict(show(folder))
    assert found["notes"][0].startswith("fsdp2-tuned, 2 ranks: failed in 1 of 3 rounds")
    assert set(found["notes"]) < set(notes(show(folder)))


def test_csv_is_the_json_with_a_row_per_case(folder: Path) -> None:
    """Errors with line breaks and commas in them, and numbers to the last digit."""
    rows = as_json(show(folder))["cases"]
    assert as_csv(show(folder)) == [
        {**{name: as_cell(value) for name, value in row.items()}, "schema_version": "2"} for row in rows
    ]
    found = {row["strategy"]: row for row in as_csv(show(folder))}
    assert float(found["ddp"]["step_time_s"]) == rows[1]["step_time_s"]
    assert found["fsdp2-tuned"]["error"].endswith("\nsecond line")
    assert found["ddp"]["bit_identical_to_ddp"] == "true"
    assert found["single"]["overlap_ratio"] == found["single"]["error"] == ""


def test_csv_of_a_run_without_cases_is_its_header(folder: Path, tmp_path: Path) -> None:
    none = show(write(unfinished(0), tmp_path / "none"))
    (header,) = forms.as_csv(none).splitlines()
    assert header.split(",") == [*as_json(show(folder))["cases"][0], "schema_version"]
    assert as_json(none)["cases"] == []


def test_the_command_prints_csv_as_it_is(folder: Path) -> None:
    done = CliRunner().invoke(app, ["show", str(folder), "--csv"])
    assert done.stdout_bytes.decode() == forms.as_csv(show(folder))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (unfinished(0), "Not finished: 0 of 12 launches are done; the run was cut off, or is still under way."),
        (unfinished(3), "Not finished: 3 of 12 launches are done; the run was cut off, or is still under way."),
        (unfinished(3, interrupted=True), "Not finished: 3 of 12 launches are done; the run was interrupted."),
        (unfinished(3, planned=0), "Not finished: 3 launches are done; the run was cut off, or is still under way."),
        (msgspec.structs.replace(run(), launches=()), "Nothing was launched."),
    ],
)
def test_the_verdict_on_a_run_that_stopped_short_begins_with_that(tmp_path: Path, made: Run, words: str) -> None:
    found = show(write(made, tmp_path / "run"))
    assert verdict(found)[0] == words
    assert text(found) == text(found).strip()


def test_what_is_simulated_has_neither_samples_nor_doubts_about_them(tmp_path: Path) -> None:
    found = show(write(modelled("simulated", 1), tmp_path / "run"))
    (told,) = verdict(found)
    assert told.startswith("refshard-yafsdp is fastest at ")
    assert "% longer." in told
    assert "Caution" not in text(found, verbose=True)
    assert {tuple(row["warnings"]) for row in as_json(found)["cases"]} == {()}


def test_what_the_model_cannot_tell_apart_is_no_order(tmp_path: Path) -> None:
    """The cases' step times are 1.25 and more apart, but for one that is put at 1.02 times the fastest's."""
    made = modelled("simulated", 1)
    fastest = made.launches[-1]
    close = [tuple(1.02 * time for time in times) for times in fastest.step_times_s]
    other = msgspec.structs.replace(made.launches[-2], step_times_s=tuple(close))
    folder = write(msgspec.structs.replace(made, launches=(*made.launches[:-2], other, fastest)), tmp_path / "run")
    (told,) = verdict(show(folder))
    assert told.startswith("refshard-yafsdp and refshard-fsdp tie for fastest: ")
    assert "Differences under 3 % are within the model's error." in told


def test_one_launch_of_each_ranks_nobody(tmp_path: Path) -> None:
    found = show(write(modelled("measured", 1), tmp_path / "run"))
    told = "Not ranked by time (n = 1: no interval): 4 strategies, 39.6 to 59.4 ms per step."
    assert verdict(found)[0].startswith(told)
    assert "inf" not in text(found, verbose=True)


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: path.name)
def test_every_recorded_run_is_shown_in_every_form(folder: Path) -> None:
    found = show(folder)
    assert verdict(found)
    rows = as_json(found)["cases"]
    assert len(as_csv(found)) == len(rows) > 0
    assert forms.as_markdown(found, "show").startswith("## refshard show\n\n- **")
    compared = {row["strategy"] for row in rows if row["state"] == "ok" and row["strategy"] != "single"}
    peer = "ddp" if "ddp" in compared else "fsdp2"  # ddp runs out of memory where the model is large, or is left out
    for table in tables(compare(peer, (), folder)):
        assert table.columns[2].head.startswith(f"step time / {peer}")
        assert all("-" not in row.values() for row in printed_rows(table)), "every case has both ratios"
    for width in (80, 120):
        assert max(map(len, text(found, width, verbose=True).splitlines())) <= width


def test_markdown_has_the_verdict_first_and_a_table_for_each_setting(folder: Path) -> None:
    lines = forms.as_markdown(show(folder), "show").splitlines()
    assert lines[:2] == ["## refshard show", ""]
    assert lines[2].startswith("- **refshard-yafsdp is fastest at 40.0 ms per step.")
    assert "### llama-mini, global batch of 8 sequences of 256 tokens" in lines
    cells = [line for line in lines if line.startswith("|")]
    assert len(cells) == 2 + 6
    assert len({line.count("|") for line in cells}) == 1
    assert [cell.strip() for cell in cells[3].split("|")[1:4]] == ["ddp", "2", "ok"]


def test_names_and_errors_are_shown_as_they_are_and_steer_nothing(tmp_path: Path) -> None:
    made = run([replace(CASES[1], strategy=f"a|b`{HOSTILE}\x1b[2J"), *CASES[1:]], rounds=1)
    folder = write(with_record(made, -1, error=f"\x1b[2J\x07{HOSTILE}"), tmp_path / "run")
    for found in (show(folder), compare("ddp", (), folder)):
        markdown = forms.as_markdown(found, "show")
        assert "<script>" not in markdown
        assert "a\\|b\\`\\</script\\>\\<script\\>" in markdown
        for shown in (markdown, text(found, verbose=True), text(found, 80)):
            assert not {"\x1b", "\x07"} & set(shown)
