"""A dry run as one self-contained HTML file; this module lays out figures and computes none.

Names of modules and operators, lines of scripts and errors are untrusted: Jinja2 escapes them in the page, ``tojson``
escapes them in the data, and the page's content security policy allows only the page's own scripts.
"""

import base64
import gzip
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from refshard.dryrun.analyse import Analysis
from refshard.dryrun.memory_course import MemoryCourse, call_clock, gpu_clock, memory_course
from refshard.dryrun.recording import Category, Kind
from refshard.dryrun.steps import steps_of
from refshard.quantities import axis_unit, format_bytes, format_ns, format_percent, format_seconds
from refshard.report.draw.charts import Chart, chart, theme
from refshard.report.draw.embed import MOST_EMBEDDED
from refshard.report.draw.render import fill, resource, script
from refshard.report.dryrun import tables as dryrun_tables
from refshard.report.dryrun.memory_picture import Axis, picture
from refshard.report.dryrun.words import (
    CATEGORIES,
    NO_RACES,
    finding_of,
    how_it_ended,
    moment,
    needed,
    refusal,
    sentences,
    what_ran,
    which_steps,
)
from refshard.report.trace import captions as trace_captions
from refshard.report.trace import charts as trace_charts
from refshard.report.trace import tables as trace_tables
from refshard.report.trace.lanes import Window
from refshard.report.trace.section import Section
from refshard.report.trace.sections import sections_of
from refshard.tracing.analysis import Analysis as Traced
from refshard.tracing.figures import TraceFigures
from refshard.tracing.files.writer import as_kineto

_NAMED = 3
_SENTENCES = re.compile(r"(?<=[.:]) (?=[A-Z])")
_LEADING = 2
"""How many sentences of an error open the verdict; torch's out-of-memory error has seven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure of the verdict: ``mood`` is ``good``, ``doubt`` or empty."""

    label: str
    value: str
    detail: str
    mood: str = ""


def page(found: Analysis, command: str) -> Iterable[str]:
    """The page's HTML in pieces, in order; ``command`` is the command line that made it."""
    request = found.run.request
    traced = found.traced
    memory = memory_charts(found)
    lead, more = verdict(found)
    content = {
        "title": what_ran(request),
        "about": (
            f"Rank {request.rank} of {request.world_size} on {request.cluster} ({found.hardware.about}), "
            f"{how_it_ended(found)}."
        ),
        "lead": lead,
        "sentences": more,
        "facts": facts(found),
        "memory": memory,
        "by_category": dryrun_tables.by_category(found),
        "largest": dryrun_tables.largest(found),
        "overheads": dryrun_tables.overheads(found),
        "trace": _trace(found),
        "timeline": None if traced is None else _timeline(traced),
        "steps": None if traced is None else _steps_chart(traced.figures),
        "finding": None if traced is None else finding_of(traced.figures),
        "time": None if traced is None else trace_tables.steps(traced.figures),
        "sections": _sections(traced),
        "races": None if found.races is None else [str(race) for race in found.races],
        "no_races": NO_RACES,
        "doubts": dryrun_tables.doubts(found),
        "peak": format_bytes(found.memory.peak_bytes),
        "command": command,
        "data": {"theme": theme()},
    }
    style = "".join(map(resource, ("style.css", "dryrun.css")))
    scripts = [script(resource(name)) for name in ("charts.js", "tables.js", "perfetto.js")]
    return fill("dryrun.html.j2", content, style=style, scripts=scripts)


def _trace(found: Analysis) -> dict[str, str] | None:
    """The replayed steps as a Kineto trace for Perfetto; None without a step, or if it is too large for the page."""
    if found.traced is None:
        return None
    content = gzip.compress(as_kineto(found.trace).encode(), mtime=0)
    if len(content) > MOST_EMBEDDED:
        return None
    return {"name": "dryrun.json.gz", "content": base64.b64encode(content).decode()}


def verdict(found: Analysis) -> tuple[str, list[str]]:
    """The verdict in one sentence, and further sentences."""
    answer, more = found.run.answer, sentences(found)
    if not found.fits:
        return f"It does not fit: it {needed(found)}.", [refusal(found), *more]
    if answer.outcome != "failed":
        return f"It fits, with {format_bytes(found.headroom_bytes)} of headroom{_pace(found)}.", more
    told = _SENTENCES.split(answer.error)
    first, rest = " ".join(told[:_LEADING]), " ".join(told[_LEADING:])
    where = [f"At {answer.where}."] if answer.where else []
    return f"The script failed: {first}", [*where, *filter(None, [rest]), *more]


def _pace(found: Analysis) -> str:
    if found.step_s is None:
        return ""
    rate = f", {found.tokens_per_s:,.0f} tokens/s/GPU" if found.tokens_per_s is not None else ""
    mfu = f", MFU {format_percent(found.mfu)}" if found.mfu is not None else ""
    return f"; a step takes {format_seconds(found.step_s)}{rate}{mfu}"


def facts(found: Analysis) -> list[Fact]:
    """The figures to read first."""
    return [_memory_fact(found), *_time_facts(found)]


def _memory_fact(found: Analysis) -> Fact:
    peak, usable = found.run.answer.peak, format_bytes(found.usable_bytes)
    detail = (
        f"{format_bytes(peak.reserved)} reserved at the peak ({usable} usable); {format_bytes(peak.allocated)} "
        "allocated."
    )
    if not found.fits:
        until = "" if found.run.refused else "Until memory ran out: "
        return Fact(label="memory", value="does not fit", detail=f"{until}{detail}", mood="doubt")
    if found.run.answer.outcome == "failed":
        return Fact(label="memory until the failure", value=f"{format_bytes(peak.reserved)} reserved", detail=detail)
    return Fact(label="memory", value=f"fits, {format_bytes(found.headroom_bytes)} left", detail=detail, mood="good")


def _time_facts(found: Analysis) -> Iterable[Fact]:
    if found.traced is None:
        return
    figures, answer = found.traced.figures, found.run.answer
    steps = [step.breakdown for step in figures.steps]
    detail = f"Predicted: a replay of {which_steps(figures)}."
    yield Fact(label="step time", value=format_seconds(found.step_s), detail=detail)
    if found.tokens is not None and found.tokens_per_s is not None:
        shared = f"; {answer.sharing} ranks share each batch" if answer.sharing > 1 else ""
        yield Fact(
            label="tokens/s/GPU", value=f"{found.tokens_per_s:,.0f}",
            detail=f"{found.tokens:,.0f} tokens per step and GPU{shared}.",
        )  # fmt: skip
    if found.mfu is not None:
        yield Fact(
            label="MFU", value=format_percent(found.mfu),
            detail=f"{found.model_flops / 1e12:,.1f} trillion FLOPs per step, without recomputation.",
        )  # fmt: skip
    if comm := sum(step.comm_ns for step in steps):
        exposed = sum(step.exposed_ns for step in steps)
        yield Fact(
            label="exposed communication", value=format_percent(exposed / sum(step.span_ns for step in steps)),
            detail=f"{format_ns(exposed / len(steps))} of {format_ns(comm / len(steps))} communication run while "
            "nothing computes.",
        )  # fmt: skip
    count = sum(one.count for one in found.synchronisations)
    yield Fact(
        label="host synchronisations per step", value=f"{count:,}",
        detail="Calls that hold the GPU up are listed below." if count else "No line waits for the GPU.",
    )  # fmt: skip


def memory_charts(found: Analysis) -> list[Chart]:
    """Memory over the last whole step; also over the whole run, unless that step has the peak and the job fits."""
    recording, step = found.run.recording, found.step
    if not found.memory.peak_bytes:
        return []
    charts = []
    if step is not None:
        clock = gpu_clock(recording, found.replayed)
        course = memory_course(recording, found.memory, clock, first=step.first, end=step.end)
        unit, size = axis_unit("s", (course.places[-1] - course.places[0]) / 1e9)
        caption = (
            f"{_caption(found, course, f'Step {step.number} (the last)')} Time is GPU time: each change is drawn where "
            "the compute stream has finished everything launched before it. The script allocates earlier, in the "
            "same order."
        )
        axis = Axis(title=f"GPU time in the step ({unit})", name=unit, unit=round(size * 1e9))
        drawn = picture(recording, course, axis, found.usable_bytes)
        charts.append(chart("memory-step", "Over the last step", drawn, caption))
        if found.fits and course.peak_bytes == found.memory.peak_bytes:
            return charts
    return [*charts, _run_chart(found)]


def _run_chart(found: Analysis) -> Chart:
    recording, clock = found.run.recording, call_clock(found.run.recording)
    course = memory_course(recording, found.memory, clock, first=0, end=_end(found))
    marks = tuple(int(clock[step.end]) for step in steps_of(recording, "step")) if found.step else ()
    axis = Axis(
        title=f"allocations and frees{'; dotted: a step ends' if marks else ''}", name="calls", unit=1,
        marks=marks,
    )  # fmt: skip
    ends = {"oom": " It ends where memory ran out.", "failed": " It ends where the script failed."}
    caption = _caption(found, course, "The whole run") + ends.get(found.run.answer.outcome, "")
    drawn = picture(recording, course, axis, found.usable_bytes)
    return chart("memory-run", "Over the whole run", drawn, caption)


def _end(found: Analysis) -> int:
    """The end of the run; if the run failed, the last event before it freed its memory."""
    recording = found.run.recording
    if found.run.answer.outcome in ("stepped", "ended"):
        return len(recording)
    return int(np.flatnonzero(recording.kinds != Kind.FREE)[-1]) + 1


def _caption(found: Analysis, course: MemoryCourse, what: str) -> str:
    """The picture in words."""
    at_peak = course.held[course.peak]
    order = sorted(Category, key=lambda category: -at_peak[category])[:_NAMED]
    most = ", ".join(f"{CATEGORIES[one]} {format_bytes(int(at_peak[one]))}" for one in order if at_peak[one])
    when = moment(found.run.recording, int(course.counts[course.peak]) - 1)
    return (
        f"{what}: memory peaks {when}, with {format_bytes(course.peak_bytes)} allocated (largest: {most}). At most "
        f"{format_bytes(course.peak_reserved_bytes)} of {format_bytes(found.usable_bytes)} usable are reserved."
    )


def _timeline(traced: Traced) -> Chart:
    last = traced.figures.steps[-1]
    window = Window(
        step=last.step, begin=last.start_ns, close=last.start_ns + last.breakdown.span_ns,
        label=f"step {last.step} (the last)",
    )  # fmt: skip
    (chart,) = trace_charts.timelines(traced.timeline, traced.figures, (window,), "streams")
    return chart


def _sections(traced: Traced | None) -> tuple[tuple[Section, pd.DataFrame], ...]:
    """What the page of a trace tells beyond the breakdown."""
    if traced is None:
        return ()
    return tuple((section, pd.DataFrame(section.rows)) for section in sections_of(traced.figures))


def _steps_chart(traced: TraceFigures) -> Chart:
    bars = trace_charts.step_bars(traced)
    return chart("steps", "Where each step goes", bars, trace_captions.steps(traced))
