"""What an analysis of traces looks like in a terminal, and as JSON."""

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from tabulate import tabulate

from refshard.quantities import format_ns, format_percent
from refshard.report.trace.words import findings, has_steps, jobs, parts
from refshard.tracing.diff import Attribution, Change
from refshard.tracing.figures import Breakdown, TraceFigures
from refshard.tracing.hta import HtaFailure, HtaFigures
from refshard.tracing.overlap import mean_ratio

_ALWAYS = frozenset(("rank", "per step", "compute", "comm.", "exposed", "overlap", "idle"))
_SHOWN_CHANGES = 25
_LONGEST_LABEL = 80
_WIDTH = 120
_CLASSES = {"comm": "communication", "prep": "preparation"}


def as_objects(traces: Sequence[TraceFigures]) -> list[dict[str, Any]]:
    """One object per trace: its whole breakdown at the top, everything else below."""
    return [_as_object(trace) for trace in traces]


def _as_object(trace: TraceFigures) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(trace)
    whole = built.pop("whole")
    identity = {key: built.pop(key) for key in ("file", "job", "rank", "world_size", "backend", "device", "events")}
    steps = [{**step.pop("breakdown"), **step} for step in built.pop("steps")]
    return {**identity, **whole, "giveway_index": trace.giveway.index, **built, "steps": steps}


def terminal_table(traces: Sequence[TraceFigures]) -> str:
    """Per job a table with a row per trace and what is to be known of it, then each trace's warnings."""
    told = []
    for (_, members), finding in zip(jobs(traces).items(), findings(traces)):
        ranks = sorted(members, key=lambda trace: (trace.rank is None, trace.rank))
        told.append(f"{finding.title}\n{_pattern(ranks)}\n{_job_table(ranks)}")
        told.append("\n".join(_wrapped(sentence) for sentence in (finding.lead, *finding.more)))
    told += [_warnings(trace) for trace in traces if trace.warnings]
    return _printable("\n\n".join(told))


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, _WIDTH, initial_indent="* ", subsequent_indent="  ")


def _printable(text: str) -> str:
    """Without characters that would steer a terminal: names in traces are anyone's."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _pattern(members: Sequence[TraceFigures]) -> str:
    """One name for all files of a job: what they have in common, and a star."""
    names = [Path(trace.file).name for trace in members]
    start = os.path.commonprefix(names)  # noqa: RUF071 -- of characters, as it does
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]  # noqa: RUF071
    return f"{start}*{end}" if len(names) > 1 else names[0]


def _job_table(members: Sequence[TraceFigures]) -> str:
    rows = []
    for trace in members:
        steps = [part.breakdown for part in parts(trace)]
        rows.append(
            {
                "rank": "-" if trace.rank is None else trace.rank,
                "steps": len(trace.steps) if has_steps(trace) else "-",
                "per step": format_ns(_mean(steps, "span_ns")),
                "compute": _share(steps, "compute_ns"),
                "comm.": _share(steps, "comm_ns"),
                "exposed": _share(steps, "exposed_ns"),
                "overlap": format_percent(mean_ratio(steps)),
                "idle": _share(steps, "idle_ns"),
                "of it host-bound": _share(steps, "idle_host_ns"),
                "give-way": format_percent(trace.giveway.index, 2),
                "warnings": len(trace.warnings) or "-",
            }
        )
    told = [key for key in rows[0] if key in _ALWAYS or any(row[key] != "-" for row in rows)]
    shown = [{key: row[key] for key in told} for row in rows]
    return tabulate(shown, headers="keys", disable_numparse=True, colalign=["right"] * len(told))


def _mean(steps: Sequence[Breakdown], key: str) -> float | None:
    values = [getattr(step, key) for step in steps]
    return None if None in values else fmean(values)


def _share(steps: Sequence[Breakdown], key: str) -> str:
    """Time per step, and its part of the step."""
    mean, span = _mean(steps, key), _mean(steps, "span_ns")
    if mean is None or not span:
        return "-"
    return f"{format_ns(mean)} ({format_percent(mean / span, 0)})"


def _warnings(trace: TraceFigures) -> str:
    lines = [f"  [{warning.code}] {warning.message}" for warning in trace.warnings]
    return f"{Path(trace.file).name}:\n" + "\n".join(lines)


def terminal_check(name: str, ours: HtaFigures | None, theirs: HtaFigures | HtaFailure) -> str:
    """Figures by HTA's classes, exact and as HTA prints them."""
    if isinstance(theirs, HtaFailure):
        return f"{name}: HTA {theirs.version} fails: {theirs.error}"
    if ours is None:
        return f"{name}: a CPU trace, of which HTA {theirs.version} says nothing that could be compared"
    rows = [
        (label, _figure(getattr(ours, key)), _figure(getattr(theirs, key)))
        for label, key in (
            ("span (us)", "span_us"), ("compute (us)", "compute_us"), ("no compute (us)", "noncompute_us"),
            ("idle (us)", "idle_us"), ("overlap (%)", "overlap_pct"),
        )
    ]  # fmt: skip
    headers = ("whole trace", "refshard", f"HTA {theirs.version}")
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "right", "right"))
    return f"{name} by HTA's classes (docs/metrics.md says why they differ):\n{table}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")


def difference_objects(a: Attribution, b: Attribution, changes: Sequence[Change]) -> dict[str, Any]:
    """A difference for programs; ``changes`` add up to ``delta_ns``, nanoseconds per step."""
    before, after = a.span_ns / a.steps, b.span_ns / b.steps
    return {"a_ns": before, "b_ns": after, "delta_ns": after - before, "changes": msgspec.to_builtins(tuple(changes))}


def terminal_difference(names: tuple[str, str], a: Attribution, b: Attribution, changes: Sequence[Change]) -> str:
    """What accounts for the change in step time: by class, and then in detail, each adding up to the whole."""
    steps = [
        f"{name}: {path}, {one.steps} steps of {format_ns(one.span_ns / one.steps)}"
        for name, path, one in zip("AB", names, (a, b))
    ]
    if not any(change.delta_ns for change in changes):
        return "\n".join([*steps, "", "no difference"])
    whole = [_change_row("step", a.span_ns / a.steps, b.span_ns / b.steps)]
    kinds = dict.fromkeys(change.kind for change in changes)
    by_kind = {kind: [change for change in changes if change.kind == kind] for kind in kinds}
    sums = [_sum_row(_CLASSES.get(kind, kind), members) for kind, members in by_kind.items()]
    shown = [c for c in changes[:_SHOWN_CHANGES] if c.delta_ns]
    details = [_change_row(_label(c), c.a_ns, c.b_ns, _CLASSES.get(c.kind, c.kind)) for c in shown]
    if rest := changes[_SHOWN_CHANGES:]:
        details.append(_sum_row(f"{len(rest)} others", rest, ""))
    told = [
        *steps,
        "\nper step, each moment given to one owner; communication and idle time are what nothing else covers:\n",
        _difference_table(("class",), [*sums, *whole]),
        "",
        _difference_table(("what", "class"), [*details, [*whole[0][:1], "", *whole[0][1:]]]),
    ]
    return _printable("\n".join(told))


def _difference_table(names: tuple[str, ...], rows: Sequence[Sequence[str]]) -> str:
    align = [*["left"] * len(names), "right", "right", "right"]
    return tabulate(rows, headers=(*names, "A", "B", "B - A"), disable_numparse=True, colalign=align)


def _sum_row(label: str, changes: Sequence[Change], *more: str) -> list[str]:
    return _change_row(label, sum(c.a_ns for c in changes), sum(c.b_ns for c in changes), *more)


def _change_row(label: str, a_ns: float, b_ns: float, *more: str) -> list[str]:
    sign = "+" if b_ns > a_ns else ""
    return [label, *more, format_ns(a_ns), format_ns(b_ns), sign + format_ns(b_ns - a_ns)]


def _label(change: Change) -> str:
    """A name cut in its middle, where kernels hold their template's arguments, and what is new or gone."""
    mark = " [new]" if change.new else " [gone]" if change.gone else ""
    label, room = change.label, _LONGEST_LABEL - len(mark)
    if len(label) > room:
        label = f"{label[: room // 2]}…{label[-(room - room // 2 - 1) :]}"
    return label + mark
