"""Settings after the first few, folded until a reader asks for them, in a real browser."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from refshard.analysis.evidence import gather
from refshard.report.run.page import UNFOLDED
from tests.browser.visits import Visit, visiting, written
from tests.report.run.test_page import many

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FIRST = f"global batch of 8 sequences of {256 + UNFOLDED} tokens"
"""The first setting that is folded."""


@pytest.fixture(scope="module")
def tab(browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    """In place of the wide page, for ``visit`` of ``conftest.py``."""
    path = tmp_path_factory.mktemp("folded") / "dashboard.html"
    visit = visiting(browser, written(gather(many(UNFOLDED + 2)), path), viewport={"width": 1280, "height": 900})
    yield visit
    visit.page.context.close()


def unfold(visit: Visit) -> None:
    """By keyboard."""
    visit.page.locator("#tables details.folded > summary").first.focus()
    visit.page.keyboard.press("Enter")


def test_what_is_folded_is_there_once_it_is_opened(visit: Visit) -> None:
    assert visit.page.locator("#tables details.folded").count() == 2
    assert not visit.page.locator(f"#s{UNFOLDED}-step_time_s").count()
    unfold(visit)
    assert [row[0] for row in visit.rows(FIRST)] == ["ddp", "fsdp2"]
    visit.draw(f"s{UNFOLDED}-step_time_s")
    assert visit.bars(f"s{UNFOLDED}-step_time_s") == 2
    visit.table(FIRST).get_by_role("button", name="CSV").wait_for()


def test_filters_reach_what_was_folded_while_they_were_set(visit: Visit) -> None:
    visit.unfold_filters()
    visit.page.locator("#filters").get_by_label("ddp", exact=True).click()
    unfold(visit)
    assert [row[0] for row in visit.rows(FIRST)] == ["fsdp2"]
    visit.draw(f"s{UNFOLDED}-step_time_s")
    assert visit.bars(f"s{UNFOLDED}-step_time_s") == 1


def test_an_address_unfolds_the_table_that_it_sorts(visit: Visit) -> None:
    unfold(visit)
    visit.table(FIRST).get_by_role("button", name="strategy").click()
    visit.table(FIRST).get_by_role("button", name="strategy").click()
    assert [row[0] for row in visit.rows(FIRST)] == ["fsdp2", "ddp"]
    state = visit.state
    visit.open(state)
    assert [row[0] for row in visit.rows(FIRST)] == ["fsdp2", "ddp"]
    assert visit.page.locator("#tables details.folded[open]").count() == 1
    assert visit.page.locator("details.folded[open]").count() == 1


def test_unfolding_twice_adds_nothing(visit: Visit) -> None:
    for _ in range(3):
        unfold(visit)
    assert visit.page.locator(f"[id='s{UNFOLDED}-step_time_s']").count() == 1
