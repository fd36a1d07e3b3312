"""Charts of a setting: a bar per case, stacked of the parts of a traced step."""

from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go

from refshard.analysis.cases import BREAKDOWN, CaseResult, ranks
from refshard.analysis.evidence import Setting
from refshard.report.draw.charts import Bar, Chart, Row, chart, label_text, stacked
from refshard.report.draw.palette import GREY, STEP, Look, look
from refshard.report.run import alternatives
from refshard.specs.case import REFERENCE_STRATEGY


def breakdown_chart(setting: Setting, prefix: str) -> Chart:
    """Where a traced step goes."""
    return chart(f"{prefix}-breakdown", "traced step", breakdown(setting), alternatives.breakdown(setting))


def breakdown(setting: Setting) -> go.Figure:
    """Compute, overlapped and exposed communication and idle time of a traced step, stacked."""
    found = {case: parts for case in setting.cases if case.ok and (parts := case.breakdown)}
    return step_parts(found, BREAKDOWN)


def step_parts(found: Mapping[CaseResult, Mapping[str, float]], parts: Iterable[str]) -> go.Figure:
    """A bar per case, stacked of ``parts`` of a traced step, s."""
    rows, places = case_rows(list(found))
    bars = [Bar(place=place, name=case.label, parts=of) for place, (case, of) in zip(places, found.items())]
    return stacked(rows, bars, {part: STEP[part] for part in parts}, "s", "per traced step")


def case_rows(cases: Sequence[CaseResult]) -> tuple[list[Row], list[int]]:
    """A row for each case, under a heading for its world size if there are several, and the place of each case's row.

    Places are numbers, not plotly's two-level categories, because those need twice the width for their names.
    """
    rows: list[Row] = []
    before = None
    several = len({case.spec.world_size for case in cases}) > 1
    for case in cases:
        if several and case.spec.world_size != before:
            before = case.spec.world_size
            rows.append(Row(text=f"<b>{ranks(before)}</b>"))
        rows.append(Row(text=label_text(case.strategy), case=case.number))
    return rows, [place for place, row in enumerate(rows) if row.case is not None]


def colour(setting: Setting, strategy: str) -> str:
    """A strategy's colour, the same on the whole page."""
    return _look(setting, strategy).colour


def _look(setting: Setting, strategy: str) -> Look:
    return Look(GREY) if strategy == REFERENCE_STRATEGY else look(setting.known.index(strategy))
