"""The answer of an analysis of traces: for each job its finding and a table with a row per rank, the sections of each
trace, warnings, and each job's largest loss as the verdict.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from refshard.analysis.analyse import Analysis
from refshard.analysis.figures import Breakdown, OperatorClass, TraceFigures
from refshard.analysis.hta import HtaFailure, HtaFigures
from refshard.analysis.overlap import mean_ratio
from refshard.events.timeline import Timeline
from refshard.quantities import format_ns
from refshard.report.blocks import (
    Answer,
    Block,
    Cell,
    Charts,
    Cover,
    Notes,
    Part,
    Quantity,
    Row,
    Section,
    Table,
    Text,
    TraceFile,
    Verdict,
    table,
    without_empty,
)
from refshard.report.draw.embed import embedded
from refshard.report.trace import sections
from refshard.report.trace.findings import SMALL, Finding, findings, warnings_text
from refshard.report.trace.lanes import one_scale
from refshard.report.trace.ranks import lateness_table
from refshard.report.trace.sides import side_by_side
from refshard.report.trace.text import each, has_steps, job_names, jobs, ns, parts, per, share, who

_OPTIONAL = (
    "device", "exposed to all", "copies alone", "idle, host late", "late reductions (give-way)", "warnings",
)  # fmt: skip
"""Columns of a job's table that are left out without values."""
_NONE: Mapping[OperatorClass, float] = MappingProxyType({})
_FEW_WARNINGS = 3
"""So many are shown without ``--verbose``."""
_DEFINITIONS = {
    "compute, communication, preparation, copy": "Time covered by the spans of the class; overlapping spans count "
    "once. Preparation: kernels under a reduce-scatter's annotation, before the collective itself.",
    "other": "In the charts: preparation, copies and unclassified spans while neither compute nor communication runs.",
    "compute over communication": "In the charts: both run, so the communication costs no time. Compute alone is the "
    "rest of compute.",
    "on a CPU": "FSDP2's copies into and out of collectives' buffers run on the computing thread and count as compute. "
    "Nothing is launched on a CPU, so its idle time is between operators: the thread does something else.",
    "exposed communication": "Communication while no compute runs. Exposed to all: while nothing else runs.",
    "overlap ratio": "1 - exposed / communication.",
    "idle": "Time in which nothing runs. Launch-bound: the queue was empty, because the host launched the next kernel "
    "too late. Blocked call: it did so because its thread stood in a call. Host late: both of these together. Between "
    "queued kernels: the ordinary distance from one kernel of a stream to the next. Waiting for a stream: the next "
    "kernel was queued and waited for another stream.",
    "gap between collectives": "From the end of one collective to the start of the next on the same stream. Blocking "
    "if the next was already launched and compute ran meanwhile.",
    "late reductions (give-way)": "Share of the time that reduce-scatters wait for preparatory kernels slowed by "
    "concurrent compute.",
    "algorithm and bus bandwidth": "Bytes of the unsharded tensor over the collective's duration; bus bandwidth is "
    "that times nccl-tests' factor for the operation and the number of ranks.",
    "queued": "From the launch on the host to the start on the device.",
}


def trace_answer(analyses: Sequence[Analysis], checks: Sequence[Block] = (), more: str = "") -> Answer:
    """The answer about ``analyses``; its charts need the timelines of each. ``checks`` are figures of another analyser,
    ``more`` is a line for the terminal.
    """
    traces = [one.figures for one in analyses]
    found, names = findings(traces), job_names(traces)
    several = len(found) > 1
    lead, lengths = [one.lead for one in found], _lengths(traces)
    lead = [*lengths, *(f"{name}: {text}" for name, text in zip(names.values(), lead))] if several else lead
    worst = _worst(analyses)
    places = [f"trace-{analyses.index(one)}" for one in worst.values()]
    bars = [
        f"{names[job]}, {who(one.figures)}" if len(traces) > len(names) else names[job] for job, one in worst.items()
    ]
    is_shared = lengths and len(worst) == len(names)
    both = side_by_side(bars, [[one] for one in worst.values()], places) if is_shared else []
    blocks: list[Block] = both[:2]
    for (job, members), finding in zip(jobs(traces).items(), found):
        ranks = sorted(members, key=lambda trace: (trace.rank is None, trace.rank))
        own: list[Block] = []
        if one := worst.get(job):
            row = list(worst).index(job)
            gains = sections.paying(one.figures, *(("sides", row) if both else (f"where-{job}", 0)))
            own += [] if both else [where_block(one.figures, one.timeline, places[row])]
            own += [gains] if gains.facts else []
        title = f"{finding.title} ({_pattern(ranks)})"
        own += [_job_table(ranks, title), Notes(sentences=finding.more)]
        job_section = Section(title=title, id=f"job-{job}", nav=names[job], heading=False, blocks=own)
        blocks += [job_section] if several else own
        if waits := sections.waits(members):
            name = f": {names[job]}" if several else ""
            caption = f"Time waited in collectives for the last rank, {sections.per_step(members[0])}; longest first"
            late = [lateness] if (lateness := lateness_table(members)) is not None else []
            blocks.append(
                Section(title=f"Who waits for whom{name}", id=f"waits-{job}", nav="" if several else "Who waits",
                        blocks=[*late, table(waits, left=2, caption=caption)], where="detail")
            )  # fmt: skip
    title = f"{len(traces)} traces of {f'{len(names)} jobs' if len(names) > 1 else 'one job'}"
    definitions: list[Row] = [{"term": term, "meaning": text} for term, text in _DEFINITIONS.items()]
    objects = as_objects(traces)

    def is_nested(value: object) -> bool:
        return isinstance(value, dict) or (
            isinstance(value, list) and bool(value) and isinstance(value[0], (dict, list))
        )

    return Answer(
        data={"verdict": lead, "traces": objects},
        rows=[{key: value for key, value in one.items() if not is_nested(value)} for one in objects],
        blocks=[
            *blocks,
            *([] if both and len(traces) == len(names) else [Charts(draw=lambda: _charts().ranks_chart(traces))]),
            *both[2:],
            *_each_trace(analyses, one_scale(list(worst.values())) if both else 0),
            *checks,
            *_warnings(traces),
            Section(title="Definitions", id="words", nav="Definitions", where="page",
                    blocks=[table(definitions, left=2, caption="The definition of each figure")]),
            Verdict(sentences=lead),
            *([Text(text=more, where="terminal")] if more else []),
        ],
        cover=Cover(title=Path(traces[0].file).name if len(traces) == 1 else title),
    )  # fmt: skip


def _worst(analyses: Sequence[Analysis]) -> dict[int, Analysis]:
    """Of each job whose timelines are kept, the trace with the longest step."""
    found = dict[int, Analysis]()
    for one in sorted(analyses, key=lambda one: one.figures.job):
        if one.kept is not None and len(one.kept.spans) and one.figures.unavailable is None:
            found[one.figures.job] = max(found.get(one.figures.job, one), one, key=lambda one: _step_ns(one.figures))
    return found


def _step_ns(figures: TraceFigures) -> float:
    return fmean(part.breakdown.span_ns for part in parts(figures))


def _lengths(traces: Sequence[TraceFigures]) -> list[str]:
    """Which of several jobs has the shortest step, and which the longest, if all have steps."""
    names = job_names(traces)
    steps = {
        name: fmean(map(_step_ns, members)) for name, members in zip(names.values(), jobs(traces).values())
        if all(one.unavailable is None and per(one) == "per step" for one in members)
    }  # fmt: skip
    if len(names) < 2 or len(steps) < len(names):
        return []
    least, most = (of(steps, key=lambda name: steps[name]) for of in (min, max))
    return [f"{least} has the shortest step, {format_ns(steps[least])}; {most} the longest, {format_ns(steps[most])}."]


def where_block(
    figures: TraceFigures,
    timeline: Timeline,
    prefix: str,
    recomputed: Mapping[OperatorClass, float] = _NONE,
) -> Charts:
    """Where the step goes; the timelines of the trace are drawn under ``prefix``. ``recomputed`` are the seconds of a
    step that recomputation takes, by class of work.
    """
    return Charts(draw=lambda: [_charts().where_chart(figures, timeline, prefix, recomputed)])


def as_objects(traces: Sequence[TraceFigures]) -> list[dict[str, Any]]:
    """One object per trace: its whole breakdown at the top, everything else below.

    Only the length of a breakdown is known if the device's events are missing.
    """
    objects = []
    for trace in traces:
        built: dict[str, Any] = msgspec.to_builtins(trace)
        unknown = {key: None for key in built["whole"] if trace.host_only and key != "span_ns"}
        identity = {key: built.pop(key) for key in ("file", "job", "rank", "world_size", "backend", "device", "events")}
        whole = {**built.pop("whole"), **unknown}
        steps = [{**step.pop("breakdown"), **unknown, **step} for step in built.pop("steps")]
        objects.append({**identity, **whole, "giveway_index": trace.giveway.index, **built, "steps": steps})
    return objects


def _pattern(members: Sequence[TraceFigures]) -> str:
    """One name for all files of a job: what they have in common, and a star."""
    names = [Path(trace.file).name for trace in members]
    start = os.path.commonprefix(names)  # noqa: RUF071 -- of characters, as it does
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]  # noqa: RUF071
    return f"{start}*{end}" if len(names) > 1 else names[0]


def _job_table(members: Sequence[TraceFigures], title: str) -> Table:
    """A row per rank: means over its steps."""
    lengths = {per(one).replace("in the", "whole") for one in members}
    length = lengths.pop() if len(lengths) == 1 else f"per {each(members[0])}"
    rows: list[Row] = []
    for trace in members:
        steps = [part.breakdown for part in parts(trace)]
        device = [] if trace.host_only else steps
        span, alone = (sum(getattr(step, key) for step in device) for key in ("span_ns", "lone_copy_ns"))
        # Other work than compute hides communication, too.
        hidden = sum(step.exposed_ns - step.exposed_any_ns for step in device)
        rows.append(
            {
                "rank": "-" if trace.rank is None else str(trace.rank),
                "device": trace.device if len({one.device for one in members}) > 1 else None,
                "windows" if trace.windows else "steps": len(trace.steps) if has_steps(trace) else None,
                length: ns(fmean(step.span_ns for step in steps)),
                "compute": _mean(device, "compute_ns"),
                "comm.": _mean(device, "comm_ns"),
                "exposed": _mean(device, "exposed_ns"),
                "exposed to all": _mean(device, "exposed_any_ns") if hidden > SMALL * span else None,
                "overlap": share(mean_ratio(device)),
                "copies alone": _mean(device, "lone_copy_ns") if alone >= SMALL * span > 0 else None,
                "idle": _mean(device, "idle_ns"),
                "idle, host late": None if trace.device == "cpu" else _mean(device, "idle_host_ns"),
                "late reductions (give-way)": share(trace.giveway.index, 2),
                "warnings": len(trace.warnings) or None,
            }
        )
    steps_head = "windows" if members[0].windows else "steps"
    rows = without_empty(rows, (*_OPTIONAL, steps_head))
    return table(rows, left=0, text=("device",), title=title, caption=f"Means over the {steps_head}")


def _mean(steps: Sequence[Breakdown], key: str) -> Cell:
    """Time per step, and its part of the step."""
    values, span = [getattr(step, key) for step in steps], sum(step.span_ns for step in steps)
    return None if None in values or not span else Part(Quantity(fmean(values), "ns"), span / len(steps))


def _warnings(traces: Sequence[TraceFigures]) -> Iterator[Block]:
    """How many, and which with ``--verbose``."""
    codes = Counter(warning.code for trace in traces for warning in trace.warnings)
    few = codes.total() <= _FEW_WARNINGS
    if not few:
        counts = ", ".join(f"{code} ({count})" if count > 1 else code for code, count in codes.items())
        yield Notes(sentences=[f"Warnings: {counts}. -v explains them."], where="terminal")
    yield Notes(sentences=warnings_text(traces), title="Warnings", where="always" if few else "detail")


def _each_trace(analyses: Sequence[Analysis], length: int) -> Iterator[Section]:
    """The sections of each trace; a terminal shows those of the first trace of each job. Timelines are at least
    ``length`` nanoseconds long.
    """
    contents: list[str | None] = []
    several, shown = len(analyses) > 1, set[int]()
    for place, one in enumerate(analyses):
        figures, first = one.figures, one.figures.job not in shown
        shown.add(figures.job)

        def content(place: int = place) -> str | None:
            contents[:] = contents or embedded([each.path for each in analyses])
            return contents[place]

        perfetto = TraceFile(id=f"trace-{place}-content", name=one.path.name, content=content)
        yield Section(
            title=f"{Path(figures.file).name}: {who(figures)}, {figures.device}" if several else "Trace",
            id=f"trace-{place}", nav="" if several else "Trace", heading=several and first,
            blocks=rank_blocks(figures, one.kept, f"trace-{place}", perfetto, length),
            where="always" if first else "page", folded=not first,
        )  # fmt: skip


def rank_blocks(
    figures: TraceFigures, timeline: Timeline | None, prefix: str, trace: TraceFile | None = None,
    length: int = 0,
) -> list[Block]:  # fmt: skip
    """Charts of one trace, with ids that begin with ``prefix``, then its sections."""
    charts = Charts(draw=lambda: _charts().all_charts(figures, timeline, prefix, length))
    return [charts, *([trace] if trace is not None else []), *sections.sections_of(figures, timeline)]


def job_blocks(figures: TraceFigures, finding: Finding) -> list[Block]:
    """A job of one rank: its table, and the finding without its lead."""
    return [_job_table([figures], ""), Notes(sentences=finding.more)]


def _charts() -> ModuleType:
    from refshard.report.trace import charts  # plotly takes a second to import

    return charts


def check_block(name: str, ours: HtaFigures | None, theirs: HtaFigures | HtaFailure) -> Block:
    """Figures by HTA's classes, exact and as HTA prints them."""
    if isinstance(theirs, HtaFailure):
        return Notes(sentences=[f"{name}: HTA {theirs.version} fails: {theirs.error}"])
    if ours is None:
        return Notes(sentences=[f"{name}: a CPU trace; HTA {theirs.version} handles GPU traces only"])

    def text(value: float | None) -> str | None:
        return None if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")

    rows: list[Row] = [
        {
            "whole trace": label,
            "refshard": text(getattr(ours, key)),
            f"HTA {theirs.version}": text(getattr(theirs, key)),
        }
        for label, key in (
            ("span (us)", "span_us"), ("compute (us)", "compute_us"), ("no compute (us)", "noncompute_us"),
            ("idle (us)", "idle_us"), ("overlap (%)", "overlap_pct"),
        )
    ]  # fmt: skip
    return table(rows, title=f"{name} by HTA's classes (docs/reference/metrics.md says why they differ)")
