"""Power and clocks of the GPUs while steps were timed."""

from collections import Counter
from collections.abc import Callable, Sequence

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.quantities import format_percent
from refshard.records import GpuUse
from refshard.report.run.views import MISSING


def power_table(cases: Sequence[CaseResult]) -> pd.DataFrame:
    """A row per case whose GPUs were watched: means over GPUs and rounds, and the extremes."""
    watched = {case: [use for one in case.launches if one.state == "ok" for use in one.gpu_use] for case in cases}
    return pd.DataFrame([_row(case, uses) for case, uses in watched.items() if uses])


def _row(case: CaseResult, uses: Sequence[GpuUse]) -> dict[str, str]:
    return {
        "case": case.label,
        "power, mean": _over(uses, "power_w", _mean, "W"),
        "power, highest": _over(uses, "max_power_w", max, "W"),
        "SM clock, mean": _over(uses, "sm_clock_mhz", _mean, "MHz"),
        "SM clock, lowest": _over(uses, "min_sm_clock_mhz", min, "MHz"),
        "throttled": _throttled(uses),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _over(uses: Sequence[GpuUse], field: str, of: Callable[[Sequence[float]], float], unit: str) -> str:
    known = [value for use in uses if (value := getattr(use, field)) is not None]
    return f"{of(known):,.0f} {unit}" if known else MISSING


def _throttled(uses: Sequence[GpuUse]) -> str:
    """The share of samples in which each reason held the clocks down."""
    samples = sum(use.samples for use in uses)
    reasons = sum((Counter(use.throttled) for use in uses), Counter[str]())
    return ", ".join(f"{why} {format_percent(count / samples)}" for why, count in reasons.most_common()) or "no"
