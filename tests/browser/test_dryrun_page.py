"""The page of a dry run in a real browser, where one is installed: it draws, answers, stays silent and fits a phone."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from refshard.folders import replace_file
from refshard.report.dryrun.answer import dryrun_answer
from refshard.report.page import as_page
from tests.browser.test_accessibility import WIDTHS, violations
from tests.browser.visits import Visit, visiting
from tests.report.dryruns import analysed

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("dryrun") / "page.html"
    replace_file(path, as_page(dryrun_answer(analysed()), product="dryrun", command="refshard dryrun -- train.py"))
    assert path.stat().st_size < 1_500_000
    return path.as_uri()


@pytest.fixture(params=["light", "dark"])
def visit(browser: "Browser", address: str, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """The page on a screen in light, on a phone in dark; at the end it has said nothing, and asked for itself alone."""
    viewport = {"width": WIDTHS[request.param], "height": 900}
    visit = visiting(browser, address, viewport=viewport, color_scheme=request.param)
    yield visit
    visit.check_silence()
    visit.page.context.close()


def test_pointing_at_memory_says_each_category_in_gib(visit: Visit) -> None:
    visit.draw("memory-step")
    box = visit.page.locator("#memory-step .nsewdrag").bounding_box()
    assert box is not None
    visit.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.7 * box["height"])
    hovered = "[...document.querySelectorAll('#memory-step .hoverlayer text')].map((text) => text.textContent)"
    visit.until(f"() => {hovered}.some((text) => text.startsWith('reserved'))")
    said = visit.run(hovered)
    for part in ("parameters", "optimizer state", "gradients", "unsharded parameters", "activations", "allocated"):
        (told,) = [text for text in said if text.startswith(f"{part} : ")]
        assert "GiB" in told
    assert "parameters : 4.00 GiB" in said
    assert "reserved : 20.00 GiB" in said


def test_pointing_at_a_stream_says_what_runs_there(visit: Visit) -> None:
    assert "layers.0" in " ".join(visit.point("replayed-timeline-0", row=0, at=0.2))
    assert "aten::mm" in " ".join(visit.point("replayed-timeline-0", row=1, at=0.2))


def test_nothing_is_wider_than_the_screen_and_axe_has_nothing_to_say(visit: Visit) -> None:
    visit.draw()
    assert visit.run("document.documentElement.scrollWidth <= innerWidth")
    assert violations(visit) == []
