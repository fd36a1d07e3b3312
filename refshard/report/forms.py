"""Renders an answer as text that fits a terminal, as JSON, CSV or Markdown.

Names and errors may come from files of strangers, so text and Markdown contain no control sequences of terminals.
"""

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import MIN_PADDING, tabulate

from refshard.plain import plain
from refshard.report.blocks import (
    Answer,
    Block,
    Cell,
    Column,
    Marked,
    Notes,
    Section,
    Style,
    Table,
    Text,
    Verdict,
    cell_text,
)

SCHEMA_VERSION = 3
"""Version of every command's JSON and CSV; it rises when a key changes its meaning or is removed. Since 3, a
gate's ``status`` is one of :class:`refshard.errors.Status`.
"""
LIST_SEPARATOR = " | "
"""What stands between the parts of a list in CSV, which has no lists."""
_WIDEST = 120
"""Sentences wrap here on wider terminals, and without a terminal."""
_NARROW, _NARROW_LEFT = 9, 20
"""A heading over numbers, or over text, wraps at this width, or at that of its column's cells if they are wider."""
_FEWEST = 2
"""Columns that stay however narrow the terminal is."""
_LEAST_WRAPPED = 24
_ANSI: dict[Style, str] = {"good": "32", "bad": "31", "doubtful": "33", "strong": "1"}
_ACTIVE = re.compile(r"([\\`*_{}\[\]<>#|~])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What text is printed on: its columns (None: any number, as in a file), and whether it shows colours."""

    width: int | None = None
    colours: bool = False

    @property
    def line(self) -> int:
        """The width of sentences."""
        return min(self.width or _WIDEST, _WIDEST)


def as_text(answer: Answer, paper: Paper, *, verbose: bool = False, quiet: bool = False) -> str:
    """The blocks for a terminal: details only if ``verbose``, the verdict only if ``quiet``."""
    if quiet:
        shown: list[Block] = [block for block in answer.blocks if isinstance(block, Verdict)]
    else:
        shown = list(_shown(answer.blocks, verbose=verbose))
    return "\n\n".join(filter(None, (_text_of(block, paper) for block in shown)))


def as_json(answer: Answer, command: str) -> str:
    """An object: the schema's version, the command, and its data; null for what is not finite."""
    whole = {"schema_version": SCHEMA_VERSION, "command": command, **answer.data}
    return json.dumps(_finite(whole), indent=2, allow_nan=False)


def as_csv(answer: Answer) -> str:
    """The rows as RFC 4180 has them, under a header that ends with the schema's version. None is empty; the parts of a
    list are one text.
    """
    columns = list(answer.columns or (answer.rows[0] if answer.rows else ()))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*columns, "schema_version"])
    writer.writerows([*(_csv_cell(row.get(name)) for name in columns), SCHEMA_VERSION] for row in answer.rows)
    return text.getvalue()


def as_markdown(answer: Answer, command: str) -> str:
    """The blocks in GitHub's dialect, the verdict first, since a job's summary is read from the top; no details."""
    shown = sorted(_shown(answer.blocks, verbose=False), key=lambda block: not isinstance(block, Verdict))
    return "\n\n".join([f"## refshard {command}", *filter(None, map(_markdown_of, shown))])


def inline(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line.

    >>> print(inline("a_b | <i>\nc"))
    a\_b \| \<i\> c
    """
    return _ACTIVE.sub(r"\\\1", " ".join(plain(text).split()))


def _shown(blocks: Iterable[Block], *, verbose: bool) -> Iterator[Block]:
    """The blocks that are no page's alone; those of a section under its title."""
    for block in blocks:
        if block.where == "page" or (block.where == "detail" and not verbose):
            continue
        if isinstance(block, Section):
            inside = list(_shown(block.blocks, verbose=verbose))
            if block.title and block.heading and inside:
                yield Text(text=block.title, style="strong")
            yield from inside
        else:
            yield block


def _text_of(block: Block, paper: Paper) -> str:
    if isinstance(block, Table):
        return _titled(block.title, _table_text(block, paper), paper) if block.rows else ""
    if isinstance(block, Notes):
        bullets = "\n".join(_filled(s, paper.line, first="* ", then="  ") for s in block.sentences)
        return _titled(block.title, bullets, paper) if block.sentences else ""
    if isinstance(block, Verdict):
        return "\n".join(_coloured(_filled(s, paper.line), block.style, paper) for s in block.sentences)
    assert isinstance(block, Text)
    return _coloured(block.text, block.style, paper)


def _titled(title: str, text: str, paper: Paper) -> str:
    return "\n\n".join(filter(None, (_coloured(_filled(title, paper.line), "strong", paper), text)))


def _filled(text: str, width: int, *, first: str = "", then: str = "", breaks_words: bool = False) -> str:
    """Lines of ``width``; options such as ``--dry-run`` stay whole, so that they can be copied, and so do paths."""
    return textwrap.fill(
        plain(text), width, initial_indent=first, subsequent_indent=then, break_long_words=breaks_words,
        break_on_hyphens=False,
    )  # fmt: skip


def _table_text(block: Table, paper: Paper) -> str:
    """As many columns as fit, and which do not."""
    shown = len(block.columns)
    text = _tabulated(block, shown, paper)
    while paper.width is not None and shown > _FEWEST and _width_of(text) > paper.width:
        shown -= 1
        text = _tabulated(block, shown, paper)
    left_out = ", ".join(" ".join(column.head.split()) for column in block.columns[shown:])
    notes = [f"(not shown in {paper.width} columns: {left_out})"] if left_out else []
    if block.shown is not None and block.shown < len(block.rows):
        notes.append(f"(the first {block.shown} of {len(block.rows):,} rows)")
    return "\n".join([text, *(_filled(sentence, paper.line) for sentence in notes)])


def _width_of(text: str) -> int:
    return max(len(re.sub(r"\x1b\[\d*m", "", line)) for line in text.splitlines())


def _tabulated(block: Table, shown: int, paper: Paper) -> str:
    columns = block.columns[:shown]
    rows = [list(map(_printable, row[:shown])) for row in block.rows[: block.shown]]
    widths = [max(_width_of(str(row[place]) or " ") for row in rows) for place in range(shown)]
    heads = [_heading(column, width) for column, width in zip(columns, widths)]
    room = _room(columns, heads, widths, paper)
    for place, column in enumerate(columns):
        if column.wraps:
            rows = [[*row[:place], _wrapped(row[place], room), *row[place + 1 :]] for row in rows]
    return tabulate(
        [[_coloured_cell(cell, paper) for cell in row] for row in rows],
        headers=heads,
        disable_numparse=True,  # the cells are text already and must keep their digits
        colalign=[column.align for column in columns],
    )


def _heading(column: Column, width: int) -> str:
    least = _NARROW if column.align == "right" else _NARROW_LEFT
    lines = column.head.splitlines()
    return "\n".join(part for line in lines for part in textwrap.wrap(line, max(width, least), break_long_words=False))


def _room(columns: Sequence[Column], heads: Sequence[str], widths: Sequence[int], paper: Paper) -> int:
    """Width left for each wrapping column by the columns that do not wrap."""
    fixed = [
        max(width, _width_of(head or " ") + MIN_PADDING)
        for column, head, width in zip(columns, heads, widths)
        if not column.wraps
    ]
    wrapping = len(columns) - len(fixed)
    left = paper.line - sum(fixed) - 2 * (len(columns) - 1)
    return max(left // wrapping, _LEAST_WRAPPED) if wrapping else 0


def _printable(cell: Cell) -> str | Marked:
    return cell if isinstance(cell, Marked) else plain(cell_text(cell))


def _wrapped(cell: str | Marked, width: int) -> str | Marked:
    text = "\n".join(_filled(line, width, breaks_words=True) for line in str(cell).splitlines())
    return Marked(text, cell.style) if isinstance(cell, Marked) else text


def _coloured_cell(cell: str | Marked, paper: Paper) -> str:
    return _coloured(cell.text, cell.style, paper) if isinstance(cell, Marked) else cell


def _coloured(text: str, style: Style, paper: Paper) -> str:
    text = plain(text)
    if not text or not paper.colours or style not in _ANSI:
        return text
    return "\n".join(f"\x1b[{_ANSI[style]}m{line}\x1b[0m" for line in text.splitlines())


def _markdown_of(block: Block) -> str:
    if isinstance(block, Table):
        return "\n\n".join(_headed(block.title, _markdown_table(block))) if block.rows else ""
    if isinstance(block, Notes):
        return "\n\n".join(_headed(block.title, "\n".join(f"- {inline(s)}" for s in block.sentences)))
    if isinstance(block, Text):
        return inline(block.text)
    assert isinstance(block, Verdict)
    return "\n".join(f"- **{inline(sentence)}**" for sentence in block.sentences)


def _headed(title: str, text: str) -> Iterator[str]:
    if text and title:
        yield f"### {inline(title)}"
    if text:
        yield text


def _markdown_table(block: Table) -> str:
    return tabulate(
        [[inline(cell_text(cell)) for cell in row] for row in block.rows[: block.shown]],
        headers=[inline(column.head) for column in block.columns],
        tablefmt="pipe",
        disable_numparse=True,
        colalign=[column.align for column in block.columns],
    )


def _csv_cell(value: object) -> object:
    """Numbers and truth as JSON writes them."""
    if isinstance(value, (list, tuple)):
        return LIST_SEPARATOR.join(map(str, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _finite(value: Any) -> Any:
    """JSON knows no infinity: null, for what has no bound."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
