"""Filters, the choice of A and B, and the address that holds them, in a real browser."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from refshard.analysis.cases import CaseResult
from tests.browser.visits import Visit, visiting, wide

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TIMES, PARTS, CURVES, RUNS = "s0-step_time_s", "s0-breakdown", "t0-losses", "history"
RATIOS = "Step time and peak memory over"
CASES = wide().cases
ALL = len(CASES)
# By table: its caption, and of each row the number of its case and whether it is shown.
ROWS = """() => [...document.querySelectorAll("main table")].map((table) => [
  table.caption.querySelector("span").textContent,
  [...table.tBodies[0].rows].map((row) => [row.dataset.case ?? null, getComputedStyle(row).display !== "none"]),
])"""
# What a reader sees of the page's state.
VIEW = """() => ({
  boxes: [...document.querySelectorAll("#filters input")].map((box) => box.checked),
  chosen: [...document.querySelectorAll("#choice select")].map((select) => select.value),
  sorted: [...document.querySelectorAll("main th")].map((head) => head.getAttribute("aria-sort")),
  rows: [...document.querySelectorAll("main tbody tr")].map((row) => !row.hidden && row.textContent),
})"""
# Whether a section begins right there, or as near as the page's end lets it come.
UNDER_THE_FILTERS = """(id) => {
  const top = document.getElementById(id).getBoundingClientRect().top - document.getElementById("filter").offsetHeight;
  const isEnd = scrollY + innerHeight >= document.documentElement.scrollHeight - 1;
  return top > -1 && (top < 20 || isEnd && top < innerHeight);
}"""
TRACES = "(id) => document.getElementById(id).querySelector('.plot').data"


def numbers(*, without: object) -> set[int]:
    """Of the cases that have nothing to do with this value."""

    def is_of(case: CaseResult) -> bool:
        return without in (case.spec.model, case.strategy, str(case.spec.world_size), case.fidelity)

    return {case.number for case in CASES if not is_of(case)}


def toggle(visit: Visit, *labels: str) -> None:
    """Click the boxes of filters with these labels."""
    visit.unfold_filters()
    for label in labels:
        visit.page.locator("#filters").get_by_label(label, exact=True).click()


def test_a_filter_hides_exactly_the_rows_of_other_cases_in_every_table(visit: Visit) -> None:
    for value in ("llama-tiny", "llama-mini", "ddp", "single", "2", "4", "measured", "emulated"):
        toggle(visit, value)
        kept = numbers(without=value)
        assert visit.page.locator("#shown").inner_text() == f"{len(kept)} of {ALL} cases"
        by_case = [one for one in visit.run(ROWS) if not one[0].startswith((RATIOS, "Loss of every step"))]
        assert len(by_case) == 14
        for caption, rows in by_case:
            assert [shown for _, shown in rows] == [int(number) in kept for number, _ in rows], (value, caption)
        toggle(visit, value)


def test_a_verdict_goes_with_its_last_case(visit: Visit) -> None:
    findings = visit.page.locator("#verdict article:not([hidden]) h3")
    every = findings.all_inner_texts()
    toggle(visit, "4")
    assert findings.all_inner_texts() == [title for title in every if "4 ranks" not in title]
    toggle(visit, "emulated")
    assert len(findings.all_inner_texts()) < len(every) - 1


def test_every_case_has_its_command(visit: Visit) -> None:
    toggle(visit, "ddp", "4")
    kept = numbers(without="ddp") & numbers(without="4")
    commands = visit.page.locator(".commands li:not([hidden])")
    assert commands.count() == len(kept)
    toggle(visit, "ddp", "4")
    assert commands.count() == ALL


def test_a_bar_stays_in_its_row(visit: Visit) -> None:
    visit.draw(TIMES)
    heights = visit.run(
        f"[...document.querySelectorAll('#{TIMES} .bars .point path')].map((bar) => bar.getBoundingClientRect().height)"
    )
    assert max(heights) < 32


def test_filters_take_bars_and_their_labels_along(visit: Visit) -> None:
    visit.draw(TIMES, PARTS)
    two = ["2 ranks", "ddp", "fsdp2", "refshard-fsdp", "refshard-yafsdp"]
    four = ["4 ranks", "ddp", "fsdp2", "fsdp2-tuned", "refshard-fsdp", "refshard-yafsdp"]
    assert visit.ticks(TIMES) == visit.ticks(PARTS) == ["1 rank", "single", *two, *four]
    assert (visit.bars(TIMES), visit.bars(PARTS)) == (10, 40)
    before = box(visit, TIMES)["height"]
    toggle(visit, "ddp")
    shown = [label for label in ["1 rank", "single", *two, *four] if label != "ddp"]
    assert visit.ticks(TIMES) == visit.ticks(PARTS) == shown
    assert (visit.bars(TIMES), visit.bars(PARTS)) == (8, 32)
    assert box(visit, TIMES)["height"] < before - 40
    values = visit.page.locator(f"#{TIMES} .textpoint").all_text_contents()
    assert [text.strip() for text in values] == [
        "80.0 ms", "60.0 ms", "48.0 ms", "40.0 ms", "36.0 ms", "40.8 ms", "28.8 ms", "24.0 ms",
    ]  # fmt: skip


def box(visit: Visit, chart: str) -> dict[str, float]:
    found: dict[str, float] = visit.run("(id) => document.getElementById(id).getBoundingClientRect().toJSON()", chart)
    return found


def test_a_heading_goes_with_the_last_row_under_it(visit: Visit) -> None:
    visit.draw(TIMES)
    toggle(visit, "single", "4")
    assert visit.ticks(TIMES) == ["2 ranks", "ddp", "fsdp2", "refshard-fsdp", "refshard-yafsdp"]
    toggle(visit, "single", "2")
    assert visit.ticks(TIMES) == ["1 rank", "single"]


def test_filters_take_curves_and_columns_along(visit: Visit) -> None:
    visit.draw(CURVES, RUNS)
    named = f"(id) => ({TRACES})(id).map((trace) => trace.name)"
    assert "ddp, 2 ranks" in visit.run(named, CURVES)
    assert len(visit.run(named, RUNS)) == 5
    toggle(visit, "ddp")
    left = visit.run(named, CURVES)
    assert left
    assert not [name for name in left if name.startswith("ddp")]
    assert len(visit.run(named, RUNS)) == 4
    table = visit.page.locator("#losses table").first
    heads = table.locator("thead th:not([hidden])").all_text_contents()
    assert [head.strip() for head in heads if "ddp" in head] == []
    assert len(heads) == 1 + len([case for case in CASES[:11] if case.strategy != "ddp" and case.ok]) or len(heads) == 9
    assert table.locator("tbody tr").first.locator("th:not([hidden]), td:not([hidden])").count() == len(heads)


def test_a_setting_without_a_case_goes_as_a_whole_and_comes_back_drawn_anew(visit: Visit) -> None:
    visit.draw(TIMES, "s1-step_time_s")
    toggle(visit, "emulated")
    assert not visit.page.locator("#s1-step_time_s").is_visible()
    toggle(visit, "fsdp2", "emulated")
    visit.draw("s1-step_time_s")
    visit.until("() => document.querySelectorAll('#s1-step_time_s .bars .point').length === 3")
    assert visit.ticks("s1-step_time_s") == ["2 ranks", "ddp", "refshard-fsdp", "refshard-yafsdp"]
    width = box(visit, "s1-step_time_s")["width"]
    assert visit.run("document.querySelector('#s1-step_time_s .main-svg').clientWidth") == pytest.approx(width, abs=1)


def test_filters_may_leave_nothing_and_show_all_brings_everything_back(visit: Visit) -> None:
    visit.draw(TIMES)
    before, ticks = visit.run(VIEW), visit.ticks(TIMES)
    toggle(visit, "1", "2", "4")
    assert visit.page.locator("#shown").inner_text() == f"0 of {ALL} cases"
    assert not visit.page.locator("main [data-case]:visible, main [data-any]:visible").count()
    assert visit.rows(RATIOS) == [["No two cases that are shown may be compared so."]]
    assert visit.page.get_by_role("heading", name="Comparison").is_visible()
    nothing = visit.run(VIEW)
    visit.open(visit.state)
    assert visit.run(VIEW) == nothing
    toggle(visit)
    visit.page.get_by_role("button", name="Show all").click()
    visit.draw(TIMES)
    assert visit.run(VIEW) == before
    assert visit.ticks(TIMES) == ticks
    assert visit.state == ""


def test_the_bar_of_filters_opens_wherever_its_words_are_clicked(visit: Visit) -> None:
    for part in ("#shown", "#filter > summary"):
        visit.page.locator(part).click(position={"x": 5, "y": 5})
        assert visit.page.locator("#filters").is_visible()
        visit.page.locator(part).click(position={"x": 5, "y": 5})
        assert not visit.page.locator("#filters").is_visible()


def select(visit: Visit, name: str) -> Any:
    return visit.page.get_by_role("combobox", name=name, exact=True)


def ratios(visit: Visit) -> dict[str, list[str]]:
    """B's ratios over A, and the words for them, by B."""
    return {row[0]: row[2:] for row in visit.rows(RATIOS)}


def test_b_over_a_is_what_is_chosen_and_a_swap_inverts_it(visit: Visit) -> None:
    assert ratios(visit)["fsdp2, 2 ranks, llama-tiny"][:2] == ["1.20", "no interval"], "one launch of each"
    assert ratios(visit)["fsdp2, 4 ranks"][1:] == ["B is faster", "0.10"]
    assert len(ratios(visit)) == 3 + 4 + 3 + 1
    assert visit.page.get_by_role("button", name="Swap").is_disabled()
    select(visit, "B").select_option("fsdp2")
    found = ratios(visit)
    of_fsdp2 = [case.full_label for case in CASES if case.strategy == "fsdp2"]
    assert sorted(found) == sorted(of_fsdp2)
    assert found["fsdp2, 2 ranks, llama-mini"] == ["1.20 (1.20 to 1.20)", "B is slower", "0.68"]
    visit.page.get_by_role("button", name="Swap").click()
    swapped = ratios(visit)
    assert sorted(swapped) == sorted(case.full_label for case in CASES if case.strategy == "ddp")
    assert swapped["ddp, 2 ranks, llama-mini"] == ["0.83 (0.83 to 0.83)", "B is faster", "1.47"]
    assert visit.state == "a=fsdp2&b=ddp"


def test_filters_leave_no_ratio_of_a_case_that_is_hidden(visit: Visit) -> None:
    toggle(visit, "4", "emulated")
    of_fsdp2 = ["fsdp2, 2 ranks, llama-mini", "fsdp2, 2 ranks, llama-tiny"]
    assert sorted(ratios(visit)) == [*of_fsdp2, "refshard-fsdp, 2 ranks", "refshard-yafsdp, 2 ranks"]
    toggle(visit, "ddp")
    assert visit.rows(RATIOS) == [["No two cases that are shown may be compared so."]]


@pytest.fixture(scope="module")
def traced(browser: "Browser", traced_address: str) -> Iterator[Visit]:
    visit = visiting(browser, traced_address, viewport={"width": 1280, "height": 900})
    yield visit
    visit.page.context.close()


def test_the_layers_of_a_and_b_are_drawn(traced: Visit) -> None:
    def drawn() -> list[str]:
        shown = traced.page.locator(".layered:not([hidden])")
        return [str(name) for name in shown.evaluate_all("(all) => all.map((figure) => figure.dataset.strategy)")]

    every = ["ddp", "fsdp2-tuned", "refshard-yafsdp"]
    assert drawn() == every
    select(traced, "B").select_option("refshard-yafsdp")
    assert drawn() == ["ddp", "refshard-yafsdp"]
    select(traced, "A").select_option("fsdp2-tuned")
    assert drawn() == ["fsdp2-tuned", "refshard-yafsdp"]
    traced.page.get_by_role("button", name="Swap").click()
    assert drawn() == ["fsdp2-tuned", "refshard-yafsdp"]
    toggle(traced, "fsdp2-tuned")
    assert drawn() == ["refshard-yafsdp"]
    traced.page.get_by_role("button", name="Show all").click()
    select(traced, "B").select_option("")
    traced.until("() => location.hash === '#a=refshard-yafsdp'")
    assert drawn() == every
    traced.check_silence()


def change(visit: Visit) -> Any:
    """Change all that an address holds; what a reader then sees."""
    toggle(visit, "fsdp2", "emulated", "1")
    select(visit, "A").select_option("refshard-fsdp")
    select(visit, "B").select_option("ddp")
    for caption, head, clicks in (
        (RATIOS, "peak memory B / A", 2),
        ("llama-mini", "peak memory", 1),
        ("Proof", "case", 2),
    ):
        for _ in range(clicks):
            visit.table(caption).get_by_role("button", name=head, exact=True).click()
    visit.page.get_by_role("navigation").get_by_role("link", name="Scaling").click()
    visit.until(UNDER_THE_FILTERS, "scaling")
    return visit.run(VIEW)


def test_an_address_opens_with_the_same_view(visit: Visit) -> None:
    plain = visit.run(VIEW)
    seen = change(visit)
    state = visit.state
    assert [part.partition("=")[0] for part in state.split("&")] == [
        *["strategy"] * 5,
        *["ranks"] * 2,
        *(["fidelity", "a", "b", "sort", "at"]),
    ]
    visit.open(state)
    assert visit.run(VIEW) == seen
    visit.until(UNDER_THE_FILTERS, "scaling")
    visit.run("location.hash = ''")
    visit.until("() => document.querySelector('#filters input:not(:checked)') === null")
    assert visit.run(VIEW) == plain
    visit.run("(state) => { location.hash = state; }", state)
    visit.until("() => document.querySelector('#filters input:not(:checked)')")
    assert visit.run(VIEW) == seen


def test_an_address_that_nobody_wrote_does_no_harm(visit: Visit) -> None:
    plain = visit.run(VIEW)
    visit.open("a=<img src=x onerror=alert(1)>&b=nobody&sort=99.1.1|x.y.z|0.77.1|-1.0.1&at=nowhere&more")
    assert visit.run(VIEW) == plain


def test_anchors_lead_to_their_sections_though_those_before_are_not_laid_out_yet(visit: Visit) -> None:
    for state in ("proof", "at=proof", "at=reproduce"):
        visit.open(state)
        visit.until(UNDER_THE_FILTERS, state.removeprefix("at="))
