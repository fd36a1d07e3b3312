"""The comparison that is shown, the filter of strategies, the base of ratios, and the address that holds them."""

from typing import Any

import pytest

from tests.browser.visits import Visit, wide

pytestmark = pytest.mark.processes

TIMES, PARTS, CURVES = "v0-tradeoff", "v0-breakdown", "t0-losses"
CASES = wide().cases
TOP = "#headline"
# What a reader sees of the page's state.
VIEW = """() => ({
  shown: document.getElementById("of").value,
  lead: document.querySelector("#view-top .lead").textContent,
  boxes: [...document.querySelectorAll("#filters input")].map((box) => box.checked),
  base: document.getElementById("base").value,
  sorted: [...document.querySelectorAll("main th")].map((head) => head.getAttribute("aria-sort")),
  rows: [...document.querySelectorAll("main tbody tr")].map((row) => !row.hidden && row.textContent),
})"""
TRACES = "(id) => document.getElementById(id).querySelector('.plot').data"
LABELLED = "(id) => Boolean(document.getElementById(id).querySelector('.plot')?.labelledAt)"


def toggle(visit: Visit, *labels: str) -> None:
    """Click the boxes of the filter with these labels."""
    visit.unfold_filters()
    for label in labels:
        visit.page.locator("#filters").get_by_label(label, exact=True).click()


def choose(visit: Visit, comparison: str) -> None:
    visit.page.locator("#of").select_option(comparison)


def strategies(visit: Visit) -> list[str]:
    """The first cells of the comparison's table."""
    shown = visit.page.locator(f"{TOP} tbody tr:not([hidden]) th")
    return [str(text) for text in shown.all_inner_texts()]


def ratios(visit: Visit) -> dict[str, str]:
    """Column "vs" by strategy."""
    rows = visit.page.locator(f"{TOP} tbody tr:not([hidden])")
    cells = rows.evaluate_all("(rows) => rows.map((row) => [row.cells[0].textContent, row.cells[2].textContent])")
    return {str(name).strip(): str(text).strip() for name, text in cells}


def labels(visit: Visit, chart: str) -> list[str]:
    """The labels of points that are shown."""
    visit.draw(chart)
    visit.until(LABELLED, chart)
    texts = visit.page.locator(f"[id='{chart}'] .textpoint text")
    return [str(text) for text in texts.all_text_contents() if text]


def test_one_comparison_is_shown_at_a_time(visit: Visit) -> None:
    lead = visit.page.locator("#view-top .lead")
    more = visit.page.locator("#view-top .more")
    assert lead.inner_text().startswith("Use refshard-yafsdp: ")
    assert more.inner_text().startswith("40.0\N{NO-BREAK SPACE}ms per step")
    first = strategies(visit)
    choose(visit, "v1")
    assert lead.inner_text().startswith("Use refshard-yafsdp: ")
    assert more.inner_text().startswith("24.0\N{NO-BREAK SPACE}ms per step")
    assert "fsdp2-tuned" in strategies(visit)
    assert visit.state == "of=v1"
    assert "v0-tradeoff" not in visit.run("[...document.querySelectorAll('#view .chart')].map((one) => one.id)")
    visit.draw("v1-tradeoff")
    choose(visit, "v0")
    assert strategies(visit) == first
    assert visit.state == ""
    visit.draw("v0-tradeoff")


def test_the_navigation_names_the_sections_that_are_there(visit: Visit) -> None:
    names = visit.page.get_by_role("navigation").get_by_role("link").all_inner_texts()
    assert names == ["Verdict", "Step", "Scaling", "Memory", "Losses", "Record"]


def test_a_filter_hides_exactly_the_rows_of_its_strategy_in_every_table(visit: Visit) -> None:
    rows = """() => [...document.querySelectorAll("main tr[data-case]")]
      .map((row) => [Number(row.dataset.case), getComputedStyle(row).display !== "none"])"""
    visit.page.locator("main details").evaluate_all("(all) => all.forEach((details) => { details.open = true; })")
    for strategy in ("ddp", "single", "refshard-fsdp"):
        toggle(visit, strategy)
        found = visit.run(rows)
        assert len(found) > 30
        assert all(shown == (CASES[number].strategy != strategy) for number, shown in found)
        assert visit.page.locator("#shown").inner_text() == "5 of 6 strategies"
        toggle(visit, strategy)
        assert visit.page.locator("#shown").inner_text() == ""


def test_a_filter_takes_points_bars_and_curves_along(visit: Visit) -> None:
    assert "ddp" in labels(visit, TIMES)
    visit.draw(PARTS, CURVES)
    four = ["refshard-yafsdp", "refshard-fsdp", "ddp", "fsdp2"]
    assert visit.ticks(PARTS) == ["2 ranks", *four, "1 rank", "single"]
    named = f"(id) => ({TRACES})(id).map((trace) => trace.name)"
    assert "ddp, 2 ranks" in visit.run(named, CURVES)
    toggle(visit, "ddp", "single")
    assert "ddp" not in labels(visit, TIMES)
    assert visit.ticks(PARTS) == ["2 ranks", *(name for name in four if name != "ddp")]
    assert visit.bars(PARTS) == 12
    assert "ddp, 2 ranks" not in visit.run(named, CURVES)
    toggle(visit, "ddp", "single")
    assert "ddp" in labels(visit, TIMES)


def test_the_front_is_that_of_the_points_that_are_shown(visit: Visit) -> None:
    front = f"(id) => {{ const front = ({TRACES})(id)[0]; return front.x.map((x, n) => [x, front.y[n]]); }}"
    visit.draw(TIMES)
    assert visit.run(front, TIMES) == [[240, 40]]
    toggle(visit, "refshard-yafsdp")
    visit.until(f"(id) => ({front})(id)[0][0] === 280", TIMES)
    toggle(visit, "refshard-fsdp")
    visit.until(f"(id) => ({front})(id).length === 2", TIMES)
    assert visit.run(front, TIMES) == [[300, 60], [440, 50]]


def test_a_filter_stays_when_another_comparison_is_chosen(visit: Visit) -> None:
    toggle(visit, "ddp")
    choose(visit, "v1")
    assert "ddp" not in strategies(visit)
    assert visit.state == "of=v1&without=ddp"


def test_the_filter_closes_by_a_click_elsewhere_and_by_escape(visit: Visit) -> None:
    visit.unfold_filters()
    visit.page.locator("h1").click()
    assert not visit.page.locator("#filters").is_visible()
    visit.unfold_filters()
    visit.page.keyboard.press("Escape")
    assert not visit.page.locator("#filters").is_visible()
    assert visit.run("document.activeElement.tagName") == "SUMMARY"


def test_ratios_are_over_the_strategy_that_is_chosen(visit: Visit) -> None:
    assert ratios(visit)["ddp"] == "1.25 (1.25 to 1.25)"
    head = visit.page.locator(f"{TOP} thead th").nth(2)
    assert head.inner_text() == "vs refshard-yafsdp"
    visit.page.locator("#base").select_option(label="ddp")
    assert head.inner_text() == "vs ddp"
    assert (ratios(visit)["ddp"], ratios(visit)["fsdp2"]) == ("1", "1.20 (1.20 to 1.20)")
    assert ratios(visit)["refshard-yafsdp"] == "0.80 (0.80 to 0.80)"
    assert visit.state == "base=ddp"
    choose(visit, "v1")
    assert head.inner_text() == "vs ddp", "it stays where the comparison has it"


def change(visit: Visit) -> Any:
    """Change all that an address holds; what a reader then sees."""
    choose(visit, "v1")
    toggle(visit, "fsdp2", "single")
    visit.page.locator("#base").select_option(label="ddp")
    visit.page.locator(TOP).get_by_role("button", name="peak memory", exact=True).click()
    visit.page.get_by_role("navigation").get_by_role("link", name="Memory").click()
    return visit.run(VIEW)


def test_an_address_opens_with_the_same_view(visit: Visit) -> None:
    plain = visit.run(VIEW)
    seen = change(visit)
    state = visit.state
    assert [part.partition("=")[0] for part in state.split("&")] == ["of", "without", "without", "base", "sort", "at"]
    visit.open(state)
    assert visit.run(VIEW) == seen
    visit.run("location.hash = ''")
    visit.until("() => document.querySelector('#filters input:not(:checked)') === null")
    assert visit.run(VIEW) == plain
    visit.run("(state) => { location.hash = state; }", state)
    visit.until("() => document.querySelector('#filters input:not(:checked)')")
    assert visit.run(VIEW) == seen


def test_an_address_that_nobody_wrote_does_no_harm(visit: Visit) -> None:
    plain = visit.run(VIEW)
    visit.open(
        "of=<img src=x onerror=alert(1)>&base=nobody&without=x&sort=99.1.1|x.y.z|v0-0.77.1|-1.0.1&at=nowhere&more"
    )
    assert visit.run(VIEW) == plain


def test_a_button_copies_the_address_with_the_state(visit: Visit) -> None:
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    choose(visit, "v1")
    visit.page.get_by_role("button", name="Copy link").click()
    assert visit.run("navigator.clipboard.readText()") == f"{visit.address}#of=v1"
