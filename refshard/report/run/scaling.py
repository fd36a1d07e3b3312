"""How throughput changes with the number of ranks, compared with the ideal and the physical bound.

One chart holds cases that differ only in strategy, world size, fidelity and cluster; a *curve* is one strategy at one
fidelity on one cluster. Ideal is the throughput per rank of the best curve in its smallest world, for each fidelity and
cluster.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Evidence, Setting, machine, shared
from refshard.quantities import format_percent, format_rate
from refshard.report.draw.charts import THEME, Chart, chart, label_text
from refshard.report.draw.palette import DASHES, INK, MARKERS
from refshard.report.run.charts import colour
from refshard.specs.case import Fidelity, spelled

_DASH: dict[Fidelity, str] = {"measured": "solid", "emulated": "dash", "dryrun": "dashdot", "simulated": "dot"}
_METRIC = "tokens_per_s_gpu"
_FLAT = 0.7  # least over largest throughput above which an axis from 0 would show one line
_OF_A_PLACE = re.compile(r", (measured|(emulated|dry run|simulated) on [^,]+|[\d,]+ ranks resident)(?=,|$)")
"""The fidelity in a setting's label, which each curve's label repeats."""
MOST_CURVES = 12
"""Curves in a chart; its table has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One strategy at one fidelity over world sizes, two or more, ascending."""

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
        return self.cases[0].fidelity, self.cases[0].spec.cluster

    @property
    def label(self) -> str:
        """The strategy, and where it ran if that was not measured."""
        fidelity, cluster = self.place
        return self.strategy if fidelity == "measured" else f"{self.strategy}, {spelled(fidelity)} on {cluster}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The curves of one chart, with their table."""

    label: str
    curves: tuple[Curve, ...]
    table: pd.DataFrame
    cases: tuple[CaseResult, ...]
    chart: Chart


def scalings(evidence: Evidence) -> tuple[Scaling, ...]:
    """One for each group of settings in which a strategy ran in two worlds or more."""
    groups: dict[tuple[object, ...], list[Curve]] = {}
    for setting in evidence.ranked:
        curves = [curve for strategy in setting.strategies if (curve := _curve(setting, strategy))]
        groups.setdefault(_group(setting), []).extend(curves)
    return tuple(_scaling(curves, f"g{place}") for place, curves in enumerate(groups.values()) if curves)


def _group(setting: Setting) -> tuple[object, ...]:
    case = setting.cases[0]
    spec, per_rank = case.spec, case.header.suite.fixes_batch_per_rank
    return shared(spec, per_rank, but=("fidelity", "cluster")), per_rank, machine(case.header.environment)


def _curve(setting: Setting, strategy: str) -> Curve | None:
    found = [case for case in setting.cases if case.strategy == strategy and case.ok and case.metrics[_METRIC]]
    if len({case.spec.world_size for case in found}) < 2:
        return None
    return Curve(setting=setting, strategy=strategy, cases=tuple(sorted(found, key=lambda case: case.spec.world_size)))


def _scaling(curves: Sequence[Curve], identity: str) -> Scaling:
    rows = [(curve, case) for curve in curves for case in curve.cases]
    return Scaling(
        label=_OF_A_PLACE.sub("", curves[0].setting.label),
        curves=tuple(curves),
        table=pd.DataFrame([_row(curve, case) for curve, case in rows]),
        cases=tuple(case for _, case in rows),
        chart=chart(f"{identity}-scaling", "throughput over world sizes", draw(curves), sentence(curves)),
    )


def _row(curve: Curve, case: CaseResult) -> dict[str, str]:
    rate, bound = case.metrics[_METRIC] or 0.0, case.metrics["overlap_efficiency"]
    return {
        "case": case.full_label,
        "tokens/s/GPU": format_rate(rate),
        "tokens/s": format_rate(rate * case.spec.world_size),
        "scaling efficiency": format_percent(rate / curve.rates[0]),
        "of the physical bound": format_percent(bound),
    }


def sentence(curves: Sequence[Curve]) -> str:
    """The best and the worst scaling efficiency: throughput per rank in the largest world over the smallest."""
    ordered = sorted(curves, key=lambda curve: -curve.kept)
    ranges = {_range(curve) for curve in curves}
    over = f", {ranges.pop()}" if len(ranges) == 1 else ""
    names = _names(curves)
    told = [f"{names[curve]} {format_percent(curve.kept)}{'' if over else f' ({_range(curve)})'}" for curve in ordered]
    if len(told) == 1:
        return f"Scaling efficiency{over}: {told[0]}."
    return f"Scaling efficiency{over}: best {told[0]}, worst {told[-1]}."


def _names(curves: Sequence[Curve]) -> dict[Curve, str]:
    """The strategy alone if all curves share fidelity and cluster."""
    same = len({curve.place for curve in curves}) == 1
    return {curve: curve.strategy if same else curve.label for curve in curves}


def _range(curve: Curve) -> str:
    first, last = curve.cases[0].spec.world_size, curve.cases[-1].spec.world_size
    return f"{first:,} to {ranks(last)}"


def draw(curves: Sequence[Curve]) -> go.Figure:
    """Tokens/s/GPU over world sizes; of many curves, those with the highest throughput."""
    shown = sorted(curves, key=lambda curve: -max(curve.rates))[:MOST_CURVES]
    shown = [curve for curve in curves if curve in shown]
    sizes = sorted({case.spec.world_size for curve in shown for case in curve.cases})
    figure = go.Figure(
        [*(_trace(curve, name) for curve, name in _names(shown).items()), *_ideals(shown), *_bounds(shown)]
    )
    figure.update_layout(template=THEME, height=300 + 12 * len(shown), showlegend=True)
    figure.update_xaxes(
        title_text="ranks", type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes], minor_showgrid=False
    )
    least, most = (of(rate for curve in shown for rate in curve.rates) for of in (min, max))
    return figure.update_yaxes(title_text="tokens/s/GPU", rangemode="normal" if least > _FLAT * most else "tozero")


def _trace(curve: Curve, name: str) -> go.Scatter:
    """The strategy by its colour and marker, the fidelity by the dash and whether the marker is filled."""
    paint = colour(curve.setting, curve.strategy)
    place = curve.setting.known.index(curve.strategy) if curve.strategy in curve.setting.known else 0
    hollow = "" if curve.place[0] == "measured" else "-open"
    return go.Scatter(
        name=label_text(name),
        x=[case.spec.world_size for case in curve.cases],
        y=[float(f"{rate:.6g}") for rate in curve.rates],
        mode="lines+markers",
        line={"color": paint, "dash": _DASH[curve.place[0]]},
        marker={"symbol": MARKERS[place % len(MARKERS)] + hollow, "size": 9},
        meta={"cases": [case.number for case in curve.cases]},
        hovertemplate=f"{label_text(curve.label)}<br>%{{x}} ranks: %{{y:,.4g}} tokens/s/GPU<extra></extra>",
    )


def _ideals(curves: Sequence[Curve]) -> Iterable[go.Scatter]:
    """A level for each fidelity and cluster, from the smallest world of its best curve on."""
    for place in dict.fromkeys(curve.place for curve in curves):
        here = [curve for curve in curves if curve.place == place]
        best = max(here, key=lambda curve: curve.rates[0])
        same = len({curve.place for curve in curves}) == 1
        where = "" if same or place[0] == "measured" else f", {spelled(place[0])} on {place[1]}"
        yield _level(f"ideal{where}", best.cases[0].spec.world_size, here, best.rates[0])


def _level(name: str, first: int, here: Sequence[Curve], rate: float) -> go.Scatter:
    last = max(case.spec.world_size for curve in here for case in curve.cases)
    cases = [case.number for curve in here for case in curve.cases]
    return go.Scatter(
        name=label_text(name),
        x=[first, last],
        y=[float(f"{rate:.6g}")] * 2,
        mode="lines",
        line={"color": INK, "dash": DASHES[4], "width": 1.5},
        meta={"any": cases},
        hoverinfo="skip",
    )


def _bounds(curves: Sequence[Curve]) -> Iterable[go.Scatter]:
    """The highest throughput that compute and the network allow any strategy, if the network's rate is known."""
    best: dict[int, tuple[float, int]] = {}
    for case in (case for curve in curves for case in curve.cases):
        share = case.metrics["overlap_efficiency"]
        if share and case.fidelity == "measured":
            rate = (case.metrics[_METRIC] or 0.0) / share
            best[case.spec.world_size] = max(best.get(case.spec.world_size, (0.0, 0)), (rate, case.number))
    if best:
        sizes = sorted(best)
        yield go.Scatter(
            name="bound by compute and network",
            x=sizes,
            y=[float(f"{best[size][0]:.6g}") for size in sizes],
            mode="lines+markers",
            marker={"symbol": "line-ns", "size": 12, "color": INK},
            line={"color": INK, "dash": "dot", "width": 1.5},
            meta={"cases": [best[size][1] for size in sizes]},
            hovertemplate="%{x} ranks: at most %{y:,.4g} tokens/s/GPU<extra></extra>",
        )
