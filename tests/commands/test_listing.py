"""``refshard list``: what stands behind each name."""

import subprocess
import sys
from pathlib import Path

import pytest

from refshard import resources
from refshard.commands import listing
from refshard.errors import SpecError
from refshard.report.blocks import Answer
from refshard.strategies.table import ROWS, Row
from tests.report.printed import notes, rows, tables, text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def listed(*, cuda: bool) -> Answer:
    rows, blocks = listing.strategies(cuda=cuda)
    return Answer(data={"strategies": rows}, rows=rows, blocks=blocks)


def test_every_strategy_has_a_row_with_whether_it_can_run_and_what_it_supports() -> None:
    found = listed(cuda=False)
    here, marks = tables(found)
    assert [row["strategy"] for row in rows(here)] == list(ROWS)
    for row in rows(here):
        why = ROWS[row["strategy"]].unavailable(cuda=False)
        assert row["here"] == ("unsupported" if why else "available")
        assert (f"{row['strategy']}: unsupported: {why}" in notes(found)) == bool(why)
    (heads,) = {column.head for column in marks.columns} - {"strategy"}
    marked = {row["strategy"]: row[heads].split() for row in rows(marks)}
    assert {name: crosses.count("x") for name, crosses in marked.items()} == {
        name: len(row.axes) for name, row in ROWS.items()
    }
    assert marked["ddp"] == ["x"] * 11 + ["-"] * 4 + ["x"] * 3 + ["-", "x"]
    assert f"  {heads}\n" in text(found, verbose=True), "marks stand under their heads"
    assert "infer" not in text(found)


def test_a_row_that_cannot_run_says_why_and_what_to_do() -> None:
    row = Row(code="m.C", about="a", axes=frozenset(), packages=("no_such", "torch"), extra="more")
    assert (
        row.unavailable(cuda=True)
        == "needs no_such, which is not installed; pip install -e '.[more]' in refshard's checkout"
    )
    quoting = Row(code="m.C", about="a", axes=frozenset(), without_cuda="Oops: no GPU")
    assert quoting.unavailable(cuda=True) == ""
    assert quoting.unavailable(cuda=False) == "needs a CUDA device; without one it says: Oops: no GPU"


WITHOUT = """
import sys
sys.modules.update(peft=None, torchao=None)  # as where they are not installed
import msgspec
from refshard.commands import listing
from refshard.errors import UnsupportedError
from refshard.strategies import strategy_for
from tests.measure.fakes import make_suite
rows, blocks = listing.strategies(cuda=False)
print(*blocks[-1].sentences, sep="\\n")
case = make_suite().cases()[0]
for changes in {"tuning": "qlora", "optimizer": "adamw-8bit"}, {"tuning": "lora"}, {}:
    try:
        print(strategy_for(case.changed(**changes), cuda=False))
    except UnsupportedError as error:
        print("unsupported:", error)
"""
PEFT = "needs peft, which is not installed; pip install -e '.[peers]' in refshard's checkout"
TORCHAO = "needs torchao, which is not installed; pip install -e '.[peers]' in refshard's checkout"


@pytest.mark.processes
def test_an_axis_whose_package_is_not_installed_is_told_and_unsupported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *told, both, lora, plain = done.stdout.splitlines()
    assert [line for line in told if line.startswith("under any strategy")] == [
        f"under any strategy: unsupported: {axis} {why}"
        for axis, why in (("lora", PEFT), ("qlora", PEFT), ("adamw-8bit", TORCHAO))
    ]
    assert both == f"unsupported: adamw-8bit {TORCHAO}; qlora {PEFT}"
    assert lora == f"unsupported: lora {PEFT}"
    assert not plain.startswith("unsupported")


def test_suites_have_a_line_each_and_how_long_they_take() -> None:
    found = listing.listing("suites")
    shown = {row["suite"]: row for row in rows(tables(found)[0])}
    assert shown.keys() == resources.suites().keys()
    assert all(row["what it compares"] for row in shown.values())
    assert shown["gpu_8"]["takes"] == "needs GPUs"
    (quickstart,) = (row for row in found.rows if row["suite"] == "quickstart")
    assert quickstart["launches"] == 18
    assert quickstart["expected_s"] > 18


def test_a_kind_that_does_not_exist_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match="list: unknown 'model'; did you mean 'models'"):
        listing.listing("model")
