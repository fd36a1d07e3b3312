"""The findings of a run: which strategy is fastest, which needs the least memory, by how much, and why."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from refshard.analysis.busy import drift_over
from refshard.analysis.cases import FIDELITY, CaseResult, ranks
from refshard.analysis.compare import Comparison
from refshard.analysis.evidence import Evidence
from refshard.analysis.rankings import ALIKE, RELEVANT, Ranking, rankings, step_time
from refshard.analysis.sample import too_few
from refshard.plain import plain
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.report.run.cells import STATES, no_interval, span
from refshard.specs.case import REPEATING, spelled

MANY = 4
"""Comparisons from which on a sentence sums them up."""
_MOST_NAMED = 3
"""Strategies that a list of unranked cases names; of more it gives the number."""
_ERROR_LENGTH = 120
_TIMES = 2  # ratio from which "2.3 times as long" reads better than "130 % longer"
_PARTS = {"compute": "compute_s", "exposed communication": "exposed_comm_s", "idle time": "idle_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one comparison in sentences, "" if there is nothing to say.

    ``lead`` says who is fastest and who needs the least memory, ``margin`` by how much, ``why`` what the traces say,
    ``busy`` that the machine drifted; ``caveats`` weaken them.
    """

    ranking: Ranking
    lead: str
    margin: str
    why: str
    busy: str
    caveats: tuple[str, ...]

    @property
    def title(self) -> str:
        """The setting and the world size."""
        return f"{self.ranking.setting.label}, {ranks(self.ranking.world_size)}"

    @property
    def summary(self) -> str:
        """The outcome without its reasons."""
        return f"{self.lead} {self.margin}".strip()


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """The outcome of every comparison."""
    return tuple(map(finding_of, rankings(evidence)))


def finding_of(ranking: Ranking) -> Finding:
    """The outcome of one comparison."""
    caveats = [warning for rival in ranking.rivals if rival.comparison for warning in rival.comparison.warnings]
    if len({id(case.header) for case in ranking.candidates if case.fidelity not in REPEATING}) > 1:
        caveats.insert(0, "the cases come from several runs, so machine drift between them looks like a difference")
    return Finding(
        ranking=ranking, lead=_lead(ranking), margin=" ".join(_margin(ranking)), why=_why(ranking), busy=_busy(ranking),
        caveats=tuple(dict.fromkeys(caveats)),
    )  # fmt: skip


def _lead(ranking: Ranking) -> str:
    """Speed and memory."""
    if not ranking.candidates:
        return "No strategy finished, so there is nothing to rank."
    if len(ranking.candidates) == 1:
        (alone,) = ranking.candidates
        time = format_seconds(step_time(alone))
        return f"{alone.strategy} is the only strategy here that finished: {time} per step{_few((alone,))}."
    memory = ""
    fastest, least = ([case.strategy for case in cases] for cases in (ranking.fastest, ranking.lowest_memory))
    if len(ranking.peaks) > 1:
        size = format_bytes(min(ranking.peaks.values()))
        kind = "reserved" if ranking.memory_metric == "peak_reserved_bytes" else "peak"
        memory = f"{'needs' if len(least) == 1 else 'need'} the least memory ({size} per rank, {kind})."
    if not fastest:
        return f"{_by_time(ranking.candidates)}{f' {listed(least)} {memory}' if memory else ''}"
    times = _between([step_time(case) for case in ranking.fastest])
    speed = f"{listed(fastest)} {'is' if len(fastest) == 1 else 'tie for'} fastest ({times} per step)"
    return f"{speed} and {memory}" if memory and fastest == least else (
        f"{speed}; {listed(least)} {memory}" if memory else f"{speed}."
    )  # fmt: skip


def _margin(ranking: Ranking) -> Iterator[str]:
    """Why the tied ones are tied, how much slower the next one is, which cases are not ranked, and the next in
    memory.
    """
    if ranking.tied:
        last = ranking.tied[-1]
        if last.comparison is None:
            yield f"Differences under {format_percent(ALIKE, 0)} are within the model's error."
        else:
            assert ranking.winner is not None
            why = f"{_interval(last.comparison, as_ratio=True)}, which includes 1; more rounds would narrow it"
            why = why if last.comparison.bounded else no_interval(last.comparison)
            ratio = f"{last.ratio:.3f} times as long as {ranking.winner.strategy}{_pairing(last.comparison)}"
            yield f"{last.case.strategy} takes {ratio} ({why})."
    if (next_ := ranking.runner_up) is not None:
        large = next_.ratio >= _TIMES
        longer = f"{next_.ratio:.1f} times as long" if large else f"{format_percent(next_.ratio - 1)} longer"
        basis = ""
        if next_.comparison is not None:
            size = (
                "significant"
                if next_.ratio - 1 >= RELEVANT
                else f"significant, but under {format_percent(RELEVANT, 0)}"
            )
            basis = f"{_pairing(next_.comparison)} ({_interval(next_.comparison, as_ratio=large)}; {size})"
        yield f"Next: {next_.case.strategy} takes {format_seconds(step_time(next_.case))}, {longer}{basis}."
    if ranking.winner and len(ranking.ranked) < len(ranking.candidates):
        yield _by_time([case for case in ranking.candidates if case not in ranking.ranked])
    for case, peak in list(ranking.peaks.items())[len(ranking.lowest_memory) :][:1]:
        more = format_percent(peak / min(ranking.peaks.values()) - 1)
        yield f"Next in memory: {case.strategy} with {format_bytes(peak)}, {more} more."


def _by_time(cases: Sequence[CaseResult]) -> str:
    """Step times of unranked cases, in the suite's order; of many cases, their range."""
    seconds = [step_time(case) for case in cases]
    if len(cases) > _MOST_NAMED:
        times = f"{len(cases)} strategies, {_between(seconds)}"
    else:
        times = listed([f"{case.strategy} {format_seconds(time)}" for case, time in zip(cases, seconds, strict=True)])
    return f"Not ranked by time{_few(cases)}: {times} per step."


def _few(cases: Sequence[CaseResult]) -> str:
    """In brackets, that there are too few launches; empty for calculated times."""
    launches = [len(case.samples) for case in cases if case.fidelity not in REPEATING]
    return "".join(f" ({reason})" for reason in too_few(min(launches))) if launches else ""


def _between(seconds: Sequence[float]) -> str:
    """The range of step times."""
    low, high = format_seconds(min(seconds)), format_seconds(max(seconds))
    return high if low == high else span(low, high)


def _interval(comparison: Comparison, *, as_ratio: bool) -> str:
    """An interval of ratios, or of what they exceed 1 by."""
    if as_ratio:
        return f"95 % interval {comparison.low:.3f} to {comparison.high:.3f}"
    return f"95 % interval {span(format_percent(comparison.low - 1), format_percent(comparison.high - 1))}"


def _pairing(comparison: Comparison) -> str:
    return ", paired by round" if comparison.paired else ""


def listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _why(ranking: Ranking) -> str:
    """Where the next slower strategy loses most, from the traced pass of both; empty if the traced steps of the two
    overlap in that part.
    """
    winner, beaten = ranking.winner, ranking.runner_up
    if winner is None or beaten is None or winner.breakdown is None or beaten.case.breakdown is None:
        return ""
    parts, others = (
        {part: case.metrics[name] or 0.0 for part, name in _PARTS.items()} for case in (winner, beaten.case)
    )
    total = sum(others.values()) - sum(parts.values())
    most = max(parts, key=lambda part: others[part] - parts[part])
    lost = others[most] - parts[most]
    mine, theirs = (case.traced_range.get(_PARTS[most]) for case in (winner, beaten.case))
    if total <= 0 or lost <= 0 or (mine is not None and theirs is not None and theirs[0] <= mine[1]):
        return ""
    share = "most" if lost > total / 2 else "the largest part"
    return (
        f"In the traces, {share} of the difference is {most}: {format_seconds(others[most])} per step in "
        f"{beaten.case.strategy}, {format_seconds(parts[most])} in {winner.strategy}."
    )


def _busy(ranking: Ranking) -> str:
    """A sentence if the machine drifted by more than a difference to the fastest, or the range of unranked cases."""
    if ranking.winner is not None:
        return busy_between((ranking.winner, rival.case, rival.ratio - 1) for rival in ranking.rivals)
    cases = ranking.candidates
    if len(cases) < 2 or cases[0].fidelity in REPEATING:
        return ""
    least, most = min(cases, key=step_time), max(cases, key=step_time)
    return busy_between([(least, most, step_time(most) / step_time(least) - 1)])


def busy_between(pairs: Iterable[tuple[CaseResult, CaseResult, float]]) -> str:
    """A sentence on the largest drift that exceeds the difference in step time of its pair of cases; empty if none
    does.
    """
    drifts = [(drift, effect) for a, b, effect in pairs if (drift := drift_over(a, b, effect))]
    if not drifts:
        return ""
    drift, effect = max(drifts, key=lambda pair: pair[0].size - abs(pair[1]))
    if drift.kind == "other processes":
        less, more = sorted((drift.before, drift.after))
        what = f"other processes used {less:.1f} of {drift.cores} cores in one case, {more:.1f} in the other"
    else:
        inside = drift.kind == "within a launch"
        where = f"within a launch of {drift.case.full_label}" if inside else "between the two cases"
        ends = f"{format_seconds(drift.before)} to {format_seconds(drift.after)}"
        what = f"its compute probe went from {ends} {where}"
    return (
        f"The machine was busy: {what} ({format_percent(drift.size)}). That is more than the difference in step time "
        f"({format_percent(abs(effect))})."
    )


def overview(found: Sequence[Finding]) -> tuple[str, ...]:
    """How often each strategy leads, a sentence per fidelity that has :data:`MANY` comparisons or more."""
    sentences = []
    fidelities = dict.fromkeys(one.ranking.cases[0].fidelity for one in found)
    for fidelity in fidelities:
        here = [one.ranking for one in found if one.ranking.cases[0].fidelity == fidelity]
        ranked = [ranking for ranking in here if len(ranking.candidates) > 1]
        if len(ranked) < MANY:
            continue
        count = f"{len(ranked)} {f'{spelled(fidelity)} ' if len(fidelities) > 1 else ''}comparisons"
        alone, ties = _led([ranking.fastest for ranking in ranked])
        unranked = sum(not ranking.fastest for ranking in ranked)
        rest = [f"{ties} {'was a tie' if ties == 1 else 'were ties'}"] if ties else []
        rest += [f"{unranked} {'was' if unranked == 1 else 'were'} not ranked"] if unranked else []
        if alone:
            (name, times), *others = alone
            text = f"{name} was fastest in {times} of {count}{''.join(f', {other} in {n}' for other, n in others)}"
            text += f"{'; ' if rest else ''}{', '.join(rest)}."
        elif ties == len(ranked):
            text = f"All {count} are ties for the fastest strategy."
        else:
            text = f"No strategy alone was fastest in {count}: {', '.join(rest)}."
        alone, ties = _led([ranking.lowest_memory for ranking in ranked])
        least = [f"{name} in {times}" for name, times in alone]
        least += [f"{ties} {'tie' if ties == 1 else 'ties'}"] if ties else []
        sentences.append(f"{text} Lowest memory: {', '.join(least)}." if least else text)
    return tuple(sentences)


def _led(leads: Sequence[tuple[CaseResult, ...]]) -> tuple[list[tuple[str, int]], int]:
    """How often each strategy led alone, most often first, and the number of ties."""
    alone = Counter(cases[0].strategy for cases in leads if len(cases) == 1)
    return sorted(alone.items(), key=lambda item: (-item[1], item[0])), sum(len(cases) > 1 for cases in leads)


def notes(evidence: Evidence) -> list[str]:
    """What a reader has to know of the cases: the network, what was not measured, what failed, and caveats."""
    networks = dict.fromkeys(run.header.environment.network for run in evidence.runs)
    kinds = dict.fromkeys(
        (case.fidelity, case.spec.job.cluster) for case in evidence.cases if case.fidelity != "measured"
    )
    caveats = dict.fromkeys(caveat for finding in findings(evidence) for caveat in finding.caveats)
    sentences = [
        *(f"The ranks ran on {name}." for name in networks if name),
        *(
            f"Not measured, but {'dry-run' if fidelity == 'dryrun' else fidelity} on {cluster}: {FIDELITY[fidelity]}."
            for fidelity, cluster in kinds
        ),
        *unranked(evidence),
        *(f"Caution: {caveat}." for caveat in caveats),
    ]
    left = [(case, warning) for case in evidence.cases for launch in case.launches for warning in launch.warnings]
    if left:
        case, warning = left[0]
        others = len({case.full_label for case, _ in left}) - 1
        more = f"; {others} more {'case has' if others == 1 else 'cases have'} warnings: see --json" if others else ""
        sentences.append(f"Caution: {case.full_label}: {plain(warning)}{more}.")
    return sentences


def unranked(evidence: Evidence) -> list[str]:
    """A sentence for every case that did not end ok."""
    sentences = []
    for case in (case for case in evidence.cases if not case.ok):
        ended = sum(launch.state == case.state for launch in case.launches)
        rounds = f" in {ended} of {len(case.launches)} rounds" if len(case.launches) > 1 else ""
        error = first_line(case, _ERROR_LENGTH)
        sentences.append(f"{case.full_label}: {STATES[case.state]}{rounds}{f' ({error})' if error else ''}.")
    return sentences


def first_line(case: CaseResult, most: int) -> str:
    """The first line of a case's error, at most so long, without the state."""
    line = plain(next(iter((case.error or "").strip().splitlines()), "")).removeprefix(f"{STATES[case.state]}: ")
    return line if len(line) <= most else f"{line[: most - 3]}..."


def unfinished(evidence: Evidence) -> list[str]:
    """A sentence for each run that did not end by itself: what is missing may change the verdict."""
    sentences = []
    for run in evidence.runs:
        name = f"{run.header.run_id}: " if len(evidence.runs) > 1 else ""
        if run.end is None or run.end.interrupted:
            why = "the run was interrupted" if run.end else "the run was cut off, or is still under way"
            # A gate's run does not know how many launches it will need.
            of = f" of {run.header.planned}" if run.header.planned else ""
            sentences.append(f"{name}Not finished: {len(run.launches)}{of} launches are done; {why}.")
        elif not run.launches:
            sentences.append(f"{name}Nothing was launched.")
    return sentences
