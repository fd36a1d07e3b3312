"""How busy the machine was, in sentences."""

from collections.abc import Iterable, Sequence

from refshard.analysis.busy import Drift, drift_over
from refshard.analysis.cases import CaseResult
from refshard.analysis.rankings import Ranking, step_time
from refshard.quantities import format_percent, format_seconds
from refshard.specs.case import REPEATING


def busy_between(pairs: Iterable[tuple[CaseResult, CaseResult, float]]) -> str:
    """A sentence on the largest drift that exceeds the difference in step time of its pair of cases; empty if none
    does.
    """
    drifts = [(drift, effect) for a, b, effect in pairs if (drift := drift_over(a, b, effect))]
    if not drifts:
        return ""
    drift, effect = max(drifts, key=lambda pair: pair[0].size - abs(pair[1]))
    return (
        f"The machine was busy: {_told(drift)}. That is more than the difference in step time "
        f"({format_percent(abs(effect))})."
    )


def busy_in(ranking: Ranking) -> str:
    """A sentence if the machine drifted by more than a difference to the fastest, or the range of unranked cases."""
    if ranking.winner is not None:
        return busy_between((ranking.winner, rival.case, rival.ratio - 1) for rival in ranking.rivals)
    return busy_between(_ends(ranking.candidates))


def _ends(cases: Sequence[CaseResult]) -> Iterable[tuple[CaseResult, CaseResult, float]]:
    """The least and the largest step time, of two cases or more."""
    if len(cases) > 1 and cases[0].fidelity not in REPEATING:
        least, most = min(cases, key=step_time), max(cases, key=step_time)
        yield least, most, step_time(most) / step_time(least) - 1


def _told(drift: Drift) -> str:
    size = format_percent(drift.size)
    if drift.kind == "other processes":
        less, more = sorted((drift.before, drift.after))
        return f"other processes used {less:.1f} of {drift.cores} cores in one case, {more:.1f} in the other ({size})"
    where = (
        f"within a launch of {drift.case.full_label}" if drift.kind == "within a launch" else "between the two cases"
    )
    ends = f"{format_seconds(drift.before)} to {format_seconds(drift.after)}"
    return f"its compute probe went from {ends} {where} ({size})"
