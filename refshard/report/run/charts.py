"""Charts of runs. For one comparison: the traced step, step time against memory, memory over a step, and losses.
Curves: throughput over ranks, step time relative to DDP over tokens, and each case over runs.

A *curve* is one strategy. One chart holds curves of cases that differ in nothing else.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from refshard.analysis.cases import BREAKDOWN, CaseResult, ranks
from refshard.analysis.compare import Comparison
from refshard.analysis.evidence import Evidence, Setting, machine, shared
from refshard.analysis.history import series_of
from refshard.analysis.rankings import Ranking, step_time
from refshard.analysis.ratios import ALIKE, ratios
from refshard.errors import SpecError
from refshard.outside_memory import outside_bytes
from refshard.quantities import GIB, axis_unit, format_bytes, format_part, format_percent, format_seconds
from refshard.records import Run
from refshard.report.blocks import Block, Charts, Column, Quantity, Row, Section, Table, table
from refshard.report.draw.charts import THEME, Bar, Chart, chart, label_text, stacked
from refshard.report.draw.charts import Row as Line
from refshard.report.draw.palette import DASHES, GREY, INK, MARKERS, OKABE_ITO, STEP, look
from refshard.report.draw.tradeoff import Frame, Point, front, shows_limit, tradeoff_figure
from refshard.report.run import cells
from refshard.report.run.cells import metric_text, ratio_text, times
from refshard.report.run.origin import run_names
from refshard.report.run.tables import numbers, trend_row
from refshard.report.run.verdict import listed
from refshard.specs.case import REPEATING, Fidelity, spelled
from refshard.specs.cluster import load_cluster
from refshard.specs.job import REFERENCE_STRATEGY

MOST_CURVES = 8
"""Curves in a chart; for losses the reference, or the first case if it has none, and the curves furthest from it."""
_DASH: dict[Fidelity, str] = {"measured": "solid", "emulated": "dash", "dryrun": "dashdot", "simulated": "dot"}
_METRIC = "tokens_per_s_gpu"
_FLAT = 0.7  # least over largest throughput above which an axis from 0 would show one line
_PLACE = re.compile(r", (measured|(emulated|dry run|simulated) on [^,]+|[\d,]+ ranks resident)(?=,|$)")
"""The fidelity in a setting's label, which each curve's label repeats."""
MOST_SCALED = 12
"""Curves in a chart of throughput; its table has all."""
MOST_TRENDS = 8
"""Curves in a chart over runs."""
BASELINE = "ddp"
"""The strategy that shards nothing, which the others are compared with as tokens grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A chart of several cases, and the same in numbers."""

    chart: Chart
    table: Table
    cases: tuple[CaseResult, ...]
    titled: bool = True

    @property
    def section(self) -> Section:
        """The chart and the table; a page hides them with the last of their cases."""
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
    rows, bars = list[Line](), list[Bar]()
    several, before = len({case.spec.job.gpus for case in found}) > 1, None
    for case, parts in found.items():
        if several and case.spec.job.gpus != before:
            before = case.spec.job.gpus
            rows.append(Line(text=f"<b>{ranks(before)}</b>"))
        bars.append(Bar(place=len(rows), name=case.label, parts=parts))
        rows.append(Line(text=label_text(case.strategy), case=case.number))
    figure = stacked(rows, bars, {part: STEP[part] for part in BREAKDOWN}, "s", "per traced step")
    return chart(identity, "Parts of a traced step", figure, text)


# --- step time against memory


def device_limit(cases: Sequence[CaseResult]) -> tuple[float, str] | None:
    """The smallest limit of these cases: bytes that a rank can use, and what limits them; None on CPUs, unless the
    suite sets a limit.
    """
    return min((limit for case in cases if (limit := _limit(case))), default=None)


def _limit(case: CaseResult) -> tuple[float, str] | None:
    if case.spec.protocol.memory_limit_gib is not None:
        return case.spec.protocol.memory_limit_gib * GIB, "limit per rank"
    if gpu := case.gpu_memory:
        return gpu.total_bytes, "on the GPU"
    if not case.spec.job.cluster:
        return None
    try:
        hardware = load_cluster(case.spec.job.cluster).accelerator
    except SpecError:  # the user's own profile, which no longer exists
        return None
    if not hardware.asynchronous:
        return None
    # Further communicators leave less.
    return hardware.memory_bytes - outside_bytes(hardware, int(case.spec.job.gpus > 1)), "usable"


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
            chosen=case in ranking.choices,
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
        f"<b>{label_text(case.strategy)}</b>, {ranks(case.spec.job.gpus)}, {spelled(case.fidelity)}",
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
    text = f"Rank 0 of {ranks(kept[0].spec.job.gpus)}: {each}."
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


# --- throughput over ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One strategy at one fidelity on one cluster over world sizes, two or more, ascending."""

    setting: Setting
    strategy: str
    cases: tuple[CaseResult, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens/s/GPU."""
        return tuple(case.metrics[_METRIC] or 0.0 for case in self.cases)

    @property
    def kept(self) -> float:
        """Throughput of a rank in the largest world over that in the smallest."""
        return self.rates[-1] / self.rates[0]

    @property
    def place(self) -> tuple[Fidelity, str]:
        """What curves must share to have one ideal."""
        return self.cases[0].fidelity, self.cases[0].spec.job.cluster

    @property
    def where(self) -> str:
        """The fidelity and the cluster after a comma, unless it was measured."""
        fidelity, cluster = self.place
        return "" if fidelity == "measured" else f", {spelled(fidelity)} on {cluster}"

    @property
    def range(self) -> str:
        """Its world sizes."""
        return f"{self.cases[0].spec.job.gpus:,} to {ranks(self.cases[-1].spec.job.gpus)}"


def scalings(evidence: Evidence) -> tuple[Drawn, ...]:
    """Throughput per rank compared with the ideal and the physical bound: a chart for each group of settings that
    differ only in fidelity and cluster, if a strategy ran in two worlds or more.
    """
    groups: dict[tuple[object, ...], list[Curve]] = {}
    for setting in evidence.ranked:
        first = setting.cases[0]
        per_rank = first.header.suite.fixes_batch_per_rank
        alike = shared(first.spec, per_rank, but=("fidelity", "cluster"))
        key = alike, per_rank, machine(first.header.environment)
        for strategy in setting.strategies:
            found = [case for case in setting.cases if case.strategy == strategy and case.ok and case.metrics[_METRIC]]
            if len({case.spec.job.gpus for case in found}) > 1:
                cases = tuple(sorted(found, key=lambda case: case.spec.job.gpus))
                groups.setdefault(key, []).append(Curve(setting=setting, strategy=strategy, cases=cases))
    return tuple(_scaling(curves, f"g{place}-scaling") for place, curves in enumerate(groups.values()))


def _scaling(curves: Sequence[Curve], identity: str) -> Drawn:
    points = [(curve, case, rate) for curve in curves for case, rate in zip(curve.cases, curve.rates)]
    rows: list[Row] = [
        {
            "case": case.full_label,
            "tokens/s/GPU": Quantity(rate, "rate"),
            "tokens/s": Quantity(rate * case.spec.job.gpus, "rate"),
            "scaling efficiency": Quantity(rate / curve.rates[0], "share"),
            "of the physical bound": Quantity(case.metrics["overlap_efficiency"], "share"),
        }
        for curve, case, rate in points
    ]
    shown = sorted(curves, key=lambda curve: -max(curve.rates))[:MOST_SCALED]
    figure = go.Figure()
    for one in (curve for curve in curves if curve in shown):
        # The strategy by its colour and marker, the fidelity by the dash and whether the marker is filled.
        filled = one.place[0] == "measured"
        figure.add_trace(
            polyline(
                _name(one, shown), [case.spec.job.gpus for case in one.cases], one.rates,
                {"color": colour(one.setting, one.strategy), "dash": _DASH[one.place[0]]},
                {"cases": numbers(one.cases)}, marker=_marker(one.setting, one.strategy, filled=filled),
                hover=f"{label_text(f'{one.strategy}{one.where}')}<br>%{{x}} ranks: %{{y:,.4g}} tokens/s/GPU",
            )
        )  # fmt: skip
    figure.add_traces([*_ideals(shown), *_bounds(shown)])
    _over(figure, "ranks", {case.spec.job.gpus for curve in shown for case in curve.cases}, len(shown))
    least, most = (of(rate for curve in shown for rate in curve.rates) for of in (min, max))
    figure.update_yaxes(title_text="tokens/s/GPU", rangemode="normal" if least > _FLAT * most else "tozero")
    # Throughput per rank in the largest world over the smallest.
    over = f", {curves[0].range}" if len({curve.range for curve in curves}) == 1 else ""
    ends = [
        f"{_name(curve, curves)} {format_percent(curve.kept)}{'' if over else f' ({curve.range})'}"
        for curve in sorted(curves, key=lambda curve: -curve.kept)
    ]
    text = ends[0] if len(ends) == 1 else f"best {ends[0]}, worst {ends[-1]}"
    cases, title = tuple(case for _, case, _ in points), "Throughput per rank as ranks are added"
    caption = f"Throughput over world sizes: {_PLACE.sub('', curves[0].setting.label)}"
    return Drawn(
        chart=chart(identity, title, figure, f"Scaling efficiency{over}: {text}."),
        table=_numbers(rows, "Scaling in numbers", caption, cases),
        cases=cases,
    )


def _name(curve: Curve, among: Sequence[Curve]) -> str:
    """The strategy alone if all curves share fidelity and cluster."""
    return f"{curve.strategy}{curve.where if len({one.place for one in among}) > 1 else ''}"


def _ideals(curves: Sequence[Curve]) -> Iterator[go.Scatter]:
    """The throughput per rank of the best curve in its smallest world, for each fidelity and cluster."""
    places = dict.fromkeys(curve.place for curve in curves)
    for place in places:
        here = [curve for curve in curves if curve.place == place]
        best = max(here, key=lambda curve: curve.rates[0])
        cases = [case for curve in here for case in curve.cases]
        ends = best.cases[0].spec.job.gpus, max(case.spec.job.gpus for case in cases)
        yield _level(f"ideal{best.where if len(places) > 1 else ''}", ends, best.rates[0], cases)


def _bounds(curves: Sequence[Curve]) -> Iterator[go.Scatter]:
    """The highest throughput that compute and the network allow any strategy, if the network's rate is known."""
    best: dict[int, tuple[float, int]] = {}
    for case in (case for curve in curves for case in curve.cases):
        share = case.metrics["overlap_efficiency"]
        if share and case.fidelity == "measured":
            rate = (case.metrics[_METRIC] or 0.0) / share
            best[case.spec.job.gpus] = max(best.get(case.spec.job.gpus, (0.0, 0)), (rate, case.number))
    if best:
        sizes = sorted(best)
        yield polyline(
            "bound by compute and network", sizes, [best[size][0] for size in sizes],
            {"color": INK, "dash": "dot", "width": 1.5}, {"cases": [best[size][1] for size in sizes]},
            marker={"symbol": "line-ns", "size": 12, "color": INK},
            hover="%{x} ranks: at most %{y:,.4g} tokens/s/GPU",
        )  # fmt: skip


# --- step time relative to DDP over tokens per rank


def crossovers(evidence: Evidence) -> tuple[Drawn, ...]:
    """When sharding pays: a chart for each group of settings that differ only in the sequence length, if DDP and
    another ran at two lengths or more.

    Communication grows with the parameters and compute with the tokens, so curves fall towards 1; below 1, sharding is
    faster.
    """
    groups: dict[tuple[object, ...], dict[str, list[_Ratio]]] = {}
    for setting in evidence.ranked:
        for ratio in ratios(setting, BASELINE):
            case = ratio.case
            if ratio.step_time is not None:
                key = shared(case.spec, True, but=("seq_len",)), case.spec.job.gpus, machine(case.header.environment)
                tokens = case.spec.job.global_batch * case.spec.job.seq_len // case.spec.job.gpus
                point = tokens, case, ratio.step_time, ratio.peak_memory, setting
                groups.setdefault(key, {}).setdefault(case.strategy, []).append(point)
    found: list[Drawn] = []
    for group in groups.values():
        curves = [sorted(points, key=lambda point: point[0]) for points in group.values()]
        curves = [points for points in curves if points[0][0] < points[-1][0]]
        if curves:
            found.append(_crossover(sorted(curves, key=lambda points: points[0][0]), f"x{len(found)}-crossover"))
    return tuple(found)


_Ratio = tuple[int, CaseResult, Comparison, float | None, Setting]
"""Tokens of a rank and step, the case, its step time and peak memory over DDP's, and its setting."""


def _crossover(curves: Sequence[Sequence[_Ratio]], identity: str) -> Drawn:
    every = [point for points in curves for point in points]
    counts, cases = sorted({tokens for tokens, *_ in every}), tuple(case for _, case, *_ in every)
    rows: list[Row] = [
        {
            "case": case.full_label,
            "tokens per rank": tokens,
            "step time / ddp (95 % interval)": ratio_text(time),
            "peak memory / ddp": times(memory),
        }
        for tokens, case, time, memory, _ in every
    ]
    figure, texts = go.Figure(), []
    for points in curves:
        setting, name = points[0][4], points[0][1].strategy
        figure.add_trace(
            polyline(
                name, [tokens for tokens, *_ in points], [time.ratio for _, _, time, *_ in points],
                {"color": colour(setting, name)}, {"cases": numbers([case for _, case, *_ in points])},
                marker=_marker(setting, name), customdata=[ratio_text(time) for _, _, time, *_ in points],
                hover=f"{label_text(name)}<br>%{{x:,}} tokens per rank: %{{customdata}}",
            )
        )  # fmt: skip
        first, last = (f"{points[end][2].ratio:.2f} at {points[end][0]:,} tokens per rank" for end in (0, -1))
        faster = ", ".join(f"{tokens:,}" for tokens, _, time, *_ in points if time.high < 1)
        texts.append(f"{name} {first}, {last}{f' (faster at {faster})' if faster else ''}")
    figure.add_trace(_level(BASELINE, (counts[0], counts[-1]), 1, cases))
    _over(figure, "tokens per rank", counts, len(curves))
    figure.update_yaxes(title_text="step time / ddp", rangemode="tozero")
    spec, title = cases[0].spec, "Step time relative to ddp as tokens per rank grow"
    caption = f"Step time relative to ddp: {spec.job.model}, {ranks(spec.job.gpus)}{cases[0].kind}"
    return Drawn(
        chart=chart(identity, title, figure, f"Step time relative to ddp: {'; '.join(texts)}."),
        table=_numbers(rows, "Ratios in numbers", caption, cases),
        cases=cases,
    )


def _numbers(rows: Sequence[Row], title: str, caption: str, cases: Sequence[CaseResult]) -> Table:
    return table(rows, title=title, caption=caption, text=["machine"], cases=numbers(cases), where="detail")


def _over(figure: go.Figure, title: str, ticks: Iterable[int], curves: int) -> None:
    """A logarithmic axis with a tick for each of the values."""
    ticks = sorted(ticks)
    figure.update_layout(template=THEME, height=300 + 12 * curves, showlegend=True)
    figure.update_xaxes(
        title_text=title, type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks], minor_showgrid=False
    )


def _marker(setting: Setting, strategy: str, *, filled: bool = True) -> dict[str, Any]:
    symbol = MARKERS[setting.known.index(strategy) % len(MARKERS) if strategy in setting.known else 0]
    return {"symbol": symbol if filled else f"{symbol}-open", "size": 9}


def _level(name: str, ends: tuple[int, int], y: float, cases: Sequence[CaseResult]) -> go.Scatter:
    line = {"color": INK, "dash": DASHES[4], "width": 1.5}
    return polyline(name, ends, [y, y], line, {"any": numbers(cases)})


# --- each case over runs


def trend(runs: Sequence[Run], evidence: Evidence) -> Drawn | None:
    """The step time of each case that several runs measured, relative to its first run; None if no case ended ok in
    two runs on one machine.
    """
    cases = {(case.spec, machine(case.header.environment)): case for case in evidence.cases}
    every = [one for one in series_of(runs, "step_time_s") if len(one.points) > 1]
    of = {one: cases[one.spec, one.environment] for one in every if (one.spec, one.environment) in cases}
    if not of:
        return None
    shown = sorted(of, key=lambda one: (-len(one.points), -abs(one.change - 1)))[:MOST_TRENDS]
    furthest = max(of, key=lambda one: abs(one.change - 1))
    text = (
        f"{len(of)} {'case' if len(of) == 1 else 'cases'} over up to {max(len(one.points) for one in of)} runs; "
        f"the largest change is {furthest.case}: {furthest.change:.3f} times its first run."
    )
    if len(shown) < len(of):
        text += f" The chart shows {len(shown)} of {len(of)} cases; the table has all."
    ordered = sorted(runs, key=lambda run: run.header.started_at)
    place_of = {(run.header.run_id, run.header.started_at): place for place, run in enumerate(ordered)}
    figure = go.Figure()
    for place, one in enumerate(one for one in of if one in shown):
        figure.add_trace(
            polyline(
                one.case, [place_of[point.run, point.started_at] for point in one.points],
                [point.value / one.points[0].value for point in one.points],
                {"color": OKABE_ITO[place % len(OKABE_ITO)], "dash": DASHES[place % len(DASHES)]},
                {"case": of[one].number}, marker={"symbol": MARKERS[place % len(MARKERS)], "size": 8},
                customdata=[f"{label_text(point.run)}: {format_seconds(point.value)}" for point in one.points],
                hover=f"{label_text(one.case)}<br>%{{customdata}}",
            )
        )  # fmt: skip
    figure.update_layout(template=THEME, height=300 + 12 * len(shown), showlegend=True)
    names = [label_text(name) for name in run_names(ordered)]
    places = list(range(0, len(names), -(-len(names) // 12)))
    figure.update_xaxes(title_text="run, oldest first", tickvals=places, ticktext=[names[place] for place in places])
    figure.update_yaxes(title_text="step time / first run")
    rows = [trend_row(one, lambda value: Quantity(value, "s")) for one in of]
    return Drawn(
        chart=chart("history", "Step time over runs", figure, text),
        table=_numbers(rows, "The trend in numbers", "Step time of each case over runs", tuple(of.values())),
        cases=tuple(of.values()),
    )
