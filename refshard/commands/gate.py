"""``refshard gate`` and ``refshard accept``: whether a change may pass, and what is the measure of that."""

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from refshard.commands.run import observer as make_observer
from refshard.errors import RefshardError, SpecError
from refshard.folders import replace_file
from refshard.harness.baseline import accept as accept_run
from refshard.harness.baseline import baseline_file, read_baseline
from refshard.harness.checkout import checked_out
from refshard.harness.environment import capture_environment
from refshard.harness.launchers.local import LocalLauncher
from refshard.harness.rounds import PairedRounds, Side
from refshard.harness.run import check_suite, run_suite
from refshard.harness.store import read_run
from refshard.records import CaseRecord, Environment
from refshard.report import gate as report
from refshard.report.gate import GateCase, GateReport
from refshard.specs.case import CaseSpec
from refshard.specs.suite import SuiteSpec, find_suite, load_suite
from refshard.stats.exact import changes, exact_metrics
from refshard.stats.gate import TimeVerdict, effect_of, is_suspect, judge

BASELINES = Path("profiles/baselines")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to compare, and how. Without a ``baseline`` (a revision or a folder) exact metrics are held against the
    accepted ones; with one, both are launched here, and unless ``exact`` is all that is wanted, their times compared.
    """

    suite: str
    baseline: str | None
    candidate: str
    exact: bool = False
    oversubscribe: bool = False
    baselines: Path = BASELINES


def gate(
    asked: Asked,
    *,
    as_json: bool = False,
    markdown: Path | None = None,
    junit: Path | None = None,
    annotate: bool = False,
) -> tuple[str, int]:
    """Hold the gate; return the text to print and the exit status.

    Raises:
        SpecError: what is asked for makes no sense; nothing was launched.
        KeyboardInterrupt: it was cut short; what had ended is written.
    """
    suite = load_suite(find_suite(asked.suite))
    if suite.network is not None:
        raise SpecError("suite: a gate launches ranks on this machine only; leave out 'network'")
    cases = tuple(
        case for case in check_suite(suite, LocalLauncher(), oversubscribe=asked.oversubscribe) if case.processes
    )
    environment = capture_environment(cases[0].threads_per_rank)
    folder = Path("runs") / f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-gate-{suite.name}"
    print(f"run folder: {folder}", file=sys.stderr, flush=True)
    if asked.baseline is None:
        found = _beside_accepted(asked, suite, environment, folder)
    else:
        found = _beside_revision(asked, suite, cases, environment, folder)
    if markdown is not None:
        replace_file(markdown, [report.markdown(found)])
    if junit is not None:
        replace_file(junit, [report.junit(found)])
    lines = list(report.annotations(found)) if annotate else []
    text = json.dumps(report.as_object(found), indent=2) if as_json else report.terminal(found)
    return "\n".join([*lines, text]), found.status


def accept(run: Path, reason: str, baselines: Path = BASELINES) -> str:
    """Make a run's exact metrics the baseline; return what to print.

    Raises:
        RefshardError: the run is none, or did not end well; or no reason is given.
    """
    path, before = accept_run(read_run(run), baselines, reason)
    if before is None:
        return f"accepted: {path}, which is new"
    made = read_baseline(path)
    changed = changes(before.cases, made.cases, {})
    return f"accepted: {path}, {len(changed)} metric{'' if len(changed) == 1 else 's'} changed"


def _beside_accepted(asked: Asked, suite: SuiteSpec, environment: Environment, folder: Path) -> GateReport:
    path = baseline_file(asked.baselines, environment, suite.name)
    baseline = f"accepted {environment.id}"
    if not path.exists():
        return GateReport(
            baseline=baseline,
            candidate=asked.candidate,
            mismatch=f"no baseline for this machine and suite ({path}); run the suite here and `refshard accept` it",
        )
    with checked_out(asked.candidate, Path.cwd()) as source, make_observer() as observer:
        launcher = LocalLauncher(source)
        run = run_suite(suite, folder, launcher, observer, environment, oversubscribe=asked.oversubscribe)
    accepted = read_baseline(path)
    records = {record.case.name: record for record in run.cases if record.fidelity != "simulated"}
    after = {name: exact_metrics(record) for name, record in records.items() if record.state == "ok"}
    differing = changes(accepted.cases, {**{name: {} for name in records}, **after}, suite.gate.rules)
    found = tuple(
        GateCase(
            name=name,
            changes=tuple(c for c in differing if c.case == name) if name not in records or name in after else (),
            trouble="" if name in after or name not in records else _trouble("the candidate", records[name]),
        )
        for name in sorted({*accepted.cases, *records})
    )
    return GateReport(baseline=baseline, candidate=asked.candidate, cases=found, must_accept=True)


def _beside_revision(
    asked: Asked, suite: SuiteSpec, cases: tuple[CaseSpec, ...], environment: Environment, folder: Path
) -> GateReport:
    assert asked.baseline is not None
    baseline, candidate = asked.baseline, asked.candidate
    with ExitStack() as open_:
        sources = [open_.enter_context(checked_out(revision, Path.cwd())) for revision in (baseline, candidate)]
        sides = (
            Side(name="baseline", launcher=LocalLauncher(sources[0]), environment=environment),
            Side(name="candidate", launcher=LocalLauncher(sources[1]), environment=environment),
        )
        observer = open_.enter_context(make_observer())
        held = open_.enter_context(PairedRounds(suite, folder, sides, observer))
        try:
            return GateReport(baseline=baseline, candidate=candidate, cases=_hold(asked, suite, cases, held))
        except RefshardError as error:
            return GateReport(baseline=baseline, candidate=candidate, error=str(error))


def _hold(asked: Asked, suite: SuiteSpec, cases: tuple[CaseSpec, ...], held: PairedRounds) -> tuple[GateCase, ...]:
    references = [case for case in cases if case == case.reference()]
    timed = [case for case in cases if case not in references]
    held.references(references)
    held.hold(timed, 1)
    first = {case: held.last(case) for case in timed}
    well = [case for case, records in first.items() if all(record.state == "ok" for record in records)]
    verdicts = {} if asked.exact else _times(suite, well, held)
    return tuple(_case(case, *records, verdicts.get(case.name), suite) for case, records in first.items())


def _times(suite: SuiteSpec, cases: list[CaseSpec], held: PairedRounds) -> Mapping[str, TimeVerdict]:
    """Screen all cases; the first round, which was for exact metrics, counts too. Then confirm the suspects."""
    limits = suite.gate.times
    held.hold(cases, limits.screen_rounds - 1)
    screened = {case.name: held.log_ratios(case) for case in cases}
    if short := [name for name, log_ratios in screened.items() if len(log_ratios) < limits.screen_rounds // 2]:
        raise SpecError(f"{short[0]}: over half of its rounds did not end ok on both sides; see the records")
    suspects = [case for case in cases if is_suspect(effect_of(screened[case.name]), limits)]
    fresh = held.rounds
    held.hold(suspects, limits.confirm_rounds)
    return judge(screened, {case.name: held.log_ratios(case, fresh) for case in suspects}, limits)


def _case(
    case: CaseSpec, before: CaseRecord, after: CaseRecord, time: TimeVerdict | None, suite: SuiteSpec
) -> GateCase:
    if before.state != "ok":
        return GateCase(name=case.name, trouble=_trouble("the baseline", before), comparable=False)
    if after.state != "ok":
        return GateCase(name=case.name, trouble=_trouble("the candidate", after))
    found = changes({case.name: exact_metrics(before)}, {case.name: exact_metrics(after)}, suite.gate.rules)
    return GateCase(name=case.name, changes=found, time=time)


def _trouble(side: str, record: CaseRecord) -> str:
    return f"{side} ended {record.state}: {record.error}"
