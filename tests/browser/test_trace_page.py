"""The page of traces in a real browser, where one is installed: it draws, answers, stays silent, hands over."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from refshard.report.trace.charts import MOST_SPANS
from tests.browser.visits import CONTENT, PATIENCE_S, Visit, visiting
from tests.report import traces

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Labels of one axis that stand upright and run into each other.
OVERLAPS = r"""() => {
const level = (text) => !/rotate\(-?[1-9]/.test(text.getAttribute("transform"));
const axes = [".xtick", ".x2tick", ".ytick", ".y2tick"];
return [...document.querySelectorAll(".chart")].flatMap((chart) => axes.flatMap((axis) => {
  const texts = [...chart.querySelectorAll(`${axis} text`)].filter(level);
  const boxes = texts.map((text) => text.getBoundingClientRect()).filter((box) => box.width);
  return boxes.slice(1).filter((box, n) => box.left < boxes[n].right && boxes[n].left < box.right
    && box.top < boxes[n].bottom && boxes[n].top < box.bottom).map(() => `${chart.id} ${axis}`);
}));
}"""
PERFETTO = """<!doctype html><script>
addEventListener("message", ({source, data}) => {
  if (data === "PING") source.postMessage("PONG", "*");
  else window.given = {...data.perfetto, bytes: [...new Uint8Array(data.perfetto.buffer)],
                       kind: data.perfetto.buffer.constructor.name, buffer: null};
});
</script>"""


def opened(browser: "Browser", address: str, **options: Any) -> "Page":
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(PATIENCE_S * 1e3)
    page.goto(address)
    return page


@pytest.fixture(scope="module")
def visit(browser: "Browser", trace_address: str) -> Visit:
    return visiting(browser, trace_address, viewport={"width": 1000, "height": 700})


def test_as_many_spans_as_a_timeline_may_hold_are_few_elements(browser: "Browser", tmp_path: Path) -> None:
    timeline = traces.gpu(kernels=1400, steps=1)
    assert len(timeline.spans) > 100_000
    (tmp_path / "trace.html").write_text(traces.page([traces.trace(tmp_path, timeline)]))
    visit = visiting(browser, (tmp_path / "trace.html").as_uri(), viewport={"width": 1000, "height": 800})
    visit.draw("trace-0-timeline-0")
    assert visit.page.locator("#trace-0-timeline-0 *").count() < 1000
    drawn = (
        "document.querySelector('#trace-0-timeline-0 .plot').data.flatMap((trace) => trace.meta?.codes ?? []).length"
    )
    assert 5_000 < visit.run(drawn) <= MOST_SPANS
    assert "too many spans to draw" in visit.page.locator("#trace-0-timeline-0 + figcaption").inner_text()
    visit.check_silence()
    visit.page.context.close()


def test_pointing_at_a_block_tells_of_it(visit: Visit) -> None:
    units, compute, comm, exposed = (visit.point("trace-0-timeline-0", row=row, at=0.07) for row in range(4))
    assert units[:2] == ["model.layers.0", "forward"]
    assert compute[-2].startswith("model.layers.0")
    assert compute[0].startswith("void cutlass::Kernel2<")
    assert comm[0] == "all_gather model.layers.0"
    assert "416 MiB; algorithm bandwidth " in comm[1]
    assert comm[-1] == "770µs"
    assert visit.point("trace-0-timeline-0", row=2, at=0.083)[0] == "all_gather model.layers.0", "its last tenth"
    assert exposed[0] == "exposed communication"


RANGE = "document.querySelector('#trace-0-timeline-0 .plot').layout.xaxis.range"


def test_buttons_and_drags_zoom_in_and_out(visit: Visit) -> None:
    visit.draw("trace-0-timeline-0")
    chart = visit.page.locator("#trace-0-timeline-0")
    begin, close = visit.run(RANGE)
    chart.locator("[data-title='Zoom in'], [data-attr='zoom'][data-val='in']").first.click()
    visit.until(f"() => {RANGE}[1] - {RANGE}[0] < 0.6 * {close - begin}")
    chart.locator("[data-title='Reset axes'], [data-val='reset']").first.click()
    visit.until(f"() => {RANGE}[0] === {begin} && {RANGE}[1] === {close}")
    box = chart.locator(".nsewdrag").nth(1).bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    visit.page.mouse.move(box["x"] + 0.2 * box["width"], y)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 0.3 * box["width"], y, steps=4)
    visit.page.mouse.up()
    visit.until(f"() => Math.abs({RANGE}[1] - {RANGE}[0] - 0.1 * {close - begin}) < 0.02 * {close - begin}")


def test_the_slowest_step_is_drawn_once_it_is_unfolded(visit: Visit) -> None:
    assert not visit.page.locator("#trace-0-timeline-1 .plot").count()
    visit.page.get_by_text("Timeline of step 2, the slowest").first.click()
    visit.draw("trace-0-timeline-1")
    lengths = [visit.run(RANGE.replace("timeline-0", f"timeline-{n}"))[1] for n in (0, 1)]
    assert lengths[0] < lengths[1]


def test_without_scripts_sentences_tables_and_the_traces_are_there(browser: "Browser", trace_address: str) -> None:
    page = opened(browser, trace_address, java_script_enabled=False, viewport={"width": 1000, "height": 900})
    assert "Charts need JavaScript" in page.locator("noscript").inner_text()
    assert page.get_by_text("Its all-gather takes").first.is_visible()
    assert not page.get_by_role("button", name="Open in Perfetto").first.is_visible()
    assert page.get_by_role("link", name="ui.perfetto.dev").first.is_visible()
    second = page.locator("#trace-1 figcaption").first
    assert not second.is_visible()
    page.locator("#trace-1 summary").first.click()
    assert second.is_visible()


def test_paper_has_the_charts(browser: "Browser", trace_address: str) -> None:
    visit = visiting(browser, trace_address, viewport={"width": 1000, "height": 700})
    visit.draw("ranks")
    visit.page.emulate_media(media="print")
    visit.run("dispatchEvent(new Event('beforeprint'))")
    shown = visit.page.locator(".chart:visible").count()
    assert visit.page.locator(".plot:visible .cartesianlayer").count() == shown > 3
    assert visit.run("document.querySelector('#ranks .main-svg').clientWidth") == 680
    visit.page.context.close()


def test_perfetto_gets_the_very_bytes_of_the_trace_or_of_the_chosen_file(
    browser: "Browser", trace_address: str, tmp_path: Path
) -> None:
    """Perfetto's page is a small one that answers."""
    page = opened(browser, trace_address, viewport={"width": 1000, "height": 700})
    page.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(content_type="text/html", body=PERFETTO)
    )
    with page.expect_popup() as popup:
        page.get_by_role("button", name="Open in Perfetto").first.click()
    popup.value.wait_for_function("window.given")
    given = popup.value.evaluate("window.given")
    assert bytes(given["bytes"]) == CONTENT
    assert (given["kind"], given["title"], given["fileName"]) == ("ArrayBuffer", "rank0.json.gz", "rank0.json.gz")
    page.get_by_text("Opened in Perfetto.").wait_for()
    page.locator("#trace-1 summary").first.click()
    (tmp_path / "chosen.json.gz").write_bytes(CONTENT[:1000])
    with page.expect_popup() as popup, page.expect_file_chooser() as chooser:
        page.locator("#trace-1").get_by_role("button", name="Choose the file").click()
        chooser.value.set_files(tmp_path / "chosen.json.gz")
    popup.value.wait_for_function("window.given")
    given = popup.value.evaluate("window.given")
    assert (bytes(given["bytes"]), given["fileName"]) == (CONTENT[:1000], "chosen.json.gz")
    page.context.close()


def test_a_part_of_the_bar_leads_to_where_it_is_longest(visit: Visit) -> None:
    visit.open()
    visit.draw("where-0")
    box = visit.page.locator("#where-0 .nsewdrag").bounding_box()
    assert box is not None
    visit.page.mouse.click(box["x"] + 0.3 * box["width"], box["y"] + box["height"] / 2)
    visit.until("() => document.activeElement.className === 'place'")
    assert str(visit.run("document.activeElement.textContent")).startswith("Framed: the longest of other kernels")
    shown = "document.querySelector('.place + .chart .plot').layout"
    (low, high), (mark,) = visit.run(f"{shown}.xaxis.range"), visit.run(f"{shown}.shapes")
    assert low <= mark["x0"] < mark["x1"] <= high < 5 * (mark["x1"] - mark["x0"]) + low
    for _ in range(2):
        visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")
    assert visit.run("document.activeElement.dataset.part") == "other kernels"
    idle = visit.page.locator("#where-0 + figcaption a", has_text="idle, launch-bound")
    idle.focus()
    visit.page.keyboard.press("Enter")
    visit.until("() => document.activeElement.textContent.startsWith('Framed: the longest of idle, launch-bound')")
    visit.page.get_by_role("button", name="Show all").click()
    assert visit.page.locator(".place").count() == 0
    visit.check_silence()


def test_hostile_names_and_all_do_so_in_silence_and_without_a_network(browser: "Browser", trace_address: str) -> None:
    visit = visiting(browser, trace_address, viewport={"width": 360, "height": 800})
    visit.open("trace-2")
    page = visit.page
    page.locator("#trace-2 summary").first.click()
    visit.draw()
    assert page.locator("#trace-2 .chart .xtitle").count() > 1
    assert page.evaluate(OVERLAPS) == []
    assert (
        page.locator(".chart .legend .scrollbar").evaluate_all(
            "(bars) => bars.filter((b) => b.getAttribute('width') > 0).length"
        )
        == 0
    )
    assert "alert(1)" in "".join(visit.point("trace-2-timeline-0", row=1, at=0.3))
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    visit.check_silence()
    page.context.close()
