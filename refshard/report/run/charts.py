"""Charts of one comparison: step time against memory, the traced step, memory over a step, and losses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from refshard.analysis.cases import BREAKDOWN, CaseResult, ranks
from refshard.analysis.evidence import Setting
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.rankings import ALIKE, Ranking, step_time
from refshard.dryrun.overheads import overheads
from refshard.errors import SpecError
from refshard.plan.memory import usable
from refshard.quantities import GIB, axis_unit, format_bytes, format_part, format_percent, format_seconds
from refshard.report.blocks import Block, Charts, Column, Section, Table
from refshard.report.draw.charts import THEME, Bar, Chart, Row, chart, label_text, stacked
from refshard.report.draw.palette import DASHES, GREY, MARKERS, STEP, look
from refshard.report.draw.tradeoff import Frame, Point, front, shows_limit, tradeoff_figure
from refshard.report.run.cells import metric_text
from refshard.report.run.verdict import listed
from refshard.specs.case import REPEATING, spelled
from refshard.specs.cluster import load_cluster
from refshard.specs.job import REFERENCE_STRATEGY

MOST_CURVES = 8
"""Curves in a chart; of losses the reference, or the first case if that has none, and the curves furthest from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A chart of several cases, under its title if ``titled``, and the same in numbers."""

    chart: Chart
    table: Table
    cases: tuple[CaseResult, ...]
    titled: bool = True

    @property
    def section(self) -> Section:
        """Both, for a page, which hides them with the last of their cases."""
        blocks: list[Block] = [drawn(self.chart, titled=self.titled), self.table]
        return Section(title="", blocks=blocks, cases=[case.number for case in self.cases])


def drawn(chart: Chart, *, titled: bool = True) -> Charts:
    """A block of one chart."""
    return Charts(draw=lambda: [chart], titled=titled)


def polyline(
    name: str, x: Sequence[float], y: Iterable[float], line: Mapping[str, Any], meta: Mapping[str, Any], *,
    hover: str = "", marker: Mapping[str, Any] | None = None, customdata: Sequence[str] | None = None,
) -> go.Scatter:  # fmt: skip
    """A line through points, with markers if ``marker`` describes them; ``hover`` is what pointing at one says."""
    return go.Scatter(
        name=label_text(name), x=list(x), y=[float(f"{value:.7g}") for value in y], line=line, marker=marker, meta=meta,
        mode="lines+markers" if marker else "lines", hoverinfo=None if hover else "skip", customdata=customdata,
        hovertemplate=f"{hover}<extra></extra>" if hover else None,
    )  # fmt: skip


def colour(setting: Setting, strategy: str) -> str:
    """A strategy's colour, the same on the whole page."""
    return GREY if strategy == REFERENCE_STRATEGY else look(setting.known.index(strategy)).colour


# --- the traced step


def breakdown_chart(setting: Setting, identity: str) -> Chart:
    """Compute, overlapped and exposed communication and idle time of a traced step, stacked, a bar per case."""
    found = {case: parts for case in setting.cases if case.ok and (parts := case.breakdown)}
    shares = {
        case.strategy: share for case in found if case.metrics["comm_s"] and (share := case.exposed_share) is not None
    }
    text = exposed_text(shares, "Exposed") if shares else "No case with communication has a traced step."
    return chart(identity, "Parts of a traced step", step_parts(found, BREAKDOWN), text)


def exposed_text(shares: Mapping[str, float], lead: str) -> str:
    """The least and the largest share of a step in exposed communication, by strategy."""
    least, most = min(shares, key=lambda name: shares[name]), max(shares, key=lambda name: shares[name])
    text = f"{lead} communication takes {format_percent(shares[least])} of a traced step ({least})"
    return f"{text}." if least == most else f"{text} to {format_percent(shares[most])} ({most})."


def step_parts(found: Mapping[CaseResult, Mapping[str, float]], parts: Iterable[str]) -> go.Figure:
    """A bar per case, stacked of ``parts`` of a traced step, s, under a heading for each world size if there are
    several.

    Places are numbers, not plotly's two-level categories, because those need twice the width for their names.
    """
    rows: list[Row] = []
    bars: list[Bar] = []
    before = None
    several = len({case.spec.job.gpus for case in found}) > 1
    for case, of in found.items():
        if several and case.spec.job.gpus != before:
            before = case.spec.job.gpus
            rows.append(Row(text=f"<b>{ranks(before)}</b>"))
        bars.append(Bar(place=len(rows), name=case.label, parts=of))
        rows.append(Row(text=label_text(case.strategy), case=case.number))
    return stacked(rows, bars, {part: STEP[part] for part in parts}, "s", "per traced step")


# --- step time against memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Bytes that a rank can use, and their name."""

    bytes: float
    name: str

    @property
    def text(self) -> str:
        """Both.

        >>> Limit(bytes=80 * 2**30, name="usable").text
        '80.0 GiB usable'
        """
        return f"{format_bytes(self.bytes)} {self.name}"


def device_limit(cases: Sequence[CaseResult]) -> Limit | None:
    """The smallest limit of these cases; None on CPUs, unless the suite sets a limit."""
    return min((limit for case in cases if (limit := _limit(case))), key=lambda limit: limit.bytes, default=None)


def _limit(case: CaseResult) -> Limit | None:
    if case.spec.protocol.memory_limit_gib is not None:
        return Limit(bytes=case.spec.protocol.memory_limit_gib * GIB, name="limit per rank")
    if gpu := gpu_memory_of(case):
        return Limit(bytes=gpu.total_bytes, name="on the GPU")
    if not case.spec.job.cluster:
        return None
    try:
        hardware = load_cluster(case.spec.job.cluster).accelerator
    except SpecError:  # a profile of the user's own that is no longer there
        return None
    if not hardware.asynchronous:
        return None
    if case.fidelity == "dryrun":
        outside = sum(one.bytes for one in overheads(case.spec.job.gpus))
        return Limit(bytes=hardware.memory_bytes - outside, name="usable")
    return Limit(bytes=usable(hardware), name="usable")


def tradeoff(
    ranking: Ranking, limit: Limit | None, identity: str, predicted: Mapping[CaseResult, CaseResult] | None = None
) -> Chart | None:
    """None if no strategy has both figures. ``predicted`` holds dry runs of the cases, drawn hollow."""
    found = tuple(ranking.peaks)
    if not found:
        return None
    metric = ranking.memory_metric

    def point(case: CaseResult, shown: CaseResult) -> Point:
        """``shown`` is the case itself, or its dry run."""
        known = ranking.setting.known
        summary = None if shown.fidelity in REPEATING else shown.step_time
        bounded = summary if summary and math.isfinite(summary.high) else None
        return Point(
            name=case.strategy,
            time=step_time(shown),
            memory=shown.metrics[metric] or 0.0,
            tip=tip(shown, metric, limit),
            colour=colour(ranking.setting, case.strategy),
            place=known.index(case.strategy) if case.strategy in known else 0,
            number=case.number,
            low=bounded.low if bounded else None,
            high=bounded.high if bounded else None,
        )

    points = [point(case, case) for case in found]
    dry = [(case, one) for case in found if (one := (predicted or {}).get(case)) and one.metrics[metric]]
    ties = len(ranking.fastest) > 1 and found[0].fidelity in REPEATING
    frame = Frame(
        memory="reserved memory" if metric == "peak_reserved_bytes" else "peak memory",
        limit=limit.bytes if limit else None,
        limit_text=limit.text if limit else "",
        tie=(1 + ALIKE) * min(point.time for point in points) if ties else None,
    )
    best = [f"{one.name} ({format_seconds(one.time)}, {format_bytes(one.memory)})" for one in front(points)]
    text = f"Lower left is better. Dotted, the Pareto front: {listed(best)}."
    if frame.tie is not None:
        text += f" Shaded: within {ALIKE:.0%} of the fastest, the model's error.".replace("%", " %")
    if frame.limit is not None and not shows_limit(points, frame):
        text += f" The limit, {frame.limit_text}, lies outside the chart."
    figure = tradeoff_figure(points, frame, [point(case, one) for case, one in dry])
    return chart(identity, "Step time against memory", figure, text)


def tip(case: CaseResult, memory_metric: str, limit: Limit | None = None) -> str:
    """What pointing at a case says, a line each: the case, its step time with interval and samples, its memory, its
    throughput.
    """
    lines = [f"<b>{label_text(case.strategy)}</b>, {ranks(case.spec.job.gpus)}, {spelled(case.fidelity)}"]
    time, summary = f"step time {format_seconds(case.metrics['step_time_s'])}", case.step_time
    if case.fidelity in REPEATING or summary is None:
        lines.append(f"{time}, calculated")
    else:
        ends = f"{format_seconds(summary.low)} to {format_seconds(summary.high)}"
        interval = f"95 % interval {ends}" if math.isfinite(summary.high) else "no interval"
        rounds = f"{summary.launches} {'round' if summary.launches == 1 else 'rounds'}"
        lines.append(f"{time}, {interval} ({rounds}, {summary.n} steps)")
    name, value = "reserved" if memory_metric == "peak_reserved_bytes" else "peak memory", case.metrics[memory_metric]
    size = "unknown" if value is None else format_part(value, limit.bytes) if limit else format_bytes(value)
    lines.append(f"{name} {size}")
    if case.metrics["tokens_per_s_gpu"] is not None:
        share = f", MFU {format_percent(mfu)}" if (mfu := case.metrics["mfu"]) is not None else ""
        lines.append(f"{metric_text(case, 'tokens_per_s_gpu')} tokens/s/GPU{share}")
    if case.exposed_share is not None:
        lines.append(f"exposed communication {format_percent(case.exposed_share)} of a traced step")
    return "<br>".join(lines)


# --- memory over a step


def memory_over_step(setting: Setting, identity: str, dry_runs: Mapping[CaseResult, CaseResult]) -> Chart | None:
    """The highest that each case's allocator held in each stretch of a step, with its dry run's dotted beside it; None
    if no course of memory was recorded.

    Stretches are as many operators each, so curves of different code share their ends and no other moment.
    """
    found: list[tuple[CaseResult, list[tuple[CaseResult, tuple[int, ...]]]]] = []
    for case in setting.cases:
        shown = [case, dry_runs[case]] if case in dry_runs else [case]
        if courses := [(one, course) for one in shown if one.ok and (course := _course(one))]:
            found.append((case, courses))
    if not found:
        return None
    found = found[:MOST_CURVES]
    unit, size = axis_unit("B", max(max(course) for _, courses in found for _, course in courses))
    figure, peaks, any_dotted = go.Figure(), [], False
    for case, courses in found:
        texts: dict[bool, list[str]] = {False: [], True: []}  # by whether it is a dry run
        for one, course in courses:
            dotted = one is not case
            any_dotted = any_dotted or dotted
            texts[dotted].append(f"{format_bytes(max(course))}{' in its dry run' if dotted else ''}")
            line = {"color": colour(setting, case.strategy), "width": 2, "dash": "dot" if dotted else "solid"}
            x = [float(f"{100 * place / max(len(course) - 1, 1):.4g}") for place in range(len(course))]
            y = [float(f"{highest / size:.5g}") for highest in course]
            hover = f"{label_text(case.strategy)}, {spelled(one.fidelity)}<br>%{{y:,.4g}} {unit}"
            trace = polyline(case.strategy, x, y, line, {"case": case.number}, hover=hover)
            figure.add_trace(trace.update(showlegend=one is courses[0][0]))
        peaks.append(f"{case.strategy} peaks at {', '.join([*texts[False], *texts[True]])}")
    figure.update_layout(template=THEME, height=300, showlegend=True)
    figure.update_xaxes(title_text="% of the step, in the host's order")
    figure.update_yaxes(title_text=f"{unit} per rank", rangemode="tozero")
    text = f"Rank 0 of {ranks(found[0][0].spec.job.gpus)}: {'; '.join(peaks)}."
    return chart(identity, "Memory over a step", figure, f"{text} Dotted: dry runs." if any_dotted else text)


def _course(case: CaseResult) -> tuple[int, ...]:
    """That of the first launch that has one."""
    return next((launch.memory_course_bytes for launch in case.launches if launch.memory_course_bytes), ())


# --- losses

Curves = Mapping[CaseResult, Sequence[float]]
"""Losses of the steps, from the first, by case; NaN where a launch recorded none."""


def losses_of(training: Setting) -> Curves:
    """Of each case that has losses; its launches repeat the same curve."""
    first = {
        case: next((launch.losses for launch in case.launches if launch.state == "ok" and launch.losses), ())
        for case in training.cases
    }
    return {case: losses for case, losses in first.items() if losses}


def losses(training: Setting, identity: str) -> Drawn | None:
    """Loss curves of cases that train the same; None if no case has losses."""
    curves = losses_of(training)
    if not curves:
        return None
    shown = _furthest(curves)
    text = f"{_ends(curves)} {difference(curves)}"
    if len(shown) < len(curves):
        text += f" The chart shows {shown[0].label} and the {MOST_CURVES - 1} curves furthest from it."
    rows = [
        [str(step + 1), *(None if loss is None else f"{loss:.6g}" for loss in (here.get(case) for case in curves))]
        for step, here in enumerate(_steps(curves))
    ]
    columns = [Column("step", "left"), *(Column(case.label, case=case.number) for case in curves)]
    title = "Loss of every step"
    return Drawn(
        chart=chart(identity, "Loss", draw_losses(training, {case: curves[case] for case in shown}), text),
        table=Table(title=title, caption=f"{title}: {training.label}", where="detail", columns=columns, rows=rows),
        cases=tuple(curves),
        titled=False,
    )


def _steps(curves: Curves) -> list[dict[CaseResult, float]]:
    """The losses of each step."""
    return [
        {case: each[step] for case, each in curves.items() if step < len(each) and not math.isnan(each[step])}
        for step in range(max(map(len, curves.values())))
    ]


def _ends(curves: Curves) -> str:
    """Where the losses start and end, and how far they are from those of one unsharded rank."""
    count = f"{len(curves)} loss curves go" if len(curves) > 1 else "The loss goes"
    known = [[loss for loss in each if not math.isnan(loss)] or [math.nan] for each in curves.values()]
    ends = (sorted(each[place] for each in known) for place in (0, -1))
    first, last = (" to ".join(dict.fromkeys((f"{low[0]:.4g}", f"{low[-1]:.4g}"))) for low in ends)
    text = f"{count} from {first} to {last} in {max(map(len, curves.values()))} steps."
    parities = {case: parity for case in curves if case.ok and (parity := case.metrics["loss_parity"]) is not None}
    if not parities:
        return text
    largest = max(parities.values())
    if largest == 0:
        return f"{text} All equal those of one unsharded rank."
    furthest = [case for case, parity in parities.items() if parity == largest]
    return (
        f"{text} In the proof of run they differ from one unsharded rank by at most "
        f"{metric_text(furthest[0], 'loss_parity')} ({listed([case.label for case in furthest])})."
    )


def difference(curves: Curves) -> str:
    """Where two curves are furthest apart, relative to the lower one; empty for one curve."""
    if len(curves) < 2:
        return ""
    worst, where = 0.0, ""
    for step, here in enumerate(_steps(curves)):
        if not here:
            continue
        low, high = min(here, key=lambda case: here[case]), max(here, key=lambda case: here[case])
        apart = (here[high] - here[low]) / abs(here[low]) if here[low] else 0.0
        if apart > worst:
            worst, where = apart, f"{low.label} and {high.label}, step {step + 1}"
    if not worst:
        return "No two curves differ at any step."
    size = format_percent(worst) if worst >= 0.001 else f"{worst:.1e} of the loss"
    return f"The largest difference between two curves is {size} ({where})."


def _furthest(curves: Curves) -> list[CaseResult]:
    """The reference or the first case, and the curves furthest from it."""
    cases = list(curves)
    if len(cases) <= MOST_CURVES:
        return cases
    reference = next((case for case in cases if case.strategy == REFERENCE_STRATEGY), cases[0])
    far = {case: max(abs(a - b) for a, b in zip(curves[case], curves[reference])) for case in cases}
    others = sorted((case for case in cases if case is not reference), key=lambda case: -far[case])
    return [reference, *others[: MOST_CURVES - 1]]


def draw_losses(training: Setting, curves: Curves) -> go.Figure:
    """Loss per step; earlier curves are wider, so that coinciding ones stay visible."""
    figure = go.Figure()
    for place, (case, each) in enumerate(curves.items()):
        wider = len(curves) - 1 - place
        line = {
            "color": colour(training, case.strategy),
            "width": 1.5 + 1.25 * wider,
            "dash": DASHES[place % len(DASHES)],
        }
        marker = {"symbol": MARKERS[place % len(MARKERS)], "size": 6 + wider}
        known = {step: loss for step, loss in enumerate(each, 1) if not math.isnan(loss)}
        hover = f"{label_text(case.label)}<br>step %{{x}}: %{{y:.6g}}"
        figure.add_trace(
            polyline(case.label, list(known), known.values(), line, {"case": case.number}, hover=hover, marker=marker)
        )
    figure.update_layout(template=THEME, height=300 + 8 * len(curves), showlegend=True)
    figure.update_xaxes(title_text="step")
    return figure.update_yaxes(title_text="loss")
