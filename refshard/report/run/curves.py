"""Curves: throughput over ranks, step time relative to DDP over tokens, each case over runs.

A *curve* is one strategy. One chart holds curves of cases that differ in nothing else.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.compare import Comparison
from refshard.analysis.evidence import Evidence, Setting, machine, shared
from refshard.analysis.history import series_of
from refshard.analysis.ratios import ratios
from refshard.quantities import format_percent, format_seconds
from refshard.records import Run
from refshard.report.blocks import Quantity, Row, Table, table
from refshard.report.draw.charts import THEME, chart, label_text
from refshard.report.draw.palette import DASHES, INK, MARKERS, OKABE_ITO
from refshard.report.run.cells import ratio_text, times
from refshard.report.run.charts import Drawn, colour, polyline
from refshard.report.run.origin import run_names
from refshard.report.run.tables import numbers, trend_row
from refshard.specs.case import Fidelity, spelled

_DASH: dict[Fidelity, str] = {"measured": "solid", "emulated": "dash", "dryrun": "dashdot", "simulated": "dot"}
_METRIC = "tokens_per_s_gpu"
_FLAT = 0.7  # least over largest throughput above which an axis from 0 would show one line
_PLACE = re.compile(r", (measured|(emulated|dry run|simulated) on [^,]+|[\d,]+ ranks resident)(?=,|$)")
"""The fidelity in a setting's label, which each curve's label repeats."""
MOST_CURVES = 12
"""Curves in a chart of throughput; its table has all."""
MOST_TRENDS = 8
"""Curves in a chart over runs."""
BASELINE = "ddp"
"""The strategy that shards nothing, which the others are compared with as tokens grow."""


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
        return self.cases[0].fidelity, self.cases[0].spec.cluster

    @property
    def where(self) -> str:
        """The fidelity and the cluster after a comma, unless it was measured."""
        fidelity, cluster = self.place
        return "" if fidelity == "measured" else f", {spelled(fidelity)} on {cluster}"

    @property
    def range(self) -> str:
        """Its world sizes."""
        return f"{self.cases[0].spec.world_size:,} to {ranks(self.cases[-1].spec.world_size)}"


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
            if len({case.spec.world_size for case in found}) > 1:
                cases = tuple(sorted(found, key=lambda case: case.spec.world_size))
                groups.setdefault(key, []).append(Curve(setting=setting, strategy=strategy, cases=cases))
    return tuple(_scaling(curves, f"g{place}-scaling") for place, curves in enumerate(groups.values()))


def _scaling(curves: Sequence[Curve], identity: str) -> Drawn:
    points = [(curve, case, rate) for curve in curves for case, rate in zip(curve.cases, curve.rates)]
    rows: list[Row] = [
        {
            "case": case.full_label,
            "tokens/s/GPU": Quantity(rate, "rate"),
            "tokens/s": Quantity(rate * case.spec.world_size, "rate"),
            "scaling efficiency": Quantity(rate / curve.rates[0], "share"),
            "of the physical bound": Quantity(case.metrics["overlap_efficiency"], "share"),
        }
        for curve, case, rate in points
    ]
    shown = sorted(curves, key=lambda curve: -max(curve.rates))[:MOST_CURVES]
    figure = go.Figure()
    for one in (curve for curve in curves if curve in shown):
        # The strategy by its colour and marker, the fidelity by the dash and whether the marker is filled.
        filled = one.place[0] == "measured"
        figure.add_trace(
            polyline(
                _name(one, shown), [case.spec.world_size for case in one.cases], one.rates,
                {"color": colour(one.setting, one.strategy), "dash": _DASH[one.place[0]]},
                {"cases": numbers(one.cases)}, marker=_marker(one.setting, one.strategy, filled=filled),
                hover=f"{label_text(f'{one.strategy}{one.where}')}<br>%{{x}} ranks: %{{y:,.4g}} tokens/s/GPU",
            )
        )  # fmt: skip
    figure.add_traces([*_ideals(shown), *_bounds(shown)])
    _over(figure, "ranks", {case.spec.world_size for curve in shown for case in curve.cases}, len(shown))
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
        ends = best.cases[0].spec.world_size, max(case.spec.world_size for case in cases)
        yield _level(f"ideal{best.where if len(places) > 1 else ''}", ends, best.rates[0], cases)


def _bounds(curves: Sequence[Curve]) -> Iterator[go.Scatter]:
    """The highest throughput that compute and the network allow any strategy, if the network's rate is known."""
    best: dict[int, tuple[float, int]] = {}
    for case in (case for curve in curves for case in curve.cases):
        share = case.metrics["overlap_efficiency"]
        if share and case.fidelity == "measured":
            rate = (case.metrics[_METRIC] or 0.0) / share
            best[case.spec.world_size] = max(best.get(case.spec.world_size, (0.0, 0)), (rate, case.number))
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
                key = shared(case.spec, True, but=("seq_len",)), case.spec.world_size, machine(case.header.environment)
                tokens = case.spec.global_batch * case.spec.seq_len // case.spec.world_size
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
    caption = f"Step time relative to ddp: {spec.model}, {ranks(spec.world_size)}{cases[0].kind}"
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
