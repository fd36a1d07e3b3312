"""How two jobs' steps differ as one HTML file that needs nothing else: the tables of the terminal, and a bar a side."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from refshard.folders import replace_file
from refshard.quantities import format_ns
from refshard.report.answer import Table
from refshard.report.draw.charts import Bar, Chart, Row, chart, stacked, theme
from refshard.report.draw.palette import GREY, STEP, Look
from refshard.report.draw.render import fill, resource, script
from refshard.report.trace.difference import (
    Compared,
    by_class,
    by_rank,
    by_work,
    claims,
    class_sums,
    not_alike,
    remarks,
    sides,
)

_MOST_CHANGES = 400
_LOOKS = {
    "compute": STEP["compute alone"],
    "communication": STEP["exposed communication"],
    "preparation": STEP["compute over communication"],
    "copy": STEP["copy, preparation, other"],
    "unclassified": Look(GREY, "+"),
    "idle": STEP["idle"],
}


def write_difference_page(found: Compared, path: Path) -> None:
    """Write the page to ``path``, whole or not at all.

    Raises:
        OSError: the folder does not exist or cannot be written; what was at ``path`` stays.
    """
    replace_file(path, difference_page(found))


def difference_page(found: Compared) -> Iterable[str]:
    """The page's HTML in pieces, in order."""
    ranks = by_rank(found.difference, shown=len(found.difference.ranks))
    content = {
        "title": "Difference of two jobs",
        "sides": sides(found),
        "unlike": not_alike(found),
        "lead": claims(found),
        "more": remarks(found),
        "bars": _bars(found),
        "classes": _frame(by_class(found.difference)),
        "changes": _frame(by_work(found.difference, shown=_MOST_CHANGES)),
        "ranks": None if ranks is None else _frame(ranks),
        "data": {"theme": theme()},
    }
    scripts = [script(resource(name)) for name in ("charts.js", "tables.js")]
    style = resource("style.css") + resource("trace.css")
    return fill("difference.html.j2", content, style=style, scripts=scripts)


def _frame(table: Table) -> pd.DataFrame:
    return pd.DataFrame(table.rows, columns=[column.head for column in table.columns])


def _bars(found: Compared) -> Chart:
    """The mean step of each side, cut into classes that add up to it."""
    bars = [
        Bar(place=place, name=name, parts={part: ns[place] / 1e9 for part, ns in class_sums(found.difference).items()})
        for place, name in enumerate("AB")
    ]
    figure = stacked([Row(text=bar.name) for bar in bars], bars, _LOOKS, "s", "of the mean step")
    whole = found.difference
    return chart("sides", "Both steps", figure, f"Mean steps: A {format_ns(whole.a_ns)}, B {format_ns(whole.b_ns)}.")
