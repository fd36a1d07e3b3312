"""A figure of horizontal bars or of curves as SVG, for readers whose browser runs no script.

It takes plotly's JSON, so that both drawings say the same; of that, what :mod:`refshard.report.draw.charts` uses.
"""

import math
import re
from collections.abc import Iterator, Sequence
from html import escape, unescape
from typing import Any

from markupsafe import Markup

WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 170, 20, 12, 44
_ROW, _BAR = 26, 16
_CURVES_HEIGHT = 320
_LEGEND = 22
_CHARACTER = 7.2
_DASHES = {
    "dash": "8 4", "dot": "2 3", "dashdot": "8 3 2 3", "longdash": "14 5", "longdashdot": "14 4 2 4",
}  # fmt: skip
_SHAPES = {
    "square": "M-4-4h8v8h-8z", "diamond": "M0-5l5 5-5 5-5-5z", "cross": "M-1-5h2v4h4v2h-4v4h-2v-4h-4v-2h4z",
    "triangle-up": "M0-5l5 9h-10z", "x": "M-4-5l4 4 4-4 1 1-4 4 4 4-1 1-4-4-4 4-1-1 4-4-4-4z",
    "triangle-down": "M0 5l5-9h-10z", "star": "M0-5l1.5 3.5 3.5.5-2.5 2.5.5 3.5-3-2-3 2 .5-3.5-2.5-2.5 3.5-.5z",
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "line-ns": "M-1-7h2v14h-2z",
}  # fmt: skip
_HATCHES = {"/": "M0 7L7 0", "\\": "M0 0L7 7", "x": "M0 7L7 0M0 0L7 7", "-": "M0 3.5H7", "|": "M3.5 0V7",
            "+": "M0 3.5H7M3.5 0V7", ".": "M3 3h1v1h-1z"}  # fmt: skip


def still(figure: dict[str, Any]) -> Markup:
    """The drawing; hidden from screen readers, which have the figure's sentence and its table."""
    drawn = _bars(figure) if "rows" in (figure["layout"].get("meta") or {}) else _curves(figure)
    return Markup("".join(drawn))


def hatches() -> Markup:
    """The patterns that the drawings of a page share, once."""
    made = "".join(
        f'<pattern id="still-{place}" width="7" height="7" patternUnits="userSpaceOnUse"><path d="{path}" '
        'stroke="#ffffff" stroke-opacity=".6" fill="none"/></pattern>'
        for place, path in enumerate(_HATCHES.values())
    )
    return Markup(f'<svg class="hatches" width="0" height="0" aria-hidden="true"><defs>{made}</defs></svg>')


def _begin(height: float) -> str:
    return f'<svg class="still" viewBox="0 0 {WIDTH} {height:.0f}" aria-hidden="true" focusable="false">'


def _text(x: float, y: float, label: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(label)}</text>'


def _plain(label: str) -> str:
    """A label without plotly's markup, names in which are escaped."""
    return unescape(re.sub(r"<br>", " ", re.sub(r"</?b>", "", label)))


def _bars(figure: dict[str, Any]) -> Iterator[str]:
    rows, layout = figure["layout"]["meta"]["rows"], figure["layout"]
    traces = [trace for trace in figure["data"] if trace["type"] == "bar"]
    named = [(trace["name"], trace["marker"]) for trace in traces if layout.get("showlegend")]
    marks = [trace for trace in figure["data"] if trace["type"] == "scatter" and trace["mode"] == "markers"]
    top = _TOP + _LEGEND * (1 if named else 0)
    yield _begin(top + _ROW * max(len(rows), 1) + _BOTTOM)
    yield from _legend([(_plain(name), *_fill(marker)) for name, marker in named], marks if named else [])
    largest = _extent(figure, traces)
    scale = (WIDTH - _LEFT - _RIGHT) / largest
    yield from _ticks(largest, top + _ROW * len(rows), top, layout)
    for place, row in enumerate(rows):
        middle, bold = top + _ROW * (place + 0.5), row["text"].startswith("<b>")
        yield _text(4 if bold else _LEFT - 8, middle + 4, _plain(row["text"]), "start" if bold else "end", bold=bold)
    ends = dict.fromkeys(range(len(rows)), 0.0)
    for trace in traces:
        yield from _bar_trace(trace, ends, top, scale, stacked=layout.get("barmode") == "stack")
    for trace in figure["data"]:
        if trace["type"] == "scatter" and trace["mode"] == "text":
            for place, x, label in zip(trace["y"], trace["x"], trace["text"]):
                yield _text(_LEFT + x * scale + 4, top + _ROW * (place + 0.5) + 4, label.strip())
        elif trace in marks:
            for place, x in zip(trace["y"], trace["x"]):
                yield _mark(_LEFT + x * scale, top + _ROW * (place + 0.5), trace["marker"]["symbol"], "var(--text)")
    yield "</svg>"


def _extent(figure: dict[str, Any], traces: Sequence[dict[str, Any]]) -> float:
    """The axis's end in the figure's unit."""
    given = figure["layout"].get("xaxis", {}).get("range")
    if given and given[1] > 0:
        return float(given[1])
    sums: dict[float, float] = {}
    for trace in traces:
        for place, value in zip(trace["y"], trace["x"]):
            sums[place] = sums.get(place, 0.0) + value
    marked = [x for trace in figure["data"] if trace["type"] == "scatter" for x in trace["x"]]
    return 1.05 * max([*sums.values(), *marked], default=0.0) or 1.0


def _bar_trace(
    trace: dict[str, Any], ends: dict[int, float], top: float, scale: float, *, stacked: bool
) -> Iterator[str]:
    colour, hatch = _fill(trace["marker"])
    error = trace.get("error_x") or {}
    for n, (place, value) in enumerate(zip(trace["y"], trace["x"])):
        x, y, width = _LEFT + ends[place] * scale, top + _ROW * (place + 0.5) - _BAR / 2, max(value, 0) * scale
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}"'
        title = f"<title>{escape(_plain(trace['customdata'][n]))}</title>" if "customdata" in trace else ""
        over = f'<rect {box} fill="url(#still-{hatch})"/>' if hatch is not None else ""
        yield f'<g>{title}<rect {box} fill="{colour}"/>{over}</g>'
        if error.get("visible"):
            low, high = x + width - error["arrayminus"][n] * scale, x + width + error["array"][n] * scale
            middle = y + _BAR / 2
            yield f'<path class="error" d="M{low:.1f} {middle:.1f}H{high:.1f}"/>'
        if stacked:
            ends[place] += value


def _fill(marker: dict[str, Any]) -> tuple[str, int | None]:
    """Colour, and which of the hatches lies over it."""
    shape = (marker.get("pattern") or {}).get("shape")
    return marker["color"], list(_HATCHES).index(shape) if shape in _HATCHES else None


def _legend(entries: Sequence[tuple[str, str, int | None]], marks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Of bars by their filling, and of what is marked beside them."""
    x = 4.0
    for name, colour, hatch in entries:
        yield f'<rect x="{x:.1f}" y="4" width="14" height="12" fill="{colour}"/>'
        if hatch is not None:
            yield f'<rect x="{x:.1f}" y="4" width="14" height="12" fill="url(#still-{hatch})"/>'
        yield _text(x + 19, 14, name)
        x += 36 + _CHARACTER * len(name)
    for trace in marks:
        yield _mark(x + 7, 10, trace["marker"]["symbol"], "var(--text)")
        yield _text(x + 19, 14, _plain(trace["name"]))
        x += 36 + _CHARACTER * len(trace["name"])


def _ticks(largest: float, bottom: float, top: float, layout: dict[str, Any]) -> Iterator[str]:
    for value in _round_values(0.0, largest):
        x = _LEFT + value / largest * (WIDTH - _LEFT - _RIGHT)
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
        yield _text(x, bottom + 16, f"{value:g}", "middle")
    title = (layout.get("xaxis", {}).get("title") or {}).get("text", "")
    yield _text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 36, _plain(title), "middle")


def _round_values(low: float, high: float) -> list[float]:
    """Some five values in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * (1 - 1e-9))
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class _Axis:
    """Values to pixels, in logarithms where the figure has them."""

    def __init__(self, values: Sequence[float], axis: dict[str, Any], begin: float, end: float) -> None:
        self.is_log = axis.get("type") == "log"
        known = [v for v in values if math.isfinite(v) and (v > 0 or not self.is_log)] or [1.0]
        low, high = (self._place(v) for v in (min(known), max(known)))
        if axis.get("rangemode") == "tozero":
            low = min(low, 0.0)
        margin = (high - low) * 0.04 or max(abs(high), 1.0) * 0.05
        self.low, self.high, self.begin, self.end = low - margin, high + margin, begin, end
        if axis.get("rangemode") == "tozero" and low == 0:
            self.low = 0.0
        given = axis.get("tickvals")
        self.ticks = [float(v) for v in given] if given else self._rounded(low, high)
        self.texts = [_plain(text) for text in axis.get("ticktext") or ()] or [f"{v:,.6g}" for v in self.ticks]
        self.title = (axis.get("title") or {}).get("text", "")

    def _rounded(self, low: float, high: float) -> list[float]:
        if not self.is_log:
            return _round_values(low, high)
        return [10.0**n for n in range(math.ceil(low), math.floor(high) + 1)] or [10**low]

    def _place(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def __call__(self, value: float) -> float:
        return self.begin + (self._place(value) - self.low) / (self.high - self.low) * (self.end - self.begin)


def _curves(figure: dict[str, Any]) -> Iterator[str]:
    layout = figure["layout"]
    traces = [trace for trace in figure["data"] if trace["type"] == "scatter" and len(trace["x"])]
    columns = max(1, int((WIDTH - 8) // max([120.0, *(48 + _CHARACTER * len(_plain(t["name"])) for t in traces)])))
    top = _TOP + _LEGEND * math.ceil(len(traces) / columns)
    bottom = top + _CURVES_HEIGHT
    yield _begin(bottom + _BOTTOM)
    xs = [float(x) for trace in traces for x in trace["x"]]
    ys = [float(y) for trace in traces for y in trace["y"] if y is not None]
    x_axis = _Axis(xs, layout.get("xaxis", {}), 70, WIDTH - _RIGHT)
    y_axis = _Axis(ys, layout.get("yaxis", {}), bottom, top)
    for value, label in zip(y_axis.ticks, y_axis.texts):
        yield f'<line class="tick" x1="70" x2="{WIDTH - _RIGHT}" y1="{y_axis(value):.1f}" y2="{y_axis(value):.1f}"/>'
        yield _text(64, y_axis(value) + 4, label, "end")
    for value, label in zip(x_axis.ticks, x_axis.texts):
        yield _text(x_axis(value), bottom + 18, label, "middle")
    yield _text((70 + WIDTH - _RIGHT) / 2, bottom + 38, _plain(x_axis.title), "middle")
    yield f'<g transform="translate(14 {(top + bottom) / 2:.0f}) rotate(-90)">'
    yield f"{_text(0, 0, _plain(y_axis.title), 'middle')}</g>"
    for place, trace in enumerate(traces):
        x, y = 4 + (place % columns) * (WIDTH - 8) / columns, 14 + _LEGEND * (place // columns)
        yield from _curve([(x, y - 4), (x + 28, y - 4)], trace)
        yield _text(x + 36, y, _plain(trace["name"]))
        points = [(x_axis(float(x)), y_axis(float(y))) for x, y in zip(trace["x"], trace["y"]) if y is not None]
        yield from _curve(points, trace)
    yield "</svg>"


def _curve(points: Sequence[tuple[float, float]], trace: dict[str, Any]) -> Iterator[str]:
    line, marker, mode = trace.get("line") or {}, trace.get("marker") or {}, trace["mode"]
    colour = line.get("color") or marker.get("color") or "currentColor"
    if "lines" in mode and len(points) > 1:
        stepped = line.get("shape") == "hv"
        path = "".join(
            f"H{x:.1f}V{y:.1f}" if stepped and n else f"{'L' if n else 'M'}{x:.1f} {y:.1f}"
            for n, (x, y) in enumerate(points)
        )
        dashes = f' stroke-dasharray="{_DASHES[line["dash"]]}"' if line.get("dash") in _DASHES else ""
        yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
    if "markers" in mode:
        yield from (
            _mark(x, y, marker.get("symbol", "circle"), colour) for x, y in points[:: max(1, len(points) // 60)]
        )


def _mark(x: float, y: float, symbol: str, colour: str) -> str:
    """A symbol; ``-open`` ones are outlines."""
    path, is_open = _SHAPES.get(symbol.removesuffix("-open"), _SHAPES["circle"]), symbol.endswith("-open")
    paint = f'fill="var(--page)" stroke="{colour}" stroke-width="1.5"' if is_open else f'fill="{colour}"'
    return f'<path d="{path}" transform="translate({x:.1f} {y:.1f})" {paint}/>'
