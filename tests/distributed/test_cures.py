"""Each cure of the engine can be taken out, and its absence shows: see tests/distributed/cures.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from refshard.engine.placement import MODES
from tests.distributed import cures
from tests.distributed.cases.corpus import CASES

ROOT = Path(__file__).parents[2]


def test_every_edit_of_the_table_can_be_made() -> None:
    for cure in cures.read_cures():
        assert (ROOT / cures.ENGINE / cure.file).read_text().count(cure.old) == 1, f"{cure.title}: {cure.old}"
        assert cure.old != cure.new, cure.title


def test_the_table_names_cases_tests_and_modes_that_exist() -> None:
    for cure in cures.read_cures():
        assert cure.cases or cure.tests, cure.title
        assert {*cure.cases} <= {*CASES}, cure.title
        assert {*cure.modes} <= {*MODES}, cure.title
        for test in cure.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), cure.title


def test_no_cure_is_listed_twice() -> None:
    listed = [(cure.file, cure.old, cure.new) for cure in cures.read_cures()]
    titles = [cure.title for cure in cures.read_cures()]
    assert len({*listed}) == len({*titles}) == len(titles)


@pytest.mark.full
@pytest.mark.parametrize("title", ["float8 parameters", "torch.compile: a part can be taken apart"])
def test_a_cure_that_is_taken_out_is_missed(title: str) -> None:
    command = [sys.executable, "-m", "tests.distributed.cures", "--only", title]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 cures are caught when they are taken out" in done.stdout


@pytest.mark.full
def test_an_edit_that_takes_no_cure_out_or_too_much_is_told(tmp_path: Path) -> None:
    """The first edit changes a comment, the second removes a field."""
    cure = """
        [[cures]]
        row = "an edit"
        cure = "{0}"
        file = "unit.py"
        old = "    presence: Presence = Presence.SHARDED\\n"
        new = "{1}"
        modes = ["fsdp"]
        cases = ["lstm"]
    """
    table = tmp_path / "table.toml"
    table.write_text(
        cure.format("nothing", "    presence: Presence = Presence.SHARDED  # still\\n") + cure.format("too much", "")
    )
    command = [sys.executable, "-m", "tests.distributed.cures", "--table", str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "nothing\n    NOT CAUGHT by lstm\n" in done.stdout
    assert "too much\n    BREAKS ORDINARY TRAINING: " in done.stdout
    assert "0 of 2 cures are caught when they are taken out" in done.stdout
