"""Two runs, or strategies of one run, compared: ratios with their intervals.

Two runs are not interleaved, so the ratio of their times includes the machine's drift; a gate (``refshard gate
--baseline``) measures both in turns. Times are compared if one machine measured both runs, exact metrics always.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import Comparison
from refshard.analysis.compared import compared
from refshard.analysis.evidence import Evidence, Setting, machine
from refshard.analysis.exact import Change, changes, exact_metrics, portable
from refshard.analysis.ratios import RATIO_COLUMNS, Ratio, ratio_columns, ratios
from refshard.errors import SpecError, nearest
from refshard.quantities import format_percent
from refshard.report.blocks import Answer, Block, Cell, Marked, Notes, Row, Section, Style, Table, Verdict, Where, table
from refshard.report.run.cells import metric, no_interval, ratio_text
from refshard.report.run.rows import COLUMNS, as_json
from refshard.report.run.verdict import busy_between, listed
from refshard.specs.case import REPEATING, Case, Fidelity, spelled
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
    found = [
        (setting, ratio)
        for setting in evidence.settings
        for ratio in ratios(setting, a)
        if not others or ratio.case.strategy in others
    ]
    rows = [{**row, **more} for row, more in zip(as_json(evidence), ratio_columns(evidence, a))]
    numbers = {ratio.case.number for _, ratio in found}
    rows = [row for row, case in zip(rows, evidence.cases) if case.number in numbers]
    sentences = [_sentence(ratio, a) for _, ratio in found] or [
        f"Nothing to compare: no other case with the same number of ranks as {a} ended ok."
    ]
    intervals = [ratio.step_time for _, ratio in found if ratio.step_time and ratio.step_time.bounded]
    doubts = dict.fromkeys(doubt for interval in intervals for doubt in interval.warnings)
    tables = [
        _ratio_table(setting, [ratio for s, ratio in found if s is setting], a)
        for setting in dict.fromkeys(setting for setting, _ in found)
    ]
    return Answer(
        data={"a": a, "verdict": sentences, "notes": list(doubts), "cases": rows},
        rows=rows,
        columns=[*COLUMNS, *RATIO_COLUMNS],
        blocks=[*tables, Notes(sentences=[f"Caution: {doubt}." for doubt in doubts]), Verdict(sentences=sentences)],
    )


def _ratio_table(setting: Setting, found: Sequence[Ratio], a: str) -> Table:
    timed = [ratio.step_time for ratio in found if ratio.step_time]
    paired = ", paired by round" if all(time.paired for time in timed) else ""
    interval = f"\n(95 % interval{paired})" if timed else ""
    rows: list[Row] = [
        {
            "strategy": ratio.case.strategy,
            "ranks": ratio.case.spec.job.gpus,
            f"step time / {a}{interval}": _time(ratio),
            f"peak memory / {a}": _times(ratio.peak_memory),
        }
        for ratio in found
    ]
    return table(rows, title=setting.label)


def _times(ratio: float | None) -> Cell:
    return None if ratio is None else f"{ratio:.2f}"


def _time(ratio: Ratio) -> Cell:
    found = ratio.step_time
    if found is None:
        return _times(ratio.calculated)
    style: Style = "plain" if not (found.bounded and found.significant) else "bad" if found.ratio > 1 else "good"
    return Marked(ratio_text(found), style)


def _sentence(ratio: Ratio, a: str) -> str:
    time, found = ratio.step_time, ratio.calculated
    if time is not None and time.bounded and not time.significant:
        text = "a tie, since the interval of the step time's ratio includes 1"
    elif time is not None:
        how = "significant" if time.bounded else no_interval(time)
        text = f"step time {_more(time.ratio, 'longer', 'shorter')} ({how})"
    elif found is not None:
        how = f"{spelled(ratio.case.fidelity)}, so there is no interval"
        text = f"step time {_more(found, 'longer', 'shorter')} ({how})"
    else:
        text = "step time not compared"
    memory = "" if ratio.peak_memory is None else f"; peak memory {_more(ratio.peak_memory, 'more', 'less')}"
    return f"{ratio.case.label} against {a}: {text}{memory}."


def _more(ratio: float, up: str, down: str) -> str:
    part = format_percent(abs(ratio - 1))
    return "the same" if part == format_percent(0) else f"{part} {up if ratio > 1 else down}"


# --- two runs


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
        """How its time changed: unknown if the interval includes both no change and a relevant one."""
        if self.ratio is None or self.why_not:
            return "not compared"
        low, high = (self.interval.low, self.interval.high) if self.interval else (self.ratio, self.ratio)
        if low >= 1 - RELEVANT and high <= 1 + RELEVANT:
            return "unchanged"
        if low > 1:
            return "slower"
        return "faster" if high < 1 else "unknown"

    @property
    def broke(self) -> bool:
        """Whether only the baseline's ended ok."""
        return self.before.ok and not self.case.ok

    @property
    def worse(self) -> bool:
        """Whether it is slower, broke, or an exact metric regressed."""
        regressed = any(change.verdict == "regressed" for change in self.exact or ())
        return self.outcome == "slower" or self.broke or regressed


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What changed in the baseline's cases, in sentences and case by case, and doubts about it."""

    baseline: str
    sentences: tuple[str, ...]
    doubts: tuple[str, ...]
    changed: tuple[Changed, ...]

    @property
    def worse(self) -> bool:
        """Whether any case is."""
        return any(one.worse for one in self.changed)

    def table(self, before: str, now: str, *, title: str = "", where: Where = "always") -> Table:
        """A row for each case; ``before`` and ``now`` name the two runs."""
        ratio = f"{now} / {before} (95 % interval)"
        rows: list[Row] = [
            {
                "case": one.case.full_label,
                before: metric(one.before, "step_time_s"),
                now: metric(one.case, "step_time_s"),
                ratio: one.why_not
                if one.ratio is None
                else f"{one.ratio:.3f}"
                if one.interval is None
                else ratio_text(one.interval, digits=3),
                "time": Marked(one.outcome, _OUTCOMES.get(one.outcome, "plain")),
                f"peak memory {before}": metric(one.before, "peak_memory_bytes"),
                f"peak memory {now}": metric(one.case, "peak_memory_bytes"),
                "exact metrics": None if one.exact is None else "; ".join(map(_exact_text, one.exact)) or "the same",
            }
            for one in self.changed
        ]
        cases = [one.case.number for one in self.changed]
        return table(
            rows, text=["time"], title=title, caption=f"{now} over {before}, by case", cases=cases, where=where
        )


def compare_runs(a: Evidence, b: Evidence, machines: Sequence[str]) -> Answer:
    """Every case that both runs have, B over A. ``machines`` says what differs between the two machines."""
    found = against(b, a)
    rows = [{name: value(one) for name, value in _ROW.items()} for one in found.changed]
    return Answer(
        data={
            "a": [run.header.run_id for run in a.runs], "b": [run.header.run_id for run in b.runs],
            "verdict": list(found.sentences), "notes": list(found.doubts), "machines_differ_in": list(machines),
            "cases": rows,
        },
        rows=rows,
        columns=list(_ROW),
        blocks=[
            found.table("A", "B", title=f"A: {found.baseline}"),
            Notes(sentences=[f"{difference}." for difference in machines], title="Machine or software differ")
            if machines else Notes(sentences=["Both runs have the same machine and software."]),
            Notes(sentences=[f"Caution: {doubt}." for doubt in found.doubts]),
            Verdict(sentences=found.sentences),
        ],
    )  # fmt: skip


def against_section(found: Against) -> Section:
    """What changed, for a page."""
    style: Style = "bad" if found.worse else "strong"
    blocks: list[Block] = [Verdict(sentences=found.sentences, style=style)]
    if found.changed:
        changes = found.table("then", "now")
        cautions = Notes(sentences=[f"Caution: {doubt}." for doubt in found.doubts])
        title = f"Each case, now and in {found.baseline}"
        blocks.append(Section(title=title, folded=True, blocks=[changes, cautions]))
    return Section(title=f"Compared with {found.baseline}", id="against", blocks=blocks)


_ROW: dict[str, Callable[[Changed], object]] = {
    "case": lambda one: one.case.name,
    "strategy": lambda one: one.case.strategy,
    "gpus": lambda one: one.case.spec.job.gpus,
    "step_time_a_s": lambda one: one.before.metrics["step_time_s"],
    "step_time_b_s": lambda one: one.case.metrics["step_time_s"],
    "step_time_ratio": lambda one: one.ratio,
    "step_time_ratio_low": lambda one: one.interval.low if one.interval and one.interval.bounded else None,
    "step_time_ratio_high": lambda one: one.interval.high if one.interval and one.interval.bounded else None,
    "time": lambda one: one.outcome,
    "why_not_compared": lambda one: one.why_not or None,
    "peak_memory_a_bytes": lambda one: one.before.metrics["peak_memory_bytes"],
    "peak_memory_b_bytes": lambda one: one.case.metrics["peak_memory_bytes"],
    "exact_changes": lambda one: (
        None
        if one.exact is None
        else [f"{change.metric}: {change.before} -> {change.after} ({change.verdict})" for change in one.exact]
    ),
}
"""A case of two runs, for programs."""


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


def _exact_text(change: Change) -> str:
    was, is_ = ("none" if value is None else str(value) for value in (change.before, change.after))
    return f"{change.metric} {was} to {is_} ({change.verdict})"


def _sentences(found: Sequence[Changed], baseline: str) -> list[str]:
    if not found:
        return [f"Nothing to compare: no case is also in {baseline}."]
    counts: Counter[str] = Counter(one.outcome for one in found)
    sentences = []
    for outcome in ("slower", "faster"):
        here = sorted((o for o in found if o.outcome == outcome), key=lambda o: -abs((o.ratio or 1.0) - 1.0))
        if here:
            more = f" and {len(here) - MOST_NAMED} more" if len(here) > MOST_NAMED else ""
            named = "; ".join(map(_change, here[:MOST_NAMED]))
            sentences.append(f"{outcome.capitalize()} than in {baseline}: {named}{more}.")
    if busy := busy_between(
        (one.before, one.case, one.ratio - 1)
        for one in found
        if one.ratio and one.interval and one.outcome in ("slower", "faster", "not compared")
    ):
        sentences.append(busy)
    if broke := [one.case.full_label for one in found if one.broke]:
        sentences.append(f"Ended ok in {baseline} but not here: {listed(broke)}.")
    if moved := [(one, one.exact) for one in found if one.exact]:
        regressed = sum(any(change.verdict == "regressed" for change in exact) for _, exact in moved)
        first, exact = moved[0]
        sentences.append(
            f"Exact metrics changed in {len(moved)} of {len(found)} cases and count as regressions in {regressed}; "
            f"the first: {first.case.full_label}, {_exact_text(exact[0])}."
        )
    reasons = dict.fromkeys(one.why_not for one in found if one.outcome == "not compared")
    rest = [
        f"{counts[outcome]} {text}"
        for outcome, text in (
            ("unchanged", f"within {RELEVANT:.1%}".replace("%", " %")),
            ("unknown", "too noisy to tell"),
            ("not compared", f"times not compared ({'; '.join(reasons)})"),
        )
        if counts[outcome]
    ]
    if rest:
        sentences.append(f"{len(found)} matching {'case' if len(found) == 1 else 'cases'}: {', '.join(rest)}.")
    return sentences


def _change(one: Changed) -> str:
    assert one.ratio is not None
    size = f"{format_percent(abs(one.ratio - 1))} {'longer' if one.ratio > 1 else 'shorter'}"
    interval = f" (times {one.interval.low:.3f} to {one.interval.high:.3f})" if one.interval else ""
    return f"{one.case.full_label} {size}{interval}"


def _doubts(found: Sequence[Changed], evidence: Evidence, baseline: Evidence) -> list[str]:
    doubts = []
    if any(one.interval for one in found):
        doubts.append(
            "The two runs were not interleaved, so machine drift looks like a change; `refshard gate` "
            "measures both in paired rounds"
        )
    warnings = dict.fromkeys(w for one in found if one.interval and not one.why_not for w in one.interval.warnings)
    doubts += list(warnings)
    keys: list[set[tuple[Case, Fidelity]]] = [{(c.spec, c.fidelity) for c in e.cases} for e in (evidence, baseline)]
    for only, where in ((keys[0] - keys[1], "only here"), (keys[1] - keys[0], "only in the earlier run")):
        if only:
            doubts.append(f"{len(only)} {'case is' if len(only) == 1 else 'cases are'} {where}")
    return doubts
