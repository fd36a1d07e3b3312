"""Analysed traces to one HTML file that needs nothing else; computes no metric, only lays out what others give.

Names in traces come from outside and are hostile until escaped: Jinja2 escapes them in the page, ``tojson`` in the
data, and the page's content security policy runs no script but the page's own.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pandas as pd

from refshard.folders import replace_file
from refshard.report.draw.charts import Chart, theme
from refshard.report.draw.embed import embedded
from refshard.report.draw.render import fill, resource, script
from refshard.report.trace import charts as trace_charts
from refshard.report.trace import doubts as trace_doubts
from refshard.report.trace import jobs as trace_jobs
from refshard.report.trace import tables as trace_tables
from refshard.report.trace import waiting
from refshard.report.trace import words as trace_words
from refshard.report.trace.gaps import gap_table, gaps_of
from refshard.report.trace.lanes import drawn_windows
from refshard.report.trace.layer import find_layer, layer_chart
from refshard.report.trace.of_cpu import chart_of_cpu, table_of_cpu
from refshard.report.trace.section import Section
from refshard.report.trace.sections import sections_of
from refshard.timeline import Timeline
from refshard.tracing.figures import TraceFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysedTrace:
    """One rank's trace: what it holds, what an analysis found in it, and the file that it came from."""

    figures: TraceFigures
    timeline: Timeline
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """What the page shows of one trace. ``content`` is the trace's gzip as base64, None where it is not embedded."""

    id: str
    figures: TraceFigures
    who: str
    timelines: tuple[Chart, ...]
    layer: Chart | None
    charts: tuple[Chart, ...]
    steps: pd.DataFrame
    gaps: pd.DataFrame
    units: pd.DataFrame
    collectives: pd.DataFrame
    overheads: list[tuple[str, str]]
    more: tuple[tuple[Section, pd.DataFrame], ...]
    per_step: str
    file_name: str
    content: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waits:
    """Who waits for whom in one job."""

    job: str
    per_step: str
    late: str
    table: pd.DataFrame


def write_trace_page(traces: Sequence[AnalysedTrace], path: Path) -> None:
    """Write the page of ``traces`` to ``path``, whole or not at all.

    Raises:
        ValueError: there is no trace to show.
        OSError: the folder does not exist or cannot be written; what was at ``path`` stays.
    """
    if not traces:
        raise ValueError("a page of traces needs one trace or more, got none")
    replace_file(path, page(traces))


def page(traces: Sequence[AnalysedTrace]) -> Iterable[str]:
    """The page's HTML in pieces, in order."""
    traces = _named_shortly(traces)
    figures = [one.figures for one in traces]
    sections = _sections(traces)
    ranks = trace_charts.ranks_chart(figures)
    if ranks is not None and all(one.device == "cpu" for one in figures):
        ranks = chart_of_cpu(ranks)
    content = {
        "title": _title(figures),
        "findings": trace_words.findings(figures),
        "ranks": ranks,
        "summary": trace_tables.summary(figures),
        "links": [f"#{section.id}" for section in sections],
        "warnings": trace_doubts.doubts(figures),
        "waits": _waits(figures),
        "sections": sections,
        "data": {"theme": theme()},
    }
    scripts = [script(resource(name)) for name in ("charts.js", "tables.js", "perfetto.js")]
    style = resource("style.css") + resource("trace.css")
    return fill("trace.html.j2", content, style=style, scripts=scripts)


def _named_shortly(traces: Sequence[AnalysedTrace]) -> list[AnalysedTrace]:
    """The same without the folder that all of their files lie in."""
    files = [Path(one.figures.file) for one in traces]
    common = len(os.path.commonprefix([file.parent.parts for file in files]))  # noqa: RUF071 -- of whole parts here
    names = [str(Path(*file.parts[common:])) for file in files]
    return [replace(one, figures=msgspec.structs.replace(one.figures, file=name)) for one, name in zip(traces, names)]


def _title(figures: Sequence[TraceFigures]) -> str:
    if len(figures) == 1:
        return figures[0].file
    count = len({one.job for one in figures})
    return f"{len(figures)} traces of {f'{count} jobs' if count > 1 else 'one job'}"


def _waits(figures: Sequence[TraceFigures]) -> tuple[_Waits, ...]:
    names = trace_jobs.job_names(figures)
    found = [
        _Waits(
            job=names[job], per_step=trace_tables.per_step(members[0]), late=waiting.late(members),
            table=trace_tables.waits(members),
        )
        for job, members in trace_jobs.jobs(figures).items()
    ]  # fmt: skip
    return tuple(one for one in found if not one.table.empty)


def _sections(traces: Sequence[AnalysedTrace]) -> list[_Section]:
    contents = embedded([one.path for one in traces])
    return [_section(one, f"trace-{place}", content) for place, (one, content) in enumerate(zip(traces, contents))]


def _section(one: AnalysedTrace, identity: str, content: str | None) -> _Section:
    figures, timeline = one.figures, one.timeline
    windows = drawn_windows(figures, timeline) if len(timeline.spans) else ()
    layer = find_layer(timeline, windows[0].begin, windows[0].close) if windows else None
    gaps = gaps_of(figures, timeline)
    found = _Section(
        id=identity,
        figures=figures,
        who=trace_jobs.who(figures),
        timelines=trace_charts.timelines(timeline, figures, windows, identity),
        layer=None if layer is None else layer_chart(layer, figures, f"{identity}-layer"),
        charts=trace_charts.charts_of(figures, gaps, identity),
        steps=trace_tables.steps(figures),
        gaps=gap_table(gaps) if gaps else pd.DataFrame(),
        units=trace_tables.units(figures),
        collectives=trace_tables.collectives(figures),
        overheads=trace_tables.overheads(figures),
        more=tuple((section, pd.DataFrame(section.rows)) for section in sections_of(figures)),
        per_step=trace_tables.per_step(figures),
        file_name=one.path.name,
        content=content,
    )
    return _of_cpu(found) if figures.device == "cpu" else found


def _of_cpu(found: _Section) -> _Section:
    return replace(
        found,
        timelines=tuple(map(chart_of_cpu, found.timelines)),
        charts=tuple(map(chart_of_cpu, found.charts)),
        steps=table_of_cpu(found.steps),
        gaps=table_of_cpu(found.gaps),
    )
