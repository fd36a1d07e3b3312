"""The three tiers of tests, the rule that keeps `make quick` quick, and the one of tests that need GPUs."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.gpu.needs import lacking

# A shell that starts a job in the background has it ignore Ctrl-C, and so whatever the job starts; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is printed here goes to no terminal. pytest-xdist sets its width, and readline, behind os.environ's back.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

# As the ranks have: sums then round alike here and there, and threads do not spin for each other on a busy machine.
torch.set_num_threads(1)

# How many inputs each property is tried with. No deadline: a busy machine is no defect.
EXAMPLES = {"quick": 8, "test": 50, "full": 300}
for _tier, _examples in EXAMPLES.items():
    settings.register_profile(
        _tier, max_examples=_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("test")

collect_ignore_glob = ["fakecuda/devices/*.py", "gpu/quick/*"]  # they change the process that imports them

STARTS_A_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
TIERS = {"full": "full", "processes": "test", "slow": "test"}
"""From which tier on a marked test runs; one without a mark runs in all."""
ORDER = list(EXAMPLES)


class _Guard:
    """An audit hook, which Python never removes; ``test`` is the unmarked test that runs."""

    test: str | None = None

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.test is not None and event in STARTS_A_PROCESS:
            raise AssertionError(f"{self.test} starts {arguments[:2]}; mark it pytest.mark.processes (CONTRIBUTING.md)")


_guard = _Guard()
sys.addaudithook(_guard)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that is not marked so starts no process, nor do the fixtures that are made for it."""
    _guard.test = None if any(map(item.get_closest_marker, ("full", "processes"))) else item.nodeid
    try:
        return (yield)
    finally:
        _guard.test = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that needs more GPUs than there are skips, before its fixtures are made."""
    marks = list(item.iter_markers("gpu"))
    if marks and (said := lacking(marks, torch.cuda.device_count())):
        pytest.skip(said)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="Rewrite the reports in tests/goldens.")
    parser.addoption(
        "--tier",
        choices=list(EXAMPLES),
        help="quick: tests without a mark, each with its first and its last input; test: all but those marked full. "
        f"Properties are tried with {EXAMPLES} inputs.",
    )
    parser.addoption(
        "--full-part",
        metavar="K/N",
        help="With --tier test: also run the tests marked full of every N-th file that has some, from the K-th on.",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(config.getoption("tier") or "test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with the longest tests come first, and of these the largest, so that none runs alone at the end."""
    tiers = {item: _tier_of(item) for item in items}
    number: Counter[Path] = Counter(item.path for item in items)
    slowest = {item.path: "quick" for item in items}
    for item, tier in tiers.items():
        slowest[item.path] = max(slowest[item.path], tier, key=ORDER.index)
    items.sort(key=lambda item: (-ORDER.index(slowest[item.path]), -number[item.path]))
    ordered = {item: tiers[item] for item in items}
    kept = chosen(ordered, config.getoption("tier") or "full", config.getoption("full_part") or "")
    config.hook.pytest_deselected(items=list(ordered.keys() - set(kept)))
    items[:] = kept


def _tier_of(item: pytest.Item) -> str:
    return max((TIERS.get(mark.name, "quick") for mark in item.iter_markers()), default="quick", key=ORDER.index)


def chosen(tiers: Mapping[pytest.Item, str], tier: str, part: str = "") -> list[pytest.Item]:
    """Of tests by tier those of ``tier`` and below, and for the part ``K/N`` every N-th file that has full ones."""
    files = list(dict.fromkeys(test.path for test, of in tiers.items() if of == "full"))
    place, step = map(int, (part or f"{len(files) + 1}/1").split("/"))
    files = files[place - 1 :: step]
    kept = [test for test, of in tiers.items() if ORDER.index(of) <= ORDER.index(tier) or test.path in files]
    if tier != "quick":
        return kept
    inputs: dict[str, list[pytest.Item]] = {}
    for test in kept:
        inputs.setdefault(test.nodeid.partition("[")[0], []).append(test)
    return [test for same in inputs.values() for test in dict.fromkeys((same[0], same[-1]))]
