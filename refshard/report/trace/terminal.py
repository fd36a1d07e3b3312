"""What an analysis of traces looks like in a terminal, and as JSON."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from refshard.plain import plain
from refshard.quantities import format_ns, format_percent
from refshard.report.answer import Answer, Block, Column, Notes, Table, Text, Verdict, table
from refshard.report.trace.jobs import job_names, jobs, parts, who
from refshard.report.trace.per_step import each, has_steps, per
from refshard.report.trace.sections import sections_of
from refshard.report.trace.words import SMALL, Finding, findings
from refshard.tracing.figures import Breakdown, TraceFigures
from refshard.tracing.hta import HtaFailure, HtaFigures
from refshard.tracing.overlap import mean_ratio

_ALWAYS = frozenset(("rank", "compute", "comm.", "exposed", "overlap", "idle"))
_FEW_WARNINGS = 3
"""So many are shown without being asked for."""


def as_objects(traces: Sequence[TraceFigures]) -> list[dict[str, Any]]:
    """One object per trace: its whole breakdown at the top, everything else below."""
    return [_as_object(trace) for trace in traces]


def _as_object(trace: TraceFigures) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(trace)
    whole = _of_device(trace, built.pop("whole"))
    identity = {key: built.pop(key) for key in ("file", "job", "rank", "world_size", "backend", "device", "events")}
    steps = [{**_of_device(trace, step.pop("breakdown")), **step} for step in built.pop("steps")]
    return {**identity, **whole, "giveway_index": trace.giveway.index, **built, "steps": steps}


def _of_device(trace: TraceFigures, breakdown: dict[str, Any]) -> dict[str, Any]:
    """A breakdown, of which nothing but its length is known if the device's events are missing."""
    return {key: None if trace.host_only and key != "span_ns" else value for key, value in breakdown.items()}


def trace_answer(traces: Sequence[TraceFigures], checks: Sequence[Block] = (), more: str = "") -> Answer:
    """Per job a table with a row per trace and what there is to know of it; warnings; and each job's largest loss."""
    blocks: list[Block] = []
    told = findings(traces)
    for (_, members), finding in zip(jobs(traces).items(), told):
        ranks = sorted(members, key=lambda trace: (trace.rank is None, trace.rank))
        blocks += job_blocks(ranks, finding, f"{finding.title} ({_pattern(ranks)})")
    alone = len(told) == 1
    names = job_names(traces).values()
    lead = [plain(one.lead if alone else f"{name}: {one.lead}") for name, one in zip(names, told)]
    return Answer(
        data={"verdict": lead, "traces": as_objects(traces)},
        rows=[_flat(trace) for trace in traces],
        blocks=[*blocks, *checks, *_warnings(traces), Verdict(sentences=lead), *_told(more)],
    )


def job_blocks(ranks: Sequence[TraceFigures], finding: Finding, title: str) -> list[Block]:
    """One job: a table with a row per rank, what there is to know beyond the finding's lead, and the sections."""
    notes = Notes(sentences=[plain(sentence) for sentence in finding.more])
    return [_job_table(ranks, plain(title)), notes, *_sections(ranks)]


def _sections(members: Sequence[TraceFigures]) -> list[Block]:
    """The sections of the first rank; those of the others are in JSON and on the page."""
    first, blocks = members[0], list[Block]()
    for section in sections_of(first):
        who_else = f", {who(first)}" if len(members) > 1 else ""
        heads, rows = list(section.rows[0]) if section.rows else [], section.rows[: section.shown]
        columns = [Column(head, "left" if head in (heads[0], *section.text) else "right") for head in heads]
        part = f": the first {len(rows)} of {len(section.rows)}" if len(rows) < len(section.rows) else ""
        cells = [[plain(cell) for cell in row.values()] for row in rows]
        title, detail = plain(f"{section.title}{who_else}{part}"), not section.brief
        blocks.append(Table(columns=columns, rows=cells, title=title, detail=detail))
        blocks.append(Notes(sentences=[plain(sentence) for sentence in section.sentences], detail=detail))
    return blocks


def _told(more: str) -> list[Block]:
    return [Text(text=more)] if more else []


def _flat(trace: TraceFigures) -> dict[str, Any]:
    """A trace without what is nested in it."""
    return {
        key: value
        for key, value in _as_object(trace).items()
        if not isinstance(value, dict)
        and not (isinstance(value, list) and value and isinstance(value[0], (dict, list)))
    }


def _pattern(members: Sequence[TraceFigures]) -> str:
    """One name for all files of a job: what they have in common, and a star."""
    names = [Path(trace.file).name for trace in members]
    start = os.path.commonprefix(names)  # noqa: RUF071 -- of characters, as it does
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]  # noqa: RUF071
    return f"{start}*{end}" if len(names) > 1 else names[0]


def _job_table(members: Sequence[TraceFigures], title: str) -> Table:
    rows = []
    for trace in members:
        steps = [part.breakdown for part in parts(trace)]
        device = [] if trace.host_only else steps
        rows.append(
            {
                "rank": "-" if trace.rank is None else str(trace.rank),
                "windows" if trace.windows else "steps": str(len(trace.steps)) if has_steps(trace) else "-",
                _length_head(members): format_ns(_mean(steps, "span_ns")),
                "compute": _share(device, "compute_ns"),
                "comm.": _share(device, "comm_ns"),
                "exposed": _share(device, "exposed_ns"),
                "overlap": format_percent(mean_ratio(device)),
                "copies alone": _if_any(device, "lone_copy_ns"),
                "idle": _share(device, "idle_ns"),
                "idle, host late": "-" if trace.device == "cpu" else _share(device, "idle_host_ns"),
                "late reductions (give-way)": format_percent(trace.giveway.index, 2),
                "warnings": str(len(trace.warnings) or "-"),
            }
        )
    always = {*_ALWAYS, _length_head(members)}
    told = [key for key in rows[0] if key in always or any(row[key] != "-" for row in rows)]
    return table([{key: row[key] for key in told} for row in rows], left=0, title=title)


def _length_head(members: Sequence[TraceFigures]) -> str:
    """The head of the lengths: of a step, or of the whole of what a trace without steps holds."""
    told = {per(one).replace("in the", "whole") for one in members}
    return told.pop() if len(told) == 1 else f"per {each(members[0])}"


def _mean(steps: Sequence[Breakdown], key: str) -> float | None:
    values = [getattr(step, key) for step in steps]
    return None if None in values or not values else fmean(values)


def _share(steps: Sequence[Breakdown], key: str) -> str:
    """Time per step, and its part of the step."""
    mean, span = _mean(steps, key), _mean(steps, "span_ns")
    if mean is None or not span:
        return "-"
    return f"{format_ns(mean)} ({format_percent(mean / span, 0)})"


def _if_any(steps: Sequence[Breakdown], key: str) -> str:
    """The same, where it is 1 % of the steps or more."""
    part, span = (sum(getattr(step, name) for step in steps) for name in (key, "span_ns"))
    return _share(steps, key) if part >= SMALL * span > 0 else "-"


def _warnings(traces: Sequence[TraceFigures]) -> list[Block]:
    """How many, and which with ``--verbose``."""
    codes = Counter(warning.code for trace in traces for warning in trace.warnings)
    if not codes:
        return []
    counted = ", ".join(f"{code} ({count})" if count > 1 else code for code, count in codes.items())
    each = [
        plain(f"{Path(trace.file).name}: [{warning.code}] {warning.message}")
        for trace in traces
        for warning in trace.warnings
    ]
    few = len(each) <= _FEW_WARNINGS
    return [
        Notes(sentences=[] if few else [f"Warnings: {counted}. -v explains them."]),
        Notes(sentences=each, title="Warnings", detail=not few),
    ]


def check_block(name: str, ours: HtaFigures | None, theirs: HtaFigures | HtaFailure) -> Block:
    """Figures by HTA's classes, exact and as HTA prints them."""
    if isinstance(theirs, HtaFailure):
        return Notes(sentences=[f"{name}: HTA {theirs.version} fails: {theirs.error}"])
    if ours is None:
        return Notes(sentences=[f"{name}: a CPU trace; HTA {theirs.version} handles GPU traces only"])
    rows = [
        {
            "whole trace": label,
            "refshard": _figure(getattr(ours, key)),
            f"HTA {theirs.version}": _figure(getattr(theirs, key)),
        }
        for label, key in (
            ("span (us)", "span_us"), ("compute (us)", "compute_us"), ("no compute (us)", "noncompute_us"),
            ("idle (us)", "idle_us"), ("overlap (%)", "overlap_pct"),
        )
    ]  # fmt: skip
    return table(rows, title=f"{name} by HTA's classes (docs/explanation/metrics.md says why they differ)")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")
