"""``refshard show`` and ``refshard report`` on a run that was written by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard import resources
from refshard.commands.compare import compare
from refshard.commands.show import show
from refshard.records import Run
from refshard.report import forms
from tests.report.printed import as_csv, as_json, tables, text, verdict
from tests.report.printed import rows as printed_rows
from tests.report.runs import CASES, HOSTILE, run, unfinished, with_record, write

pytestmark = pytest.mark.slow

RECORDED = sorted(path.parent for path in (resources.root() / "profiles" / "recorded").glob("*/*/records.jsonl"))


def as_cell(value: Any) -> str:
    """A value of JSON as CSV has it."""
    if isinstance(value, list):
        return " | ".join(map(str, value))
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(run(), tmp_path / "run")


def test_csv_is_the_json_with_a_row_per_case(folder: Path) -> None:
    """Errors with line breaks and commas in them, and numbers to the last digit."""
    rows = as_json(show(folder))["cases"]
    assert as_csv(show(folder)) == [
        {**{name: as_cell(value) for name, value in row.items()}, "schema_version": str(forms.SCHEMA_VERSION)}
        for row in rows
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


@pytest.mark.parametrize(
    ("made", "begins"),
    [
        (unfinished(3), "Not finished: 3 of 12 launches are done; the run was cut off, or is still under way."),
        (unfinished(3, interrupted=True), "Not finished: 3 of 12 launches are done; the run was interrupted."),
        (unfinished(3, planned=0), "Not finished: 3 launches are done; the run was cut off, or is still under way."),
        (msgspec.structs.replace(run(), launches=()), "Nothing was launched."),
    ],
)
def test_the_verdict_on_a_run_that_stopped_early_begins_with_that(tmp_path: Path, made: Run, begins: str) -> None:
    found = show(write(made, tmp_path / "run"))
    assert verdict(found)[0] == begins
    assert text(found) == text(found).strip()


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
    assert lines[2].startswith("- **Use refshard-yafsdp: 60.0 MiB")
    assert "### llama-mini, global batch of 8 sequences of 256 tokens" in lines
    cells = [line for line in lines if line.startswith("|")]
    assert len(cells) == 2 + 6
    assert len({line.count("|") for line in cells}) == 1


def test_names_and_errors_are_shown_as_they_are_and_steer_nothing(tmp_path: Path) -> None:
    made = run([replace(CASES[1], strategy=f"a|b`{HOSTILE}\x1b[2J"), *CASES[1:]], rounds=1)
    folder = write(with_record(made, -1, error=f"\x1b[2J\x07{HOSTILE}"), tmp_path / "run")
    for found in (show(folder), compare("ddp", (), folder)):
        markdown = forms.as_markdown(found, "show")
        assert "<script>" not in markdown
        assert "a\\|b\\`\\</script\\>\\<script\\>" in markdown
        for shown in (markdown, text(found, verbose=True), text(found, 80)):
            assert not {"\x1b", "\x07"} & set(shown)
