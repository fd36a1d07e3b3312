"""The page in a real browser, where one is installed: it draws, stays silent and asks the network for nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from refshard.report.render import write_dashboard
from tests.report.runs import run

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Page

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")


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


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    path = tmp_path_factory.mktemp("page") / "dashboard.html"
    write_dashboard(run(), path)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme="light")
        visit = Visit(page=page, address=path.as_uri())
        page.on("console", lambda message: visit.said.append(message.text))
        page.on("pageerror", lambda error: visit.said.append(str(error)))
        page.on("dialog", visit.dismiss)
        page.on("request", lambda request: visit.asked.append(request.url))
        page.goto(visit.address)
        page.locator(".chart .xtitle").nth(4).wait_for()
        yield visit
        browser.close()


def test_five_charts_are_drawn(visit: Visit) -> None:
    assert visit.page.locator(".chart .xtitle").count() == 5


def test_a_narrow_screen_scrolls_down_only(visit: Visit) -> None:
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 360


def test_text_in_charts_follows_the_colour_scheme(visit: Visit) -> None:
    colour = "getComputedStyle(document.querySelector('.chart .ytick text')).fill"
    assert visit.page.evaluate(colour) == "rgb(28, 32, 36)"
    visit.page.emulate_media(color_scheme="dark")
    assert visit.page.evaluate(colour) == "rgb(228, 231, 234)"


def test_all_that_in_silence_and_without_a_network(visit: Visit) -> None:
    visit.page.get_by_text("Log of fsdp2-tuned").click()
    assert visit.page.get_by_text("rank 1: <img src=x onerror=alert(2)>").is_visible()
    assert visit.said == []
    assert visit.asked == [visit.address]
