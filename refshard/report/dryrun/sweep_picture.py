"""The chart of a sweep: speed against memory, the front, and what the GPU has."""

from collections.abc import Sequence

import plotly.graph_objects as go

from refshard.dryrun.sweep import Row, front
from refshard.quantities import format_bytes
from refshard.report.draw.charts import THEME, Chart, chart, label_text, short
from refshard.report.draw.palette import INK, MARKERS, OKABE_ITO, RED
from refshard.report.dryrun.sweep import named

_GIB = 2**30


def speed_and_memory(rows: Sequence[Row]) -> Chart:
    """Tokens/s/GPU against peak reserved memory; what does not fit is hollow."""
    drawn = [row for row in rows if row.tried.tokens_per_s]
    best = front(rows)
    figure = go.Figure()
    figure.add_scatter(
        x=short(row.tried.reserved_bytes / _GIB for row in best),
        y=[round(row.tried.tokens_per_s or 0) for row in best],
        mode="lines", line={"color": INK, "width": 1.5, "dash": "dot"}, hoverinfo="skip", showlegend=False,
        meta={"front": True},
    )  # fmt: skip
    sizes = list(dict.fromkeys(row.trial.request.world_size for row in drawn))
    for place, size in enumerate(sizes):
        some = [row for row in drawn if row.trial.request.world_size == size]
        marker = MARKERS[place % len(MARKERS)]
        figure.add_scatter(
            name=f"{size:,} GPUs", x=short(row.tried.reserved_bytes / _GIB for row in some),
            y=[round(row.tried.tokens_per_s or 0) for row in some], mode="markers",
            marker={"size": 11, "color": OKABE_ITO[place % len(OKABE_ITO)],
                    "symbol": [marker if row.tried.fits else f"{marker}-open" for row in some]},
            text=[_tip(row) for row in some], hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=short(row.tried.reserved_bytes / _GIB for row in drawn),
        y=[round(row.tried.tokens_per_s or 0) for row in drawn], mode="markers+text", marker={"size": 12, "opacity": 0},
        text=[label_text(named(row.choices)) for row in drawn], hoverinfo="skip", showlegend=False,
        meta={"labels": True},
    )  # fmt: skip
    limit = min(row.tried.usable_bytes for row in drawn)
    figure.add_shape(
        type="line", x0=limit / _GIB, x1=limit / _GIB, yref="paper", y0=0, y1=1, name="limit",
        line={"color": RED, "dash": "dash", "width": 2},
    )  # fmt: skip
    figure.add_annotation(
        x=limit / _GIB, yref="paper", y=1, xanchor="right", yanchor="top", showarrow=False,
        text=f"usable: {format_bytes(limit)}",
    )  # fmt: skip
    figure.update_layout(template=THEME, height=400, showlegend=len(sizes) > 1, hovermode="closest", margin={"t": 24})
    figure.update_xaxes(title_text="peak reserved per GPU, GiB (lower is better)", rangemode="tozero")
    figure.update_yaxes(title_text="tokens/s/GPU (higher is better)", rangemode="tozero")
    listed = "; ".join(
        f"{named(row.choices)} ({row.tried.tokens_per_s:,.0f}, {format_bytes(row.tried.reserved_bytes)})"
        for row in best
    )
    return chart(
        "speed-memory", "Speed against memory", figure,
        f"Upper left is better. Hollow: does not fit. Dotted, the Pareto front: {listed}.",
    )  # fmt: skip


def _tip(row: Row) -> str:
    tried = row.tried
    lines = [f"<b>{label_text(named(row.choices))}</b>", f"{tried.tokens_per_s:,.0f} tokens/s/GPU",
             f"{format_bytes(tried.reserved_bytes)} reserved at the peak"]  # fmt: skip
    return "<br>".join(lines)
