"""The rule of the marker ``gpu``: a test runs where there are as many GPUs as it asks for, and skips elsewhere."""

import pytest

from tests.conftest import pytest_runtest_setup
from tests.gpu.needs import lacking

ONE, TWO, EIGHT = (mark.mark for mark in (pytest.mark.gpu, pytest.mark.gpu(count=2), pytest.mark.gpu(count=8)))


@pytest.mark.parametrize(
    ("there", "runs"), [(0, []), (1, [ONE]), (2, [ONE, TWO]), (7, [ONE, TWO]), (8, [ONE, TWO, EIGHT])]
)
def test_a_machine_runs_what_fits_on_its_gpus(there: int, runs: list[pytest.Mark]) -> None:
    assert [mark for mark in (ONE, TWO, EIGHT) if not lacking([mark], there)] == runs


def test_what_is_lacking_is_told_of_the_mark_that_asks_for_most() -> None:
    assert lacking([TWO, EIGHT, ONE], 1) == "needs 8 GPUs, this machine has 1"
    assert lacking([ONE], 0) == "needs 1 GPU, this machine has none"
    assert lacking([], 0) == ""


@pytest.mark.parametrize("mark", [pytest.mark.gpu(8), pytest.mark.gpu(counts=8)])
def test_a_mark_that_is_misspelled_is_an_error(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(TypeError):
        lacking([mark.mark], 8)


def test_a_test_is_skipped_before_its_fixtures_are_made(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.gpu(count=10_000))
    with pytest.raises(pytest.skip.Exception, match="needs 10000 GPUs, this machine has"):
        pytest_runtest_setup(request.node)
