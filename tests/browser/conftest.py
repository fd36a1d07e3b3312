"""One browser for all tests that need it, and the pages that several of them visit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from refshard import resources
from refshard.analysis.evidence import gather
from refshard.measure.store import read_run
from refshard.report.run.page import Extras
from refshard.report.run.traces import read_traces
from tests.browser.visits import CONTENT, Visit, earlier, visiting, wide, written
from tests.report import traces
from tests.report.runs import CASES
from tests.report.trace.test_page import hostile

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = Path("/usr/bin/chromium")
RECORDED = resources.root() / "profiles" / "recorded" / "xeon-2-cores" / "engine_network"
TRACED = ("ddp", "fsdp2-tuned", "refshard-yafsdp")
SMOKE = {
    "test_a_filter_hides_exactly_the_rows_of_its_strategy_in_every_table", "test_charts_are_drawn_as_they_come_near",
    "test_times_and_sizes_sort_by_what_they_are_worth", "test_pointing_at_a_block_tells_of_it",
    "test_pointing_at_a_stream_says_what_runs_there", "test_published_pages_are_three_and_small",
}  # fmt: skip
"""``make test`` opens each kind of page, and uses its filter, its charts and its tables once; the rest is full."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and getattr(item, "originalname", "") not in SMOKE:
            item.add_marker("full")


# Not of the session: playwright leaves an event loop running, which other tests must not meet.
@pytest.fixture(scope="package")
def browser() -> Iterator["Browser"]:
    if not CHROMIUM.exists():
        pytest.skip("needs Debian's chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def wide_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of many cases: two runs, two models, three world sizes, two fidelities; beside an earlier run."""
    path = tmp_path_factory.mktemp("wide") / "dashboard.html"
    return written(wide(), path, Extras(baseline=gather(earlier(CASES))))


@pytest.fixture(scope="package")
def traced_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of a recorded run, of which three cases have a trace: that of ``fsdp2-tuned``, for two others too."""
    path = tmp_path_factory.mktemp("traced") / "dashboard.html"
    recorded = read_run(RECORDED)
    evidence = gather(recorded)
    traces = read_traces(evidence, [(recorded, RECORDED)], path)
    (one,) = [one for case, one in traces.items() if case.strategy == "fsdp2-tuned"]
    found = {case: replace(one, case=case) for case in evidence.cases if case.strategy in TRACED}
    return written(evidence, path, Extras(traces=found))


@pytest.fixture(scope="package")
def trace_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of a trace whose file travels along, one whose file does not, and one of hostile names."""
    folder = tmp_path_factory.mktemp("traces")
    small = traces.trace(folder, traces.gpu(layers=6), content=CONTENT)
    large = traces.trace(folder, traces.gpu(layers=3, rank=1), content=b"\x1f\x8b" + bytes(5 * 2**20))
    (folder / "trace.html").write_text(traces.page([small, large, hostile(folder)]))
    return (folder / "trace.html").as_uri()


@pytest.fixture(scope="module")
def tab(browser: "Browser", wide_address: str) -> Iterator[Visit]:
    """A tab with the wide page."""
    visit = visiting(browser, wide_address, viewport={"width": 1280, "height": 900}, color_scheme="light")
    yield visit
    visit.page.context.close()


@pytest.fixture
def visit(tab: Visit) -> Iterator[Visit]:
    """The wide page, as if just opened; at the end it has said nothing, and asked for itself alone."""
    tab.open()
    yield tab
    tab.check_silence()
