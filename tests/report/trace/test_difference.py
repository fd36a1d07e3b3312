"""Differences on a page: complete, and escaped; ``scenarios`` shows the text."""

from msgspec.structs import replace

from refshard.report import blocks
from refshard.report.page import as_page
from refshard.report.trace.difference import difference_answer, remarks, verdict
from refshard.report.trace.sides import beside
from tests.report.pages import Page
from tests.report.printed import rows, tables
from tests.report.trace.scenarios import DIFFERENCES, MM, compared, side
from tests.report.traces import HOSTILE


def test_a_page_holds_what_the_terminal_shows_and_escapes_names() -> None:
    work = replace(MM, operator=HOSTILE)
    found = compared([side((work, 60), kernel=HOSTILE)] * 2, [side((work, 50)), side((work, 45))], ranks=(0, 1))
    written = "".join(as_page(difference_answer(found), product="trace", command="x"))
    assert "<script>alert" not in written
    text = Page(written).text.replace("\N{NO-BREAK SPACE}", " ")
    for table in tables(difference_answer(found)):
        for row in table.rows:
            assert all(str(cell) in text for cell in row if HOSTILE[:5] not in str(cell))
    assert all(sentence in text for sentence in remarks(found))
    assert [row["most, on rank"] for row in rows(tables(difference_answer(found))[1])] == ["-15 ns, 1", ""]


def test_what_is_not_like_for_like_comes_first() -> None:
    found = DIFFERENCES["not like for like"]
    written = "".join(as_page(difference_answer(found), product="trace", command="x"))
    text = " ".join(Page(written).text.replace("\N{NO-BREAK SPACE}", " ").split())
    places = [text.index(sentence) for sentence in (*verdict(found)[:2], "A and B differ in device (H100 and MI300X)")]
    assert places == sorted(places)


def test_two_tables_become_one_with_the_columns_of_both() -> None:
    def of(*rows: tuple[str, int, int]) -> blocks.Table:
        return blocks.table([{"kernel": name, "count": n, "time": blocks.Quantity(ns, "ns")} for name, n, ns in rows])

    a, b = of(("x", 1, 10), ("y", 2, 50), ("x", 3, 7)), of(("y", 2, 20), ("new", 1, 5))
    both = beside([a, b], ("A", "B"), ["kernel"], "caption")
    heads = [column.head for column in both.columns]
    assert heads == ["kernel", "count, A", "count, B", "time, A", "time, B", "B - A"]
    cells = [[str(cell) for cell in row] for row in both.rows]
    assert cells[0] == ["y", "2", "2", "50 ns", "20 ns", "-30 ns"]
    assert [row[0] for row in cells[1:]] == ["x", "x", "new"]
    assert [row[3:] for row in cells[1:]] == [
        ["10 ns", "None", "None"], ["7 ns", "None", "None"], ["None", "5 ns", "None"],
    ]  # fmt: skip
