"""Differences on a page: complete, and escaped; ``scenarios`` shows the text."""

from msgspec.structs import replace

from refshard.report.page import as_page
from refshard.report.trace.difference import difference_answer, remarks, verdict
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
