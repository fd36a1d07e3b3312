"""Jobs side by side on a page: their steps as bars on one scale, and of two the columns of their tables together."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType

from refshard.analysis.analyse import Analysis
from refshard.analysis.figures import Cause, TraceFigures
from refshard.report.blocks import Block, Cell, Charts, Quantity, Row, Section, Table, cell_text, table
from refshard.report.trace import sections
from refshard.report.trace.lanes import one_scale
from refshard.report.trace.text import IDLE, ON_CPU, ns, section, who
from refshard.report.trace.where import where_means

_SMALL = 0.001
"""Parts under this share of both steps have no row."""
_LEFT_OUT = ("share", "count in all")
"""Columns for which a table of two traces has no room."""
_COLLECTIVES = ("collective", "bytes", "units", "group")
_TABLES: tuple[tuple[str, Callable[[TraceFigures], Section | None], Sequence[str]], ...] = (
    ("Work by class", sections.work_by_class, ("class",)),
    ("Kernels", sections.kernels, ("kernel", "class")),
    ("Operators", sections.operators, ("operator", "class")),
    ("Operators by shape", sections.operators_by_shape, ("operator", "shapes", "dtype")),
    ("Collectives", lambda one: section("", sections.collectives(one), text=_COLLECTIVES), _COLLECTIVES),
    ("Messages", sections.messages, ("collective", "size", "group", "spans")),
    ("Idle time by cause", sections.idle_time, ("cause", "what")),
    ("Host time", sections.host_time, ("host",)),
    ("What if", sections.what_ifs, ("what if",)),
    ("Memory at the peak", sections.memory_at_peak, ("held for",)),
)
"""Title, table of one trace, and the columns that say which rows of two traces are about the same."""


def side_by_side(
    names: Sequence[str], sides: Sequence[Sequence[Analysis]], prefixes: Sequence[str] = ()
) -> list[Block]:  # fmt: skip
    """The mean steps as bars, a row for each of their parts, and of the first trace of each of two sides its tables and
    its timelines, unless those are drawn already, under ``prefixes``. ``names`` are those of columns and bars.
    """
    firsts = [side[0] for side in sides]
    length, own = one_scale(firsts), prefixes or [f"side-{n}" for n in range(len(sides))]
    bars = Charts(draw=lambda: [_charts().sides_chart(names, sides, own, length)])
    called = {IDLE[Cause.LAUNCH]: ON_CPU} if all(one.figures.device == "cpu" for one in firsts) else {}
    means = [{called.get(name, name): value for name, value in where_means(side).items()} for side in sides]
    blocks: list[Block] = [bars, _by_part(names, means)]
    if len(sides) > 2:
        return blocks
    about = " and ".join(f"{name}: {who(one.figures)}" for name, one in zip(names, firsts))
    tables = list[Block]()
    for title, make, keys in _TABLES:
        found = [table for one in firsts if (table := _table_of(make(one.figures)))]
        if len(found) == len(sides):
            both = beside(found, names, keys, f"{about}. {found[0].caption}")
            tables.append(Section(title=title, blocks=[both], folded=True))
    lanes = [
        Section(title=f"{name}: {who(one.figures)} of {one.path.name}", blocks=[_lanes(one, prefix, length)])
        for name, one, prefix in zip(names, firsts, own)
        if one.kept is not None and not prefixes
    ]
    blocks.append(Section(title="Tables side by side", id="tables", nav="Tables", blocks=tables, where="page"))
    lanes_section = Section(title="Timelines", id="lanes", nav="Timelines", blocks=lanes, where="page")
    return [*blocks, lanes_section] if lanes else blocks


def _charts() -> ModuleType:
    from refshard.report.trace import charts  # plotly takes a second to import

    return charts


def _lanes(one: Analysis, prefix: str, length: int) -> Charts:
    return Charts(draw=lambda: _charts().all_charts(one.figures, one.kept, prefix, length))


def _by_part(names: Sequence[str], means: Sequence[dict[str, float]]) -> Table:
    steps = [sum(parts.values()) for parts in means]
    every = {name: [parts[name] for parts in means] for name in means[0]} | {"step": steps}
    rows: list[Row] = [
        {
            "part of the step": name, **{side: ns(1e9 * value) for side, value in zip(names, values)},
            **(_change(names, values) if len(names) == 2 else {}),
        }
        for name, values in every.items()
        if any(value >= _SMALL * step for value, step in zip(values, steps))
    ]  # fmt: skip
    return table(rows, caption="The parts of the bars, which add up to the steps", where="page")


def _change(names: Sequence[str], values: Sequence[float]) -> Row:
    a, b = values
    return {
        _delta(names): _signed(Quantity(1e9 * (b - a), "ns")),
        f"{names[1]} / {names[0]}": f"{b / a:.2f}" if a and b else None,
    }


def _delta(names: Sequence[str]) -> str:
    return f"{names[1]} - {names[0]}"


def _signed(value: Quantity) -> str:
    return f"{'+' if (value.value or 0) > 0 else ''}{value}"


def _table_of(section: Section | None) -> Table | None:
    """The table of a section, if it has rows."""
    tables = [block for block in section.blocks if isinstance(block, Table) and block.rows] if section else []
    return tables[0] if tables else None


def beside(both: Sequence[Table], names: Sequence[str], keys: Sequence[str], caption: str) -> Table:
    """Two tables with the same columns as one: rows with the same cells under ``keys`` are one row, and each other
    column comes once for each table, the first time and the first size with their change. Rows that change most come
    first, those of one table last.
    """
    heads = dict.fromkeys(column.head for one in both for column in one.columns if column.head not in _LEFT_OUT)
    shown = [head for head in heads if head not in keys]
    rows: dict[tuple[object, ...], list[dict[str, Cell]]] = defaultdict(lambda: [{}, {}])
    for place, one in enumerate(both):
        seen = Counter[tuple[str, ...]]()
        for cells in one.rows:
            row = dict(zip((column.head for column in one.columns), cells))
            key = tuple(cell_text(row.get(head)) for head in keys)
            seen[key] += 1
            rows[*key, seen[key]][place] = row
    every = [row for pair in rows.values() for row in pair]
    changing = next((head for head in shown if any(_amount(row.get(head)) for row in every)), "")
    made = list[tuple[float, Row]]()
    for pair in rows.values():
        found: dict[str, Cell] = {head: pair[0].get(head, pair[1].get(head)) for head in keys if head in heads}
        change = -1.0
        for head in shown:
            found |= {f"{head}, {name}": row.get(head) for name, row in zip(names, pair)}
            if head == changing:
                amounts = [amount for row in pair if (amount := _amount(row.get(head)))]
                delta = (amounts[1].value or 0) - (amounts[0].value or 0) if len(amounts) == len(pair) else None
                found[_delta(names)] = None if delta is None else _signed(Quantity(delta, amounts[0].unit))
                change = -1.0 if delta is None else abs(delta)
        made.append((change, found))
    ordered = [row for _, row in sorted(made, key=lambda pair: -pair[0])]
    left = {column.head for one in both for column in one.columns if column.align == "left"}
    text = [head for head in ordered[0] if head.rpartition(", ")[0] in left or head in keys]
    return table(ordered, left=0, text=text, caption=caption, where="page")


def _amount(cell: Cell) -> Quantity | None:
    """A time or a size that is known."""
    return cell if isinstance(cell, Quantity) and cell.unit in ("ns", "B") and cell.value is not None else None
