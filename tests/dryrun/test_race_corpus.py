"""Scripts made after public reports of races: which of them are found before the fix, and silence after it."""

import pytest

from tests.fakecuda.needs import needs_device
from tests.races import FOLDER, FOUND, REPORTS, as_reported, kinds, main, races_of, reports_of


def test_every_script_names_its_report_and_most_are_found() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == REPORTS.keys()
    assert all(reports_of(name) for name in REPORTS)
    assert (len(REPORTS), len(FOUND)) == (20, 16)
    assert all(one.why for name, one in REPORTS.items() if name not in FOUND)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no_such_race"]) == 2
    assert "there is no script 'no_such_race'" in capsys.readouterr().err


@needs_device
@pytest.mark.processes
def test_a_reported_race_is_found_and_its_fix_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bucket_overwritten"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "bucket_overwritten" in line)
    assert row.split("  ")[0] == "deepspeedai/DeepSpeed#5606"
    assert "write-write: all_reduce, aten::copy_" in row
    assert row.endswith("silent")


@needs_device
@pytest.mark.full
@pytest.mark.parametrize("name", REPORTS)
def test_reports_of_races(name: str) -> None:
    before = races_of(name)
    assert as_reported(name, before), kinds(before)
    assert races_of(name, "--fixed") == ()
