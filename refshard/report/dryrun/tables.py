"""The findings of a dry run as tables of text, ready for a page."""

import pandas as pd

from refshard.dryrun.analyse import Analysis
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.report.dryrun.words import CATEGORIES, merged, where

MOST_HELD = 24


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
