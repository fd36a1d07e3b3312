"""Predictions beside measurements, as a table and sentences."""

import textwrap
from collections.abc import Sequence
from statistics import median

from tabulate import tabulate

from refshard.analysis.validation import PREDICTED, Validated, errors, in_order, scaled
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.specs.case import spelled

_WIDTH = 120


def terminal_validation(pairs: Sequence[Validated]) -> str:
    """A row a prediction, and what they come to by fidelity."""
    rows = [
        {
            "case": pair.measured.label,
            "model": pair.measured.spec.model,
            "predicted": spelled(pair.predicted.fidelity),
            "on": pair.predicted.spec.cluster,
            "step time measured": format_seconds(pair.measured.metrics["step_time_s"]),
            "step time predicted": format_seconds(pair.predicted.metrics["step_time_s"]),
            "error": _signed(pair.step_time_error),
            "peak memory measured": format_bytes(pair.measured.metrics["peak_memory_bytes"]),
            "peak memory predicted": format_bytes(pair.predicted.metrics["peak_memory_bytes"]),
            "of it": _signed(pair.memory_error),
        }
        for pair in pairs
    ]
    headers = {key: "\n".join(textwrap.wrap(key, 10)) for key in rows[0]}
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=["left"] * 4 + ["right"] * 6)
    told = [textwrap.fill(f"* {sentence}", _WIDTH, subsequent_indent="  ") for sentence in findings(pairs)]
    return "\n".join([table, *told])


def findings(pairs: Sequence[Validated]) -> list[str]:
    """What the predictions come to, a sentence for each fidelity."""
    told = []
    for fidelity in PREDICTED:
        times, memory = (errors(pairs, fidelity, metric) for metric in ("step_time_s", "peak_memory_bytes"))
        if not times:
            continue
        agreed, all_ = in_order(pairs, fidelity)
        alone = all(len(pair.measured.launches) == 1 for pair in pairs)
        quickest = [abs(p.quickest_error or 0) for p in pairs if p.predicted.fidelity == fidelity]
        least = "" if alone else f" (of each case's quickest launch {format_percent(median(quickest))})"
        factor, left = scaled(pairs, fidelity)
        common = (
            f"; one factor on all, {factor:.2f}, leaves {format_percent(median(left))}, at most "
            f"{format_percent(max(left))}"
        )
        sizes = f"; of peak memory at most {format_percent(max(memory))}" if memory else ""
        ordered = f"; {agreed} of {all_} pairs that measurement tells apart are in its order" if all_ else ""
        told.append(
            f"{spelled(fidelity).capitalize()}: median error of the step time {format_percent(median(times))}{least}, "
            f"at most {format_percent(max(times))}{common if len(times) > 2 else ''}{ordered}{sizes}."
        )
    return told


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"
