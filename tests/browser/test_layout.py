"""What pages measure at the widths of a phone, a tablet and a screen: height, overflow, labels that overlap."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from refshard import resources
from refshard.commands.report import report
from refshard.folders import replace_file
from refshard.report.dryrun.answer import dryrun_answer
from refshard.report.page import as_page
from tests.browser.visits import Visit, visiting
from tests.report.dryruns import analysed

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PUBLISHED = resources.dashboards() / "published"
RECORDED = resources.root() / "profiles" / "recorded"
WIDTHS = (390, 768, 1440)
HIGHEST = 6300
LARGEST = 2_000_000
# Texts of a chart that run into each other: labels of points, ticks that stand upright, names of limits.
OVERLAPS = r"""() => {
const level = (text) => !/rotate\(-?[1-9]/.test(text.getAttribute("transform"));
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
return [...document.querySelectorAll(".chart")].filter((chart) => chart.offsetParent).flatMap((chart) => {
  const texts = [...chart.querySelectorAll(".xtick text, .ytick text, .textpoint text, .annotation text")]
    .filter((text) => level(text) && text.textContent && getComputedStyle(text.closest("g")).display !== "none");
  const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
  return boxes.flatMap(([name, box], n) => boxes.slice(n + 1).filter(([, other]) => meet(box, other))
    .map(([other]) => `${chart.id}: ${name} and ${other}`));
});
}"""
# Points under the name of the limit, or under a label of another point.
COVERED = r"""() => [...document.querySelectorAll("[id$='-tradeoff']")].flatMap((chart) => {
const names = [...chart.querySelectorAll(".textpoint text, .annotation text")].filter((text) => text.textContent);
const points = [...chart.querySelectorAll(".points path.point")].map((point) => point.getBoundingClientRect());
return names.flatMap((name) => {
  const box = name.getBoundingClientRect();
  const under = points.filter((point) => {
    const [x, y] = [(point.left + point.right) / 2, (point.top + point.bottom) / 2];
    return box.left < x && x < box.right && box.top < y && y < box.bottom;
  });
  return under.map(() => `${chart.id}: a point under ${name.textContent}`);
});
})"""
LABELLED = """() => [...document.querySelectorAll("#view .chart[id$='-tradeoff']")]
  .every((chart) => chart.querySelector(".plot")?.labelledAt)"""


def peers(folder: Path) -> Path:
    """Twenty-three strategies, which few labels name."""
    return report([RECORDED / "epyc-2-cores" / "peers"], folder / "peers.html")


def index(folder: Path) -> Path:
    runs = [RECORDED / "epyc-2-cores" / name for name in ("quickstart", "peers")]
    return report(runs, folder / "pages") / "index.html"


def dryrun(folder: Path) -> Path:
    replace_file(
        folder / "dryrun.html", as_page(dryrun_answer(analysed()), product="dryrun", command="refshard dryrun")
    )
    return folder / "dryrun.html"


def published(name: str) -> Callable[[Path], Path]:
    return lambda _: PUBLISHED / name


PAGES = {
    "llama3": published("llama3-8b-h100.html"), "measured": published("measured.html"),
    "trace": published("trace.html"), "peers": peers, "index": index, "dryrun": dryrun,
}  # fmt: skip


@pytest.fixture(scope="module", params=PAGES)
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return PAGES[request.param](tmp_path_factory.mktemp("layout")).as_uri()


def settled(visit: Visit) -> None:
    """All charts drawn, and their labels placed."""
    visit.draw()
    visit.until(LABELLED)
    visit.run("scrollTo(0, 0)")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_is_short_scrolls_down_only_and_its_labels_are_apart(
    browser: "Browser", address: str, width: int
) -> None:
    visit = visiting(browser, address, viewport={"width": width, "height": 900})
    settled(visit)
    assert visit.run("document.documentElement.scrollHeight") < HIGHEST
    assert visit.run("document.documentElement.scrollWidth") == width
    assert visit.run(OVERLAPS) == []
    assert visit.run(COVERED) == []
    visit.check_silence()
    visit.page.context.close()


@pytest.mark.parametrize("name", ["llama3-8b-h100.html", "measured.html"])
def test_the_first_screen_has_the_verdict_the_chart_trust_and_the_table(browser: "Browser", name: str) -> None:
    visit = visiting(browser, (PUBLISHED / name).as_uri(), viewport={"width": 1440, "height": 900})
    settled(visit)
    bottoms = "(all) => all.map((one) => one.getBoundingClientRect().bottom)"
    for part in (".lead", "#trust", "#v0-tradeoff", "#headline"):
        (bottom,) = visit.page.locator(part).evaluate_all(bottoms)
        assert 0 < bottom <= 900, part
    visit.page.context.close()


def test_nothing_moves_while_a_reader_scrolls_down(browser: "Browser") -> None:
    """Charts take the place that was left for them."""
    visit = visiting(browser, (PUBLISHED / "measured.html").as_uri(), viewport={"width": 1440, "height": 900})
    before = visit.run("document.documentElement.scrollHeight")
    settled(visit)
    assert visit.run("document.documentElement.scrollHeight") == pytest.approx(before, abs=40)
    visit.page.context.close()


def test_the_bar_on_top_and_the_first_column_stay_in_view(browser: "Browser") -> None:
    visit = visiting(browser, (PUBLISHED / "measured.html").as_uri(), viewport={"width": 390, "height": 900})
    visit.page.locator("#headline").scroll_into_view_if_needed()
    assert visit.page.locator(".bar").bounding_box()["y"] == 0  # type: ignore[index]
    scroll = visit.page.locator(".scroll", has=visit.page.locator("#headline"))
    first = visit.page.locator("#headline tbody th").first
    x = first.bounding_box()["x"]  # type: ignore[index]
    scroll.evaluate("(box) => { box.scrollLeft = 200; }")
    assert first.bounding_box()["x"] == x  # type: ignore[index]
    visit.page.context.close()


def test_published_pages_are_three_and_small() -> None:
    pages = sorted(PUBLISHED.glob("*.html"))
    assert [page.name for page in pages] == ["llama3-8b-h100.html", "measured.html", "trace.html"]
    assert all(page.stat().st_size < LARGEST for page in pages), json.dumps([page.stat().st_size for page in pages])


def test_charts_are_saved_as_pictures(browser: "Browser", tmp_path: Path) -> None:
    visit = visiting(browser, (PUBLISHED / "llama3-8b-h100.html").as_uri(), viewport={"width": 1440, "height": 900})
    visit.draw("v0-tradeoff")
    for kind, begins in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        button = visit.page.get_by_role("button", name=f"Save as {kind}: Step time against memory")
        with visit.page.expect_download() as download:
            button.click()
        assert download.value.suggested_filename == f"Step-time-against-memory.{kind.lower()}"
        assert download.value.path().read_bytes().startswith(begins)
    visit.check_silence()
    visit.page.context.close()
