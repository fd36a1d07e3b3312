"""Warnings about traces, each said once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from refshard.quantities import format_ns
from refshard.report.trace.jobs import counted
from refshard.tracing.figures import TraceFigures, TraceWarning

MOST_NAMED = 6


def warning(told: TraceWarning) -> str:
    """A warning, with what it concerns where that is not in its words."""
    concerned = [] if told.count is None or _says(told, told.count) else [counted(told.count, "event")]
    concerned += [] if told.ns is None or format_ns(told.ns) in told.message else [format_ns(told.ns)]
    return f"{told.message} ({', '.join(concerned)})" if concerned else told.message


def _says(told: TraceWarning, count: int) -> bool:
    return bool(re.search(rf"(?<![\d.,]){count:,}(?![\d,]|\.\d)|(?<![\d.,]){count}(?![\d,]|\.\d)", told.message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A warning, and which traces give it, by their place among all; ``more`` of them are not named."""

    sentence: str
    where: tuple[tuple[str, int], ...]
    more: int = 0


def doubts(figures: Sequence[TraceFigures]) -> tuple[Doubt, ...]:
    """Every warning once, with the traces that give it."""
    givers: dict[str, list[tuple[str, int]]] = {}
    for place, one in enumerate(figures):
        for sentence in dict.fromkeys(map(warning, one.warnings)):
            givers.setdefault(sentence, []).append((one.file, place))
    return tuple(
        Doubt(sentence=sentence, where=tuple(of[:MOST_NAMED]), more=len(of[MOST_NAMED:]))
        for sentence, of in givers.items()
    )
