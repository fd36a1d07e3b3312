"""``refshard gate`` and ``refshard accept``: whether a change may pass, and what is the measure of that."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from refshard import resources
from refshard.analysis.exact import PEAK, Change, Exact, changes, exact_metrics, portable
from refshard.commands.folders import find_run
from refshard.commands.launching import check_gated, run_folder
from refshard.commands.paired import side_by_side
from refshard.commands.printing import check_writable, warn
from refshard.commands.progress import observer as make_observer
from refshard.errors import SpecError
from refshard.folders import replace_file
from refshard.measure.environment import capture_environment
from refshard.measure.gate import Baseline, baseline_file, checked_out, machine_of, read_baseline, read_others
from refshard.measure.gate import accept as accept_run
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.run import run_suite
from refshard.measure.store import read_run
from refshard.records import Environment, LaunchRecord, Run
from refshard.report.blocks import Answer
from refshard.report.forms import as_markdown
from refshard.report.gate import formats as report
from refshard.report.gate.formats import GateCase, GateReport
from refshard.specs.gate import MetricRule
from refshard.specs.job import REFERENCE_STRATEGY
from refshard.specs.suite import SuiteSpec, find_suite, load_suite
from refshard.strategies import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to compare, and how.

    With a ``baseline`` (a revision or a checkout), it and the ``candidate`` are both launched here; with
    ``strategies``, the candidate is launched under each of the two, the baseline first. Times are compared unless
    ``exact``. Without either, exact metrics are compared with the accepted ones. With ``portable``, if this machine has
    none, metrics that do not depend on the machine are compared with another's.

    Raises:
        SpecError: it makes no sense.
    """

    suite: str
    baseline: str | None = None
    candidate: str = "."
    strategies: tuple[str, str] | None = None
    exact: bool = False
    portable: bool = False
    oversubscribe: bool = False
    baselines: Path = resources.BASELINES

    def __post_init__(self) -> None:
        for field in ("baseline", "candidate"):
            if (given := getattr(self, field)) is not None and not given.strip():
                raise SpecError(f"{field}: '{given}' given; name a revision or a folder (is a variable empty?)")
        if self.strategies is not None and self.baseline is not None:
            raise SpecError("strategy: compares two strategies of one revision; leave out --baseline")
        if self.portable and (self.baseline or self.strategies):
            raise SpecError("portable applies to accepted baselines only; leave it out: both sides are launched here")
        for strategy in self.strategies or ():
            check_name(strategy)
            if strategy == REFERENCE_STRATEGY:
                raise SpecError(f"strategy: '{strategy}' is the reference for all; name two others")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where the verdict goes besides the terminal.

    Raises:
        SpecError: a file cannot be written there.
    """

    summary: Path | None = None
    junit: Path | None = None
    annotate: bool = False

    def __post_init__(self) -> None:
        check_writable(summary=self.summary, junit=self.junit)


def gate(options: Options, outputs: Outputs) -> Answer:
    """Hold the gate; the status is that of ``refshard gate``.

    Raises:
        SpecError: the options make no sense; nothing was launched.
        KeyboardInterrupt: it was cut short; finished launches are saved.
    """
    if options.baseline is None and options.strategies is None:
        found = _beside_accepted(options)
    else:
        found = side_by_side(
            options.suite,
            revisions=(options.candidate if options.baseline is None else options.baseline, options.candidate),
            strategies=options.strategies,
            exact=options.exact,
            oversubscribe=options.oversubscribe,
            baselines=options.baselines,
        )
    return put_out(found, outputs)


def two_strategies(given: str | None) -> tuple[str, str] | None:
    """``fsdp2,refshard-yafsdp``: baseline and candidate.

    Raises:
        SpecError: these are not two.
    """
    if given is None:
        return None
    names = given.split(",")
    if len(names) != 2 or names[0] == names[1]:
        raise SpecError(f"strategy must be BASELINE,CANDIDATE, two different names, got '{given}'")
    return names[0], names[1]


def put_out(found: GateReport, outputs: Outputs) -> Answer:
    """The answer; the report is written to the files that ``outputs`` name, too."""
    answer = report.gate_answer(found)
    for path, text in ((outputs.summary, as_markdown(answer, "gate") + "\n"), (outputs.junit, report.junit(found))):
        try:
            if path is not None:
                replace_file(path, [text])
        except OSError as error:  # the verdict must not be lost for it
            warn(f"refshard: {path} cannot be written ({error.strerror}); the verdict is printed below")
    for line in report.annotations(found) if outputs.annotate else ():
        warn(line)
    return answer


def accept(run: Path, reason: str, baselines: Path = resources.BASELINES) -> str:
    """Make a run's exact metrics the baseline; return what to print.

    Raises:
        RefshardError: it is not a run, or did not end well; or no reason is given.
    """
    path, before = accept_run(read_run(find_run(run)), baselines, reason)
    if before is None:
        return f"accepted: {path}, which is new"
    changed = changes(before.cases, read_baseline(path).cases, {})
    lines = [f"  {c.case}: {c.metric or 'the case'} {c.before} -> {c.after}" for c in changed]
    count = f"{len(changed)} metric{'' if len(changed) == 1 else 's'} changed"
    return "\n".join([f"accepted: {path}, {count}", *lines])


def _beside_accepted(options: Options) -> GateReport:
    suite = load_suite(find_suite(options.suite))
    cases = check_gated(suite, oversubscribe=options.oversubscribe)
    environment = capture_environment(cases[0].protocol.threads_per_rank)
    accepted = find_accepted(options, suite, environment)
    if isinstance(accepted, str):
        return GateReport(baseline="accepted", candidate=options.candidate, mismatch=accepted)
    own = accepted.fingerprint == environment.id
    with checked_out(options.candidate, Path.cwd()) as source, make_observer() as observer:

        def launched(name: str) -> tuple[Path, dict[str, list[LaunchRecord]]]:
            folder, launcher = run_folder(name), LocalLauncher(source.folder)
            here = source.of(environment)
            return folder, _by_case(
                run_suite(suite, folder, launcher, observer, here, oversubscribe=options.oversubscribe)
            )

        def held(records: Mapping[str, list[LaunchRecord]]) -> tuple[GateCase, ...]:
            return tuple(
                beside(name, accepted.cases.get(name), records.get(name, []), suite.gate.rules, own=own)
                for name in sorted({*accepted.cases, *records})
            )

        folder, records = launched(f"gate-{suite.name}")
        found = held(records)
        if any(map(peak_alone, found)):
            _, again = launched(f"gate-{suite.name}-again")
            found = held({name: [*mine, *again.get(name, [])] for name, mine in records.items()})
    whose = f"no baseline for this machine: compared with {accepted.machine['cpu']}, machine-independent metrics only"
    made = GateReport(
        baseline=f"accepted {accepted.fingerprint}",
        candidate=options.candidate,
        cases=found,
        must_accept=True,
        notes=(
            f"accepted on {accepted.accepted_at[:10]}: {accepted.reason}",
            *(() if own else (whose,)),
        ),
    )
    if made.outcome != "regression":
        return made
    remedy = f"if the change is intended, make it the baseline: refshard accept {folder} --reason ..."
    return replace(made, notes=(*made.notes, remedy))


def _by_case(run: Run) -> dict[str, list[LaunchRecord]]:
    records: dict[str, list[LaunchRecord]] = {}
    for record in run.launches:
        records.setdefault(record.case.name, []).append(record)
    return records


def peak_alone(case: GateCase) -> bool:
    """Whether nothing but the measured peak of memory has risen. Now and then a thread frees its memory late: such a
    rise counts if a second launch has it, too.
    """
    return [change.metric for change in case.changes if change.verdict == "regressed"] == [PEAK]


def beside(
    name: str,
    accepted: Mapping[str, int | float | str] | None,
    records: list[LaunchRecord],
    rules: Mapping[str, MetricRule],
    *,
    own: bool,
) -> GateCase:
    """One case compared with what was accepted; all its ``records``, one a launch, must match. The smallest measured
    peak of memory counts.
    """
    bad = next((record for record in records if record.state != "ok"), None)
    if bad is not None:
        return GateCase(name=name, trouble=f"the candidate ended in state {bad.state}: {bad.error}")
    before: dict[str, Exact] = {} if accepted is None else {name: accepted if own else portable(accepted)}
    found: dict[str, Change] = {}
    exact = [exact_metrics(record) for record in records]
    if peaks := [metrics[PEAK] for metrics in exact if PEAK in metrics]:
        exact = [{**metrics, PEAK: min(peaks)} for metrics in exact]
    for after in [{name: metrics} for metrics in exact] or [{}]:  # one that is gone has none
        now: dict[str, Exact] = {name: metrics if own else portable(metrics) for name, metrics in after.items()}
        found |= {change.metric: change for change in changes(before, now, rules)}
    return GateCase(name=name, changes=tuple(found.values()))


def find_accepted(options: Options, suite: SuiteSpec, environment: Environment) -> Baseline | str:
    """What was accepted for this machine, or, if that may be, for another with the same software; or why nothing."""
    path = baseline_file(options.baselines, environment, suite.name)
    if path.exists():
        return read_baseline(path)
    others = read_others(options.baselines, suite.name)
    remedy = f"`refshard run {suite.name}` here and `refshard accept` it"
    if not others:
        return f"no baseline for this suite ({path} does not exist); {remedy}"
    here = machine_of(environment)
    differing = {o.fingerprint: [field for field in here if o.machine.get(field) != here[field]] for o in others}
    closest = min(others, key=lambda other: len(differing[other.fingerprint]))
    alike = [other for other in others if not {"torch", "gpus"} & set(differing[other.fingerprint])]
    if options.portable and alike:
        return min(alike, key=lambda other: len(differing[other.fingerprint]))
    change = "; ".join(f"{f} was {closest.machine.get(f)} and is {here[f]}" for f in differing[closest.fingerprint])
    return f"no baseline for this machine ({environment.id}); the closest is {closest.fingerprint}: {change}; {remedy}"
