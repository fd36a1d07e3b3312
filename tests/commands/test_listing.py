"""``refshard list``: what stands behind each name."""

import subprocess
import sys
from pathlib import Path

import pytest

from refshard.commands import listing
from refshard.strategies.table import ROWS, Row

ROOT = Path(__file__).parents[2]


def row_of(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.split()[:1] == [name]).split()


def test_every_strategy_has_a_row_with_its_axes_and_whether_it_can_run() -> None:
    text = listing.strategies(cuda=False)
    heads = text.splitlines()[0].split()[3:]
    for name, row in ROWS.items():
        words = row_of(text, name)
        marks = words[-len(heads) :]
        assert marks.count("x") == len(row.axes)
        here = words[-len(heads) - 1]
        assert here == ("unsupported" if row.unavailable(cuda=False) else "available")
        reason = f"{name}: unsupported: {row.unavailable(cuda=False)}"
        assert (reason in text) == (here == "unsupported")
    assert row_of(text, "ddp")[-len(heads) :] == ["x"] * 8 + ["-"] * 4


def test_a_row_that_cannot_run_says_why_and_what_to_do() -> None:
    row = Row(module="m", class_name="C", about="a", axes=frozenset(), packages=("no_such", "torch"), extra="more")
    assert (
        row.unavailable(cuda=True)
        == "needs no_such, which is not installed; pip install -e '.[more]' in refshard's checkout"
    )
    quoting = Row(module="m", class_name="C", about="a", axes=frozenset(), without_cuda="Oops: no GPU")
    assert quoting.unavailable(cuda=True) == ""
    assert quoting.unavailable(cuda=False) == "needs a CUDA device; without one it says: Oops: no GPU"


WITHOUT = """
import sys
sys.modules.update(peft=None, torchao=None)  # as where they are not installed
import msgspec
from refshard.commands import listing
from refshard.errors import UnsupportedError
from refshard.strategies import strategy_for
from tests.harness.fakes import make_suite
print(listing.strategies(cuda=False))
case = make_suite().cases()[0]
for changes in {"tuning": "qlora", "optimizer": "adamw-8bit"}, {"tuning": "lora"}, {}:
    try:
        print(strategy_for(msgspec.structs.replace(case, **changes), cuda=False))
    except UnsupportedError as error:
        print("unsupported:", error)
"""
PEFT = "needs peft, which is not installed; pip install -e '.[peers]' in refshard's checkout"
TORCHAO = "needs torchao, which is not installed; pip install -e '.[peers]' in refshard's checkout"


@pytest.mark.processes
def test_an_axis_whose_package_is_not_installed_is_told_and_unsupported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *listed, both, lora, plain = done.stdout.splitlines()
    assert [line for line in listed if line.startswith("under any strategy")] == [
        f"under any strategy: unsupported: {axis} {why}"
        for axis, why in (("lora", PEFT), ("qlora", PEFT), ("adamw-8bit", TORCHAO))
    ]
    assert both == f"unsupported: adamw-8bit {TORCHAO}; qlora {PEFT}"
    assert lora == f"unsupported: lora {PEFT}"
    assert not plain.startswith("unsupported")


@pytest.mark.parametrize("kind", ["models", "modes", "suites", "clusters", "hardware"])
def test_other_kinds_are_a_name_a_line(kind: str) -> None:
    assert all(len(line.split()) == 1 for line in listing.lines(kind).splitlines())
