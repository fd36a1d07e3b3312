"""Settings of all tests, the rule that keeps `make quick` quick, and the one of tests that need GPUs."""

import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.gpu.needs import lacking
from tests.parts import part_of, places

# A shell that starts a job in the background has it ignore Ctrl-C, and so whatever the job starts; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As the ranks have: sums then round alike here and there, and threads do not spin for each other on a busy machine.
torch.set_num_threads(1)

# A busy machine is no defect: tests assert values, never wall time.
settings.register_profile("refshard", deadline=None)
settings.load_profile("refshard")

collect_ignore_glob = ["fakecuda/devices/*.py", "gpu/quick/*"]  # they change the process that imports them

STARTS_A_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
TIERS = ("full", "processes")


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
    """A test without a marker starts no process, nor do the fixtures that are made for it."""
    _guard.test = None if any(map(item.get_closest_marker, TIERS)) else item.nodeid
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
        "--full-part",
        type=places,
        metavar="K/N",
        help="Run the tests marked full in every N-th of the files that have some, from the K-th file on.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with the longest tests come first, and of these the largest, so that none runs alone at the end."""
    rank = {marker: place for place, marker in enumerate(TIERS)}
    first: dict[Path, int] = {}
    number: Counter[Path] = Counter(item.path for item in items)
    for item in items:
        place = min((rank[mark.name] for mark in item.iter_markers() if mark.name in rank), default=len(rank))
        first[item.path] = min(place, first.get(item.path, place))
    items.sort(key=lambda item: (first[item.path], -number[item.path]))
    if part := config.getoption("full_part"):
        full = [item for item in items if item.get_closest_marker("full")]
        kept = part_of(list(dict.fromkeys(item.path for item in full)), part)
        left = {item for item in full if item.path not in kept}
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
