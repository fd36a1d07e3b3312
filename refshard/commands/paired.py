"""Two revisions, or two strategies, side by side: exact metrics of one launch each, times of paired rounds."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from refshard.analysis.exact import OPERATORS, ORDER, PEAK, Change, changes, exact_metrics, first_difference
from refshard.analysis.gate import Effect, effect_of, judge, needs_fresh
from refshard.analysis.rehearsal import Noise
from refshard.commands.launching import check_gated, run_folder
from refshard.commands.printing import tell
from refshard.commands.progress import observer as make_observer
from refshard.errors import RefshardError, SpecError, StoreError
from refshard.measure.environment import capture_environment
from refshard.measure.gate import PairedRounds, Side, checked_out, noise_file, of_strategy, read_noise
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.run import serial
from refshard.records import LaunchRecord
from refshard.report.gate.formats import GateCase, GateReport
from refshard.specs.case import Case
from refshard.specs.gate import FEWEST_ROUNDS, GateSpec
from refshard.specs.suite import SuiteSpec, find_suite, load_suite


def side_by_side(
    suite: str,
    *,
    revisions: tuple[str, str],
    strategies: tuple[str, str] | None,
    exact: bool,
    oversubscribe: bool,
    baselines: Path,
) -> GateReport:
    """Launch both, and compare. Each revision loads its own ``suite``; the baseline's limits hold.

    Raises:
        SpecError: the options make no sense; nothing was launched.
    """
    with ExitStack() as open_:
        checkouts = {r: open_.enter_context(checked_out(r, Path.cwd())) for r in dict.fromkeys(revisions)}
        before, after = (checkouts[revision] for revision in revisions)
        specs = suite_in(before.folder, suite), suite_in(after.folder, suite)
        cases = check_gated(specs[1], oversubscribe=oversubscribe)
        environment = capture_environment(cases[0].protocol.threads_per_rank)
        first, second = (
            Side(name=name, launcher=LocalLauncher(at.folder), environment=at.of(environment), strategy=strategy)
            for name, at, strategy in zip(("baseline", "candidate"), (before, after), strategies or (None, None))
        )
        names = strategies or revisions
        noise, notes = _noise(noise_file(baselines, environment, specs[0].name), specs[0].gate)
        report = GateReport(baseline=names[0], candidate=names[1], notes=notes, noise=noise)
        comparison = Comparison(spec=specs[0].gate, strategies=strategies)
        references, compared = shared(specs, cases)
        folder = run_folder(f"gate-{specs[0].name}")
        try:
            with make_observer() as observer, PairedRounds(specs[1], folder, (first, second), observer, tell) as held:
                comparison.hold(held, references, compared, exact=exact)
        except RefshardError as error:
            report = replace(report, error=str(error))
    return replace(report, cases=(*comparison.cases, *gone_and_come(specs, cases)))


def suite_in(source: Path, given: str) -> SuiteSpec:
    """The suite from a checkout, by path or name; if it is not there, from this one.

    Raises:
        SpecError: it does not exist, or it is invalid.
    """
    found = next((path for path in (source / given, source / "suites" / f"{given}.toml") if path.is_file()), None)
    return load_suite(found or find_suite(given))


def shared(specs: tuple[SuiteSpec, SuiteSpec], cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """References, and the cases that both suites have, as the candidate's has them.

    Raises:
        SpecError: they have none in common.
    """
    known = {case.name for case in specs[0].cases()}
    references = [case for case in cases if case == case.reference() and case.name in known]
    compared = [case for case in cases if case not in references and case.name in known]
    if not (references or compared):
        raise SpecError(f"suite '{specs[0].name}': the revisions have no case in common; compare others")
    return references, compared


def gone_and_come(specs: tuple[SuiteSpec, SuiteSpec], cases: Sequence[Case]) -> tuple[GateCase, ...]:
    """Cases that only one suite has."""
    before, after = [case.name for case in specs[0].cases() if case.processes], [case.name for case in cases]
    found = [Change(case=n, metric="", before=None, after=None, verdict="removed") for n in before if n not in after]
    found += [Change(case=n, metric="", before=None, after=None, verdict="new") for n in after if n not in before]
    return tuple(GateCase(name=change.case, changes=(change,)) for change in found)


def _noise(path: Path, spec: GateSpec) -> tuple[Noise | None, tuple[str, ...]]:
    """This machine's noise, where it is known for these limits, and a word on it where it is not."""
    try:
        recorded = read_noise(path)
    except StoreError as error:
        return None, (f"noise: {error}",)
    if recorded is None:
        return None, ("this machine's noise is not known; `refshard noise` measures it",)
    if recorded.limits != spec.times:
        return None, ("this machine's noise was measured with other limits; run `refshard noise` again",)
    return recorded.noise, ()


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What is found by and by, so that an error in the rounds does not lose what was exact."""

    spec: GateSpec
    strategies: tuple[str, str] | None
    cases: tuple[GateCase, ...] = ()

    def hold(self, held: PairedRounds, references: list[Case], compared: list[Case], *, exact: bool) -> None:
        """Launch each case once alone, then the timeable cases in rounds."""
        if self.strategies is not None:
            compared = list(dict.fromkeys(of_strategy(case, self.strategies[0]) for case in compared))
        held.apart(references)
        held.apart(compared)
        reported = compared if self.strategies is not None else [*references, *compared]
        first = {case: held.last(case) for case in reported}
        self.cases = tuple(self._exactly(case, *records, held) for case, records in first.items())
        if exact:
            return
        well = {c.name for c in self.cases if not c.trouble}
        timed = [case for case in compared if serial(case) and case.name in well]
        self.cases = tuple(self._with_times(held, timed))

    def _exactly(self, case: Case, before: LaunchRecord, after: LaunchRecord, held: PairedRounds) -> GateCase:
        if before.state != "ok":
            return GateCase(name=case.name, trouble=_trouble("the baseline", before), trouble_is="not comparable")
        if after.state != "ok":
            return GateCase(name=case.name, trouble=_trouble("the candidate", after))
        metrics = exact_metrics(before), exact_metrics(after)
        if self.strategies is not None:  # that they do different things is no change
            metrics = ({PEAK: metrics[0][PEAK]}, {PEAK: metrics[1][PEAK]})
        found = changes({case.name: metrics[0]}, {case.name: metrics[1]}, self.spec.rules)
        remark = ""
        if any(change.metric in (ORDER, OPERATORS) for change in found):
            remark = first_difference(*held.operators(case))
        elif not serial(case):
            remark = "not timed: rounds need measured cases without a memory limit"
        return GateCase(name=case.name, changes=found, remark=remark)

    def _with_times(self, held: PairedRounds, timed: Sequence[Case]) -> list[GateCase]:
        """Screen all cases, then run fresh rounds of those in doubt."""
        limits = self.spec.times
        found = {case.name: case for case in self.cases}
        screened = self._rounds(held, timed, limits.screen_rounds, found)
        doubtful = [c for c in timed if c.name in screened and needs_fresh(screened[c.name], limits)]
        confirmed = self._rounds(held, doubtful, limits.confirm_rounds, found)
        judged = {n: e for n, e in screened.items() if n in confirmed or not needs_fresh(e, limits)}
        for name, verdict in judge(judged, confirmed, limits).items():
            found[name] = replace(found[name], time=verdict)
        return list(found.values())

    def _rounds(
        self, held: PairedRounds, cases: Sequence[Case], rounds: int, found: dict[str, GateCase]
    ) -> dict[str, Effect]:
        """B's time over A's in each case with enough rounds; for the others ``found`` says what went wrong."""
        first = held.rounds
        held.hold(cases, rounds)
        enough: dict[str, Effect] = {}
        for case in cases:
            log_ratios, failures = held.log_ratios(case, first), held.failures(case, first)
            if len(failures[1]) > len(failures[0]):
                trouble = f"in {len(failures[1])} of {rounds} rounds {_trouble('the candidate', failures[1][0])}"
                found[case.name] = replace(found[case.name], trouble=trouble)
            elif len(log_ratios) < max(FEWEST_ROUNDS, rounds // 2):
                trouble = f"only {len(log_ratios)} of {rounds} rounds ended ok on both sides"
                found[case.name] = replace(found[case.name], trouble=trouble, trouble_is="inconclusive")
            else:
                enough[case.name] = effect_of(log_ratios)
        return enough


def _trouble(side: str, record: LaunchRecord) -> str:
    return f"{side} ended in state {record.state}: {record.error}"
