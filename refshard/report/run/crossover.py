"""When sharding pays: step time relative to DDP as the tokens per rank grow.

One chart holds cases that differ only in strategy and sequence length; a curve is one strategy. Communication grows
with the parameters and compute with the tokens, so curves fall towards 1; below 1, sharding is faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, Setting, machine, shared
from refshard.analysis.ratios import Ratio, ratios
from refshard.report.draw.charts import THEME, Chart, chart, label_text
from refshard.report.draw.palette import DASHES, INK, MARKERS
from refshard.report.run.charts import colour
from refshard.report.run.intervals import ratio_text

BASELINE = "ddp"
"""The strategy that shards nothing, which the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One strategy at one world size over tokens per rank, two counts or more, ascending."""

    setting: Setting
    strategy: str
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """The curves of one chart, with their table."""

    label: str
    table: pd.DataFrame
    cases: tuple[CaseResult, ...]
    chart: Chart


def crossovers(evidence: Evidence) -> tuple[Crossover, ...]:
    """One for each group of settings in which DDP and another ran at two sequence lengths or more."""
    groups: dict[tuple[object, ...], list[tuple[Setting, Ratio]]] = {}
    for setting in evidence.ranked:
        for ratio in ratios(setting, BASELINE):
            if ratio.step_time is not None:
                groups.setdefault(_group(ratio.case), []).append((setting, ratio))
    found = [curves for group in groups.values() if (curves := _curves(group))]
    return tuple(_crossover(curves, f"x{place}") for place, curves in enumerate(found))


def tokens(case: CaseResult) -> int:
    """Tokens of a rank and step."""
    return case.spec.global_batch * case.spec.seq_len // case.spec.world_size


def _group(case: CaseResult) -> tuple[object, ...]:
    return shared(case.spec, True, but=("seq_len",)), case.spec.world_size, machine(case.header.environment)


def _curves(group: Sequence[tuple[Setting, Ratio]]) -> list[Curve]:
    by_strategy: dict[str, list[tuple[Setting, Ratio]]] = {}
    for setting, ratio in sorted(group, key=lambda pair: tokens(pair[1].case)):
        by_strategy.setdefault(ratio.case.strategy, []).append((setting, ratio))
    return [
        Curve(setting=members[0][0], strategy=strategy, ratios=tuple(ratio for _, ratio in members))
        for strategy, members in by_strategy.items()
        if len({tokens(ratio.case) for _, ratio in members}) > 1
    ]


def _crossover(curves: Sequence[Curve], identity: str) -> Crossover:
    rows = [ratio for curve in curves for ratio in curve.ratios]
    spec = rows[0].case.spec
    label = f"{spec.model}, {spec.world_size} ranks{rows[0].case.kind}"
    return Crossover(
        label=label,
        table=pd.DataFrame([_row(ratio) for ratio in rows]),
        cases=tuple(ratio.case for ratio in rows),
        chart=chart(
            f"{identity}-crossover", "step time relative to ddp, over tokens per rank", draw(curves), sentence(curves)
        ),
    )


def _row(ratio: Ratio) -> dict[str, str]:
    time, memory = ratio.step_time, ratio.peak_memory
    assert time is not None
    return {
        "case": ratio.case.full_label,
        "tokens per rank": f"{tokens(ratio.case):,}",
        "step time / ddp (95 % interval)": ratio_text(time),
        "peak memory / ddp": "-" if memory is None else f"{memory:.2f}",
    }


def sentence(curves: Sequence[Curve]) -> str:
    """Each curve's first and last ratio, and at how many tokens it is significantly faster, if at any."""
    return f"Step time relative to ddp: {'; '.join(_told(curve) for curve in curves)}."


def _told(curve: Curve) -> str:
    first, last = curve.ratios[0], curve.ratios[-1]
    told = f"{curve.strategy} {_times(first)}, {_times(last)}"
    faster = [tokens(r.case) for r in curve.ratios if r.step_time is not None and r.step_time.high < 1]
    return f"{told} (faster at {', '.join(f'{count:,}' for count in faster)})" if faster else told


def _times(ratio: Ratio) -> str:
    assert ratio.step_time is not None
    return f"{ratio.step_time.ratio:.2f} at {tokens(ratio.case):,} tokens per rank"


def draw(curves: Sequence[Curve]) -> go.Figure:
    """Ratios over tokens per rank, and the level of ddp itself."""
    counts = sorted({tokens(ratio.case) for curve in curves for ratio in curve.ratios})
    numbers = [ratio.case.number for curve in curves for ratio in curve.ratios]
    level = go.Scatter(
        name="ddp", x=[counts[0], counts[-1]], y=[1, 1], mode="lines", hoverinfo="skip", meta={"any": numbers},
        line={"color": INK, "dash": DASHES[4], "width": 1.5},
    )  # fmt: skip
    figure = go.Figure([*(_trace(curve) for curve in curves), level])
    figure.update_layout(template=THEME, height=300 + 12 * len(curves), showlegend=True)
    figure.update_xaxes(
        title_text="tokens per rank", type="log", tickvals=counts, ticktext=[f"{count:,}" for count in counts],
        minor_showgrid=False,
    )  # fmt: skip
    return figure.update_yaxes(title_text="step time / ddp", rangemode="tozero")


def _trace(curve: Curve) -> go.Scatter:
    known = curve.setting.known
    place = known.index(curve.strategy) if curve.strategy in known else 0
    return go.Scatter(
        name=label_text(curve.strategy),
        x=[tokens(ratio.case) for ratio in curve.ratios],
        y=[float(f"{ratio.step_time.ratio:.4g}") for ratio in curve.ratios if ratio.step_time is not None],
        mode="lines+markers",
        line={"color": colour(curve.setting, curve.strategy)},
        marker={"symbol": MARKERS[place % len(MARKERS)], "size": 9},
        meta={"cases": [ratio.case.number for ratio in curve.ratios]},
        customdata=[ratio_text(ratio.step_time) for ratio in curve.ratios if ratio.step_time is not None],
        hovertemplate=f"{label_text(curve.strategy)}<br>%{{x:,}} tokens per rank: %{{customdata}}<extra></extra>",
    )
