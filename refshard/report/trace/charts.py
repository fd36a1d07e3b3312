"""The charts of traces: steps and ranks as bars, a step and a layer as lanes over time, memory as curves.

On lanes, each style in a row is one filled curve that steps up where a block begins and down where it ends: one SVG
path for any number of blocks, while bars would need an element each. An invisible curve in each row has the text that
hovering shows; its points are the blocks' ends, so that the nearest point belongs to the block under the pointer. The
texts are in the layout's ``meta`` once, and the codes of blocks in that of the curve.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import plotly.graph_objects as go

from refshard.analysis.analyse import Analysis
from refshard.analysis.attribution import Owner, attribute
from refshard.analysis.difference import label_of
from refshard.analysis.figures import Breakdown, Cause, MemoryPoint, OperatorClass, TraceFigures
from refshard.events.timeline import Nanoseconds, Timeline, Window
from refshard.quantities import axis_unit, format_bytes, format_ns, format_percent
from refshard.report.draw.charts import THEME, Bar, Chart, Jump, Row, chart, label_text, pattern, shortened, stacked
from refshard.report.draw.palette import BLUE, INK, OKABE_ITO, SPANS, STEP, Look, dimmed
from refshard.report.trace.findings import WORK
from refshard.report.trace.lanes import (
    NAMES,
    Blocks,
    LaneRow,
    View,
    drawn_windows,
    find_layer,
    layer_sentence,
    rows_of,
)
from refshard.report.trace.text import (
    IDLE,
    ON_CPU,
    counted,
    each,
    has_steps,
    job_names,
    jobs,
    mean,
    parts,
    per,
    who,
)
from refshard.report.trace.where import LOOKS, RECOMPUTATION, parts_of, where_means, where_parts

MOST_STEPS, MOST_RANKS, MOST_POINTS = 60, 40, 1500
MOST_SPANS, MOST_BLOCKS = 20_000, 2_000
"""Limits for a timeline, which then takes about 1 MB of its page and is drawn in 0.1 s, and for a layer."""
_NONE: Mapping[OperatorClass, float] = MappingProxyType({})
PARTS = ("compute alone", "compute over communication", "exposed communication", "other", *IDLE.values())
"""Parts of a step; they add up to it."""
_ROW, _NARROW, _LABEL, _PAUSE, _AXIS, _MODES, _LEGEND = 24, 12, 17, 5, 48, 26, 26
"""Heights in pixels: rows, narrow rows, a lane's name, the pause above it, the axis, the buttons that zoom and pan, the
legend."""
_LOW, _HIGH = 0.3, (1.0, 0.9)
"""Heights of gaps between collectives, and of blocks in turn, so that touching ones differ; parts of a row."""
_NUDGE = 1 / 30_000
"""How far within a block its points lie, so that none is on its neighbour's: plotly compares hundredths of a pixel."""
_CHARACTER = 1 / 100
"""Room for a character of a label, like the nudge a part of the figure's width."""
_LINE, _LINES = 48, 6
"""Most characters of a line that pointing shows, and most lines."""


def ranks_chart(figures: Sequence[TraceFigures]) -> list[Chart]:
    """A bar per rank, those of a job under its name; nothing for a single trace."""
    if len(figures) < 2:
        return []
    names, spans = job_names(figures), [mean([one], lambda part: part.span_ns) for one in figures]
    kept = sorted(sorted(range(len(figures)), key=lambda place: -spans[place])[:MOST_RANKS])
    shown = [figures[place] for place in kept]

    def span_of(place: int) -> str:
        one = figures[place]
        of = "" if len(names) == 1 or one.rank is None else f" of {names[one.job]}"
        return f"{format_ns(spans[place])} on {who(one)}{of}"

    rows, bars = list[Row](), list[Bar]()
    for job, members in jobs(shown).items():
        rows.append(Row(text=f"<b>{shortened(names[job], 24)}</b>"))
        for one in members:
            name = f"rank {'?' if one.rank is None else one.rank}"
            bars.append(Bar(place=len(rows), name=name, parts=_seconds(mean_split(one))))
            rows.append(Row(text=name))
    shortest, longest = (choose(kept, key=spans.__getitem__) for choose in (min, max))
    left_out = f" The {len(shown)} of {len(figures)} ranks with the longest step." if len(shown) < len(figures) else ""
    text = f"Mean {each(figures[longest])} of each rank: from {span_of(shortest)} to {span_of(longest)}.{left_out}"
    figure = stacked(rows, bars, {part: STEP[part] for part in PARTS}, "s", "of the mean step")
    drawn = chart("ranks", "Ranks side by side", figure, text)
    return [_on_cpu(drawn) if all(one.device == "cpu" for one in figures) else drawn]


def where_chart(
    figures: TraceFigures,
    timeline: Timeline,
    prefix: str,
    recomputed: Mapping[OperatorClass, float] = _NONE,
) -> Chart:
    """One bar of the mean step by :func:`where_parts`. Each part leads to where it is longest in the timelines that
    :func:`all_charts` draws under ``prefix``. ``recomputed`` seconds of classes of work are a part of their own.
    """
    found, report = attribute(timeline), figures.operators
    rates = {WORK[one.name]: one.of_roofline for one in report.classes if one.name in WORK} if report else {}
    parts = where_parts(figures, found)
    for one, seconds in recomputed.items():
        name = WORK.get(one, "other kernels")
        taken = min(parts[name], seconds)
        parts[name], parts[RECOMPUTATION] = parts[name] - taken, parts[RECOMPUTATION] + taken
    step = sum(parts.values())
    parts = {name: value for name, value in parts.items() if value >= 0.001 * step}
    names = {name: name if rates.get(name) is None else f"{name} ({format_percent(rates[name], 0)} of roofline)"
             for name in LOOKS}  # fmt: skip
    bar = Bar(place=0, name=who(figures), parts={names[name]: value for name, value in parts.items()})
    figure = stacked([Row(text="")], [bar], {names[name]: look for name, look in LOOKS.items()}, "s", per(figures))
    order = sorted(parts.items(), key=lambda part: -part[1])
    said = {name: f"{names[name]} {format_ns(1e9 * value)}" for name, value in order if value >= 0.01 * step}
    lead = f"{'Mean ' if found.steps > 1 else ''}{each(figures)} of {who(figures)}, {format_ns(1e9 * step)}"
    lead = f"{lead[0].upper()}{lead[1:]}"
    title = f"Where the {each(figures)} goes"
    drawn = chart(f"where-{figures.job}", title, figure, f"{lead}: {', '.join(said.values())}.")
    places = _longest_places(figures, timeline, prefix)
    nowhere = Jump(part="", text="", chart="", begin=0, end=0, note="")
    jumps = [replace(places.get(name, nowhere), part=names[name], text=told) for name, told in said.items()]
    drawn = replace(drawn, lead=lead, jumps=jumps)
    return _on_cpu(drawn) if figures.device == "cpu" else drawn


def sides_chart(
    names: Sequence[str], sides: Sequence[Sequence[Analysis]], prefixes: Sequence[str], length: int
) -> Chart:
    """The bars of several jobs on one scale, means over the ranks of each. A part leads to where it is longest in the
    timelines of a job's first rank, which are drawn under its prefix over ``length``, as :func:`all_charts` does.
    """
    means = [where_means(side) for side in sides]
    steps = [sum(parts.values()) for parts in means]
    shown = [name for name in LOOKS if any(parts[name] >= 0.001 * step for parts, step in zip(means, steps))]
    bars = [
        Bar(place=n, name=name, parts={part: parts[part] for part in shown})
        for n, (name, parts) in enumerate(zip(names, means))
    ]
    rows = [Row(text=shortened(name, 24)) for name in names]
    figure = stacked(rows, bars, {name: LOOKS[name] for name in shown}, "s", "per step")
    jumps = list[Jump]()
    for row, (name, side, prefix) in enumerate(zip(names, sides, prefixes)):
        places = {} if side[0].kept is None else _longest_places(side[0].figures, side[0].kept, prefix, length)
        for part in sorted(shown, key=lambda part: -means[row][part]):
            if (place := places.get(part)) and means[row][part] >= 0.01 * steps[row]:
                of = "" if any(one.row == row for one in jumps) else f"{name}: "
                text = f"{of}{part} {format_ns(1e9 * means[row][part])}"
                jumps.append(replace(place, row=row, text=text, note=f"{name}, {place.note}"))
    lead = ", ".join(f"{name} {format_ns(1e9 * step)}" for name, step in zip(names, steps))
    lead = f"Mean steps on one scale, {lead}"
    told = f"{lead}{': ' if jumps else ''}{', '.join(one.text for one in jumps)}."
    title = "Both steps" if len(sides) == 2 else "All steps"
    drawn = replace(chart("sides", title, figure, told), lead=lead, jumps=jumps)
    return _on_cpu(drawn) if all(one.figures.device == "cpu" for side in sides for one in side) else drawn


def _longest_places(figures: TraceFigures, timeline: Timeline, prefix: str, length: int = 0) -> dict[str, Jump]:
    """Where each part of the step is longest in the windows that are drawn, each over ``length`` at least."""
    windows = drawn_windows(figures, timeline)
    shown = tuple(Window(step=one.step, start=one.begin, end=one.close) for one in windows)
    found = dict[str, Owner]()
    for owner in attribute(replace(timeline, windows=shown)).owners:
        for name in parts_of(owner.work, figures) if owner.longest[0] else ():
            found[name] = max(found.get(name, owner), owner, key=lambda one: one.longest)
    places = {}
    for name, owner in found.items():
        ns, start, end = owner.longest
        n = next(n for n, window in enumerate(windows) if start < window.close and end > window.begin)
        window = windows[n]
        begin, close = ((at - window.begin) / max(window.close - window.begin, length) for at in (start, end))
        note = f"{format_ns(ns)}: {label_of(owner.work)}"
        places[name] = Jump(
            part=name, text=name, chart=f"{prefix}-timeline-{n}", begin=max(0.0, begin), end=min(1.0, close), note=note
        )
    return places


def all_charts(figures: TraceFigures, timeline: Timeline | None, prefix: str, length: int = 0) -> list[Chart]:
    """Every chart of one trace, as far as its timeline is known; ids begin with ``prefix``. The axes of timelines are
    at least ``length`` nanoseconds long.
    """
    found = []
    windows = () if timeline is None or not len(timeline.spans) else drawn_windows(figures, timeline)
    for n, window in enumerate(windows):
        assert timeline is not None
        rows, undrawn = rows_of(timeline, figures, window.begin, window.close)
        title = f"from the start of the {'trace' if window.step is None else 'step'}"
        close = max(window.close, window.begin + length)
        figure, cell = spans_figure(rows, (window.begin, close), window.begin, title, MOST_SPANS)
        sentences = [f"{window.label[0].upper()}{window.label[1:]}, of {who(figures)}."]
        if cell:
            sentences.append(
                f"There are too many spans to draw: those under {format_ns(cell)} that begin within that time of each "
                "other are one block."
            )
        if undrawn:
            verb = "is" if undrawn == 1 else "are"
            sentences.append(f"{counted(undrawn, 'more lane')}, the least busy, {verb} not drawn.")
        sentences.append("Point at a block for details, drag to zoom, double-click to zoom out.")
        drawn = chart(f"{prefix}-timeline-{n}", f"Timeline of {window.label}", figure, " ".join(sentences))
        found.append(replace(drawn, folded=n > 0))
    if timeline is not None and windows and (layer := find_layer(timeline, windows[0].begin, windows[0].close)):
        found.append(layer_chart(layer, figures, f"{prefix}-layer"))
    title = "Where each step goes" if has_steps(figures) else "Where the time goes"
    drawn = chart(f"{prefix}-steps", title, step_bars(figures), _steps_sentence(figures))
    found.append(replace(drawn, folded=bool(windows)))  # the bar of the mean step stands above
    if figures.memory:
        found.append(chart(f"{prefix}-memory", "Memory", _memory_curves(figures), memory_sentence(figures.memory)))
    return list(map(_on_cpu, found)) if figures.device == "cpu" else found


def _on_cpu(drawn: Chart) -> Chart:
    """The chart with a CPU's name for idle time between operators, in its legend and in what pointing shows."""
    text = json.dumps(drawn.figure).replace(IDLE[Cause.LAUNCH], ON_CPU)
    told = drawn.alternative.replace(IDLE[Cause.LAUNCH], ON_CPU)
    jumps = [
        replace(
            one, part=one.part.replace(IDLE[Cause.LAUNCH], ON_CPU), text=one.text.replace(IDLE[Cause.LAUNCH], ON_CPU)
        )
        for one in drawn.jumps
    ]
    return replace(drawn, figure=json.loads(text), alternative=told, jumps=jumps)


def split(part: Breakdown) -> dict[str, int]:
    """A window cut into parts that add up to it.

    Compute and communication together cover compute + exposed; *other* is all other busy time.
    """
    overlapped = part.comm_ns - part.exposed_ns
    return {
        "compute alone": part.compute_ns - overlapped,
        "compute over communication": overlapped,
        "exposed communication": part.exposed_ns,
        "other": part.busy_ns - part.compute_ns - part.exposed_ns,
        **{name: getattr(part, f"idle_{cause}_ns") or 0 for cause, name in IDLE.items()},
    }


def mean_split(figures: TraceFigures) -> dict[str, float]:
    """The parts of a trace's mean step."""
    every = [split(part.breakdown) for part in parts(figures)]
    return {name: sum(parts[name] for parts in every) / len(every) for name in every[0]}


def _seconds(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: ns / 1e9 for part, ns in parts.items()}


def step_bars(figures: TraceFigures) -> go.Figure:
    """One stacked bar per step, the last :data:`MOST_STEPS` of them."""
    every = [(f"{each(figures)} {one.step}", one.breakdown) for one in figures.steps if one.step is not None]
    every = every[-MOST_STEPS:] or [("whole trace", figures.whole)]
    bars = [Bar(place=n, name=name, parts=_seconds(split(part))) for n, (name, part) in enumerate(every)]
    return stacked([Row(text=bar.name) for bar in bars], bars, {part: STEP[part] for part in PARTS}, "s", per(figures))


def _steps_sentence(figures: TraceFigures) -> str:
    every = [part.breakdown for part in parts(figures)]
    ranges = []
    for key in ("exposed_ns", "idle_ns"):
        shares = [getattr(part, key) / part.span_ns for part in every if part.span_ns]
        ends = dict.fromkeys(format_percent(end(shares)) for end in (min, max) if shares)
        ranges.append(" to ".join(ends))
    what = counted(len(every), each(figures)) if has_steps(figures) else "The whole trace, which has no steps"
    return f"{what}: exposed communication takes {ranges[0] or '-'}, idle time {ranges[1] or '-'} of it."


def memory_sentence(points: Sequence[MemoryPoint]) -> str:
    """The first value and the peak of every device."""
    sentences = ["Bytes that torch's allocator holds."]
    for device in dict.fromkeys(point.device for point in points):
        mine = [point.bytes for point in points if point.device == device]
        sentences.append(f"{device}: from {format_bytes(mine[0])} at first to a peak of {format_bytes(max(mine))}.")
    return " ".join(sentences)


def _memory_curves(figures: TraceFigures) -> go.Figure:
    """Bytes over time, a curve per device; dotted where a step begins."""
    points = figures.memory
    first, last = min(point.ns for point in points), max(point.ns for point in points)
    unit, size = axis_unit("s", (last - first) / 1e9)
    name, bytes_each = axis_unit("B", max(point.bytes for point in points))
    figure = go.Figure()
    for place, device in enumerate(dict.fromkeys(point.device for point in points)):
        mine = thinned([point for point in points if point.device == device])
        figure.add_scatter(
            name=label_text(device), x=[(point.ns - first) / size / 1e9 for point in mine],
            y=[point.bytes / bytes_each for point in mine], mode="lines",
            line={"shape": "hv", "color": OKABE_ITO[place % len(OKABE_ITO)]},
            customdata=[format_bytes(point.bytes) for point in mine],
            hovertemplate=f"{label_text(device)}<br>%{{x:.4g}} {unit}: %{{customdata}}<extra></extra>",
        )  # fmt: skip
    begins = [step.start_ns for step in figures.steps if step.step is not None and first <= step.start_ns <= last]
    begins = begins if len(begins) <= MOST_STEPS else []
    for x in ((ns - first) / size / 1e9 for ns in begins):
        line = {"dash": "dot", "width": 1, "color": INK}
        figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, yref="paper", line=line)
    figure.update_layout(template=THEME, height=300, showlegend=len(figure.data) > 1)
    title = f"{unit} from the first event{'; dotted: a step begins' if begins else ''}"
    figure.update_xaxes(title_text=title, nticks=6)
    return figure.update_yaxes(title_text=name, rangemode="tozero")


def thinned(points: Sequence[MemoryPoint]) -> list[MemoryPoint]:
    """At most :data:`MOST_POINTS` points: the least and the largest of each run of neighbours, so that peaks stay."""
    if len(points) <= MOST_POINTS:
        return list(points)
    kept: list[MemoryPoint] = []
    for run in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        here = [points[i] for i in run]
        ends = {id(p): p for p in (min(here, key=lambda p: p.bytes), max(here, key=lambda p: p.bytes))}
        kept += sorted(ends.values(), key=lambda p: p.ns)
    return kept


def layer_chart(view: View, figures: TraceFigures, identity: str) -> Chart:
    """The picture of a layer, over the extent of the view."""
    noun = "kernel" if view.timeline.on_device else "operator"
    axis = f"from the start of the layer's first {noun}"
    rows, _ = rows_of(view.timeline, figures, view.begin, view.end, view.hull.unit)
    figure, _ = spans_figure(rows, (view.begin, view.end), view.hull.start, axis, MOST_BLOCKS)
    title = f"The {view.hull.phase} of {view.unit}" if view.hull.phase else view.unit
    drawn = chart(identity, title, figure, f"{layer_sentence(view)} Dimmed: other units.")
    return _on_cpu(drawn) if figures.device == "cpu" else drawn


def spans_figure(
    rows: Sequence[LaneRow], shown: tuple[int, int], origin: int, title: str, most: int
) -> tuple[go.Figure, int]:
    """Rows of blocks over the time ``shown``, counted from ``origin``, under an axis with this title.

    Also the nanoseconds within which shorter blocks are drawn as one so that at most ``most`` are: 0 if all are drawn.
    """
    rows, cell = fitting(rows, most)
    unit, size = axis_unit("s", (shown[1] - shown[0]) / 1e9)
    heights = [_NARROW if row.narrow else _ROW for row in rows]
    whole = sum(heights) + sum(_LABEL + _PAUSE for row in rows if row.label)
    figure, top, texts, named = go.Figure(), 0, dict[str, int](), set[str]()

    def places(moments: Nanoseconds) -> Any:
        """On the axis; a float would not hold nanoseconds since 1970."""
        return np.asarray((moments - origin) / (size * 1e9), np.float64)

    for place, (row, height) in enumerate(zip(rows, heights), 1):
        if row.label:
            top += _PAUSE + _LABEL
            figure.add_annotation(
                x=0, y=1 - top / whole, xref="paper", yref="paper", xanchor="left", yanchor="bottom", showarrow=False,
                borderpad=0, font={"size": 12}, text=shortened(row.label, _LINE),
            )  # fmt: skip
        figure.layout[f"yaxis{place}"] = {
            "domain": [max(0, 1 - (top + height) / whole), 1 - top / whole], "range": [0, 1], "fixedrange": True,
            "visible": False,
        }  # fmt: skip
        top += height
        for blocks in row.blocks:
            look, name = SPANS[blocks.style], NAMES.get(blocks.style)
            latest = np.append(blocks.starts[:1], np.maximum.accumulate(blocks.ends)[:-1])
            starts = np.maximum(blocks.starts, latest)
            sides = np.zeros((len(blocks), 2), np.float32)
            sides[:, 0] = _LOW if blocks.style in ("gap", "gap-blocking") else np.resize(_HIGH, len(blocks))
            figure.add_scatter(
                x=places(np.stack([starts, np.maximum(starts, blocks.ends)], 1).ravel()), y=sides.ravel(),
                yaxis=f"y{place}", mode="lines", line={"shape": "hv", "width": 0, "color": look.colour},
                fill="tozeroy", fillcolor=dimmed(look.colour) if blocks.dimmed else look.colour,
                fillpattern=pattern(Look("") if blocks.dimmed else look), hoverinfo="skip", name=name, legendgroup=name,
                showlegend=name is not None and not blocks.dimmed and blocks.style not in named,
            )  # fmt: skip
            named |= set() if blocks.dimmed else {blocks.style}
        starts, ends = (np.concatenate([getattr(one, end) for one in row.blocks]) for end in ("starts", "ends"))
        order, notes = np.argsort(starts, kind="stable"), [note for one in row.blocks for note in one.notes]
        starts, ends, codes = starts[order], ends[order], []
        for number in order.tolist():
            lines = [line for part in notes[number] for line in textwrap.wrap(part, _LINE)]
            text = "<br>".join(label_text(line) for line in lines[:_LINES])
            codes.append(texts.setdefault(text, len(texts)))
        inset = np.repeat(np.minimum(_NUDGE * (shown[1] - shown[0]), (ends - starts) / 4), 2) / (size * 1e9)
        inset[1::2] *= -1
        figure.add_scatter(
            x=places(np.stack([starts, ends], 1).ravel()) + inset, y=np.ones(2 * len(order), np.int8),
            yaxis=f"y{place}", mode="none", showlegend=False, meta={"codes": codes},
            customdata=np.repeat((ends - starts) / 1e9, 2).astype(np.float32),
            hovertemplate="%{text}<br>%{customdata:.3s}s<extra></extra>",
        )  # fmt: skip
        if labels := [label for one in row.blocks for label in _labels(one, shown)]:
            figure.add_scatter(
                x=places(np.array([middle for middle, _ in labels])), y=[0.5] * len(labels), yaxis=f"y{place}",
                mode="text", text=[text for _, text in labels], textfont={"size": 11}, hoverinfo="skip",
                showlegend=False,
            )  # fmt: skip
    figure.update_layout(
        template=THEME, height=whole + _MODES + _AXIS + _LEGEND, hovermode="x", hoverdistance=-1,
        meta={"texts": list(texts)}, legend={"y": -_AXIS / whole, "yanchor": "top"}, margin={"t": _MODES},
        hoverlabel={"bgcolor": "#444444", "align": "left"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": BLUE},
    )  # fmt: skip
    figure.update_xaxes(
        title_text=title, title_standoff=4, anchor=f"y{len(rows)}", range=places(np.array(shown)).tolist(), nticks=6,
        ticks="outside", ticksuffix=f" {unit}", hoverformat=",.7~r", showgrid=False, zeroline=False,
    )  # fmt: skip
    return figure, cell


def _labels(blocks: Blocks, shown: tuple[int, int]) -> list[tuple[int, str]]:
    """The names of blocks that are wide enough, each with the middle of the part that is shown."""
    if blocks.style not in ("comm", "unit", "unit-odd") or blocks.dimmed:
        return []
    found = []
    starts, ends = (end.clip(*shown) for end in (blocks.starts, blocks.ends))
    for start, length, (name, _) in zip(starts.tolist(), (ends - starts).tolist(), blocks.notes):
        for label in (name, name.partition(" ")[0]):
            if length >= _CHARACTER * len(label) * (shown[1] - shown[0]):
                found.append((start + length // 2, label_text(label)))
                break
    return found


def fitting(rows: Sequence[LaneRow], most: int) -> tuple[Sequence[LaneRow], int]:
    """The rows with at most ``most`` blocks, if merging can reach that, and the cell in ns within which it merged."""
    cell, found = 0, rows
    longest = max((int(one.ends.max() - one.starts.min()) for row in rows for one in row.blocks), default=0)
    while sum(len(one) for row in found for one in row.blocks) > most and cell <= longest:
        cell = 2 * cell or 256
        found = [replace(row, blocks=tuple(merged(one, cell) for one in row.blocks)) for row in rows]
    return found, cell


def merged(blocks: Blocks, cell: int) -> Blocks:
    """The same, with one block for all shorter ones that begin in one cell of this many nanoseconds."""
    short, place = blocks.ends - blocks.starts < cell, blocks.starts // cell
    heads = np.flatnonzero(np.append(True, ~(short[1:] & short[:-1] & (place[1:] == place[:-1]))))
    counts = np.diff(np.append(heads, len(blocks))).tolist()
    notes = [
        blocks.notes[head] if count == 1 else (f"{count} spans", "") for head, count in zip(heads.tolist(), counts)
    ]
    return replace(blocks, starts=blocks.starts[heads], ends=np.maximum.reduceat(blocks.ends, heads), notes=notes)
