"""Every package keeps to its budget of lines, and every budget stays close to its package."""

import pytest

from tests.size import BUDGETS, SLACK, sizes

SIZES = sizes()


@pytest.mark.parametrize("place", SIZES)
def test_package_keeps_to_its_budget(place: str) -> None:
    assert place in BUDGETS, f"{place}: has no budget; give it one in tests/size.py"
    assert SIZES[place] <= BUDGETS[place], f"{place}: {SIZES[place]} lines; delete some, or raise its budget"


@pytest.mark.parametrize("place", BUDGETS)
def test_budget_follows_the_package_down(place: str) -> None:
    assert BUDGETS[place] - SIZES[place] <= SLACK, f"{place}: {SIZES[place]} lines; lower its budget"
