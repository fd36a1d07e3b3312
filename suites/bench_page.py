"""The dashboard of 1,000 cases and 100,000 traced spans: until a browser lets its reader act, and until a filter acts.

The cases are those of a recorded run at many sequence lengths, each with five launches in five rounds, and as many of
them as a page analyses have one of its traces. Chromium (Debian's) opens the file from disk; it is interactive when its
scripts have run and a frame is drawn. The aim is one second.

    pytest suites/bench_page.py --benchmark-json=page.json
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard import resources
from refshard.analysis.evidence import gather
from refshard.measure.store import read_run
from refshard.records import LaunchRecord, Run
from refshard.report.run.page import Extras, write_dashboard
from refshard.report.run.traces import MOST_TRACED, Traced, read_traces

FOLDER = resources.root() / "profiles" / "recorded" / "epyc-2-cores" / "quickstart"
CHROMIUM = Path("/usr/bin/chromium")
MANY, FEW = 1_000, 40
SPANS = 100_000
FRAME = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
FILTER = (
    """() => { const box = document.querySelector('#filters input[value="ddp"]'); box.click(); return box.checked; }"""
)


def multiplied(run: Run, cases: int) -> Run:
    """The run's cases again and again, at a sequence length of their own each time."""
    kinds = len({record.case for record in run.launches})
    records: list[LaunchRecord] = []
    for copy in range(-(-cases // kinds)):
        for record in run.launches:
            case = record.case.changed(seq_len=record.case.job.seq_len + copy)
            records.append(msgspec.structs.replace(record, case=case, spec_hash=case.hash))
    header = msgspec.structs.replace(run.header, planned=len(records))
    return msgspec.structs.replace(run, header=header, launches=tuple(records))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The file; of a few cases without measuring."""
    few = request.config.getoption("--benchmark-disable")
    run = multiplied(read_run(FOLDER), FEW if few else MANY)
    evidence, path = gather(run), tmp_path_factory.mktemp("page") / "dashboard.html"
    traces: dict[Any, Traced] = read_traces(evidence, [(run, FOLDER)], path)
    assert few or len(traces) >= MOST_TRACED
    spans = sum(len(one.analysis.timeline.spans) for one in traces.values() if one.analysis)
    assert few or spans >= SPANS, f"{spans} spans"
    write_dashboard(evidence, path, Extras(traces=traces))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless, and closed afterwards."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason=f"playwright is not here; {resources.install_extra('test')}"
    )
    if not CHROMIUM.exists():
        pytest.skip("needs Debian's chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


def test_open(benchmark: Any, page: Path, browser: Any) -> None:
    """From the address until the page answers."""
    opened: list[Any] = []

    def go() -> None:
        opened[-1].goto(page.as_uri(), wait_until="load")
        opened[-1].evaluate(FRAME)

    benchmark.pedantic(go, setup=lambda: opened.append(browser.new_page()), rounds=1 if benchmark.disabled else 5)
    benchmark.extra_info.update({"cases": cases(opened[-1]), "bytes": page.stat().st_size})
    assert cases(opened[-1]) >= (FEW if benchmark.disabled else MANY)


def cases(opened: Any) -> int:
    """How many the page holds."""
    return int(opened.evaluate("charts.data.cases.length"))


def test_filter(benchmark: Any, page: Path, browser: Any) -> None:
    """One strategy hidden or shown again, until the next frame."""
    opened = browser.new_page()
    opened.goto(page.as_uri(), wait_until="load")
    shown = []

    def click() -> None:
        shown.append(opened.evaluate(FILTER))
        opened.evaluate(FRAME)

    benchmark.pedantic(click, rounds=1 if benchmark.disabled else 6)
    assert shown[0] is False
    told = opened.locator("#shown").text_content()
    assert (told == "") == shown[-1]
