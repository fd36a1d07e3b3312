"""Every case over one strategy at the same number of ranks: ratios of step time and of peak memory.

A ratio of 1.2 means a fifth more time, or memory.
"""

from dataclasses import dataclass
from itertools import combinations

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import Comparison
from refshard.analysis.compared import compared, metric_ratio
from refshard.analysis.evidence import Evidence, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """``case`` over the peer, both paired by round where they ran in one run; ``step_time`` has a 95 % interval. If the
    times are ``calculated``, the step time's ratio is that alone, and has none.
    """

    case: CaseResult
    step_time: Comparison | None
    calculated: float | None
    peak_memory: float | None


def ratios(setting: Setting, peer: str) -> tuple[Ratio, ...]:
    """The cases that ended ok beside the one of strategy ``peer`` with as many ranks, if there is one."""
    peers = {case.spec.job.gpus: case for case in reversed(setting.cases) if case.strategy == peer and case.ok}
    found = ((case, peers.get(case.spec.job.gpus)) for case in setting.cases if case.ok)
    return tuple(_ratio(case, other) for case, other in found if other is not None and other is not case)


def _ratio(case: CaseResult, other: CaseResult) -> Ratio:
    step_time = compared(other, case)
    return Ratio(
        case=case,
        step_time=step_time,
        calculated=metric_ratio(other, case, "step_time_s") if step_time is None else None,
        peak_memory=metric_ratio(other, case, "peak_memory_bytes"),
    )


Pair = tuple[int, int, float | None, float | None, float | None, float | None]
"""Numbers of A and B, B's step time over A's, both ends of its 95 % interval, and B's peak memory over A's."""


def pairs(evidence: Evidence) -> list[Pair]:
    """Every two cases that may be compared, once; what does not exist is None."""
    found: list[Pair] = []
    for setting in evidence.ranked:
        by_size: dict[int, list[CaseResult]] = {}
        for case in setting.cases:
            if case.ok:
                by_size.setdefault(case.spec.job.gpus, []).append(case)
        found += [_pair(a, b) for here in by_size.values() for a, b in combinations(here, 2)]
    return found


def _pair(a: CaseResult, b: CaseResult) -> Pair:
    columns = _columns(_ratio(b, a))
    found = (columns[name] for name in RATIO_COLUMNS[1:])
    return (a.number, b.number, *(None if x is None else float(f"{x:.5g}") for x in found))  # type: ignore[return-value]


RATIO_COLUMNS = ("against", "step_time_ratio", "step_time_ratio_low", "step_time_ratio_high", "peak_memory_ratio")
"""What programs get beside each case that is compared."""


def ratio_columns(evidence: Evidence, peer: str) -> list[dict[str, float | str | None]]:
    """The values of :data:`RATIO_COLUMNS` beside each case of :func:`refshard.analysis.cases.cases`, in its order."""
    every = (ratio for setting in evidence.settings for ratio in ratios(setting, peer))
    found = {ratio.case: ratio for ratio in every}
    return [{"against": peer, **_columns(found.get(case))} for case in evidence.cases]


def _columns(ratio: Ratio | None) -> dict[str, float | str | None]:
    time = ratio.step_time if ratio else None
    bounded = time if time and time.bounded else None
    found = (
        time.ratio if time else ratio.calculated if ratio else None,
        bounded.low if bounded else None,
        bounded.high if bounded else None,
        ratio.peak_memory if ratio else None,
    )
    return dict(zip(RATIO_COLUMNS[1:], found))
