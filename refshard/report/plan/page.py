"""A plan as one HTML page: no script, no network."""

from collections.abc import Iterable

import pandas as pd
from markupsafe import Markup

from refshard.quantities import format_bytes, format_seconds
from refshard.report.draw.render import fill, resource
from refshard.report.draw.stacked_bars import Bars, draw, legend
from refshard.report.plan import table as plan_table
from refshard.report.plan import words as plan_words
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan


def page(plan: Plan, job: Job, title: str, command: str) -> Iterable[str]:
    """The page's HTML in pieces; ``command`` is what prints the same plan."""
    lead, *more = plan_words.verdict(plan, job)
    content = {
        "title": title,
        "lead": lead,
        "more": more,
        "warnings": plan_words.warnings(plan, job),
        "summary": pd.DataFrame(plan_table.summary(plan)),
        "charts": [
            {"bars": Markup(draw(bars)), "legend": legend(bars), "title": bars.title, "table": pd.DataFrame(rows)}
            for bars, rows in (
                (_time(plan), plan_table.time_by_part(plan)),
                (_memory(plan), plan_table.memory_by_part(plan)),
            )
        ],
        "command": command,
    }
    return fill("plan.html.j2", content, style=resource("style.css") + resource("plan.css"), scripts=[])


def _time(plan: Plan) -> Bars:
    by_row = [plan_words.parts(row.step.account) for row in plan.rows]
    return Bars(
        title="Time of a step",
        rows=tuple(row.strategy for row in plan.rows),
        parts=tuple(by_row[0]),
        values=tuple(tuple(parts.values()) for parts in by_row),
        text=format_seconds,
    )


def _memory(plan: Plan) -> Bars:
    names = tuple(dict.fromkeys(name for row in plan.rows for name in row.memory.at_peak))
    return Bars(
        title="Memory at the peak",
        rows=tuple(row.strategy for row in plan.rows),
        parts=names,
        values=tuple(tuple(float(row.memory.at_peak.get(name, 0)) for name in names) for row in plan.rows),
        text=format_bytes,
        limit=float(plan.usable_bytes),
    )
