"""Two runs, or strategies of one run, compared: ratios with their intervals.

Two runs are not interleaved, so the ratio of their times includes the machine's drift; a gate (``refshard gate
--baseline``) measures both in turns. Times are compared if one machine measured both runs, exact metrics always.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import Comparison
from refshard.analysis.evidence import Evidence, machine
from refshard.analysis.exact import Change, changes, exact_metrics, portable
from refshard.analysis.rankings import ranking_of
from refshard.analysis.ratios import RATIO_COLUMNS, Ratio, ratio_columns, ratio_of, ratios
from refshard.errors import SpecError, Status, nearest
from refshard.quantities import format_percent
from refshard.report.blocks import Answer, Block, Cell, Marked, Notes, Row, Section, Style, Table, Verdict, table
from refshard.report.run.answer import COLUMNS, as_rows
from refshard.report.run.cells import metric, no_interval, ratio_text, times
from refshard.report.run.tables import numbers
from refshard.report.run.verdict import Finding, finding_of, listed, undecided
from refshard.specs.case import REPEATING, spelled
from refshard.specs.gate import RULES, TimeLimits

Outcome = Literal["slower", "faster", "unchanged", "unknown", "not compared"]
RELEVANT = TimeLimits().relevant
"""A ratio this near to 1 is no change."""
MOST_NAMED = 4
_OUTCOMES: dict[str, Style] = {"slower": "bad", "faster": "good", "unknown": "doubtful"}


# --- strategies of one run


def compare_strategies(evidence: Evidence, a: str, others: Sequence[str]) -> Answer:
    """Each of the strategies ``others`` (all, if empty) over ``a`` at the same number of ranks.

    Raises:
        SpecError: the run has no case of a strategy.
    """
    present = sorted({case.strategy for case in evidence.cases})
    for name in (a, *others):
        if not present:
            raise SpecError(f"compare: this run has no case yet, so none of strategy '{name}'; wait for its first case")
        if name not in present:
            raise SpecError(
                f"compare: there is no run in '{name}', and this run has no case of strategy '{name}'; "
                f"{nearest(name, present)}"
            )
    tables, found, verdicts = list[Table](), list[Ratio](), list[Finding]()
    for setting in evidence.settings:
        here = [ratio for ratio in ratios(setting, a) if not others or ratio.case.strategy in others]
        timed = [ratio.step_time for ratio in here if ratio.step_time]
        paired = ", paired by round" if all(time.paired for time in timed) else ""
        interval = f"\n(95 % interval{paired})" if timed else ""
        rows: list[Row] = [
            {
                "strategy": ratio.case.strategy,
                "ranks": ratio.case.spec.job.gpus,
                f"step time / {a}{interval}": _time(ratio),
                f"peak memory / {a}": times(ratio.peak_memory),
            }
            for ratio in here
        ]
        tables.append(table(rows, title=setting.label))
        found += here
        for size in dict.fromkeys(ratio.case.spec.job.gpus for ratio in here):
            cases = [ratio for ratio in here if ratio.case.spec.job.gpus == size]
            entered = tuple(dict.fromkeys([cases[0].peer, *(ratio.case for ratio in cases)]))
            verdicts.append(finding_of(ranking_of(replace(setting, cases=entered), size)))
    shown = {ratio.case.number for ratio in found}
    flat = [
        {**row, **more}
        for case, row, more in zip(evidence.cases, as_rows(evidence), ratio_columns(evidence, a))
        if case.number in shown
    ]
    leads = [f"{one.title}: {one.lead}" if len(verdicts) > 1 else one.lead for one in verdicts]
    sentences = [*leads, *(_sentence(ratio, a) for ratio in found)] or [
        f"No verdict: no other case with the same number of ranks as {a} ended ok."
    ]
    status = 0 if any(one.decides for one in verdicts) else Status.NO_VERDICT
    intervals = [ratio.step_time for ratio in found if ratio.step_time and ratio.step_time.bounded]
    warnings = dict.fromkeys(warning for interval in intervals for warning in interval.warnings)
    return Answer(
        data={"a": a, "verdict": sentences, "notes": list(warnings), "cases": flat},
        rows=flat,
        columns=[*COLUMNS, *RATIO_COLUMNS],
        blocks=[*tables, Notes(sentences=[f"Caution: {one}." for one in warnings]), Verdict(sentences=sentences)],
        status=status,
    )


def _time(ratio: Ratio) -> Cell:
    found, style = ratio.step_time, _OUTCOMES.get(ratio.outcome, "plain")
    return times(ratio.calculated) if found is None else Marked(ratio_text(found), style)


def _sentence(ratio: Ratio, a: str) -> str:
    if ratio.time is None:
        text = "step time not compared"
    elif ratio.step_time is None:
        text = f"step time {_more(ratio.time, 'longer', 'shorter')} ({spelled(ratio.case.fidelity)})"
    elif ratio.outcome == "tie":
        text = "a tie in step time"
    else:
        why = f", not decided: {undecided(ratio)}" if ratio.outcome == "not decided" else ""
        text = f"step time {_more(ratio.time, 'longer', 'shorter')}{why}"
    memory = "" if ratio.peak_memory is None else f"; peak memory {_more(ratio.peak_memory, 'more', 'less')}"
    return f"{ratio.case.label} against {a}: {text}{memory}."


def _more(ratio: float, up: str, down: str) -> str:
    part = format_percent(abs(ratio - 1))
    return "the same" if part == format_percent(0) else f"{part} {up if ratio > 1 else down}"


# --- two runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A case and the same case in the baseline; ``why_not`` says why times are not compared. ``exact`` are the exact
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
        """How its time changed: unknown if the interval includes both no change and a relevant one, or the machine
        drifted by more than the change.
        """
        if self.ratio is None or self.why_not:
            return "not compared"
        low, high = (self.interval.low, self.interval.high) if self.interval else (self.ratio, self.ratio)
        if low >= 1 - RELEVANT and high <= 1 + RELEVANT:
            return "unchanged"
        return "unknown" if low <= 1 <= high or self.over.drift else "slower" if low > 1 else "faster"

    @property
    def over(self) -> Ratio:
        """This case over the baseline's."""
        return ratio_of(self.before, self.case)

    @property
    def broke(self) -> bool:
        """Whether only the baseline's ended ok."""
        return self.before.ok and not self.case.ok

    @property
    def regressed(self) -> bool:
        """Whether an exact metric did."""
        return any(change.verdict == "regressed" for change in self.exact or ())

    @property
    def row(self) -> dict[str, Any]:
        """For programs."""
        bounded = self.interval if self.interval and self.interval.bounded else None
        return {
            "case": self.case.name, "strategy": self.case.strategy, "gpus": self.case.spec.job.gpus,
            "step_time_a_s": self.before.metrics["step_time_s"], "step_time_b_s": self.case.metrics["step_time_s"],
            "step_time_ratio": self.ratio,
            "step_time_ratio_low": bounded and bounded.low, "step_time_ratio_high": bounded and bounded.high,
            "time": self.outcome, "why_not_compared": self.why_not or None,
            "peak_memory_a_bytes": self.before.metrics["peak_memory_bytes"],
            "peak_memory_b_bytes": self.case.metrics["peak_memory_bytes"],
            "exact_changes": None if self.exact is None else [
                f"{change.metric}: {change.before} -> {change.after} ({change.verdict})" for change in self.exact
            ],
        }  # fmt: skip


_ROW = ("case", "strategy", "gpus", "step_time_a_s", "step_time_b_s", "step_time_ratio", "step_time_ratio_low",
        "step_time_ratio_high", "time", "why_not_compared", "peak_memory_a_bytes", "peak_memory_b_bytes",
        "exact_changes")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What changed in the baseline's cases, in sentences and case by case, and caveats."""

    baseline: str
    sentences: list[str]
    caveats: list[str]
    changed: list[Changed]

    @property
    def worse(self) -> bool:
        """Whether any case is slower, broke, or has an exact metric that regressed."""
        return any(one.outcome == "slower" or one.broke or one.regressed for one in self.changed)

    @property
    def decides(self) -> bool:
        """Whether anything is known to have changed, or not to have."""
        return any(one.outcome not in ("unknown", "not compared") or one.broke or one.exact for one in self.changed)

    @property
    def notes(self) -> Notes:
        """The caveats."""
        return Notes(sentences=[f"Caution: {caveat}." for caveat in self.caveats])

    def table(self, before: str, now: str, *, title: str = "") -> Table:
        """A row for each case; ``before`` and ``now`` name the two runs."""

        def ratio(one: Changed) -> str:
            if one.ratio is None:
                return one.why_not
            return f"{one.ratio:.3f}" if one.interval is None else ratio_text(one.interval, digits=3)

        rows: list[Row] = [
            {
                "case": one.case.full_label,
                before: metric(one.before, "step_time_s"),
                now: metric(one.case, "step_time_s"),
                f"{now} / {before} (95 % interval)": ratio(one),
                "time": Marked(one.outcome, _OUTCOMES.get(one.outcome, "plain")),
                f"peak memory {before}": metric(one.before, "peak_memory_bytes"),
                f"peak memory {now}": metric(one.case, "peak_memory_bytes"),
                "exact metrics": None if one.exact is None else "; ".join(map(_exact_text, one.exact)) or "the same",
            }
            for one in self.changed
        ]
        cases = numbers([one.case for one in self.changed])
        return table(rows, text=["time"], title=title, caption=f"{now} over {before}, by case", cases=cases)


def compare_runs(a: Evidence, b: Evidence, machines: Sequence[str]) -> Answer:
    """Every case that both runs have, B over A. ``machines`` says what differs between the two machines."""
    found = against(b, a)
    rows = [one.row for one in found.changed]
    return Answer(
        data={
            "a": [run.header.run_id for run in a.runs], "b": [run.header.run_id for run in b.runs],
            "verdict": found.sentences, "notes": found.caveats, "machines_differ_in": list(machines), "cases": rows,
        },
        rows=rows,
        columns=_ROW,
        blocks=[
            found.table("A", "B", title=f"A: {found.baseline}"),
            Notes(sentences=[f"{difference}." for difference in machines], title="Machine or software differ")
            if machines else Notes(sentences=["Both runs have the same machine and software."]),
            found.notes,
            Verdict(sentences=found.sentences, style="strong" if found.decides else "doubtful"),
        ],
        status=0 if found.decides else Status.NO_VERDICT,
    )  # fmt: skip


def against_section(found: Against) -> Section:
    """What changed, as a section of a page."""
    title = f"Each case, now and in {found.baseline}"
    folded = Section(title=title, folded=True, blocks=[found.table("then", "now"), found.notes])
    verdict = Verdict(sentences=found.sentences, style="bad" if found.worse else "strong")
    blocks: list[Block] = [verdict, *([folded] if found.changed else [])]
    return Section(title=f"Compared with {found.baseline}", id="against", blocks=blocks)


def against(evidence: Evidence, baseline: Evidence) -> Against:
    """Every case of the evidence that is in the baseline too, on the same machine if possible."""
    found = []
    for case in evidence.cases:
        same = [b for b in baseline.cases if (b.spec, b.fidelity) == (case.spec, case.fidelity)]
        here = [b for b in same if machine(b.header.environment) == machine(case.header.environment)]
        found += [_changed(case, before, together=before in here) for before in [*here, *reversed(same)][:1]]
    names = listed([run.header.run_id for run in baseline.runs])
    timed = [one for one in found if one.interval]
    caveats = dict.fromkeys(w for one in timed if one.interval and not one.why_not for w in one.interval.warnings)
    drift = (
        "The two runs were not interleaved, so machine drift looks like a change; `refshard gate` measures both in "
        "paired rounds"
    )
    mine, its = ({(case.spec, case.fidelity) for case in side.cases} for side in (evidence, baseline))
    only = [
        f"{len(alone)} {'case is' if len(alone) == 1 else 'cases are'} only {where}"
        for alone, where in ((mine - its, "here"), (its - mine, "in the earlier run"))
        if alone
    ]
    return Against(
        baseline=names, sentences=_sentences(found, names), caveats=[*([drift] if timed else []), *caveats, *only],
        changed=found,
    )  # fmt: skip


def _changed(case: CaseResult, before: CaseResult, *, together: bool) -> Changed:
    """``together``: on one machine."""
    mine, its = case.metrics["step_time_s"], before.metrics["step_time_s"]
    ratio, interval = None, None
    if not (case.ok and before.ok):
        why_not = f"{'now' if before.ok else 'then'} {case.state if before.ok else before.state}"
    elif not together and case.fidelity not in REPEATING:
        why_not = "another machine"
    elif not mine or not its:
        why_not = "no step time"
    else:
        interval = ratio_of(before, case).step_time
        ratio = interval.ratio if interval else mine / its
        why_not = "" if interval is None or interval.bounded else no_interval(interval)
    exact = _exact(case, before, together=together)
    return Changed(case=case, before=before, ratio=ratio, interval=interval, why_not=why_not, exact=exact)


def _exact(case: CaseResult, before: CaseResult, *, together: bool) -> tuple[Change, ...] | None:
    """Exact metrics that changed; between machines, only machine-independent ones."""
    sides = []
    for one in (before, case):
        launch = next((launch for launch in one.ok_launches if launch.proof), None)
        if launch is None:
            return None
        metrics = exact_metrics(launch)
        sides.append({case.full_label: metrics if together else portable(metrics)})
    moved = changes(sides[0], sides[1], RULES)
    return tuple(change for change in moved if change.verdict not in ("new", "removed"))  # another refshard's metrics


def _exact_text(change: Change) -> str:
    was, is_ = ("none" if value is None else str(value) for value in (change.before, change.after))
    return f"{change.metric} {was} to {is_} ({change.verdict})"


def _sentences(found: Sequence[Changed], baseline: str) -> list[str]:
    if not found:
        return [f"No verdict: no case is also in {baseline}."]
    sentences = []
    for outcome in ("slower", "faster"):
        here = sorted((o for o in found if o.outcome == outcome), key=lambda o: -abs((o.ratio or 1.0) - 1.0))
        named = []
        for one in here[:MOST_NAMED]:
            interval = f" (times {one.interval.low:.3f} to {one.interval.high:.3f})" if one.interval else ""
            named.append(f"{one.case.full_label} {_more(one.ratio or 1.0, 'longer', 'shorter')}{interval}")
        more = f" and {len(here) - MOST_NAMED} more" if len(here) > MOST_NAMED else ""
        if here:
            sentences.append(f"{outcome.capitalize()} than in {baseline}: {'; '.join(named)}{more}.")
    if broke := [one.case.full_label for one in found if one.broke]:
        sentences.append(f"Ended ok in {baseline} but not here: {listed(broke)}.")
    if moved := [(one, one.exact) for one in found if one.exact]:
        regressed = sum(one.regressed for one, _ in moved)
        first, exact = moved[0]
        sentences.append(
            f"Exact metrics changed in {len(moved)} of {len(found)} cases and count as regressions in {regressed}; "
            f"the first: {first.case.full_label}, {_exact_text(exact[0])}."
        )
    reasons = dict.fromkeys(one.why_not for one in found if one.outcome == "not compared")
    rest = [
        f"{count} {text}"
        for outcome, text in (
            ("unchanged", f"within {format_percent(RELEVANT)}"),
            ("unknown", "too noisy to tell"),
            ("not compared", f"times not compared ({'; '.join(reasons)})"),
        )
        if (count := sum(one.outcome == outcome for one in found))
    ]
    if rest:
        text = f"{len(found)} matching {'case' if len(found) == 1 else 'cases'}: {', '.join(rest)}."
        sentences.append(
            text if sentences or any(one.outcome == "unchanged" for one in found) else f"No verdict: {text}"
        )
    if drifted := [one for one in found if one.outcome == "unknown" and one.interval and one.interval.significant]:
        first = max(drifted, key=lambda one: abs((one.ratio or 1.0) - 1.0))
        more = _more(first.ratio or 1.0, "longer", "shorter")
        sentences.append(f"{first.case.full_label} {more}, not decided: {undecided(first.over)}.")
    return sentences
