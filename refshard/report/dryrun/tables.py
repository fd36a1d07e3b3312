"""The findings of a dry run as tables of text, ready for a page."""

import pandas as pd

from refshard.dryrun.analyse import Analysis
from refshard.quantities import format_bytes, format_percent, format_rate, format_seconds
from refshard.report.dryrun.words import CATEGORIES, merged, parts_of_step, place, where

MOST_HELD = 24
MOST_OPERATORS = 20
MOST_WAITS = 40


def by_category(found: Analysis) -> pd.DataFrame:
    """Bytes at the peak, by category."""
    peak = max(found.memory.peak_bytes, 1)
    rows = [
        {"category": CATEGORIES[category], "bytes": format_bytes(size), "share": format_percent(size / peak)}
        for category, size in found.memory.by_category().items()
    ]
    return pd.DataFrame(rows)


def largest(found: Analysis) -> pd.DataFrame:
    """The :data:`MOST_HELD` largest entries at the peak; layers that differ only in their number are merged."""
    rows = [
        {
            "category": CATEGORIES[one.category],
            "allocated in": where(one),
            "operator": one.operator or "-",
            "blocks": f"{one.blocks:,}",
            "bytes": format_bytes(one.bytes),
        }
        for one in merged(found.memory.held)[:MOST_HELD]
    ]
    return pd.DataFrame(rows)


def overheads(found: Analysis) -> pd.DataFrame:
    """GPU memory outside torch's allocator."""
    return pd.DataFrame(
        [{"what": one.name, "bytes": format_bytes(one.bytes), "source": one.source} for one in found.overheads]
    )


def time(found: Analysis) -> pd.DataFrame:
    """Where the time of the last step goes."""
    figures = found.figures
    assert figures is not None
    return pd.DataFrame(
        [
            {
                "part": name.replace("  ", "\N{EM SPACE}"),
                "time": format_seconds(s),
                "of the step": format_percent(s / figures.step_s),
            }
            for name, s in parts_of_step(figures)
        ]
    )


def operators(found: Analysis) -> pd.DataFrame:
    """The longest operators of the last step, with TFLOPS if they have FLOPs."""
    figures = found.figures
    assert figures is not None
    return pd.DataFrame(
        [
            {
                "operator": one.name,
                "count": f"{one.count:,}",
                "time": format_seconds(one.seconds),
                "of the step": format_percent(one.seconds / figures.step_s),
                "TFLOPS": format_rate(one.flops / one.seconds / 1e12) if one.flops and one.seconds else "-",
            }
            for one in figures.operators[:MOST_OPERATORS]
        ]
    )


def synchronisations(found: Analysis) -> pd.DataFrame:
    """Lines at which the host waits in the last step, and for how long. If a line waits for computed and for uncomputed
    values in the same way, its first row has the time of both.
    """
    waits = {(one.why, one.site): one.seconds for one in (found.figures.waits if found.figures else ())}
    return pd.DataFrame(
        [
            {
                "where": place(one),
                "waits for": one.why,
                "times per step": f"{one.count:,}",
                "waiting time": format_seconds(waits.pop((one.why, one.site), None)),
                "value": "not computed" if one.unknown else "-",
            }
            for one in found.synchronisations[:MOST_WAITS]
        ]
    )


def doubts(found: Analysis) -> pd.DataFrame:
    """Operators with an uncertain price over the whole run, longest first."""
    return pd.DataFrame(
        [
            {
                "operator": one.name,
                "why": one.reason,
                "launches": f"{one.count:,}",
                "priced at": format_seconds(one.seconds),
            }
            for one in sorted(found.prices.doubts, key=lambda one: -one.seconds)
        ]
    )
