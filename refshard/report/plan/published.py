"""Published results beside their predictions, for a terminal and as JSON."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from refshard.quantities import format_percent
from refshard.report.answer import Answer, Block, Notes, Verdict, table
from refshard.simulate.published import STANDS_FOR, Prediction
from refshard.specs.published import PublishedTable


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


def published_answer(tables: Mapping[str, tuple[PublishedTable, Sequence[Prediction]]]) -> Answer:
    """A table each, and what it comes to."""
    objects = as_objects(tables)
    blocks = [block for table_, found in tables.values() for block in _blocks(table_, found)]
    everything = [one for _, found in tables.values() for one in found if not one.row.fitted]
    told = f"Median error on rows that no constant was fitted to: {format_percent(typical_error(everything))}."
    return Answer(
        data={"tables": objects},
        rows=[{"table": one["table"], "unit": one["unit"], **row} for one in objects for row in one["rows"]],
        blocks=[*blocks, Verdict(sentences=[told])],
    )


def _blocks(published: PublishedTable, found: Sequence[Prediction]) -> list[Block]:
    rows = [
        {
            "model": one.row.model, "strategy": one.strategy, "ranks": f"{one.ranks:,}",
            "published": _number(one.published), "predicted": _number(one.predicted),
            "error": f"{100 * one.error:+.1f} %", "batch": f"{one.row.sequences} x {one.row.seq_len}",
            "checkpointed": str(one.row.checkpointing), "compiled": "yes" if one.row.compiled else "no",
            "fitted": "yes" if one.row.fitted else "no",
        }
        for one in found
    ]  # fmt: skip
    assumed = [f"Assumed: {published.assumed}"] if published.assumed else []
    stands = [
        f"{name} is predicted by the closed form of {recipe}."
        for name, recipe in STANDS_FOR.items()
        if any(one.strategy == name for one in found)
    ]
    title = f"{published.title}, {published.unit}, on {published.cluster}"
    return [table(rows, left=2, title=title), Notes(sentences=[*_sums(found), *assumed, *stands])]


def _sums(found: Sequence[Prediction]) -> list[str]:
    others = [one for one in found if not one.row.fitted]
    told = [
        f"Median error {format_percent(typical_error(found))}; of rows not fitted "
        f"{format_percent(typical_error(others))}."
    ]
    agreed = in_order(found)
    if agreed is not None:
        told.append(f"Speed-ups in the published order: {agreed[0]} of {agreed[1]} pairs of rows.")
    told += [
        f"MFU of {_number(one.published)}: published {format_percent(one.mfu)}, replayed "
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
