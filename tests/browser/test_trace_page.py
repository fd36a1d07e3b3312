"""The page of traces in a real browser, where one is installed: it draws little, answers, stays silent, hands over."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from refshard.report.trace.page import write_trace_page
from tests.browser.visits import CONTENT, PATIENCE_S, visiting
from tests.report import traces

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Labels of one axis that stand upright and run into each other.
OVERLAPS = r"""
const level = (text) => !/rotate\(-?[1-9]/.test(text.getAttribute("transform"));
const axes = [".xtick", ".x2tick", ".ytick", ".y2tick"];
return [...document.querySelectorAll(".chart")].flatMap((chart) => axes.flatMap((axis) => {
  const texts = [...chart.querySelectorAll(`${axis} text`)].filter(level);
  const boxes = texts.map((text) => text.getBoundingClientRect()).filter((box) => box.width);
  return boxes.slice(1).filter((box, n) => box.left < boxes[n].right && boxes[n].left < box.right
    && box.top < boxes[n].bottom && boxes[n].top < box.bottom).map(() => `${chart.id} ${axis}`);
}));
"""
NEEDS_SCRIPTS = "The timeline and the charts need JavaScript; the drawing of one layer and every table below do not."
PERFETTO = """<!doctype html><script>
addEventListener("message", ({source, data}) => {
  if (data === "PING") source.postMessage("PONG", "*");
  else window.given = {...data.perfetto, bytes: [...new Uint8Array(data.perfetto.buffer)],
                       kind: data.perfetto.buffer.constructor.name, buffer: null};
});
</script>"""


@pytest.fixture(scope="module")
def shared(browser: "Browser", trace_address: str) -> "Page":
    """One page for all tests that look, move about and hand over; Perfetto's page is a small one that answers."""
    page = opened(browser, trace_address, viewport={"width": 1000, "height": 700})
    page.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(content_type="text/html", body=PERFETTO)
    )
    return page


@pytest.fixture
def page(shared: "Page") -> "Page":
    """It, as if just opened."""
    drawing(shared, "t.chosen = t.hovered = null; t.reset(); t.draw(); document.activeElement.blur(); scrollTo(0, 0)")
    return shared


def opened(browser: "Browser", address: str, **options: Any) -> "Page":
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(PATIENCE_S * 1e3)
    page.goto(address)
    return page


def drawing(page: "Page", expression: str, argument: object = None) -> Any:
    return page.evaluate(f"(x) => {{ const t = document.querySelector('.timeline').timeline; {expression} }}", argument)


def test_a_hundred_thousand_spans_are_drawn_as_few_rectangles(browser: "Browser", tmp_path: Path) -> None:
    timeline = traces.gpu(kernels=1400, steps=1)
    assert len(timeline.spans) > 100_000
    write_trace_page([traces.trace(tmp_path, timeline)], tmp_path / "trace.html")
    page = opened(browser, (tmp_path / "trace.html").as_uri(), viewport={"width": 1000, "height": 800})
    frames = drawing(
        page,
        """const frames = [], whole = t.data.length;
        for (let span = whole; span > 100; span /= 2) for (const at of [0, 0.1, 0.5, 0.502, 0.9]) {
          const from = Math.min(whole - span, at * whole);
          t.view = { from, to: from + span };
          t.draw();
          frames.push({ ...t.stats });
        }
        return { frames, width: t.width, groups: t.data.groups.length, lanes: t.data.lanes.length };""",
    )
    assert max(frame["drawn"] for frame in frames["frames"]) <= 4 * frames["width"] * frames["lanes"]
    assert max(frame["visited"] for frame in frames["frames"]) <= 4 * frames["width"] * frames["groups"]
    assert {frame["level"] for frame in frames["frames"]} >= {0, 1, 2, 3, 4}
    assert all(frame["drawn"] for frame in frames["frames"][:5])


def test_the_wheel_drags_and_keys_move_the_view(page: "Page") -> None:
    canvas = page.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    whole = drawing(page, "return t.data.length")
    view = "return [t.view.from, t.view.to]"
    assert drawing(page, view) == [0, whole]
    page.locator("canvas").first.focus()
    page.keyboard.press("w")
    assert drawing(page, view) == [whole / 4, whole * 3 / 4]
    page.keyboard.press("ArrowRight")
    assert drawing(page, view)[0] == pytest.approx(whole * 3 / 8)
    page.keyboard.press("r")
    assert drawing(page, view) == [0, whole]
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 1, box["y"] + 60)
    page.mouse.wheel(0, -200)
    page.wait_for_function("document.querySelector('.timeline').timeline.view.to < 0.9e9")
    near, far = drawing(page, view)
    assert near == pytest.approx(0, abs=whole / 100)
    assert far < 0.8 * whole
    page.mouse.move(box["x"] + 500, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    page.mouse.up()
    assert drawing(page, view)[0] > near + 0.1 * (far - near)
    page.get_by_role("button", name="Whole step").first.click()
    assert drawing(page, view) == [0, whole]


def test_without_focus_the_wheel_scrolls_the_page(page: "Page") -> None:
    canvas = page.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    canvas.hover()
    before = drawing(page, "return [t.view.to, scrollY]")
    page.mouse.wheel(0, 300)
    page.wait_for_function("(y) => scrollY > y", arg=before[1])
    assert drawing(page, "return t.view.to") == before[0]


def test_a_keyboard_reads_span_after_span(page: "Page") -> None:
    detail = page.locator(".detail").first
    page.locator("canvas").first.focus()
    page.keyboard.press("]")
    assert "model.layers.0 forward" in detail.inner_text()
    page.keyboard.press("ArrowDown")
    told = detail.inner_text()
    assert "void cutlass::Kernel2<" in told
    assert ", model.layers.0: compute, 66.7 us at " in told
    assert ", launched " in told
    page.keyboard.press("]")
    assert detail.inner_text() != told
    page.keyboard.press("[")
    assert detail.inner_text() == told
    page.keyboard.press("f")
    span = drawing(page, "return t.view.to - t.view.from")
    assert span == pytest.approx(1.4 * 66_666, rel=0.01)


def test_pointing_at_a_span_tells_of_it(page: "Page") -> None:
    canvas = page.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    where = drawing(
        page,
        """const g = t.data.groups.findIndex(([, , style]) => style === "comm"), level = t.levels[t.stats.level];
        const i = level.offsets[g], { top, height } = t.place(t.data.groups[g]);
        return { x: (level.starts[i] + level.extents[i] / 2) / t.scale(), y: top + height / 2 };""",
    )
    canvas.hover(position=where)
    told = page.locator(".detail").first.inner_text()
    assert told.startswith("all_gather model.layers.0: communication, 770 us at ")
    assert "; 416 MiB; algorithm bandwidth " in told
    assert told.endswith("; gap of 2.07 ms before it, which does not block; " + traces.GATHER)
    label = """const g = t.data.groups.findIndex(([, , style]) => style === "comm"), level = t.levels[0];
        return t.label(level, level.offsets[g], x, "spans")"""
    assert [drawing(page, label, room) for room in (40, 12, 6)] == ["all_gather model.layers.0", "all_gather", "all_g…"]


def test_a_button_shows_the_slowest_step(page: "Page") -> None:
    length = "return (t.data.close - t.data.begin) * t.data.tick"
    median = drawing(page, length)
    page.get_by_role("button", name="slowest step 2").first.click()
    assert drawing(page, length) > median
    assert page.locator(".timeline-of").first.inner_text() == "Timeline of step 2, the slowest"
    assert page.locator("canvas").first.get_attribute("aria-label") == "Timeline of step 2, the slowest of rank 0"
    button = page.get_by_role("button", name="median step 1").first
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert drawing(page, length) == median
    assert page.locator(".timeline-of").first.inner_text() == "Timeline of step 1, of median length"


def test_the_summary_is_not_cut_at_1300_pixels(browser: "Browser", trace_address: str) -> None:
    page = opened(browser, trace_address, java_script_enabled=False, viewport={"width": 1300, "height": 900})
    widths = page.locator("#summary .scroll").first.evaluate("(box) => [box.scrollWidth, box.clientWidth]")
    assert widths[0] <= widths[1]


def test_without_scripts_the_layer_the_tables_and_the_traces_are_there(browser: "Browser", trace_address: str) -> None:
    page = opened(browser, trace_address, java_script_enabled=False, viewport={"width": 1000, "height": 900})
    assert page.locator("svg.layer").first.is_visible()
    assert page.locator("svg.layer text", has_text="ncclDevKernel_ReduceSc").first.is_visible()
    assert page.locator("noscript").first.text_content() == NEEDS_SCRIPTS
    assert not page.get_by_role("button", name="Zoom in").first.is_visible()
    assert not page.get_by_role("button", name="Open in Perfetto").first.is_visible()
    assert page.get_by_role("link", name="ui.perfetto.dev").first.is_visible()
    second = page.locator("#trace-1 svg.layer")
    assert not second.is_visible()
    page.locator("#trace-1 > summary").click()
    assert second.is_visible()


def test_paper_has_the_charts(browser: "Browser", trace_address: str) -> None:
    visit = visiting(browser, trace_address, viewport={"width": 1000, "height": 700})
    visit.draw("ranks")
    visit.page.emulate_media(media="print")
    visit.run("dispatchEvent(new Event('beforeprint'))")
    shown = visit.page.locator(".chart:visible").count()
    assert visit.page.locator(".plot:visible .cartesianlayer").count() == shown > 3
    assert visit.run("document.querySelector('#trace-0-steps .main-svg').clientWidth") == 680
    visit.page.context.close()


def given(page: "Page") -> dict[str, Any]:
    page.wait_for_function("window.given")
    return page.evaluate("window.given")  # type: ignore[no-any-return]


def test_perfetto_gets_the_very_bytes_of_the_trace(page: "Page") -> None:
    with page.expect_popup() as popup:
        page.get_by_role("button", name="Open in Perfetto").first.click()
    got = given(popup.value)
    assert bytes(got["bytes"]) == CONTENT
    assert (got["kind"], got["title"], got["fileName"]) == ("ArrayBuffer", "rank0.json.gz", "rank0.json.gz")
    page.get_by_text("Handed to Perfetto.").wait_for()


def test_perfetto_gets_the_file_that_the_reader_chooses(page: "Page", tmp_path: Path) -> None:
    page.locator("#trace-1 > summary").click()
    (tmp_path / "chosen.json.gz").write_bytes(CONTENT[:1000])
    with page.expect_popup() as popup, page.expect_file_chooser() as chooser:
        page.locator("#trace-1").get_by_role("button", name="Choose the file").click()
        chooser.value.set_files(tmp_path / "chosen.json.gz")
    got = given(popup.value)
    assert bytes(got["bytes"]) == CONTENT[:1000]
    assert got["fileName"] == "chosen.json.gz"


def test_hostile_names_and_all_do_so_in_silence_and_without_a_network(browser: "Browser", trace_address: str) -> None:
    visit = visiting(browser, trace_address, viewport={"width": 360, "height": 800})
    visit.open("trace-2")
    page = visit.page
    visit.draw()
    assert page.locator("#trace-2 .chart .xtitle").count() > 1
    assert drawing(page, OVERLAPS) == []
    assert (
        page.locator(".chart .legend .scrollbar").evaluate_all(
            "(bars) => bars.filter((b) => b.getAttribute('width') > 0).length"
        )
        == 0
    )
    canvas = page.locator("#trace-2 canvas")
    canvas.focus()
    for key in ("]", "ArrowDown", "]", "f", "ArrowDown"):
        page.keyboard.press(key)
    assert "alert(1)" in page.locator("#trace-2 .detail").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    visit.check_silence()
    page.context.close()
