"""Curves over something that varies: throughput over ranks, step time relative to DDP over tokens, each case over runs.

A *curve* is one strategy. One chart holds curves of cases that differ in nothing else.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Evidence, Setting, machine, shared
from refshard.analysis.history import Series, series_of
from refshard.analysis.ratios import Ratio, ratios
from refshard.quantities import format_percent, format_seconds
from refshard.records import Run
from refshard.report.blocks import Quantity, Row, Table, table
from refshard.report.draw.charts import THEME, chart, label_text
from refshard.report.draw.palette import DASHES, INK, MARKERS, OKABE_ITO
from refshard.report.run.cells import ratio_text
from refshard.report.run.charts import Drawn, colour, polyline
from refshard.report.run.origin import run_names
from refshard.report.run.tables import moved, trend_row
from refshard.specs.case import Fidelity, spelled

_DASH: dict[Fidelity, str] = {"measured": "solid", "emulated": "dash", "dryrun": "dashdot", "simulated": "dot"}
_METRIC = "tokens_per_s_gpu"
_FLAT = 0.7  # least over largest throughput above which an axis from 0 would show one line
_OF_A_PLACE = re.compile(r", (measured|(emulated|dry run|simulated) on [^,]+|[\d,]+ ranks resident)(?=,|$)")
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
        """What curves must share for one ideal."""
        return self.cases[0].fidelity, self.cases[0].spec.job.cluster

    @property
    def where(self) -> str:
        """After a comma, where it ran if that was not measured."""
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
        case = setting.cases[0]
        per_rank = case.header.suite.fixes_batch_per_rank
        alike = shared(case.spec, per_rank, but=("fidelity", "cluster"))
        for strategy in setting.strategies:
            found = [case for case in setting.cases if case.strategy == strategy and case.ok and case.metrics[_METRIC]]
            if len({case.spec.job.gpus for case in found}) > 1:
                cases = tuple(sorted(found, key=lambda case: case.spec.job.gpus))
                curve = Curve(setting=setting, strategy=strategy, cases=cases)
                groups.setdefault((alike, per_rank, machine(case.header.environment)), []).append(curve)
    return tuple(_scaling(curves, f"g{place}") for place, curves in enumerate(groups.values()))


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
    cases = tuple(case for _, case, _ in points)
    caption = f"Throughput over world sizes: {_OF_A_PLACE.sub('', curves[0].setting.label)}"
    title = "Throughput per rank as ranks are added"
    return Drawn(
        chart=chart(f"{identity}-scaling", title, _draw_scaling(curves), _scaling_text(curves)),
        table=_numbers(rows, "Scaling in numbers", caption, cases),
        cases=cases,
    )


def _numbers(rows: Sequence[Row], title: str, caption: str, cases: Sequence[CaseResult]) -> Table:
    numbers = [case.number for case in cases]
    return table(rows, title=title, caption=caption, cases=numbers, where="detail")


def _scaling_text(curves: Sequence[Curve]) -> str:
    """The best and the worst scaling efficiency: throughput per rank in the largest world over the smallest."""
    ordered = sorted(curves, key=lambda curve: -curve.kept)
    over = f", {curves[0].range}" if len({curve.range for curve in curves}) == 1 else ""
    names = _names(curves)
    text = [f"{names[curve]} {format_percent(curve.kept)}{'' if over else f' ({curve.range})'}" for curve in ordered]
    if len(text) == 1:
        return f"Scaling efficiency{over}: {text[0]}."
    return f"Scaling efficiency{over}: best {text[0]}, worst {text[-1]}."


def _names(curves: Sequence[Curve]) -> dict[Curve, str]:
    """The strategy alone if all curves share fidelity and cluster."""
    same = len({curve.place for curve in curves}) == 1
    return {curve: curve.strategy if same else f"{curve.strategy}{curve.where}" for curve in curves}


def _draw_scaling(curves: Sequence[Curve]) -> go.Figure:
    """Tokens/s/GPU over world sizes; of many curves, those with the highest throughput."""
    shown = sorted(curves, key=lambda curve: -max(curve.rates))[:MOST_CURVES]
    shown = [curve for curve in curves if curve in shown]
    figure = go.Figure()
    for one, name in _names(shown).items():
        # The strategy by its colour and marker, the fidelity by the dash and whether the marker is filled.
        hollow = "" if one.place[0] == "measured" else "-open"
        figure.add_trace(
            polyline(
                name, [case.spec.job.gpus for case in one.cases], one.rates,
                {"color": colour(one.setting, one.strategy), "dash": _DASH[one.place[0]]},
                {"cases": [case.number for case in one.cases]},
                marker={"symbol": _marker(one.setting, one.strategy) + hollow, "size": 9},
                hover=f"{label_text(f'{one.strategy}{one.where}')}<br>%{{x}} ranks: %{{y:,.4g}} tokens/s/GPU",
            )
        )  # fmt: skip
    figure.add_traces([*_ideals(shown), *_bounds(shown)])
    sizes = sorted({case.spec.job.gpus for curve in shown for case in curve.cases})
    _over(figure, "ranks", sizes, len(shown))
    least, most = (of(rate for curve in shown for rate in curve.rates) for of in (min, max))
    return figure.update_yaxes(title_text="tokens/s/GPU", rangemode="normal" if least > _FLAT * most else "tozero")


def _over(figure: go.Figure, title: str, ticks: Sequence[int], curves: int) -> None:
    """A logarithmic axis with a tick for each of the values."""
    figure.update_layout(template=THEME, height=300 + 12 * curves, showlegend=True)
    figure.update_xaxes(
        title_text=title, type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks], minor_showgrid=False
    )


def _marker(setting: Setting, strategy: str) -> str:
    return MARKERS[setting.known.index(strategy) % len(MARKERS) if strategy in setting.known else 0]


def _level(name: str, ends: tuple[int, int], y: float, cases: Iterable[CaseResult]) -> go.Scatter:
    line = {"color": INK, "dash": DASHES[4], "width": 1.5}
    return polyline(name, ends, [y, y], line, {"any": [case.number for case in cases]})


def _ideals(curves: Sequence[Curve]) -> Iterable[go.Scatter]:
    """The throughput per rank of the best curve in its smallest world, for each fidelity and cluster."""
    places = dict.fromkeys(curve.place for curve in curves)
    for place in places:
        here = [curve for curve in curves if curve.place == place]
        best = max(here, key=lambda curve: curve.rates[0])
        cases = [case for curve in here for case in curve.cases]
        ends = best.cases[0].spec.job.gpus, max(case.spec.job.gpus for case in cases)
        yield _level(f"ideal{best.where if len(places) > 1 else ''}", ends, best.rates[0], cases)


def _bounds(curves: Sequence[Curve]) -> Iterable[go.Scatter]:
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
    groups: dict[tuple[object, ...], dict[str, list[tuple[Setting, Ratio]]]] = {}
    for setting in evidence.ranked:
        for ratio in ratios(setting, BASELINE):
            case = ratio.case
            if ratio.step_time is not None:
                key = shared(case.spec, True, but=("seq_len",)), case.spec.job.gpus, machine(case.header.environment)
                groups.setdefault(key, {}).setdefault(case.strategy, []).append((setting, ratio))
    found: list[Drawn] = []
    for group in groups.values():
        curves = [
            (members[0][0], sorted((ratio for _, ratio in members), key=lambda ratio: tokens(ratio.case)))
            for members in sorted(group.values(), key=lambda members: min(tokens(ratio.case) for _, ratio in members))
            if len({tokens(ratio.case) for _, ratio in members}) > 1
        ]
        if curves:
            found.append(_crossover(curves, f"x{len(found)}"))
    return tuple(found)


def tokens(case: CaseResult) -> int:
    """Tokens of a rank and step."""
    return case.spec.job.global_batch * case.spec.job.seq_len // case.spec.job.gpus


def _crossover(curves: Sequence[tuple[Setting, Sequence[Ratio]]], identity: str) -> Drawn:
    every = [ratio for _, each in curves for ratio in each]
    counts, cases = sorted({tokens(ratio.case) for ratio in every}), tuple(ratio.case for ratio in every)
    rows: list[Row] = [
        {
            "case": ratio.case.full_label,
            "tokens per rank": tokens(ratio.case),
            "step time / ddp (95 % interval)": ratio_text(ratio.step_time),
            "peak memory / ddp": None if ratio.peak_memory is None else f"{ratio.peak_memory:.2f}",
        }
        for ratio in every
        if ratio.step_time is not None
    ]
    figure, texts = go.Figure(), []
    for setting, each in curves:
        timed = [(tokens(ratio.case), ratio.step_time) for ratio in each if ratio.step_time is not None]
        name = each[0].case.strategy
        figure.add_trace(
            polyline(
                name, [count for count, _ in timed], [time.ratio for _, time in timed],
                {"color": colour(setting, name)}, {"cases": [ratio.case.number for ratio in each]},
                marker={"symbol": _marker(setting, name), "size": 9},
                customdata=[ratio_text(time) for _, time in timed],
                hover=f"{label_text(name)}<br>%{{x:,}} tokens per rank: %{{customdata}}",
            )
        )  # fmt: skip
        first, last = (f"{time.ratio:.2f} at {count:,} tokens per rank" for count, time in (timed[0], timed[-1]))
        faster = ", ".join(f"{count:,}" for count, time in timed if time.high < 1)
        texts.append(f"{name} {first}, {last}{f' (faster at {faster})' if faster else ''}")
    figure.add_trace(_level(BASELINE, (counts[0], counts[-1]), 1, cases))
    _over(figure, "tokens per rank", counts, len(curves))
    figure.update_yaxes(title_text="step time / ddp", rangemode="tozero")
    spec = cases[0].spec
    caption = f"Step time relative to ddp: {spec.job.model}, {spec.job.gpus} ranks{cases[0].kind}"
    title, text = "Step time relative to ddp as tokens per rank grow", "; ".join(texts)
    return Drawn(
        chart=chart(f"{identity}-crossover", title, figure, f"Step time relative to ddp: {text}."),
        table=_numbers(rows, "Ratios in numbers", caption, cases),
        cases=cases,
    )


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
    drawn = sorted(of, key=lambda one: (-len(one.points), -abs(moved(one) - 1)))[:MOST_TRENDS]
    furthest = max(of, key=lambda one: abs(moved(one) - 1))
    text = (
        f"{len(of)} {'case' if len(of) == 1 else 'cases'} over up to {max(len(one.points) for one in of)} runs; "
        f"the largest change is {furthest.case}: {moved(furthest):.3f} times its first run."
    )
    if len(drawn) < len(of):
        text += f" The chart shows {len(drawn)} of {len(of)} cases; the table has all."
    rows = [trend_row(one, lambda value: Quantity(value, "s")) for one in of]
    figure = _draw_trend(runs, {one: case for one, case in of.items() if one in drawn})
    return Drawn(
        chart=chart("history", "Step time over runs", figure, text),
        table=table(rows, text=["machine"], title="The trend in numbers", caption="Step time of each case over runs",
                    cases=[case.number for case in of.values()], where="detail"),
        cases=tuple(of.values()),
    )  # fmt: skip


def _draw_trend(runs: Sequence[Run], shown: dict[Series, CaseResult]) -> go.Figure:
    ordered = sorted(runs, key=lambda run: run.header.started_at)
    place_of = {(run.header.run_id, run.header.started_at): place for place, run in enumerate(ordered)}
    figure = go.Figure()
    for place, (one, case) in enumerate(shown.items()):
        points = [(place_of[point.run, point.started_at], point.value / one.points[0].value) for point in one.points]
        figure.add_trace(
            polyline(
                one.case, [x for x, _ in points], [y for _, y in points],
                {"color": OKABE_ITO[place % len(OKABE_ITO)], "dash": DASHES[place % len(DASHES)]},
                {"case": case.number}, marker={"symbol": MARKERS[place % len(MARKERS)], "size": 8},
                customdata=[f"{label_text(point.run)}: {format_seconds(point.value)}" for point in one.points],
                hover=f"{label_text(one.case)}<br>%{{customdata}}",
            )
        )  # fmt: skip
    figure.update_layout(template=THEME, height=300 + 12 * len(shown), showlegend=True)
    names = [label_text(name) for name in run_names(ordered)]
    places = list(range(0, len(names), -(-len(names) // 12)))
    figure.update_xaxes(title_text="run, oldest first", tickvals=places, ticktext=[names[place] for place in places])
    return figure.update_yaxes(title_text="step time / first run")
