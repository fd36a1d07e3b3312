"""``refshard gate`` and ``refshard accept``: whether a change may pass, and what is the measure of that."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from refshard.commands.progress import observer as make_observer
from refshard.errors import LaunchError, RefshardError, SpecError
from refshard.folders import replace_file
from refshard.harness.baseline import MACHINE, Baseline, baseline_file, machine_of, read_baseline, read_others
from refshard.harness.baseline import accept as accept_run
from refshard.harness.checkout import checked_out
from refshard.harness.environment import capture_environment
from refshard.harness.launchers.local import LocalLauncher
from refshard.harness.noise import noise_file, read_noise
from refshard.harness.rounds import PairedRounds, Side, of_strategy
from refshard.harness.run import check_suite, run_suite
from refshard.harness.store import read_run
from refshard.records import CaseRecord, Environment
from refshard.report import gate as report
from refshard.report.gate import GateCase, GateReport
from refshard.specs.case import CaseSpec
from refshard.specs.suite import SuiteSpec, find_suite, load_suite
from refshard.stats.exact import OPERATORS, ORDER, PEAK, Exact, changes, exact_metrics, first_difference, portable
from refshard.stats.gate import TimeVerdict, judge, needs_fresh
from refshard.strategies import check_name

BASELINES = Path("profiles/baselines")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to compare, and how.

    With a ``baseline`` (a revision or a checkout), it and the ``candidate`` are both launched here; with
    ``strategies``, the candidate is launched under each of the two, the baseline first. Times are compared unless
    ``exact`` is all that is wanted. Without either, exact metrics are held against those that were accepted, and with
    ``portable``, where this machine has none, against another's, as far as they do not depend on the machine.
    """

    suite: str
    baseline: str | None = None
    candidate: str = "."
    strategies: tuple[str, str] | None = None
    exact: bool = False
    portable: bool = False
    oversubscribe: bool = False
    baselines: Path = BASELINES

    def __post_init__(self) -> None:
        if self.strategies is not None and self.baseline is not None:
            raise SpecError("strategies: two of them are compared in one revision; leave out --baseline")
        if self.portable and (self.baseline or self.strategies):
            raise SpecError("portable is for what was accepted; leave it out, since both sides are launched here")
        for strategy in self.strategies or ():
            check_name(strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where the verdict goes beside the terminal."""

    as_json: bool = False
    markdown: Path | None = None
    junit: Path | None = None
    annotate: bool = False


def gate(asked: Asked, outputs: Outputs) -> tuple[str, int]:
    """Hold the gate; return the text to print and the exit status.

    Raises:
        SpecError: what is asked for makes no sense; nothing was launched.
        KeyboardInterrupt: it was cut short; what had ended is written.
    """
    suite = load_suite(find_suite(asked.suite))
    cases = check_gated(suite, oversubscribe=asked.oversubscribe)
    environment = capture_environment(cases[0].threads_per_rank)
    folder = Path("runs") / f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-gate-{suite.name}"
    tell(f"run folder: {folder}")
    if asked.baseline is None and asked.strategies is None:
        found = _beside_accepted(asked, suite, environment, folder)
    else:
        found = _side_by_side(asked, suite, cases, environment, folder)
    return _put_out(found, outputs), found.status


def two_strategies(given: str | None) -> tuple[str, str] | None:
    """``fsdp2,refshard-yafsdp``: baseline and candidate.

    Raises:
        SpecError: these are not two.
    """
    if given is None:
        return None
    names = given.split(",")
    if len(names) != 2 or names[0] == names[1]:
        raise SpecError(f"strategies must be two with a comma between them, the baseline first, got '{given}'")
    return names[0], names[1]


def tell(text: str) -> None:
    """Say something of a long command's progress."""
    print(text, file=sys.stderr, flush=True)


def check_gated(suite: SuiteSpec, *, oversubscribe: bool) -> tuple[CaseSpec, ...]:
    """The cases of ``suite`` that have processes.

    Raises:
        SpecError: a gate cannot launch them.
    """
    if suite.network is not None:
        raise SpecError("suite: a gate launches ranks on this machine only; leave out 'network'")
    if not (
        cases := tuple(
            case for case in check_suite(suite, LocalLauncher(), oversubscribe=oversubscribe) if case.processes
        )
    ):
        raise SpecError("suite: all cases are simulated, so there is nothing to launch; add measured ones")
    return cases


def _put_out(found: GateReport, outputs: Outputs) -> str:
    if outputs.markdown is not None:
        replace_file(outputs.markdown, [report.markdown(found)])
    if outputs.junit is not None:
        replace_file(outputs.junit, [report.junit(found)])
    lines = list(report.annotations(found)) if outputs.annotate else []
    text = json.dumps(report.as_object(found), indent=2) if outputs.as_json else report.terminal(found)
    return "\n".join([*lines, text])


def accept(run: Path, reason: str, baselines: Path = BASELINES) -> str:
    """Make a run's exact metrics the baseline; return what to print.

    Raises:
        RefshardError: the run is none, or did not end well; or no reason is given.
    """
    path, before = accept_run(read_run(run), baselines, reason)
    if before is None:
        return f"accepted: {path}, which is new"
    changed = changes(before.cases, read_baseline(path).cases, {})
    lines = [f"  {c.case}: {c.metric or 'the case'} {c.before} -> {c.after}" for c in changed]
    count = f"{len(changed)} metric{'' if len(changed) == 1 else 's'} changed"
    return "\n".join([f"accepted: {path}, {count}", *lines])


def _beside_accepted(asked: Asked, suite: SuiteSpec, environment: Environment, folder: Path) -> GateReport:
    accepted = find_accepted(asked, suite, environment)
    if isinstance(accepted, str):
        return GateReport(baseline="accepted", candidate=asked.candidate, mismatch=accepted)
    own = accepted.fingerprint == environment.id
    with checked_out(asked.candidate, Path.cwd()) as source, make_observer() as observer:
        launcher = LocalLauncher(source)
        run = run_suite(suite, folder, launcher, observer, environment, oversubscribe=asked.oversubscribe)
    records = {record.case.name: record for record in run.cases if record.fidelity != "simulated"}
    before: Mapping[str, Exact] = accepted.cases
    after: Mapping[str, Exact] = {name: exact_metrics(r) for name, r in records.items() if r.state == "ok"}
    if not own:
        before = {name: portable(metrics) for name, metrics in before.items()}
        after = {name: portable(metrics) for name, metrics in after.items()}
    differing = changes(before, {**{name: {} for name in records}, **after}, suite.gate.rules)
    found = tuple(
        GateCase(
            name=name,
            changes=tuple(c for c in differing if c.case == name) if name not in records or name in after else (),
            trouble="" if name in after or name not in records else _trouble("the candidate", records[name]),
        )
        for name in sorted({*before, *records})
    )
    whose = f"those of {accepted.machine['cpu']}, for this machine has none: only what no machine changes is compared"
    return GateReport(
        baseline=f"accepted {accepted.fingerprint}",
        candidate=asked.candidate,
        cases=found,
        must_accept=True,
        notes=(f"accepted on {accepted.accepted_at[:10]}: {accepted.reason}", *(() if own else (whose,))),
    )


def find_accepted(asked: Asked, suite: SuiteSpec, environment: Environment) -> Baseline | str:
    """What was accepted for this machine, or, if that may be, for another with the same software; or why nothing."""
    path = baseline_file(asked.baselines, environment, suite.name)
    if path.exists():
        return read_baseline(path)
    others = read_others(asked.baselines, suite.name)
    remedy = f"`refshard run {suite.name}` here and `refshard accept` it"
    if not others:
        return f"nothing was accepted for this suite ({path} is not there); {remedy}"
    here = machine_of(environment)
    differing = {other.fingerprint: [f for f in MACHINE if other.machine.get(f) != here[f]] for other in others}
    closest = min(others, key=lambda other: len(differing[other.fingerprint]))
    if asked.portable and "torch" not in differing[closest.fingerprint]:
        return closest
    told = "; ".join(f"{f} was {closest.machine.get(f)} and is {here[f]}" for f in differing[closest.fingerprint])
    return f"nothing was accepted for this machine ({environment.id}); of {closest.fingerprint}, {told}; {remedy}"


def _side_by_side(
    asked: Asked, suite: SuiteSpec, cases: Sequence[CaseSpec], environment: Environment, folder: Path
) -> GateReport:
    with ExitStack() as open_:
        revisions = dict.fromkeys((asked.baseline or asked.candidate, asked.candidate))
        sources = {revision: open_.enter_context(checked_out(revision, Path.cwd())) for revision in revisions}
        before, after = asked.strategies or (None, None)
        sides = tuple(
            Side(name=name, launcher=LocalLauncher(sources[revision]), environment=environment, strategy=strategy)
            for name, revision, strategy in (
                ("baseline", asked.baseline or asked.candidate, before),
                ("candidate", asked.candidate, after),
            )
        )
        observer = open_.enter_context(make_observer())
        held = open_.enter_context(PairedRounds(suite, folder, (sides[0], sides[1]), observer, tell))
        gate_report = GateReport(baseline=before or asked.baseline or "", candidate=after or asked.candidate)
        try:
            found = _hold(asked, suite, cases, held)
        except RefshardError as error:
            return replace(gate_report, error=str(error))
    noise = read_noise(noise_file(asked.baselines, environment, suite.name))
    return replace(gate_report, cases=found, noise=noise.noise if noise is not None else None)


def _hold(asked: Asked, suite: SuiteSpec, cases: Sequence[CaseSpec], held: PairedRounds) -> tuple[GateCase, ...]:
    references = [case for case in cases if case == case.reference()]
    compared = [case for case in cases if case not in references]
    if asked.strategies is not None:
        compared = list(dict.fromkeys(of_strategy(case, asked.strategies[0]) for case in compared))
    held.apart(references)
    held.apart(compared)
    first = {case: held.last(case) for case in compared}
    timed = [
        case
        for case, records in first.items()
        if all(r.state == "ok" for r in records) and case.fidelity == "measured" and case.memory_limit_gib is None
    ]
    verdicts = {} if asked.exact else _times(suite, timed, held)
    return tuple(
        _case(case, *records, verdicts.get(case.name), suite, held, strategies=asked.strategies is not None)
        for case, records in first.items()
    )


def _times(suite: SuiteSpec, cases: list[CaseSpec], held: PairedRounds) -> Mapping[str, TimeVerdict]:
    """Screen all cases, then hold fresh rounds of those that need them."""
    limits = suite.gate.times
    first = held.rounds
    held.hold(cases, limits.screen_rounds)
    screened = {case.name: held.log_ratios(case, first) for case in cases}
    if short := [name for name, log_ratios in screened.items() if len(log_ratios) < limits.screen_rounds // 2]:
        raise LaunchError(f"{short[0]}: over half of its rounds did not end ok on both sides; see the records")
    doubtful = [case for case in cases if needs_fresh(screened[case.name], limits)]
    fresh = held.rounds
    held.hold(doubtful, limits.confirm_rounds)
    return judge(screened, {case.name: held.log_ratios(case, fresh) for case in doubtful}, limits)


def _case(
    case: CaseSpec,
    before: CaseRecord,
    after: CaseRecord,
    time: TimeVerdict | None,
    suite: SuiteSpec,
    held: PairedRounds,
    *,
    strategies: bool,
) -> GateCase:
    if before.state != "ok":
        return GateCase(name=case.name, trouble=_trouble("the baseline", before), comparable=False)
    if after.state != "ok":
        return GateCase(name=case.name, trouble=_trouble("the candidate", after))
    metrics = exact_metrics(before), exact_metrics(after)
    if strategies:  # that they do different things is no change
        metrics = ({PEAK: metrics[0][PEAK]}, {PEAK: metrics[1][PEAK]})
    found = changes({case.name: metrics[0]}, {case.name: metrics[1]}, suite.gate.rules)
    remark = ""
    if any(change.metric in (ORDER, OPERATORS) for change in found):
        remark = first_difference(*held.operators(case))
    return GateCase(name=case.name, changes=found, time=time, remark=remark)


def _trouble(side: str, record: CaseRecord) -> str:
    return f"{side} ended {record.state}: {record.error}"
