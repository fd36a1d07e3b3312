"""Two cases set beside each other: what both ran in one round is compared within it."""

import statistics
from functools import lru_cache

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import Comparison, compare
from refshard.specs.case import REPEATING


@lru_cache(maxsize=2**14)
def compared(a: CaseResult, b: CaseResult) -> Comparison | None:
    """Step time of ``b`` over that of ``a``; None where either has no samples, or its times are calculated.

    What is calculated takes the same time always: its samples are none. Rounds of two runs are not interleaved.
    """
    if not (a.samples and b.samples) or REPEATING & {a.fidelity, b.fidelity}:
        return None
    return compare(a.samples, b.samples, interleaved=a.header is b.header)


def metric_ratio(a: CaseResult, b: CaseResult, metric: str) -> float | None:
    """``metric`` of ``b`` over that of ``a``: the median over common rounds of one run, else the ratio of what both
    show; None where either has none.
    """
    mine, its = (
        {
            launch.round: value
            for launch in case.launches
            if launch.state == "ok" and (value := launch.metrics.get(metric))
        }
        for case in (b, a)
    )
    if a.header is b.header and (rounds := mine.keys() & its.keys()):
        return statistics.median(mine[number] / its[number] for number in rounds)
    of_b, of_a = b.metrics[metric], a.metrics[metric]
    return of_b / of_a if of_b and of_a else None
