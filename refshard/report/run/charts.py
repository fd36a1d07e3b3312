"""Charts of one comparison: step time against memory, the traced step, memory over a step, and losses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from refshard.analysis.cases import BREAKDOWN, CaseResult, ranks
from refshard.analysis.evidence import Setting
from refshard.analysis.rankings import ALIKE, Ranking, step_time
from refshard.dryrun.overheads import overheads
from refshard.errors import SpecError
from refshard.plan.memory import usable
from refshard.quantities import GIB, axis_unit, format_bytes, format_part, format_percent, format_seconds
from refshard.report.blocks import Block, Charts, Column, Section, Table
from refshard.report.draw.charts import THEME, Bar, Chart, Row, chart, label_text, stacked
from refshard.report.draw.palette import DASHES, GREY, MARKERS, STEP, look
from refshard.report.draw.tradeoff import Frame, Point, front, shows_limit, tradeoff_figure
from refshard.report.run import cells
from refshard.report.run.cells import metric_text
from refshard.report.run.tables import numbers
from refshard.report.run.verdict import listed
from refshard.specs.case import REFERENCE_STRATEGY, REPEATING, spelled
from refshard.specs.cluster import load_cluster

MOST_CURVES = 8
"""Curves in a chart; for losses the reference, or the first case if it has none, and the curves furthest from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A chart of several cases, and the same in numbers."""

    chart: Chart
    table: Table
    cases: tuple[CaseResult, ...]
    titled: bool = True

    @property
    def section(self) -> Section:
        """Both, for a page, which hides them with the last of their cases."""
        blocks: list[Block] = [drawn(self.chart, titled=self.titled), self.table]
        return Section(title="", blocks=blocks, cases=numbers(self.cases))


def drawn(chart: Chart, *, titled: bool = True) -> Charts:
    """A block of one chart."""
    return Charts(draw=lambda: [chart], titled=titled)


def polyline(
    name: str, x: Sequence[float], y: Iterable[float], line: Mapping[str, Any], meta: Mapping[str, Any], *,
    hover: str = "", marker: Mapping[str, Any] | None = None, customdata: Sequence[str] | None = None,
) -> go.Scatter:  # fmt: skip
    """A line through points, with markers if ``marker`` describes them; ``hover`` is the tip of a point."""
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
    """Compute, overlapped and exposed communication and idle time of a traced step, stacked, a bar per case, under a
    heading for each world size if there are several.

    Places are numbers, not plotly's two-level categories, because those need twice the width for their names.
    """
    found = {case: parts for case in setting.cases if case.ok and (parts := case.breakdown)}
    shares = {
        case.strategy: share for case in found if case.metrics["comm_s"] and (share := case.exposed_share) is not None
    }
    text = "No case with communication has a traced step."
    if shares:
        least, most = (of(shares, key=lambda name: shares[name]) for of in (min, max))
        text = f"Exposed communication takes {format_percent(shares[least])} of a traced step ({least})"
        text += "." if least == most else f" to {format_percent(shares[most])} ({most})."
    rows, bars = list[Row](), list[Bar]()
    several, before = len({case.spec.world_size for case in found}) > 1, None
    for case, parts in found.items():
        if several and case.spec.world_size != before:
            before = case.spec.world_size
            rows.append(Row(text=f"<b>{ranks(before)}</b>"))
        bars.append(Bar(place=len(rows), name=case.label, parts=parts))
        rows.append(Row(text=label_text(case.strategy), case=case.number))
    figure = stacked(rows, bars, {part: STEP[part] for part in BREAKDOWN}, "s", "per traced step")
    return chart(identity, "Parts of a traced step", figure, text)


# --- step time against memory


def device_limit(cases: Sequence[CaseResult]) -> tuple[float, str] | None:
    """The smallest limit of these cases: bytes that a rank can use, and what limits them; None on CPUs, unless the
    suite sets a limit.
    """
    return min((limit for case in cases if (limit := _limit(case))), default=None)


def _limit(case: CaseResult) -> tuple[float, str] | None:
    if case.spec.memory_limit_gib is not None:
        return case.spec.memory_limit_gib * GIB, "limit per rank"
    if gpu := case.gpu_memory:
        return gpu.total_bytes, "on the GPU"
    if not case.spec.cluster:
        return None
    try:
        hardware = load_cluster(case.spec.cluster).accelerator
    except SpecError:  # the user's own profile, which no longer exists
        return None
    if not hardware.asynchronous:
        return None
    if case.fidelity == "dryrun":
        return hardware.memory_bytes - sum(one.bytes for one in overheads(case.spec.world_size)), "usable"
    return usable(hardware), "usable"


def tradeoff(ranking: Ranking, identity: str, dry_runs: Mapping[CaseResult, CaseResult]) -> Chart | None:
    """Step time against memory, with the dry run of each case drawn hollow; None if no strategy has both figures."""
    if not ranking.peaks:
        return None
    metric, limit = ranking.memory_metric, device_limit(ranking.cases)

    def point(case: CaseResult, shown: CaseResult) -> Point:
        """``shown`` is the case itself, or its dry run."""
        known, time = ranking.setting.known, shown.step_time
        bounded = time if time and shown.fidelity not in REPEATING and math.isfinite(time.high) else None
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

    points = [point(case, case) for case in ranking.peaks]
    dry = [point(case, one) for case in ranking.peaks if (one := dry_runs.get(case)) and one.metrics[metric]]
    ties = len(ranking.fastest) > 1 and ranking.fastest[0].fidelity in REPEATING
    frame = Frame(
        memory="reserved memory" if metric == "peak_reserved_bytes" else "peak memory",
        limit=limit and limit[0],
        limit_text=f"{format_bytes(limit[0])} {limit[1]}" if limit else "",
        tie=(1 + ALIKE) * min(point.time for point in points) if ties else None,
    )
    best = [f"{one.name} ({format_seconds(one.time)}, {format_bytes(one.memory)})" for one in front(points)]
    text = f"Lower left is better. Dotted, the Pareto front: {listed(best)}."
    if frame.tie is not None:
        text += f" Shaded: within {format_percent(ALIKE, 0)} of the fastest, the model's error."
    if frame.limit is not None and not shows_limit(points, frame):
        text += f" The limit, {frame.limit_text}, lies outside the chart."
    return chart(identity, "Step time against memory", tradeoff_figure(points, frame, dry), text)


def tip(case: CaseResult, memory_metric: str, limit: tuple[float, str] | None = None) -> str:
    """The tip of a case: its step time with interval and samples, its memory, its throughput."""
    time, found = cells.step_time(case).replace("\n", " "), case.step_time
    if case.fidelity in REPEATING or found is None:
        time += ", calculated"
    else:
        time += f", {found.launches} {'round' if found.launches == 1 else 'rounds'}, {found.n} steps"
    name, value = "reserved" if memory_metric == "peak_reserved_bytes" else "peak memory", case.metrics[memory_metric]
    size = "unknown" if value is None else format_part(value, limit[0]) if limit else format_bytes(value)
    lines = [
        f"<b>{label_text(case.strategy)}</b>, {ranks(case.spec.world_size)}, {spelled(case.fidelity)}",
        f"step time {time}",
        f"{name} {size}",
    ]
    if case.metrics["tokens_per_s_gpu"] is not None:
        share = f", MFU {format_percent(mfu)}" if (mfu := case.metrics["mfu"]) is not None else ""
        lines.append(f"{metric_text(case, 'tokens_per_s_gpu')} tokens/s/GPU{share}")
    if case.exposed_share is not None:
        lines.append(f"exposed communication {format_percent(case.exposed_share)} of a traced step")
    return "<br>".join(lines)


# --- memory over a step


def memory_over_step(setting: Setting, identity: str, dry_runs: Mapping[CaseResult, CaseResult]) -> Chart | None:
    """The maximum that each case's allocator held in each stretch of a step, with its dry run's dotted; None if no
    memory was recorded over the step.

    All stretches have the same number of operators, so curves of different code share their ends and no other moment.
    """
    found: list[tuple[CaseResult, CaseResult, tuple[int, ...]]] = []
    for case in setting.cases:
        for shown in filter(None, (case, dry_runs.get(case))):
            courses = (launch.memory_course_bytes for launch in shown.launches if launch.memory_course_bytes)
            if shown.ok and (course := next(courses, None)):
                found.append((case, shown, course))
    if not found:
        return None
    kept = list(dict.fromkeys(case for case, _, _ in found))[:MOST_CURVES]
    unit, size = axis_unit("B", max(max(course) for _, _, course in found))
    figure, peaks = go.Figure(), dict[CaseResult, list[str]]()
    for case, shown, course in found:
        if case not in kept:
            continue
        dotted = shown is not case
        line = {"color": colour(setting, case.strategy), "width": 2, "dash": "dot" if dotted else "solid"}
        x = [float(f"{100 * place / max(len(course) - 1, 1):.4g}") for place in range(len(course))]
        y = [float(f"{highest / size:.5g}") for highest in course]
        hover = f"{label_text(case.strategy)}, {spelled(shown.fidelity)}<br>%{{y:,.4g}} {unit}"
        trace = polyline(case.strategy, x, y, line, {"case": case.number}, hover=hover)
        figure.add_trace(trace.update(showlegend=case not in peaks))
        peaks.setdefault(case, []).append(f"{format_bytes(max(course))}{' in its dry run' if dotted else ''}")
    figure.update_layout(template=THEME, height=300, showlegend=True)
    figure.update_xaxes(title_text="% of the step, in the host's order")
    figure.update_yaxes(title_text=f"{unit} per rank", rangemode="tozero")
    each = "; ".join(f"{case.strategy} peaks at {', '.join(texts)}" for case, texts in peaks.items())
    text = f"Rank 0 of {ranks(kept[0].spec.world_size)}: {each}."
    dotted = any(case is not shown for case, shown, _ in found)
    return chart(identity, "Memory over a step", figure, f"{text} Dotted: dry runs." if dotted else text)


# --- losses


def losses(training: Setting, identity: str) -> Drawn | None:
    """Loss curves of cases that train the same; None if no case has losses. NaN: a launch recorded none."""
    of = {case: next((one.losses for one in case.ok_launches if one.losses), ()) for case in training.cases}
    curves = {case: each for case, each in of.items() if each}
    if not curves:
        return None
    steps = [
        {case: each[step] for case, each in curves.items() if step < len(each) and not math.isnan(each[step])}
        for step in range(max(map(len, curves.values())))
    ]
    shown = list(curves)
    if len(shown) > MOST_CURVES:
        reference = next((case for case in shown if case.strategy == REFERENCE_STRATEGY), shown[0])
        far = {case: max(abs(a - b) for a, b in zip(curves[case], curves[reference])) for case in shown}
        others = sorted((case for case in shown if case is not reference), key=lambda case: -far[case])
        shown = [reference, *others[: MOST_CURVES - 1]]
    rows = [
        [str(step), *(None if (loss := here.get(case)) is None else f"{loss:.6g}" for case in curves)]
        for step, here in enumerate(steps, 1)
    ]
    columns = [Column("step", "left"), *(Column(case.label, case=case.number) for case in curves)]
    known = [here for here in steps if here]
    count = f"{len(curves)} loss curves go" if len(curves) > 1 else "The loss goes"
    first, last = (
        " to ".join(dict.fromkeys(f"{of(here.values()):.4g}" for of in (min, max)))
        for here in ((known[0], known[-1]) if known else ({None: math.nan},) * 2)
    )
    text = f"{count} from {first} to {last} in {len(steps)} steps. {_difference(steps)}".strip()
    if len(shown) < len(curves):
        text += f" The chart shows {shown[0].label} and the {MOST_CURVES - 1} curves furthest from it."
    title = "Loss of every step"
    figure = go.Figure()
    for place, case in enumerate(shown):
        wider = len(shown) - 1 - place  # earlier curves are wider, so that coinciding ones stay visible
        points = {step: here[case] for step, here in enumerate(steps, 1) if case in here}
        figure.add_trace(
            polyline(
                case.label, list(points), points.values(),
                {"color": colour(training, case.strategy), "width": 1.5 + 1.25 * wider,
                 "dash": DASHES[place % len(DASHES)]},
                {"case": case.number}, hover=f"{label_text(case.label)}<br>step %{{x}}: %{{y:.6g}}",
                marker={"symbol": MARKERS[place % len(MARKERS)], "size": 6 + wider},
            )
        )  # fmt: skip
    figure.update_layout(template=THEME, height=300 + 8 * len(shown), showlegend=True)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss")
    return Drawn(
        chart=chart(identity, "Loss", figure, text),
        table=Table(title=title, caption=f"{title}: {training.label}", where="detail", columns=columns, rows=rows),
        cases=tuple(curves),
        titled=False,
    )


def _difference(steps: Sequence[Mapping[CaseResult, float]]) -> str:
    """Where two curves are furthest apart, relative to the lower one; empty for one curve."""
    worst, where = 0.0, ""
    for step, here in enumerate(steps, 1):
        if here:
            low, high = min(here, key=lambda case: here[case]), max(here, key=lambda case: here[case])
            apart = (here[high] - here[low]) / abs(here[low]) if here[low] else 0.0
            if apart > worst:
                worst, where = apart, f"{low.label} and {high.label}, step {step}"
    if not worst:
        return "No two curves differ at any step." if any(len(here) > 1 for here in steps) else ""
    size = format_percent(worst) if worst >= 0.001 else f"{worst:.1e} of the loss"
    return f"The largest difference between two curves is {size} ({where})."
