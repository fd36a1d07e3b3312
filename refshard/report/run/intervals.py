"""Ratios with their intervals as text: one way for every table and sentence."""

from refshard.quantities import format_percent
from refshard.stats.compare import Comparison
from refshard.stats.sample import Summary, too_few


def no_interval(found: Comparison | Summary) -> str:
    """Why there is none."""
    return ", ".join(too_few(found.launches)) or "no interval"


def ratio_text(comparison: Comparison, digits: int = 2) -> str:
    """A ratio with its interval, or with why it has none.

    >>> ratio_text(Comparison(ratio=1.0925, low=1.011, high=1.182, launches=3, paired=True))
    '1.09 (1.01 to 1.18)'
    >>> ratio_text(Comparison(ratio=1.82, low=0.0, high=float("inf"), launches=1, paired=True))
    '1.82 (n = 1: no interval)'
    """
    ends = f"{comparison.low:.{digits}f} to {comparison.high:.{digits}f}"
    return f"{comparison.ratio:.{digits}f} ({ends if comparison.bounded else no_interval(comparison)})"


def interval_text(comparison: Comparison, *, as_ratio: bool) -> str:
    """An interval in words, of ratios or of what they exceed 1 by."""
    if as_ratio:
        return f"95 % interval {comparison.low:.3f} to {comparison.high:.3f}"
    low = format_percent(comparison.low - 1).removesuffix(" %")
    return f"95 % interval {low} to {format_percent(comparison.high - 1)}"


def pairing(comparison: Comparison | None) -> str:
    """How a ratio came about, after a comma, if it is not the ratio of the medians."""
    return ", paired by round" if comparison and comparison.paired else ""
