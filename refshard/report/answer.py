"""What a command found: blocks for people, an object and flat rows for programs.

A command returns one :class:`Answer`; :mod:`refshard.report.forms` turns it into text that fits a terminal, JSON, CSV
or Markdown. Blocks are in the order of reading: tables first, the verdict last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Style = Literal["plain", "good", "bad", "doubtful", "strong"]


@dataclass(frozen=True, slots=True)
class Marked:
    """A cell that a terminal with colours sets apart."""

    text: str
    style: Style

    def __str__(self) -> str:
        return self.text


Cell = str | Marked


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column. One that ``wraps`` holds sentences and takes the width that the others leave."""

    head: str
    align: Literal["left", "right"] = "right"
    wraps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells for people, under a title. Columns that do not fit a terminal are left out from the right, so the most
    important ones come first.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    detail: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """Sentences, an item each, under a title."""

    sentences: Sequence[str]
    title: str = ""
    detail: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Lines that stay as they are."""

    text: str
    style: Style = "plain"
    detail: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What it comes to, in few sentences: all that ``--quiet`` prints."""

    sentences: Sequence[str]
    style: Style = "strong"


Block = Table | Notes | Text | Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command found.

    ``data`` is what JSON holds, beside the schema's version: seconds, bytes and fractions. ``rows`` are flat, for CSV;
    all have the same keys, which are ``columns`` if there may be no row. Blocks that are ``detail`` are printed with
    ``--verbose``. ``status`` is the exit status.
    """

    data: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    blocks: Sequence[Block]
    columns: Sequence[str] = field(default=())
    status: int = 0


def table(rows: Sequence[Mapping[str, Cell]], *, left: int = 1, title: str = "", detail: bool = False) -> Table:
    """A table of ``rows`` under their keys, the first ``left`` columns flush left and the others right."""
    heads = list(rows[0]) if rows else []
    columns = [Column(head, "left" if place < left else "right") for place, head in enumerate(heads)]
    return Table(columns=columns, rows=[list(row.values()) for row in rows], title=title, detail=detail)
