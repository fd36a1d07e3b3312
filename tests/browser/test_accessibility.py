"""What axe, a checker of accessibility, finds on the pages: nothing that is serious or critical."""

from typing import TYPE_CHECKING

import pytest

from tests.browser.visits import Visit, visiting

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

axe = pytest.importorskip("axe_playwright_python.sync_playwright")
WIDTHS = {"light": 1280, "dark": 360}


def violations(visit: Visit) -> list[str]:
    """Each serious or critical one: its rule, and what it was found on."""
    found = axe.Axe().run(visit.page).response["violations"]
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_axe_has_nothing_to_say_of_a_run(
    browser: "Browser", wide_address: str, traced_address: str, scheme: str
) -> None:
    for address, is_open in ((wide_address, True), (traced_address, False)):
        visit = visiting(browser, address, viewport={"width": WIDTHS[scheme], "height": 900}, color_scheme=scheme)
        if is_open:
            visit.page.locator("details").evaluate_all("(all) => all.forEach((details) => { details.open = true; })")
            visit.page.locator("#filters input").first.click()
            visit.page.locator("thead button:visible").first.click()
            visit.draw()
        assert violations(visit) == []
        visit.page.context.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_axe_has_nothing_to_say_of_traces(browser: "Browser", trace_address: str, scheme: str) -> None:
    visit = visiting(browser, trace_address, viewport={"width": WIDTHS[scheme], "height": 900}, color_scheme=scheme)
    visit.draw()
    visit.page.locator("details").evaluate_all("(all) => all.forEach((details) => { details.open = true; })")
    assert violations(visit) == []
    visit.page.context.close()
