"""The search for the largest number that fits, and the front of a sweep."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.dryrun.request import Request
from refshard.dryrun.sweep import Row, front, largest, ranked
from refshard.dryrun.trials import Laboratory, Prediction, Trial
from refshard.errors import SpecError
from refshard.report.dryrun.sweep import sweep_answer
from tests.report.printed import verdict

LIMIT = 1000


def trial(number: int) -> Trial:
    return Trial(request=Request(command=("train.py", str(number)), cluster="dgx-h100", world_size=8, local_ranks=8))


class Known(Laboratory):
    """Answers by a law, and starts no process."""

    def __init__(self, law: Callable[[int], int | None]) -> None:
        self.law, self.rounds, self.asked = law, 0, list[int]()

    def try_all(self, trials: Iterable[Trial]) -> list[Prediction]:
        numbers = [int(one.request.command[1]) for one in trials]
        self.rounds += bool(numbers)
        self.asked += numbers
        return [self._tried(self.law(number)) for number in numbers]

    def _tried(self, size: int | None) -> Prediction:
        if size is None:
            return Prediction(fits=None, why="raised", reserved_bytes=0, allocated_bytes=0, usable_bytes=LIMIT)
        return Prediction(fits=size <= LIMIT, reserved_bytes=size, allocated_bytes=size, usable_bytes=LIMIT)


def found(
    law: Callable[[int], int | None], step: int = 1, known: dict[int, Prediction] | None = None
) -> tuple[int, Known]:
    laboratory = Known(law)
    tried = largest(laboratory, trial, step, known or {})
    assert len(laboratory.asked) == len(set(laboratory.asked)), "one was tried twice"
    return max((number for number, one in tried.items() if one.fits), default=0), laboratory


@given(st.integers(0, 900), st.integers(30, 400))
def test_even_growth_takes_few_rounds(base: int, each: int) -> None:
    best, laboratory = found(lambda number: base + each * number)
    assert best == (LIMIT - base) // each
    assert laboratory.rounds <= 3


@given(st.lists(st.integers(1, 300), min_size=3, max_size=40))
def test_any_growth_ends_at_the_largest_that_fits(growth: list[int]) -> None:
    sizes = [sum(growth[: n + 1]) for n in range(len(growth))]

    def law(number: int) -> int:
        return sizes[number - 1] if number <= len(sizes) else LIMIT + number

    assert found(law)[0] == sum(size <= LIMIT for size in sizes)


def test_numbers_are_multiples_of_the_step() -> None:
    best, laboratory = found(lambda number: number // 10, step=1024)
    assert best == 9 * 1024
    assert all(number % 1024 == 0 for number in laboratory.asked)


def test_what_was_tried_before_is_not_tried_again() -> None:
    known = {24: Prediction(fits=False, reserved_bytes=2400, allocated_bytes=2400, usable_bytes=LIMIT)}
    best, laboratory = found(lambda number: 100 * number, known=known)
    assert best == 10
    assert 24 not in laboratory.asked


def test_what_fails_counts_as_too_large() -> None:
    assert found(lambda number: 10 * number if number < 7 else None)[0] == 6


def test_nothing_fits() -> None:
    assert found(lambda number: 2000 * number)[0] == 0


def test_a_number_that_changes_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match=r"memory does not grow with the number: [0-9,]+ still fits"):
        found(lambda _: 10)


def row(speed: float, reserved: int, *, fits: bool | None = True) -> Row:
    tried = Prediction(
        fits=fits, reserved_bytes=reserved, allocated_bytes=reserved, usable_bytes=LIMIT, tokens_per_s=speed
    )
    return Row(choices={"speed": str(speed)}, trial=trial(1), tried=tried)


def test_the_front_has_what_no_other_row_beats() -> None:
    rows = [row(10, 900), row(12, 950), row(12, 800), row(30, 2000, fits=False), row(5, 700), row(4, 750)]
    assert front(rows) == [rows[2], rows[4]]
    assert ranked(rows)[0] is rows[2]


@pytest.mark.parametrize(
    ("rows", "status", "sentences"),
    [
        ([row(100, 950), row(98, 800), row(90, 500), row(200, 2000, fits=False)], 0,
         ["Use speed 98: 150 B (16 %) less memory than speed 100 at the same speed.",
          "98 tokens/s/GPU, 800 B of 1000 B reserved, by dry run; 3 % is a tie."]),
        ([row(100, 950), row(96, 800)], 0,
         ["Use speed 100: the fastest that fits.",
          "100 tokens/s/GPU, 950 B of 1000 B reserved, by dry run; 3 % is a tie."]),
        ([row(1, 1500, fits=False)], 1, ["NOTHING FITS: 0 of 1 combinations; least memory: speed 1, which is large"]),
        ([row(1, 10, fits=None)], 3, ["No verdict: speed 1: is large"]),
    ],
)  # fmt: skip
def test_memory_decides_between_equally_fast_combinations(rows: list[Row], status: int, sentences: list[str]) -> None:
    rows = [
        Row(choices=one.choices, trial=one.trial, tried=msgspec.structs.replace(one.tried, why="is large"))
        for one in rows
    ]
    found = sweep_answer(rows, "train.py", folder=Path("runs/x"))
    assert (verdict(found), found.status) == (sentences, status)
