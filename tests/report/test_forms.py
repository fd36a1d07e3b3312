"""One answer in every form: text that fits, JSON, CSV and Markdown."""

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.report import forms
from refshard.report.blocks import Answer, Block, Cell, Column, Marked, Notes, Table, Text, Verdict, table
from refshard.report.forms import Paper, as_csv, as_json, as_markdown, as_text, inline

WIDE = Table(
    columns=[Column("strategy", "left"), Column("ranks"), Column("step time"), Column("peak memory")],
    rows=[["ddp", "2", "50.0 ms", "440 MiB"], ["refshard-yafsdp", "16", "40.0 ms", "240 MiB"]],
)
WRAPPING = Table(
    columns=[Column("name", "left"), Column("about", "left", wraps=True)],
    rows=[["a", "word " * 40], ["b", "short"]],
)


def answer(
    *blocks: Block, rows: Sequence[dict[str, Any]] = (), data: Any = None, columns: Sequence[str] = ()
) -> Answer:
    return Answer(data=data or {}, rows=rows, blocks=blocks, columns=columns)


def shown(*blocks: Block, width: int | None = None, colours: bool = False, **how: bool) -> str:
    return as_text(answer(*blocks), Paper(width=width, colours=colours), **how)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


class TestColumns:
    """A table takes no more columns than the terminal has."""

    def test_a_file_gets_all_of_them(self) -> None:
        assert shown(WIDE).splitlines()[0].split() == ["strategy", "ranks", "step", "time", "peak"]
        assert "not shown" not in shown(WIDE)

    def test_those_that_do_not_fit_are_left_out_from_the_right_and_named(self) -> None:
        text = shown(WIDE, width=40)
        assert "peak" not in text.splitlines()[0]
        assert "40.0 ms" in text
        assert text.splitlines()[-1] == "(not shown in 40 columns: peak memory)"
        assert widest(text) <= 40
        several = shown(WIDE, width=30)
        assert "(not shown in 30 columns: step\ntime, peak memory)" in several

    def test_the_first_two_stay_however_narrow_the_terminal_is(self) -> None:
        head, *_ = shown(WIDE, width=5).splitlines()
        assert head.split() == ["strategy", "ranks"]

    @given(
        cells=st.lists(
            st.lists(st.text(st.characters(codec="ascii", categories=["L", "N", "Zs"]), max_size=25), min_size=5,
                     max_size=5),
            min_size=1, max_size=4,
        ),
        width=st.integers(60, 200),
    )  # fmt: skip
    def test_no_line_is_wider_than_the_terminal(self, cells: list[list[str]], width: int) -> None:
        columns = [
            Column("first", "left"),
            Column("a long head of a number"),
            Column("c", wraps=True),
            *[Column("d")] * 2,
        ]
        assert widest(shown(Table(columns=columns, rows=cells), width=width) or " ") <= width

    def test_a_wrapping_column_takes_what_the_others_leave(self) -> None:
        text = shown(WRAPPING, width=60)
        assert "not shown" not in text
        assert 50 < widest(text) <= 60
        assert " ".join(text.split()).count("word") == 40
        assert widest(shown(WRAPPING, width=200)) <= 120, "sentences are not wider"

    def test_a_wrapping_column_that_is_left_too_little_room_goes(self) -> None:
        columns = [Column("a", "left"), Column("b", "left"), Column("about", "left", wraps=True)]
        text = shown(Table(columns=columns, rows=[["x" * 15, "y" * 15, "word " * 9]]), width=50)
        assert "(not shown in 50 columns: about)" in text

    def test_headings_wrap_at_the_width_of_their_cells_or_9(self) -> None:
        columns = [Column("strategy", "left"), Column("exposed communication\n[traced steps]")]
        head = shown(Table(columns=columns, rows=[["ddp", "15.6 ms (10.2 %)"]])).splitlines()
        assert [line.split() for line in head[:3]] == [
            ["strategy", "exposed"],
            ["communication"],
            ["[traced", "steps]"],
        ]
        assert head[0].endswith("exposed"), "over numbers that are flush right"

    def test_digits_stay_as_they_are(self) -> None:
        text = shown(table([{"name": "1.10", "value": "2.0e-07"}, {"name": "007", "value": "1,000"}]))
        assert {"1.10", "2.0e-07", "007", "1,000"} <= set(text.split())

    def test_a_table_without_rows_is_not_there(self) -> None:
        assert shown(Table(columns=WIDE.columns, rows=[], title="empty")) == ""


class TestWhatIsShown:
    """Blocks in the order of reading; details and verdicts by option."""

    BLOCKS = (
        Text(text="head"),
        Table(columns=WIDE.columns, rows=WIDE.rows, title="a title"),
        Table(columns=[Column("detailed")], rows=[["1"]], where="detail"),
        Notes(sentences=["a note"]),
        Notes(sentences=["a detail"], where="detail"),
        Verdict(sentences=["First.", "Second."]),
    )

    def test_the_verdict_comes_last_and_details_do_not_come(self) -> None:
        text = shown(*self.BLOCKS)
        parts = ["head", "a title", "refshard-yafsdp", "* a note", "First.\nSecond."]
        assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
        assert text.endswith("\n\nFirst.\nSecond.")
        assert "detail" not in text

    def test_verbose_adds_details_in_their_place(self) -> None:
        text = shown(*self.BLOCKS, verbose=True)
        assert text.index("yafsdp") < text.index("detailed") < text.index("a note") < text.index("a detail")

    def test_quiet_leaves_the_verdict_alone(self) -> None:
        assert shown(*self.BLOCKS, quiet=True) == "First.\nSecond."

    def test_a_title_of_many_words_wraps(self) -> None:
        text = shown(Table(columns=WIDE.columns, rows=WIDE.rows, title="word " * 40), width=60)
        assert widest(text) <= 60

    def test_sentences_wrap_at_120_in_a_file_and_options_and_paths_stay_whole(self) -> None:
        path = "/" + "/".join(["folder"] * 25)
        for before in range(80, 118):
            text = shown(Notes(sentences=["." * before + " refshard run --dry-run-first", f"See {path} there."]))
            assert {"--dry-run-first", path} <= set(text.split())
            assert max(len(line) for line in text.splitlines() if path not in line) <= 120


class TestColours:
    """Only where they are asked for, and never counted."""

    MARKED = Table(
        columns=[Column("strategy", "left"), Column("state", "left"), Column("n")],
        rows=[["a", Marked("ok", "plain"), "1"], ["b", Marked("failed", "bad"), "2"], ["c", Marked("", "bad"), "3"]],
        title="title",
    )

    def test_a_file_gets_none(self) -> None:
        text = shown(self.MARKED, Verdict(sentences=["Bad."], style="bad"), Text(text="good", style="good"))
        assert "\x1b" not in text

    def test_a_terminal_gets_the_same_text_in_colours(self) -> None:
        blocks = (self.MARKED, Verdict(sentences=["Bad.", "Worse."], style="bad"), Text(text="a\nb", style="good"))
        text = shown(*blocks, width=80, colours=True)
        assert re.sub(r"\x1b\[\d*m", "", text) == shown(*blocks, width=80)
        for coloured in ("\x1b[31mfailed\x1b[0m", "\x1b[1mtitle\x1b[0m", "\x1b[31mBad.\x1b[0m", "\x1b[32mb\x1b[0m"):
            assert coloured in text
        assert "mok" not in text, "what is plain has none"

    def test_they_take_no_room(self) -> None:
        """The row of 12 characters fits a terminal of 18 columns, with its colours or without."""
        narrow = [shown(self.MARKED, width=width, colours=True) for width in (24, 19)]
        assert ["not shown" in text for text in narrow] == [
            "not shown" in shown(self.MARKED, width=w) for w in (24, 19)
        ]

    def test_each_line_of_a_cell_that_wraps_is_coloured_by_itself(self) -> None:
        block = Table(
            columns=[Column("a", "left"), Column("b", "left", wraps=True)], rows=[["x", Marked("word " * 20, "bad")]]
        )
        lines = [line for line in shown(block, width=60, colours=True).splitlines() if "word" in line]
        assert len(lines) > 1
        assert all(line.count("\x1b[31m") == line.count("\x1b[0m") == 1 for line in lines)

    @pytest.mark.parametrize("colours", [False, True])
    def test_names_cannot_steer_the_terminal(self, colours: bool) -> None:
        evil = "\x1b[2J\x07evil\x1b]0;title\x07"
        blocks: list[Block] = [
            Text(text=evil), Notes(sentences=[evil], title=evil), Verdict(sentences=[evil]),
            Table(columns=[Column("a"), Column("b", wraps=True)], rows=[[evil, evil], [Marked(evil, "bad")] * 2]),
        ]  # fmt: skip
        text = shown(*blocks, width=100, colours=colours)
        assert not re.search(r"\x1b(?!\[(0|1|3[123])m)|\x07", text)
        assert text.count("evil") == 8
        markdown = as_markdown(answer(*blocks), "show")
        assert not {"\x1b", "\x07"} & set(markdown)


class TestJson:
    """For programs: one object."""

    def test_an_object_with_the_schemas_version_and_the_command(self) -> None:
        found = json.loads(as_json(answer(data={"cases": [1]}), "show"))
        assert found == {"schema_version": forms.SCHEMA_VERSION, "command": "show", "cases": [1]}
        assert next(iter(found)) == "schema_version"

    def test_what_is_not_finite_is_null_wherever_it_is(self) -> None:
        data = {"a": math.inf, "b": [math.nan, (1.5, -math.inf)], "c": {"d": {"e": math.nan}}, "f": None, "g": True}
        found = json.loads(as_json(answer(data=data), "show"))
        assert {key: found[key] for key in data} == {
            "a": None, "b": [None, [1.5, None]], "c": {"d": {"e": None}}, "f": None, "g": True,
        }  # fmt: skip


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


class TestCsv:
    """As RFC 4180 has it."""

    def test_every_line_ends_as_it_says_and_texts_come_back_whole(self) -> None:
        nasty = 'a "quoted", text\r\nof two lines'
        text = as_csv(answer(rows=[{"name": nasty, "n": 1}]))
        assert text.splitlines()[0] == "name,n,schema_version"
        assert text.startswith("name,n,schema_version\r\n")
        assert text.endswith("\r\n")
        assert read(text) == [{"name": nasty, "n": "1", "schema_version": "3"}]

    def test_values_are_as_in_json_and_what_is_not_there_is_empty(self) -> None:
        row = {
            "none": None, "nan": math.nan, "infinite": math.inf, "true": True, "exact": 0.1 + 0.2, "int": 10**12,
            "list": ["a", "b"], "tuple": (1, 2), "empty": [],
        }  # fmt: skip
        (found,) = read(as_csv(answer(rows=[row])))
        assert found == {
            "none": "", "nan": "", "infinite": "", "true": "true", "exact": "0.30000000000000004",
            "int": "1000000000000", "list": "a | b", "tuple": "1 | 2", "empty": "", "schema_version": "3",
        }  # fmt: skip

    def test_without_rows_there_is_the_header_that_is_known(self) -> None:
        assert as_csv(answer(columns=("a", "b"))) == "a,b,schema_version\r\n"
        assert as_csv(answer()) == "schema_version\r\n"

    def test_columns_say_which_keys_and_in_which_order(self) -> None:
        assert as_csv(answer(rows=[{"b": 2, "a": 1}, {"b": 3}], columns=("a", "b"))).splitlines()[1:] == [
            "1,2,3",
            ",3,3",
        ]

    @given(st.lists(st.fixed_dictionaries({"a": st.text(), "b": st.none() | st.text()}), min_size=1))
    def test_any_text_is_read_back(self, rows: list[dict[str, str | None]]) -> None:
        text = as_csv(answer(rows=rows))
        found = [{"a": row["a"], "b": row["b"]} for row in read(text)]
        assert found == [{"a": row["a"], "b": row["b"] or ""} for row in rows]


class TestMarkdown:
    """For pull requests and the summaries of jobs."""

    def test_the_verdict_comes_first_and_details_do_not_come(self) -> None:
        lines = as_markdown(answer(*TestWhatIsShown.BLOCKS), "gate").splitlines()
        assert lines[:4] == ["## refshard gate", "", "- **First.**", "- **Second.**"]
        assert lines.index("head") < lines.index("### a title") < lines.index("- a note")
        assert not any("detail" in line for line in lines)

    def test_a_table_has_all_columns_and_their_alignment(self) -> None:
        rows = [line for line in as_markdown(answer(WIDE), "show").splitlines() if line.startswith("|")]
        assert [cell.strip() for cell in rows[0].split("|")[1:-1]] == ["strategy", "ranks", "step time", "peak memory"]
        assert re.fullmatch(r"\|:-+\|-+:\|-+:\|-+:\|", rows[1])
        assert [cell.strip() for cell in rows[2].split("|")[1:-1]] == ["ddp", "2", "50.0 ms", "440 MiB"]

    def test_names_are_shown_as_they_are_in_one_row(self) -> None:
        cells: list[Cell] = ["a|b`\nc", Marked("<script>", "bad")]
        text = as_markdown(answer(Table(columns=[Column("a_b"), Column("c")], rows=[cells])), "show")
        (row,) = (line for line in text.splitlines() if "script" in line)
        assert row.split() == ["|", "a\\|b\\`", "c", "|", "\\<script\\>", "|"]
        assert "<script>" not in text

    def test_a_log_cannot_begin_a_line_of_its_own(self) -> None:
        assert inline("error\n# heading\n| a |") == "error \\# heading \\| a \\|"
