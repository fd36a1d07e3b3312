"""Save a chart of a page as a picture, 830 pixels wide: ``python dashboards/picture.py PAGE CHART TITLE PICTURE``.

Needs playwright and Debian's chromium, which the browser tests use too.
"""

import base64
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
WIDTH, HEIGHT, SCALE = 830, 490, 2
DRAWN = "(id) => Boolean(document.getElementById(id).querySelector('.plot')?.labelledAt)"
SAVE = """async ([id, title, width, height, scale]) => {
  const { data, layout } = document.getElementById(id).querySelector(".plot");
  const text = { color: "#1c2024" };
  const own = {
    ...layout, width, height, autosize: false, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff",
    margin: { t: 84, l: 8, r: 12, b: 8 },
    font: { ...text, size: 14, family: "system-ui, sans-serif" },
    title: { text: title, x: 0.01, xanchor: "left", y: 0.93, yanchor: "middle", font: { ...text, size: 17 } },
  };
  return Plotly.toImage({ data, layout: own }, { format: "png", width, height, scale });
}"""


def save(page: Path, chart: str, title: str, picture: Path) -> None:
    """Open the page, wait until the chart is drawn, and write it to ``picture``."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH + 40, "height": 900}, color_scheme="light")
        tab.goto(page.resolve().as_uri())
        tab.locator(f"[id='{chart}']").scroll_into_view_if_needed()
        while not tab.evaluate(DRAWN, chart):
            tab.wait_for_timeout(100)
        data = tab.evaluate(SAVE, [chart, title, WIDTH, HEIGHT, SCALE])
        browser.close()
    picture.write_bytes(base64.b64decode(data.partition(",")[2]))


if __name__ == "__main__":
    save(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
