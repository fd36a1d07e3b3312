"""Stacked bars as a drawing that needs no script: a bar a row, a colour a part, the figures in it and beside it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, _LEFT, _RIGHT = 960, 130, 90
_BAR, _ROW, _TOP = 18, 28, 22
_NARROWEST = 46
_CUT = 1.6
COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442", "#D55E00", "#999999", "#7d8fa3")
"""Okabe and Ito's, and greys; parts take them in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """``values[row][part]``; ``text`` writes a value.

    ``limit``, if there is one, is drawn as a line; a bar of several times as much is cut, and says so.
    """

    title: str
    rows: tuple[str, ...]
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    text: Callable[[float], str]
    limit: float | None = None


def draw(bars: Bars) -> str:
    """The drawing; its text alternative is each row's total. Names are escaped."""
    return "".join(_svg(bars))


def legend(bars: Bars) -> list[tuple[str, str]]:
    """Each part's name and colour, parts that are nowhere left out."""
    return [
        (part, COLOURS[i % len(COLOURS)]) for i, part in enumerate(bars.parts) if any(row[i] for row in bars.values)
    ]


def alternative(bars: Bars) -> str:
    """The finding in words: totals by row."""
    totals = ", ".join(f"{row} {bars.text(sum(values))}" for row, values in zip(bars.rows, bars.values))
    limit = "" if bars.limit is None else f" The line is at {bars.text(bars.limit)}."
    return f"{bars.title}: {totals}.{limit}"


def _svg(bars: Bars) -> Iterator[str]:
    height = _TOP + _ROW * len(bars.rows)
    yield (
        f'<svg class="bars" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(alternative(bars))}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )
    longest = max([*(sum(values) for values in bars.values), bars.limit or 0.0, 1e-30])
    if bars.limit is not None:
        longest = min(longest, _CUT * bars.limit)
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    for place, (row, values) in enumerate(zip(bars.rows, bars.values)):
        yield from _bar(bars, row, values, _TOP + place * _ROW, scale)
    if bars.limit is not None:
        x = _LEFT + bars.limit * scale
        yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height}"/>'
        yield f'<text x="{x:.1f}" y="11" text-anchor="middle">{escape(bars.text(bars.limit))}</text>'
    yield "</svg>"


def _bar(bars: Bars, row: str, values: Sequence[float], y: int, scale: float) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(row)}</text>'
    x, end = float(_LEFT), float(WIDTH - _RIGHT)
    for index, value in enumerate(values):
        width = min(value * scale, end - x)
        if width > 0:
            colour, told = COLOURS[index % len(COLOURS)], f"{row}, {bars.parts[index]}: {bars.text(value)}"
            yield f'<g><title>{escape(told)}</title><rect x="{x:.1f}" y="{y}" width="{width:.2f}" height="{_BAR}" '
            yield f'fill="{colour}" stroke="var(--page)" stroke-width="1"/>'
            if width >= _NARROWEST:
                ink = "#ffffff" if colour in ("#0072B2", "#D55E00") else "#000000"
                middle = x + width / 2
                yield f'<text x="{middle:.1f}" y="{y + 13}" text-anchor="middle" style="fill:{ink}">'
                yield f"{escape(bars.text(value))}</text>"
            yield "</g>"
        x += width
    cut = "\N{RIGHTWARDS ARROW} " if sum(values) * scale > end - _LEFT + 1 else ""
    yield f'<text x="{x + 8:.1f}" y="{y + 14}">{cut}{escape(bars.text(sum(values)))}</text>'
