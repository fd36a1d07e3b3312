"""The dashboard in a real browser: it draws, prints, reads without scripts, and says what is hostile as text."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from refshard.analysis.evidence import Evidence, gather
from tests.browser.visits import Visit, visiting, written
from tests.report.runs import CASES, HOSTILE, run, with_record

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGE = "<img src=x onerror=alert(4)>"
FOCUSED = """() => {
  const { tagName, name, id, textContent } = document.activeElement;
  return [tagName, name || id || "", textContent.trim()];
}"""


def test_charts_are_drawn_as_they_come_near(visit: Visit) -> None:
    assert not visit.page.locator("#t0-losses .plot").count()
    count = visit.page.locator(".chart").count()
    assert count == 5
    visit.draw()
    assert visit.page.locator(".chart .plot").count() == count
    assert not visit.page.locator("canvas").count(), "a browser allows few WebGL canvases"


def test_ids_are_unique_and_every_anchor_that_is_shown_has_its_target(visit: Visit) -> None:
    twice = "[...document.querySelectorAll('[id]')].map((e) => e.id).filter((id, n, all) => all.indexOf(id) !== n)"
    assert visit.run(twice) == []
    anchors = "[...document.querySelectorAll('a[href^=\"#\"]:not([hidden])')]"
    assert visit.run(f"{anchors}.filter((a) => !document.getElementById(a.hash.slice(1))).map((a) => a.hash)") == []


def test_the_navigation_leads_to_every_section_that_it_names(visit: Visit) -> None:
    links = visit.page.get_by_role("navigation").get_by_role("link")
    for name in links.all_inner_texts():
        links.get_by_text(name, exact=True).click()
        target = visit.state.removeprefix("at=")
        top = "document.getElementById(id).getBoundingClientRect().top"
        visit.until(f"(id) => {top} >= 0 && {top} < innerHeight", target)
        assert visit.run("document.activeElement.id") == target


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (3840, "light")])
def test_a_screen_of_any_width_scrolls_down_only(
    browser: "Browser", wide_address: str, width: int, scheme: str
) -> None:
    visit = visiting(browser, wide_address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    visit.unfold_filters()
    visit.draw()
    visit.page.locator("details").evaluate_all("(all) => all.forEach((details) => { details.open = true; })")
    assert visit.run("document.documentElement.scrollWidth") == width
    colour = visit.run("getComputedStyle(document.querySelector('.plot .ytick text')).fill")
    assert colour == {"light": "rgb(28, 32, 36)", "dark": "rgb(228, 231, 234)"}[scheme]
    visit.check_silence()
    visit.page.context.close()


def test_two_ticked_rows_are_compared_and_the_address_holds_them(visit: Visit) -> None:
    def tick(name: str) -> None:
        visit.page.get_by_role("checkbox", name=f"Compare {name}", exact=True).click()

    names = visit.page.locator("#headline tbody th").all_inner_texts()[:3]
    tick(names[0])
    assert visit.page.locator("#pair").count() == 0
    tick(names[1])
    assert visit.page.locator("#pair thead th").all_inner_texts() == ["figure", *names[:2], f"{names[1]} / {names[0]}"]
    first = visit.page.locator("#headline tbody tr").nth(1).locator("td").all_inner_texts()
    shown = dict(visit.page.locator("#pair tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [row.cells[0].textContent, row.cells[2].textContent])"
    ))  # fmt: skip
    assert shown["step time (95 % interval)"] == " ".join(first[0].split())
    state = visit.state
    tick(names[2])
    assert visit.page.locator("#pair thead th").all_inner_texts()[1:3] == names[1:3]
    visit.open(state)
    assert visit.page.locator("#pair thead th").all_inner_texts()[1:3] == names[:2]


def test_text_in_charts_follows_a_change_of_the_colour_scheme(visit: Visit) -> None:
    visit.draw("v0-tradeoff")
    colour = "getComputedStyle(document.querySelector('.plot .ytick text')).fill"
    assert visit.run(colour) == "rgb(28, 32, 36)"
    visit.page.emulate_media(color_scheme="dark")
    assert visit.run(colour) == "rgb(228, 231, 234)"
    visit.page.emulate_media(color_scheme="light")


def test_a_button_copies_the_command(visit: Visit) -> None:
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.page.get_by_text("Reproduce: the command").click()
    visit.page.get_by_role("button", name="Copy: refshard run").first.click()
    copied = visit.run("navigator.clipboard.readText()")
    assert shlex.split(copied) == ["refshard", "run", "suites/quickstart.toml", "--note", "it's <b>bold</b>"]
    visit.page.get_by_role("button", name="Copy: refshard run").last.click()
    assert visit.run("navigator.clipboard.readText()") == visit.page.locator("pre.copied").last.text_content()


@pytest.fixture
def on_paper(visit: Visit) -> Iterator[Visit]:
    """The page on paper, as soon as the test has chosen what to print."""
    yield visit
    visit.page.emulate_media(media="screen")


def print_out(visit: Visit) -> None:
    visit.page.emulate_media(media="print")
    visit.run("dispatchEvent(new Event('beforeprint'))")


def test_paper_has_charts_whole_tables_and_no_controls(on_paper: Visit) -> None:
    page = on_paper.page
    on_paper.draw("v0-tradeoff")
    print_out(on_paper)
    assert page.locator("#v0-tradeoff .plot").is_visible()
    assert page.locator("#t0-losses .plot").is_visible(), "it had not been near the screen"
    assert page.locator("#t0-losses .main-svg").first.evaluate("(drawn) => drawn.clientWidth") == 680
    heads = page.locator("#headline thead th")
    assert [heads.nth(place).is_visible() for place in range(heads.count())] == [True] * heads.count()
    for control in ("#filter", ".choice", ".tool", "nav", ".skip", "#link"):
        assert not page.locator(f"{control}:visible").count(), control
    on_paper.run("dispatchEvent(new Event('afterprint'))")


def test_paper_has_what_the_filter_leaves(on_paper: Visit) -> None:
    page = on_paper.page
    on_paper.unfold_filters()
    page.get_by_label("ddp", exact=True).click()
    on_paper.draw("v0-breakdown")
    print_out(on_paper)
    assert page.locator(".plot:visible").count() == page.locator(".chart:visible").count() == 5
    assert "ddp" not in on_paper.ticks("v0-breakdown")
    legend = page.locator("#v0-over-step .legendtext").all_text_contents()
    assert "fsdp2" in legend
    assert "ddp" not in legend, "it had not been near the screen"
    on_paper.run("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    page.locator("#filters").get_by_role("button").click()
    on_paper.draw()
    for chart in ("v0-breakdown", "v0-over-step"):
        widths = "(chart) => [chart.clientWidth, chart.querySelector('.main-svg').clientWidth]"
        there, drawn = page.locator(f"#{chart}").evaluate(widths)
        assert drawn == pytest.approx(there, abs=1)


def test_the_keyboard_reaches_and_works_everything(visit: Visit) -> None:
    page, press = visit.page, visit.page.keyboard.press
    press("Tab")
    assert visit.run(FOCUSED) == ["A", "", "Skip to the verdict"]
    assert page.get_by_text("Skip to the verdict").bounding_box()["x"] >= 0  # type: ignore[index]
    press("Enter")
    assert visit.run(FOCUSED)[:2] == ["SECTION", "verdict"]
    visit.open()
    reached = []
    while (focused := visit.run(FOCUSED))[:2] != ["SELECT", "base"]:
        reached.append(focused)
        assert len(reached) < 400
        if focused[0] == "SUMMARY" and focused[2].startswith("Filter"):
            assert not page.locator("#filters").is_visible()
            press("Enter")
            assert page.locator("#filters").is_visible()
        if visit.run("document.activeElement.value") == "ddp":
            press("Space")
            assert page.locator("#shown").inner_text() == "5 of 6 strategies"
        press("Tab")
    names = [focused[:2] for focused in reached]
    assert names.count(["INPUT", "strategy"]) == 6
    assert ["SELECT", "of"] in names
    assert ["BUTTON", "", "Show all"] in reached
    assert ["BUTTON", "", "CSV"] in reached
    assert ["BUTTON", "", "SVG"] in reached
    assert ["BUTTON", "", "peak memory"] in reached
    press("ArrowDown")
    assert visit.state.endswith("base=refshard-fsdp")


def test_without_scripts_sentences_and_tables_are_there(browser: "Browser", traced_address: str) -> None:
    visit = visiting(browser, traced_address, java_script_enabled=False, viewport={"width": 1280, "height": 900})
    page = visit.page
    assert "need JavaScript" in page.locator("noscript").inner_text()
    assert page.locator("figcaption:visible").count() > 3
    assert page.locator("#headline tbody tr:visible").count() > 3
    assert not page.locator("button:visible, select:visible, input:visible, #filter:visible").count()
    page.get_by_text("Loss of every step").first.click()
    assert visit.table("Loss of every step").is_visible()
    visit.check_silence()
    page.context.close()


def hostile() -> Evidence:
    """A run in which every name, text and log attacks whoever shows it."""
    made = run([replace(case, strategy=name) for case, name in zip(CASES[1:], (HOSTILE, IMAGE, "ddp"))])
    made = with_record(made, 0, warnings=(HOSTILE, IMAGE))
    header = made.header
    suite = msgspec.structs.replace(header.suite, about=f'"><b onclick=alert(3)>{IMAGE}')
    machine = msgspec.structs.replace(header.environment, hostname=IMAGE, cpu=HOSTILE, network=IMAGE)
    changed = msgspec.structs.replace(header, run_id=HOSTILE, suite=suite, environment=machine)
    return gather(msgspec.structs.replace(made, header=changed))


def test_hostile_names_stay_text_wherever_they_stand(browser: "Browser", tmp_path: Path) -> None:
    address = written(hostile(), tmp_path / "dashboard.html")
    visit = visiting(browser, address, viewport={"width": 1280, "height": 800})
    page = visit.page
    visit.draw()
    assert {HOSTILE, IMAGE} < set(visit.ticks("v0-breakdown"))
    for place, name in enumerate(n for n in visit.ticks("v0-breakdown") if n != "2 ranks"):
        bar = page.locator("#v0-breakdown .bars .point path").nth(place)
        visit.point_at(bar, name.partition("(")[0])
    page.get_by_text("Case states: ").click()
    page.get_by_text("Log of fsdp2-tuned").click()
    assert page.get_by_text("rank 1: <img src=x onerror=alert(2)>").is_visible()
    visit.unfold_filters()
    page.get_by_label("ddp", exact=True).click()
    page.locator("#base").select_option(label=IMAGE)
    assert page.locator("#headline thead th").nth(2).inner_text() == f"vs {IMAGE}"
    visit.open(visit.state)
    assert page.locator("#headline thead th").nth(2).inner_text() == f"vs {IMAGE}"
    assert page.get_by_text(f'"><b onclick=alert(3)>{IMAGE}').is_visible()
    assert not page.locator("img").count()
    handlers = "(all) => all.flatMap((one) => one.getAttributeNames()).filter((name) => name.startsWith('on'))"
    assert page.locator("*").evaluate_all(handlers) == []
    page.set_viewport_size({"width": 360, "height": 800})
    visit.until("() => document.documentElement.scrollWidth === 360")
    visit.check_silence()
    page.context.close()
