"""What changed since an earlier run: times if one machine measured both, exact metrics always.

Two runs are not interleaved, so the ratio includes the machine's drift; a gate (``refshard gate --baseline``) measures
both in turns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.analysis.compared import compared
from refshard.analysis.evidence import Evidence, machine
from refshard.quantities import format_percent
from refshard.report.run.busy import busy_between
from refshard.report.run.intervals import no_interval, ratio_text
from refshard.report.run.verdict import listed
from refshard.report.run.views import format_metric
from refshard.specs.case import REPEATING, CaseSpec, Fidelity
from refshard.specs.gate import RULES, TimeLimits
from refshard.stats.compare import Comparison
from refshard.stats.exact import Change, changes, exact_metrics, portable

Outcome = Literal["slower", "faster", "unchanged", "unknown", "not compared"]
RELEVANT = TimeLimits().relevant
"""A ratio this near to 1 is no change."""
MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One case and the same case in the baseline; ``why_not`` says why times are not compared. ``exact`` are the exact
    metrics that changed, None if there are none to compare.
    """

    case: CaseResult
    before: CaseResult
    ratio: float | None
    interval: Comparison | None
    why_not: str
    exact: tuple[Change, ...] | None

    @property
    def outcome(self) -> Outcome:
        """What its time says: unknown if the interval includes both no change and a relevant one."""
        if self.ratio is None or self.why_not:
            return "not compared"
        low, high = (self.interval.low, self.interval.high) if self.interval else (self.ratio, self.ratio)
        if low >= 1 - RELEVANT and high <= 1 + RELEVANT:
            return "unchanged"
        if low > 1:
            return "slower"
        return "faster" if high < 1 else "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What changed in the baseline's cases, in sentences and case by case, and doubts about it."""

    baseline: str
    sentences: tuple[str, ...]
    doubts: tuple[str, ...]
    changed: tuple[Changed, ...]
    table: pd.DataFrame
    worse: bool


def against(evidence: Evidence, baseline: Evidence) -> Against:
    """Every case of the evidence that is in the baseline too, on the same machine if possible."""
    pairs = [(case, before) for case in evidence.cases if (before := _before(case, baseline)) is not None]
    found = tuple(_changed(case, before) for case, before in pairs)
    names = listed([run.header.run_id for run in baseline.runs])
    return Against(
        baseline=names,
        sentences=tuple(_sentences(found, names)),
        doubts=tuple(_doubts(found, evidence, baseline)),
        changed=found,
        table=pd.DataFrame([_row(one) for one in found]),
        worse=any(_is_worse(one) for one in found),
    )


def _before(case: CaseResult, baseline: Evidence) -> CaseResult | None:
    same = [b for b in baseline.cases if (b.spec, b.fidelity) == (case.spec, case.fidelity)]
    here = [b for b in same if machine(b.header.environment) == machine(case.header.environment)]
    return next(iter([*here, *reversed(same)]), None)


def _changed(case: CaseResult, before: CaseResult) -> Changed:
    together = machine(before.header.environment) == machine(case.header.environment)
    mine, its = case.metrics["step_time_s"], before.metrics["step_time_s"]
    exact = _exact(case, before, together=together)
    if not (case.ok and before.ok):
        why_not = f"{'now' if before.ok else 'then'} {case.state if before.ok else before.state}"
    elif not together and case.fidelity not in REPEATING:
        why_not = "another machine"
    elif not mine or not its:
        why_not = "no step time"
    else:
        interval = compared(before, case)
        ratio = interval.ratio if interval else mine / its
        why_not = "" if interval is None or interval.bounded else no_interval(interval)
        return Changed(case=case, before=before, ratio=ratio, interval=interval, why_not=why_not, exact=exact)
    return Changed(case=case, before=before, ratio=None, interval=None, why_not=why_not, exact=exact)


def _exact(case: CaseResult, before: CaseResult, *, together: bool) -> tuple[Change, ...] | None:
    """Exact metrics that changed; between machines, only those that do not depend on the machine."""
    sides = []
    for one in (before, case):
        launch = next((launch for launch in one.launches if launch.state == "ok" and launch.proof), None)
        if launch is None:
            return None
        metrics = exact_metrics(launch)
        sides.append({case.full_label: metrics if together else portable(metrics)})
    moved = changes(sides[0], sides[1], RULES)
    return tuple(change for change in moved if change.verdict not in ("new", "removed"))  # another refshard's metrics


def _is_worse(one: Changed) -> bool:
    broke = one.before.ok and not one.case.ok
    return one.outcome == "slower" or broke or any(change.verdict == "regressed" for change in one.exact or ())


def _sentences(found: Sequence[Changed], baseline: str) -> list[str]:
    if not found:
        return [f"Nothing to compare: no case is also in {baseline}."]
    counts: Counter[str] = Counter(one.outcome for one in found)
    sentences = []
    for outcome in ("slower", "faster"):
        here = sorted((o for o in found if o.outcome == outcome), key=lambda o: -abs((o.ratio or 1.0) - 1.0))
        if here:
            more = f" and {len(here) - MOST_NAMED} more" if len(here) > MOST_NAMED else ""
            sentences.append(
                f"{outcome.capitalize()} than in {baseline}: {'; '.join(map(_told, here[:MOST_NAMED]))}{more}."
            )
    if busy := busy_between(
        (one.before, one.case, one.ratio - 1)
        for one in found
        if one.ratio and one.interval and one.outcome in ("slower", "faster", "not compared")
    ):
        sentences.append(busy)
    if broke := [one.case.full_label for one in found if one.before.ok and not one.case.ok]:
        sentences.append(f"Ended ok in {baseline} but not here: {listed(broke)}.")
    if moved := [(one, one.exact) for one in found if one.exact]:
        regressed = sum(any(change.verdict == "regressed" for change in exact) for _, exact in moved)
        first, exact = moved[0]
        sentences.append(
            f"Exact metrics changed in {len(moved)} of {len(found)} cases and count as regressions in {regressed}; "
            f"the first: {first.case.full_label}, {_exact_words(exact[0])}."
        )
    reasons = dict.fromkeys(one.why_not for one in found if one.outcome == "not compared")
    rest = [
        f"{counts[outcome]} {words}"
        for outcome, words in (
            ("unchanged", f"within {RELEVANT:.1%}".replace("%", " %")),
            ("unknown", "too noisy to tell"),
            ("not compared", f"times not compared ({'; '.join(reasons)})"),
        )
        if counts[outcome]
    ]
    if rest:
        sentences.append(f"{len(found)} matching {'case' if len(found) == 1 else 'cases'}: {', '.join(rest)}.")
    return sentences


def _told(one: Changed) -> str:
    assert one.ratio is not None
    size = f"{format_percent(abs(one.ratio - 1))} {'longer' if one.ratio > 1 else 'shorter'}"
    return f"{one.case.full_label} {size}{_interval(one)}"


def _interval(one: Changed) -> str:
    if one.interval is None:
        return ""
    return f" (times {one.interval.low:.3f} to {one.interval.high:.3f})"


def _doubts(found: Sequence[Changed], evidence: Evidence, baseline: Evidence) -> list[str]:
    doubts = []
    if any(one.interval for one in found):
        doubts.append(
            "The two runs were not interleaved, so machine drift looks like a change; `refshard gate` "
            "measures both in paired rounds"
        )
    warnings = dict.fromkeys(w for one in found if one.interval and not one.why_not for w in one.interval.warnings)
    doubts += list(warnings)
    keys: list[set[tuple[CaseSpec, Fidelity]]] = [{(c.spec, c.fidelity) for c in e.cases} for e in (evidence, baseline)]
    for only, where in ((keys[0] - keys[1], "only here"), (keys[1] - keys[0], "only in the earlier run")):
        if only:
            doubts.append(f"{len(only)} {'case is' if len(only) == 1 else 'cases are'} {where}")
    return doubts


def _row(one: Changed) -> dict[str, str]:
    now, then = one.case.metrics, one.before.metrics
    return {
        "case": one.case.full_label,
        "then": format_metric("step_time_s", then["step_time_s"]),
        "now": format_metric("step_time_s", now["step_time_s"]),
        "now / then (95 % interval)": _ratio(one),
        "time": one.outcome,
        "peak memory then": format_metric("peak_memory_bytes", then["peak_memory_bytes"]),
        "peak memory now": format_metric("peak_memory_bytes", now["peak_memory_bytes"]),
        "exact metrics": "-" if one.exact is None else "; ".join(map(_exact_words, one.exact)) or "the same",
    }


def _ratio(one: Changed) -> str:
    if one.ratio is None:
        return one.why_not
    return f"{one.ratio:.3f}" if one.interval is None else ratio_text(one.interval, digits=3)


def _exact_words(change: Change) -> str:
    was, is_ = ("none" if value is None else str(value) for value in (change.before, change.after))
    return f"{change.metric} {was} to {is_} ({change.verdict})"
