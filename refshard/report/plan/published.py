"""Published results beside their predictions, for a terminal and as JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from tabulate import tabulate

from refshard.quantities import format_percent
from refshard.simulate.published import STANDS_FOR, Prediction
from refshard.specs.published import PublishedTable

_WIDTH = 120


def as_objects(tables: Mapping[str, tuple[PublishedTable, Sequence[Prediction]]]) -> list[dict[str, Any]]:
    """One object a table: errors as fractions, results in the table's unit."""
    return [
        {
            "table": name,
            "title": table.title,
            "source": table.source,
            "assumed": table.assumed,
            "cluster": table.cluster,
            "unit": table.unit,
            "median_error": typical_error(found),
            "median_error_of_rows_not_fitted": typical_error([one for one in found if not one.row.fitted]),
            "speedups_in_order": in_order(found),
            "rows": [_row(one) for one in found],
        }
        for name, (table, found) in tables.items()
    ]


def _row(one: Prediction) -> dict[str, Any]:
    return {
        "model": one.row.model, "ranks": one.ranks, "seq_len": one.row.seq_len, "sequences": one.row.sequences,
        "checkpointing": one.row.checkpointing, "compiled": one.row.compiled, "strategy": one.strategy,
        "fitted": one.row.fitted, "published": one.published, "predicted": one.predicted, "error": one.error,
        "published_mfu": one.mfu, "replayed_mfu": one.replayed_mfu,
    }  # fmt: skip


def terminal_published(tables: Mapping[str, tuple[PublishedTable, Sequence[Prediction]]]) -> str:
    """A table each, and what it comes to."""
    return "\n\n".join(_told(table, found) for table, found in tables.values())


def _told(table: PublishedTable, found: Sequence[Prediction]) -> str:
    rows = [
        {
            "model": one.row.model, "ranks": one.ranks, "batch": f"{one.row.sequences} x {one.row.seq_len}",
            "checkpointed": one.row.checkpointing, "strategy": one.strategy,
            "compiled": "yes" if one.row.compiled else "no", "published": _number(one.published),
            "predicted": _number(one.predicted), "error": f"{100 * one.error:+.1f} %",
            "": "fitted" if one.row.fitted else "",
        }
        for one in found
    ]  # fmt: skip
    printed = tabulate(rows, headers="keys", disable_numparse=True, colalign=["left"] + ["right"] * 8 + ["left"])
    assumed = [f"* Assumed: {table.assumed}"] if table.assumed else []
    stands = [
        f"* {name} is predicted by the closed form of {recipe}."
        for name, recipe in STANDS_FOR.items()
        if any(one.strategy == name for one in found)
    ]
    sums = [textwrap.fill(told, _WIDTH, subsequent_indent="  ") for told in (*_sums(found), *assumed, *stands)]
    return "\n".join([f"{table.title}, {table.unit}, on {table.cluster}", printed, *sums])


def _sums(found: Sequence[Prediction]) -> list[str]:
    others = [one for one in found if not one.row.fitted]
    told = [
        f"* Median error {format_percent(typical_error(found))}; of rows not fitted "
        f"{format_percent(typical_error(others))}."
    ]
    agreed = in_order(found)
    if agreed is not None:
        told.append(f"* Of {agreed[1]} pairs of rows, {agreed[0]} have their speed-ups in the published order.")
    told += [
        f"* MFU of {_number(one.published)}: published {format_percent(one.mfu)}, replayed "
        f"{format_percent(one.replayed_mfu)}."
        for one in found
        if one.mfu is not None
    ]
    return told


def typical_error(found: Sequence[Prediction]) -> float | None:
    """Median of the absolute errors; None of nothing."""
    return median(abs(one.error) for one in found) if found else None


def in_order(found: Sequence[Prediction]) -> tuple[int, int] | None:
    """Of all pairs of rows with two strategies whose published speed-ups differ, how many are predicted in that order.

    None where no two rows have two strategies.
    """
    speedups: list[tuple[float, float]] = []
    for first, second in pairwise(found):
        if first.row is second.row:
            speedups.append((second.published / first.published, second.predicted / first.predicted))
    pairs = [(a, b) for a, b in combinations(speedups, 2) if a[0] != b[0]]
    agreed = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    return (agreed, len(pairs)) if pairs else None


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.2f}"
