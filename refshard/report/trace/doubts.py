"""Warnings about traces, each said once."""

import re
from collections.abc import Sequence
from pathlib import Path

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


def doubts(figures: Sequence[TraceFigures]) -> list[str]:
    """Every warning once, with the traces that give it, where there are several traces."""
    givers: dict[str, list[str]] = {}
    for one in figures:
        for found in one.warnings:
            files = givers.setdefault(f"[{found.code}] {warning(found)}", [])
            files += [] if one.file in files else [Path(one.file).name]
    return [f"{sentence}{_of(files, len(figures))}" for sentence, files in givers.items()]


def _of(files: Sequence[str], traces: int) -> str:
    if traces == 1:
        return ""
    if len(files) == traces:
        return f" (all {traces} traces)"
    more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
    return f" ({', '.join(files[:MOST_NAMED])}{more})"
