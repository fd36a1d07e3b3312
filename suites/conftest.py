"""What the benchmarks here share: their options, and the fixture that replays records."""

import pytest

from refshard.replay import replay, replay_clock  # noqa: F401  fixtures


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of benchmarks."""
    group = parser.getgroup("refshard")
    group.addoption("--suite", default="gate", help="The suite whose cases bench_cases.py launches: file or name.")
    group.addoption("--long", action="store_true", help="Run the benchmarks too that take minutes or much memory.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what takes long, unless it is asked for, or is small: without measuring."""
    if config.getoption("--long") or config.getoption("--benchmark-disable"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes or much memory: --long runs it"))
