"""The results of a gate as text, Markdown for a pull request, JUnit XML, and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import msgspec

from refshard.analysis.exact import Change, Value
from refshard.analysis.gate import TimeVerdict, Verdict
from refshard.analysis.rehearsal import CaseNoise, Noise
from refshard.errors import Status
from refshard.plain import plain
from refshard.quantities import format_percent
from refshard.report import blocks as printed
from refshard.report.blocks import Answer, Cell, Notes, Quantity, Row, Style, Text, cell_text, table

Outcome = Literal["pass", "regression", "harness error", "inconclusive", "not comparable"]
_WORST: tuple[Verdict, ...] = (
    "not comparable", "regressed", "removed", "inconclusive", "improved", "new", "pass",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCase:
    """One case: what changed exactly, what its time says, and what went wrong with its launches, if anything."""

    name: str
    changes: tuple[Change, ...] = ()
    time: TimeVerdict | None = None
    trouble: str = ""
    trouble_is: Verdict = "regressed"
    remark: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst of all that was found."""
        found: list[Verdict] = [change.verdict for change in self.changes]
        if self.trouble:
            found.append(self.trouble_is)
        if self.time is not None:
            found.append(self.time.verdict)
        return min(found, key=_WORST.index, default="pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """All cases of one gate. Beside an accepted baseline (``must_accept``) an improvement fails too: someone has to
    accept it. ``error`` and ``mismatch`` say why there is no comparison. ``noise`` is what gates on this machine are
    worth, if that was measured.
    """

    baseline: str
    candidate: str
    cases: tuple[GateCase, ...] = ()
    must_accept: bool = False
    error: str = ""
    mismatch: str = ""
    notes: tuple[str, ...] = ()
    noise: Noise | None = None

    @property
    def status(self) -> Status:
        """The exit status."""
        return {"pass": Status.YES, "regression": Status.NO}.get(self.outcome, Status.NO_VERDICT)

    @property
    def outcome(self) -> Outcome:
        """What the gate says of all cases."""
        verdicts = {case.verdict for case in self.cases}
        if self.error:
            return "harness error"
        if self.mismatch:
            return "not comparable"
        if not self.cases:
            return "harness error"
        if any(self.fails(case) for case in self.cases):
            return "regression"
        if "not comparable" in verdicts:
            return "not comparable"
        return "inconclusive" if "inconclusive" in verdicts else "pass"

    def fails(self, case: GateCase) -> bool:
        """Whether this case alone makes the gate fail."""
        return case.verdict in ("regressed", "removed", *(("improved", "new") if self.must_accept else ()))


def gate_answer(report: GateReport) -> Answer:
    """Tables of the cases and of what changed, and the verdict in a sentence."""
    cases = [_row(case, report.noise) for case in report.cases]
    # Columns that say nothing about any case are left out: times, if none were compared.
    shown = [key for key in (cases[0] if cases else ()) if any(cell_text(row[key]) != "-" for row in cases)]
    cases = [{key: row[key] for key in shown} for row in cases]
    changed: list[Row] = [
        {
            "case": c.case, "metric": c.metric or "the case", f"before: {report.baseline}": _value(c.before),
            f"after: {report.candidate}": _value(c.after), "verdict": c.verdict,
        }
        for case in report.cases
        for c in case.changes
    ]  # fmt: skip
    notes = [f"{case.name}: {note}" for case in report.cases for note in (case.trouble, case.remark) if note]
    notes += [noise_text(report.noise)] if report.noise is not None else []
    style: Style = "good" if report.outcome == "pass" else "doubtful" if report.outcome == "inconclusive" else "bad"
    return Answer(
        data=as_object(report),
        rows=[_flat(case) for case in report.cases],
        columns=_COLUMNS,
        blocks=[
            table(cases, left=2),
            table(changed, left=5),
            Notes(sentences=[*notes, *report.notes]),
            printed.Verdict(sentences=[f"{_headline(report)}: {_sentence(report)}"], style=style),
        ],
        status=report.status,
    )


def _headline(report: GateReport) -> str:
    """The status in words; what only waits to be accepted is no regression."""
    worse = any(case.verdict in ("regressed", "removed") for case in report.cases)
    return "CHANGED" if report.outcome == "regression" and not worse else report.outcome.upper()


_COLUMNS = ("case", "verdict", "exact_changes", "trouble", "time_ratio", "time_ratio_low", "time_ratio_high", "rounds")


def _flat(case: GateCase) -> dict[str, Any]:
    effect = case.time.effect if case.time else None
    values = (
        case.name, case.verdict, len(case.changes), case.trouble or None, effect.ratio if effect else None,
        effect.low if effect else None, effect.high if effect else None, effect.rounds if effect else None,
    )  # fmt: skip
    return dict(zip(_COLUMNS, values))


def noise_text(noise: Noise) -> str:
    """How a machine's own noise affects gates, in a sentence."""
    judged = noise.gates * len(noise.cases)
    alarms = sum(case.false_alarms for case in noise.cases.values())
    return (
        f"False alarms on this machine: {noise.failing_gates:,} of {noise.gates:,} gates failed with permuted labels "
        f"over {noise.launches} launches of the same code, {format_percent(alarms / judged)} of all cases."
    )


def noise_answer(noise: Noise, path: Path) -> Answer:
    """A row a case: how gates would judge it."""
    rows: list[Row] = [
        {
            "case": name,
            "B / A (95 % interval)": f"{case.ratio:.3f} ({case.low:.3f} to {case.high:.3f})",
            "spread of a round": Quantity(case.spread, "share"),
            "smallest visible change": Quantity(case.smallest_visible, "share"),
            "inconclusive": Quantity(case.inconclusive / noise.gates, "share"),
            **_noise_cells(case, noise),
            "rounds": case.rounds,
        }
        for name, case in noise.cases.items()
    ]
    data = msgspec.to_builtins(noise)
    return Answer(
        data={"file": str(path), **data},
        rows=[{"case": name, **case} for name, case in data["cases"].items()],
        blocks=[table(rows), Text(text=f"kept: {path}"), printed.Verdict(sentences=[noise_text(noise)])],
    )


def _noise_cells(case: CaseNoise | None, noise: Noise) -> dict[str, Cell]:
    """How gates judged one case; None if its times are not compared. The planted slowdown is the same for all."""
    planted = f"+{format_percent(next(iter(noise.cases.values())).planted)} found here"
    alarms = None if case is None else Quantity(case.false_alarms / noise.gates, "share")
    return {"false alarms here": alarms, planted: None if case is None else Quantity(case.found / case.tried, "share")}


def _row(case: GateCase, noise: Noise | None) -> dict[str, Cell]:
    time = case.time
    ratio = f"{time.effect.ratio:.3f} ({time.effect.low:.3f} to {time.effect.high:.3f})" if time else None
    return {
        "case": case.name,
        "verdict": case.verdict,
        "exact changes": len(case.changes),
        "time, candidate / baseline": ratio,
        "rounds": time.effect.rounds if time else None,
        "smallest visible": Quantity(time.smallest_visible, "share") if time else None,
        **({} if noise is None else _noise_cells(noise.cases.get(case.name), noise)),
    }


def _value(value: Value | None) -> str | int | None:
    return value if value is None or isinstance(value, int) else str(value)


def _sentence(report: GateReport) -> str:
    if report.error or report.mismatch or not report.cases:
        return plain(report.error or report.mismatch or "there was no case to compare")
    counts = {verdict: sum(case.verdict == verdict for case in report.cases) for verdict in _WORST}
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{listed} of {len(report.cases)} case{'' if len(report.cases) == 1 else 's'}"


def as_object(report: GateReport) -> dict[str, Any]:
    """Everything, for machines."""
    return {
        "status": report.status,
        "verdict": report.outcome,
        "baseline": report.baseline,
        "candidate": report.candidate,
        "error": report.error,
        "mismatch": report.mismatch,
        "notes": list(report.notes),
        "noise": None if report.noise is None else msgspec.to_builtins(report.noise),
        "cases": [
            {
                "case": case.name,
                "verdict": case.verdict,
                "trouble": case.trouble,
                "remark": case.remark,
                "changes": [
                    {"metric": c.metric, "before": c.before, "after": c.after, "verdict": c.verdict}
                    for c in case.changes
                ],
                "time": None if case.time is None else _time(case.time),
            }
            for case in report.cases
        ],
    }


def _time(time: TimeVerdict) -> dict[str, Any]:
    effect = time.effect
    return {
        "verdict": time.verdict, "ratio": effect.ratio, "low": effect.low, "high": effect.high,
        "p_slower": effect.p_slower, "p_faster": effect.p_faster, "rounds": effect.rounds,
        "smallest_visible": time.smallest_visible, "suspect": time.suspect,
    }  # fmt: skip


def junit(report: GateReport) -> str:
    """A test case for each case of the suite, as CI systems read them."""
    failing = [case for case in report.cases if report.fails(case)]
    amiss = report.outcome in ("harness error", "not comparable")
    root = ElementTree.Element(
        "testsuite", name="refshard gate", tests=str(len(report.cases) + amiss), failures=str(len(failing)),
        errors=str(int(amiss)),
    )  # fmt: skip
    for case in report.cases:
        node = ElementTree.SubElement(root, "testcase", classname="refshard.gate", name=plain(case.name))
        reason = _reason(case)
        if case in failing:
            ElementTree.SubElement(node, "failure", message=reason)
        elif case.verdict in ("inconclusive", "not comparable"):
            ElementTree.SubElement(node, "skipped", message=reason)
    if amiss:
        node = ElementTree.SubElement(root, "testcase", classname="refshard.gate", name="gate")
        ElementTree.SubElement(node, "error", message=_sentence(report))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def annotations(report: GateReport) -> Sequence[str]:
    """Workflow commands that mark a job's page: an error for each case that fails, a warning where it is unclear."""
    found = []
    for case in report.cases:
        if report.fails(case) or case.verdict in ("inconclusive", "not comparable"):
            level = "error" if report.fails(case) else "warning"
            found.append(f"::{level} title=refshard gate::{_escaped(f'{plain(case.name)}: {_reason(case)}')}")
    if report.outcome in ("harness error", "not comparable"):
        found.append(f"::error title=refshard gate::{_escaped(_sentence(report))}")
    return found


def _reason(case: GateCase) -> str:
    """Why a case has its verdict, in a line."""
    found = [
        f"{c.metric or 'the case'}: {cell_text(_value(c.before))} -> {cell_text(_value(c.after))} ({c.verdict})"
        for c in case.changes
    ]
    if case.time is not None and case.time.verdict != "pass":
        effect = case.time.effect
        found.append(
            f"time {case.time.verdict}: {effect.ratio:.3f} times the baseline's ({effect.low:.3f} to {effect.high:.3f})"
        )
    return plain("; ".join([*found, *([case.trouble] if case.trouble else [])]) or case.verdict)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
