"""The page in a real browser, where one is installed: it draws, stays silent and asks the network for nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from refshard.report.render import write_dashboard
from tests.report.runs import run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "dashboard.html"
    write_dashboard(run(), path)
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_the_page_draws_in_silence(
    browser: "Browser", address: str, width: int, scheme: Literal["dark", "light"]
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))

    def dismiss(dialog: "Dialog") -> None:
        said.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.locator(".chart .plot").nth(4).wait_for()
    assert said == []
    assert asked == [address]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


def test_text_in_charts_follows_the_colour_scheme(browser: "Browser", address: str) -> None:
    colours = set()
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector(".chart .ytick text")
        colours.add(page.evaluate("getComputedStyle(document.querySelector('.chart .ytick text')).fill"))
        context.close()
    assert colours == {"rgb(28, 32, 36)", "rgb(228, 231, 234)"}
