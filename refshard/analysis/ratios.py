"""Cases compared with each other: ratios of step time and of peak memory, B over A, and what they decide.

A ratio of 1.2 means a fifth more time, or memory. What both cases ran in one round is compared within it.

One rule decides whether B is slower, and every sentence and table follows it. B is *slower* or *faster* if the 95 %
interval excludes 1, the difference is :data:`~refshard.analysis.compare.RELEVANT`, and the machine drifted by less than
the difference. It *ties* with A if the interval includes 1, or the difference is not relevant, and the interval stays
below :data:`TOO_WIDE`. Else the difference is *not decided*. Calculated times repeat exactly: they tie within
:data:`ALIKE`, and are always decided.
"""

import statistics
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal

from refshard.analysis.busy import Drift, drift_over
from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import RELEVANT, Comparison, compare
from refshard.analysis.evidence import Evidence, Setting
from refshard.specs.case import REPEATING

RATIO_COLUMNS = ("against", "step_time_ratio", "step_time_ratio_low", "step_time_ratio_high", "peak_memory_ratio")
"""What programs get for each case that is compared."""
ALIKE = 0.03
"""Relative difference of step times under which a model cannot rank two strategies."""
TOO_WIDE = 1.25
"""A ratio that an interval must exclude to show a tie."""
Outcome = Literal["slower", "faster", "tie", "not decided"]


@lru_cache(maxsize=2**14)
def compared(a: CaseResult, b: CaseResult) -> Comparison | None:
    """Step time of ``b`` over that of ``a``; None if either has no samples, or its times are calculated.

    Calculated times repeat exactly, so they are no samples. Rounds of two runs are not interleaved.
    """
    if not (a.samples and b.samples) or REPEATING & {a.fidelity, b.fidelity}:
        return None
    return compare(a.samples, b.samples, interleaved=a.header is b.header)


def metric_ratio(a: CaseResult, b: CaseResult, metric: str) -> float | None:
    """``metric`` of ``b`` over that of ``a``: the median over common rounds of one run, else the ratio of what both
    show; None if either has none.
    """
    mine, its = (
        {one.round: value for one in case.ok_launches if (value := one.metrics.get(metric))} for case in (b, a)
    )
    if a.header is b.header and (rounds := mine.keys() & its.keys()):
        return statistics.median(mine[number] / its[number] for number in rounds)
    of_b, of_a = b.metrics[metric], a.metrics[metric]
    return of_b / of_a if of_b and of_a else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """``case`` over its ``peer``. Measured step times have a 95 % interval; ``calculated`` is the ratio of times that
    are calculated, and has none.
    """

    peer: CaseResult
    case: CaseResult
    step_time: Comparison | None
    calculated: float | None
    peak_memory: float | None

    @property
    def time(self) -> float | None:
        """Step time over the peer's."""
        return self.step_time.ratio if self.step_time else self.calculated

    @property
    def drift(self) -> Drift | None:
        """The machine's drift, if it exceeds the difference of the step times."""
        found, time = self.step_time, self.time
        return drift_over(self.peer, self.case, max(time, 1 / time) - 1) if found and time else None

    @property
    def outcome(self) -> Outcome:
        """What the step times decide, by the module's rule."""
        found, ratio = self.step_time, self.time
        if ratio is None or (found and not found.bounded):
            return "not decided"
        tolerance = RELEVANT if found else ALIKE
        if (found and not found.significant) or max(ratio, 1 / ratio) < 1 + tolerance:
            wide = found and (found.high >= TOO_WIDE or found.low <= 1 / TOO_WIDE)
            return "not decided" if wide else "tie"
        return "not decided" if self.drift else "slower" if ratio > 1 else "faster"

    @property
    def columns(self) -> dict[str, float | None]:
        """The values of :data:`RATIO_COLUMNS`, but the name of the peer."""
        time = self.step_time
        low, high = (time.low, time.high) if time and time.bounded else (None, None)
        return dict(zip(RATIO_COLUMNS[1:], (time.ratio if time else self.calculated, low, high, self.peak_memory)))


def ratios(setting: Setting, peer: str) -> tuple[Ratio, ...]:
    """The cases that ended ok over the one of strategy ``peer`` with as many ranks, if there is one."""
    peers = {case.spec.job.gpus: case for case in reversed(setting.cases) if case.strategy == peer and case.ok}
    found = ((case, peers.get(case.spec.job.gpus)) for case in setting.cases if case.ok)
    return tuple(ratio_of(other, case) for case, other in found if other is not None and other is not case)


def ratio_of(a: CaseResult, b: CaseResult) -> Ratio:
    """``b`` over ``a``."""
    time = compared(a, b)
    return Ratio(
        peer=a,
        case=b,
        step_time=time,
        calculated=metric_ratio(a, b, "step_time_s") if time is None else None,
        peak_memory=metric_ratio(a, b, "peak_memory_bytes"),
    )


def pairs(evidence: Evidence) -> list[list[float | None]]:
    """Every two cases that may be compared, once: the numbers of A and B, B's step time over A's, and both ends of its
    95 % interval.
    """
    found: list[list[float | None]] = []
    for setting in evidence.ranked:
        for a, b in combinations([case for case in setting.cases if case.ok], 2):
            if a.spec.job.gpus == b.spec.job.gpus:
                columns = ratio_of(a, b).columns
                known = (columns[name] for name in RATIO_COLUMNS[1:4])
                found.append([a.number, b.number, *(None if x is None else float(f"{x:.5g}") for x in known)])
    return found


def ratio_columns(evidence: Evidence, peer: str) -> list[dict[str, float | str | None]]:
    """The values of :data:`RATIO_COLUMNS` for each case of the evidence, in its order."""
    found = {ratio.case: ratio.columns for setting in evidence.settings for ratio in ratios(setting, peer)}
    nothing = dict.fromkeys(RATIO_COLUMNS[1:])
    return [{"against": peer, **found.get(case, nothing)} for case in evidence.cases]
