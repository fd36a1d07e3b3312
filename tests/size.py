"""How large each package is, and its budget. ``python -m tests.size`` prints the table.

Nothing brakes growth by itself: a change that needs more lines than its package's budget has to delete something, or
to raise the budget here, where a reviewer sees it. A budget far above the package is no brake, so it follows every
reduction down (:data:`SLACK`).
"""

from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parent.parent
SLACK = 100
"""Most lines that a budget may exceed its package by."""
BUDGETS = {
    "refshard/analysis": 12_240,
    "refshard/commands": 3_890,
    "refshard/dryrun": 8_080,
    "refshard/emit": 935,
    "refshard/emulate": 1_365,
    "refshard/engine": 9_335,
    "refshard/events": 2_340,
    "refshard/fakecuda": 2_005,
    "refshard/measure": 8_615,
    "refshard/models": 1_265,
    "refshard/plan": 3_430,
    "refshard/report": 10_880,
    "refshard/specs": 3_020,
    "refshard/strategies": 3_190,
    "refshard/*.py": 2_655,
    "tests": 81_985,
}
"""Lines of Python by package, comments and empty lines included; ``*.py`` are the modules beside the packages."""


def lines(place: str) -> int:
    """Lines of the Python files in a folder, or of those that a pattern matches."""
    folder, _, pattern = place.partition("/*")
    found = (ROOT / folder).glob(f"*{pattern}") if pattern else (ROOT / folder).rglob("*.py")
    return sum(len(path.read_text().splitlines()) for path in found)


def sizes() -> dict[str, int]:
    """Lines of each place that has a budget, and of each package that has none."""
    packages = [f"refshard/{path.parent.name}" for path in (ROOT / "refshard").glob("*/__init__.py")]
    return {place: lines(place) for place in dict.fromkeys((*BUDGETS, *sorted(packages)))}


def main() -> None:
    """Print the table."""
    found = sizes()
    product = sum(size for place, size in found.items() if place.startswith("refshard"))
    budget = sum(size for place, size in BUDGETS.items() if place.startswith("refshard"))
    rows = [(place, size, BUDGETS.get(place)) for place, size in found.items()]
    print(tabulate([*rows, ("refshard, sum", product, budget)], headers=("package", "lines", "budget"), intfmt=","))


if __name__ == "__main__":
    main()
