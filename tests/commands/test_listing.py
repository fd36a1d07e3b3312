"""``refshard list``: what stands behind each name."""

import pytest

from refshard.commands import listing
from refshard.strategies.table import ROWS, Row


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
    assert row_of(text, "ddp")[-len(heads) :] == ["x"] * 7 + ["-"] * 3


def test_a_row_that_cannot_run_says_why_and_what_to_do() -> None:
    row = Row(module="m", class_name="C", about="a", axes=frozenset(), packages=("no_such", "torch"), extra="more")
    assert row.unavailable(cuda=True) == "needs no_such, which is not installed; pip install 'refshard[more]'"
    quoting = Row(module="m", class_name="C", about="a", axes=frozenset(), without_cuda="Oops: no GPU")
    assert quoting.unavailable(cuda=True) == ""
    assert quoting.unavailable(cuda=False) == "needs a CUDA device; without one it says: Oops: no GPU"


@pytest.mark.parametrize("kind", ["models", "modes", "suites", "clusters", "hardware"])
def test_other_kinds_are_a_name_a_line(kind: str) -> None:
    assert all(len(line.split()) == 1 for line in listing.lines(kind).splitlines())
