"""The answer of a command: blocks for people, an object and flat rows for programs.

A command returns one :class:`Answer`. :mod:`refshard.report.forms` renders it as text for a terminal, JSON, CSV and
Markdown, :mod:`refshard.report.page` as an HTML page: all from the same blocks, so that no result is described twice.
Blocks are in reading order; a page and Markdown begin with the verdict.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from refshard.quantities import format_bytes, format_ns, format_percent, format_rate, format_seconds

if TYPE_CHECKING:
    from refshard.report.draw.charts import Chart

Style = Literal["plain", "good", "bad", "doubtful", "strong", "code", "command"]
"""How text is set apart: ``code`` keeps its lines on a page, and a ``command`` can be copied there."""
Where = Literal["always", "detail", "page", "terminal"]
"""Where a block is shown. ``detail``: with ``--verbose``, and folded on a page. ``page``: only there. ``terminal``:
anywhere but on a page.
"""
Unit = Literal["ns", "s", "B", "share", "rate", "GB/s"]
_FORMATS: dict[Unit, Callable[[float | None], str]] = {
    "ns": format_ns, "s": format_seconds, "B": format_bytes, "share": format_percent, "rate": format_rate,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value and its unit: nanoseconds, seconds, bytes, a fraction (``share``, printed in percent) or a plain number
    (``rate``), printed with three significant digits; ``digits`` are a percentage's decimals. None prints as "-".

    >>> str(Quantity(41.2e9, "GB/s")), str(Quantity(None, "GB/s")), str(Quantity(0.5, "share", 0))
    ('41.2 GB/s', '-', '50 %')
    """

    value: float | None
    unit: Unit
    digits: int = 1

    def __str__(self) -> str:
        if self.unit == "share":
            return format_percent(self.value, self.digits)
        if self.unit == "GB/s":
            return "-" if self.value is None else f"{format_rate(self.value / 1e9)} GB/s"
        return _FORMATS[self.unit](self.value)


@dataclass(frozen=True, slots=True)
class Part:
    """A quantity and its share of ``whole``, as in ``763 ms (91 %)``."""

    quantity: Quantity
    whole: float

    def __str__(self) -> str:
        value = self.quantity.value
        if value is None or not self.whole:
            return "-"
        return f"{self.quantity} ({format_percent(value / self.whole, 0)})"


@dataclass(frozen=True, slots=True)
class Marked:
    """A cell that is set apart, by colours in a terminal, or that leads to ``href`` on a page."""

    text: str
    style: Style = "plain"
    href: str = ""

    def __str__(self) -> str:
        return self.text


Cell = str | int | None | Quantity | Part | Marked
"""A cell of a table: integers are counts, None is not known."""
Row = Mapping[str, Cell]
"""A row of a table by the heads of its columns."""


def cell_text(cell: Cell) -> str:
    """A cell for people.

    >>> cell_text(1234), cell_text(None), cell_text(Quantity(0.5, "share"))
    ('1,234', '-', '50.0 %')
    """
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column. One that ``wraps`` holds sentences and takes the width that the others leave. One of a ``case``
    belongs to that case, as rows do.
    """

    head: str
    align: Literal["left", "right"] = "right"
    wraps: bool = False
    case: int | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells under a title. Columns that do not fit a terminal are left out from the right, so the most important ones
    come first. A terminal shows the first ``shown`` rows (None: all). ``caption`` explains the rows; a page shows it.
    ``cases`` are the numbers of the cases that rows belong to: a page's filter hides those of other strategies. A page
    shows ``numbers`` before the rows' names, as its charts do.
    """

    kind: ClassVar[str] = "table"
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    caption: str = ""
    shown: int | None = None
    cases: Sequence[int] = ()
    numbers: Sequence[int] = ()
    id: str = ""
    where: Where = "always"


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Sentences, an item each, under a title."""

    kind: ClassVar[str] = "notes"
    sentences: Sequence[str]
    title: str = ""
    where: Where = "always"


@dataclass(frozen=True, kw_only=True)
class Text:
    """Lines that stay as they are."""

    kind: ClassVar[str] = "text"
    text: str
    style: Style = "plain"
    where: Where = "always"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result in few sentences: all that ``--quiet`` prints, and what a page begins with."""

    kind: ClassVar[str] = "verdict"
    sentences: Sequence[str]
    style: Style = "strong"
    where: Where = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure to read first. ``part`` is the beginning of a part's name in the chart with the id ``chart``, in its
    bar on ``row``, which the fact is about.
    """

    label: str
    value: str
    detail: str
    style: Style = "plain"
    chart: str = ""
    part: str = ""
    row: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The figures to read first, side by side on a page."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[Fact]
    where: Where = "page"


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts of a page, drawn only for it, since importing plotly takes a second; ``titled`` sets a title over each."""

    kind: ClassVar[str] = "charts"
    draw: "Callable[[], Sequence[Chart]]"
    titled: bool = True
    where: Where = "page"


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """A trace that a page hands to Perfetto: the gzip that ``content`` makes, None if it is too large for the page."""

    kind: ClassVar[str] = "trace"
    id: str
    name: str
    content: Callable[[], str | None]
    where: Where = "page"


@dataclass(frozen=True, kw_only=True)
class Section:
    """Blocks under a heading; a terminal shows it only with ``heading``.

    ``id`` names the section on a page; the navigation lists outer sections as ``nav``. A page folds ``folded`` sections
    and inner details. A section of ``cases`` is hidden with the last of them.
    """

    kind: ClassVar[str] = "section"
    title: str
    blocks: "Sequence[Block]"
    id: str = ""
    nav: str = ""
    heading: bool = True
    folded: bool = False
    cases: Sequence[int] = ()
    where: Where = "always"


Block = Table | Notes | Text | Verdict | Facts | Charts | TraceFile | Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """The head of a page: its title, what it is about, and the fidelity of its figures."""

    title: str
    about: str = ""
    fidelity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command found.

    ``data`` is what JSON holds, besides the schema's version: seconds, bytes and fractions. ``rows`` are flat, for CSV;
    all have the same keys, which are ``columns`` if there may be no row. ``status`` is the exit status. An answer with
    a ``cover`` can be a page.
    """

    data: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    blocks: Sequence[Block]
    columns: Sequence[str] = field(default=())
    status: int = 0
    cover: Cover | None = None


def table(
    rows: Sequence[Row], *, left: int = 1, text: Sequence[str] = (), title: str = "", caption: str = "",
    shown: int | None = None, cases: Sequence[int] = (), identity: str = "", where: Where = "always",
) -> Table:  # fmt: skip
    """A table of ``rows`` under their keys. The first ``left`` columns and those named in ``text`` are flush left, the
    others right.
    """
    heads = list(rows[0]) if rows else []
    columns = [Column(head, "left" if place < left or head in text else "right") for place, head in enumerate(heads)]
    cells = [list(row.values()) for row in rows]
    return Table(
        columns=columns, rows=cells, title=title, caption=caption, shown=shown, cases=cases, id=identity, where=where
    )


def without_empty(rows: Sequence[Row], columns: Sequence[str]) -> list[Row]:
    """The rows without those of ``columns`` that hold nothing in any row."""
    empty = {head for head in columns if all(row[head] is None for row in rows)}
    return [{head: cell for head, cell in row.items() if head not in empty} for row in rows]
