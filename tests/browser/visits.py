"""Pages of made-up runs in a real browser, and what they said and asked for while they were looked at."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from refshard.analysis.evidence import Evidence, gather
from refshard.records import LaunchRecord, Run
from refshard.report.run.page import Extras, write_dashboard
from tests.report.runs import CASES, Made, run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Locator, Page

CONTENT = b"\x1f\x8b" + bytes(range(256)) * 300
"""The file of a trace that travels in its page."""
PATIENCE_S = 120
DRAWN = "(chart) => chart.querySelector('.plot .xtitle, .plot .legend')"
"""Whether plotly has drawn a chart."""


@dataclass
class Visit:
    """An open page, and what it said and asked for since it was opened."""

    page: "Page"
    address: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def dismiss(self, dialog: "Dialog") -> None:
        """A dialog is something said too."""
        self.said.append(dialog.message)
        dialog.dismiss()

    def open(self, state: str = "") -> None:
        """Open the address anew, with what is to stand after ``#``."""
        self.page.goto("about:blank")
        self.said.clear()
        self.asked.clear()
        self.page.goto(f"{self.address}#{state}" if state else self.address)

    def check_silence(self) -> None:
        """Check that the page said nothing and asked for itself alone."""
        assert self.said == []
        assert {asked.partition("#")[0] for asked in self.asked if not asked.startswith("blob:")} == {self.address}

    @property
    def state(self) -> str:
        """What stands after ``#``."""
        return str(self.page.evaluate("location.hash.slice(1)"))

    def run(self, script: str, argument: object = None) -> Any:
        """What an expression or a function of ``argument`` gives on the page."""
        return self.page.evaluate(script, argument)

    def until(self, script: str, argument: object = None) -> None:
        """Wait until a function gives true; playwright's own wait is not allowed by the page's policy."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.run(script, argument):
            assert time.monotonic() < deadline, f"never came true: {script} of {argument}"
            self.page.wait_for_timeout(20)

    def unfold_filters(self) -> None:
        """Click until they are open: on a busy machine what is drawn meanwhile may move them from below it."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.page.locator("#filters").is_visible():
            assert time.monotonic() < deadline, "the filters never opened"
            self.page.locator("#filter > summary").click()

    def point_at(self, mark: "Locator", text: str) -> None:
        """Point at a mark of a chart until its tip shows ``text``: a busy machine may lose a movement."""
        tip = self.page.locator(".hoverlayer text", has_text=text).first
        deadline = time.monotonic() + PATIENCE_S
        while not tip.is_visible():
            assert time.monotonic() < deadline, f"no tip says {text}"
            self.page.mouse.move(0, 0)
            mark.hover(force=True)  # plotly lays a sheet over its bars
            self.page.wait_for_timeout(200)

    def draw(self, *charts: str) -> None:
        """Scroll to each of these charts, or to every one that is shown, until plotly has drawn it."""
        for chart in charts or self.run("[...document.querySelectorAll('.chart')].map((chart) => chart.id)"):
            found = self.page.locator(f"[id='{chart}']")
            if charts or found.is_visible():
                found.evaluate("(chart) => chart.scrollIntoView({ behavior: 'instant', block: 'center' })")
                self.until(f"(id) => Boolean(({DRAWN})(document.getElementById(id)))", chart)

    def point(self, chart: str, *, row: int, at: float) -> list[str]:
        """What pointing at a row of a timeline says, line by line; ``at`` is a share of its width."""
        self.draw(chart)
        box = self.page.locator(f"[id='{chart}'] .nsewdrag").nth(row).bounding_box()
        assert box is not None
        self.page.mouse.move(0, 0)
        self.page.mouse.move(box["x"] + at * box["width"], box["y"] + box["height"] / 2)
        lines = (
            "(id) => [...document.getElementById(id).querySelectorAll('.hovertext tspan')].map((t) => t.textContent)"
        )
        self.until(f"(id) => ({lines})(id).length", chart)
        return [str(line) for line in self.run(lines, chart)]

    def ticks(self, chart: str) -> list[str]:
        """The labels of a chart's rows, from top to bottom."""
        texts = self.page.locator(f"[id='{chart}'] .ytick text")
        return [str(text) for text in texts.evaluate_all("(all) => all.map((text) => text.textContent)")]

    def bars(self, chart: str) -> int:
        """How many bars a chart draws."""
        return self.page.locator(f"[id='{chart}'] .plot .bars .point path").count()

    def rows(self, caption: str) -> list[list[str]]:
        """The cells of the rows that a table shows, the row of its heads aside."""
        cells = "(rows) => rows.map((row) => [...row.cells].filter((c) => !c.hidden).map((c) => c.textContent.trim()))"
        shown = self.table(caption).locator("tbody tr:not([hidden])").evaluate_all(cells)
        return [[str(text).replace("\N{NO-BREAK SPACE}", " ") for text in row] for row in shown]

    def table(self, caption: str) -> Any:
        """The first table whose caption has these words, scrolled into view."""
        found = self.page.locator("table", has=self.page.locator("caption", has_text=caption)).first
        found.evaluate("(table) => table.scrollIntoView({ behavior: 'instant', block: 'center' })")
        return found


def visiting(browser: "Browser", address: str, **options: Any) -> Visit:
    """Open a page in a context of its own."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(PATIENCE_S * 1e3)
    visit = Visit(page=page, address=address)
    page.on("console", lambda message: visit.said.append(message.text))
    page.on("pageerror", lambda error: visit.said.append(str(error)))
    page.on("dialog", visit.dismiss)
    page.on("request", lambda request: visit.asked.append(request.url))
    visit.open()
    return visit


def written(evidence: Evidence, path: Path, beside: Extras | None = None) -> str:
    """Write a dashboard; return its address."""
    write_dashboard(evidence, path, beside)
    return path.as_uri()


def wide() -> Evidence:
    """Two runs of many cases: two models, three world sizes, two fidelities, a failure; times of ms and of s, memory of
    MiB and of GiB.
    """
    on_four = [replace(made, world_size=4, step_time=0.6 * made.step_time) for made in CASES[2:]]
    slow = replace(CASES[1], world_size=4, step_time=1.2, peak_mib=3072)
    measured = run([*CASES, slow, *on_four])
    emulated = run(CASES[1:], rounds=1, failed=False, fidelity="emulated")
    tiny = of_model(run(CASES[1:3], rounds=1, failed=False).launches, "llama-tiny")
    joined = msgspec.structs.replace(measured, launches=(*measured.launches, *emulated.launches, *tiny))
    return gather(earlier(CASES), joined)


def of_model(launches: Sequence[LaunchRecord], model: str) -> tuple[LaunchRecord, ...]:
    """The launches, had they trained another model."""
    changed = [(launch, launch.case.changed(model=model)) for launch in launches]
    return tuple(msgspec.structs.replace(launch, case=case, spec_hash=case.hash) for launch, case in changed)


def earlier(made: Sequence[Made]) -> Run:
    """A run of the day before, a tenth slower."""
    found = run([replace(one, step_time=1.1 * one.step_time) for one in made], failed=False)
    header = msgspec.structs.replace(found.header, run_id="before", started_at="2026-02-28T10:00:00Z")
    return msgspec.structs.replace(found, header=header)
