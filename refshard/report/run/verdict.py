"""The findings of a run: which strategy is fastest, which needs the least memory, by how much, and why."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from refshard.analysis.busy import drift_over
from refshard.analysis.cases import FIDELITY, CaseResult, ranks
from refshard.analysis.compare import Comparison
from refshard.analysis.evidence import Evidence
from refshard.analysis.rankings import ALIKE, RELEVANT, Ranking, Rival, rankings, step_time
from refshard.analysis.sample import too_few
from refshard.plain import plain
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.records import Run
from refshard.report.run.cells import STATES, no_interval, span
from refshard.specs.case import REPEATING, spelled
from refshard.specs.job import REFERENCE_STRATEGY

MANY = 4
"""Comparisons from which on a sentence sums them up."""
_MOST_NAMED = 3
"""Strategies that a lead or a list of unranked cases names; of more it gives the number."""
_ERROR_LENGTH = 120
_TIMES = 2  # ratio from which "2.3 times as long" reads better than "130 % longer"
_PARTS = {"compute": "compute_s", "exposed communication": "exposed_comm_s", "idle time": "idle_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one comparison: a title, sentences, and doubts about them.

    ``cases`` are all of the comparison, including references and cases that did not end ok. ``fastest`` and
    ``lowest_memory`` name the strategies that lead, several if they tie; empty if nothing is ranked. ``lead`` is the
    outcome in one sentence.
    """

    title: str
    cases: tuple[CaseResult, ...]
    fastest: tuple[str, ...]
    lowest_memory: tuple[str, ...]
    lead: str
    speed: str
    margin: str
    memory: str
    why: str
    busy: str
    caveats: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The outcome in full."""
        return tuple(sentence for sentence in (self.speed, *self.reasons, self.memory) if sentence)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What the lead leaves out: by how much, why, and whether the machine was busy."""
        return tuple(sentence for sentence in (self.margin, self.why, self.busy) if sentence)

    @property
    def summary(self) -> str:
        """Speed and memory, without reasons."""
        return " ".join(filter(None, (self.speed, self.margin, self.memory)))


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """The outcome of every comparison."""
    return tuple(map(finding_of, rankings(evidence)))


def finding_of(ranking: Ranking) -> Finding:
    """The outcome of one comparison."""
    candidates = [case for case in ranking.candidates if case.fidelity not in REPEATING]
    drift = "the cases come from several runs, so a drift of the machine between them looks like a difference"
    doubts = [drift] if len({id(case.header) for case in candidates}) > 1 else []
    doubts += [doubt for rival in ranking.rivals if rival.comparison for doubt in rival.comparison.warnings]
    return Finding(
        title=f"{ranking.setting.label}, {ranks(ranking.world_size)}",
        cases=ranking.cases,
        fastest=tuple(case.strategy for case in ranking.fastest),
        lowest_memory=tuple(case.strategy for case in ranking.lowest_memory),
        lead=_lead(ranking),
        speed=_speed(ranking),
        margin=_margin(ranking),
        memory=_memory(ranking),
        why=_why(ranking),
        busy=_busy(ranking),
        caveats=tuple(dict.fromkeys(doubts)),
    )


def overview(found: Sequence[Finding]) -> tuple[str, ...]:
    """How often each strategy leads, a sentence per fidelity that has :data:`MANY` comparisons or more."""
    sentences = []
    fidelities = dict.fromkeys(finding.cases[0].fidelity for finding in found)
    for fidelity in fidelities:
        here = [finding for finding in found if finding.cases[0].fidelity == fidelity]
        ranked = [one for one in here if sum(c.ok and c.strategy != REFERENCE_STRATEGY for c in one.cases) > 1]
        if len(ranked) < MANY:
            continue
        count = f"{len(ranked)} {f'{spelled(fidelity)} ' if len(fidelities) > 1 else ''}comparisons"
        alone, ties, unranked = _led([finding.fastest for finding in ranked])
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
        alone, ties, _ = _led([finding.lowest_memory for finding in ranked])
        least = [f"{name} in {times}" for name, times in alone]
        least += [f"{ties} {'tie' if ties == 1 else 'ties'}"] if ties else []
        sentences.append(f"{text} Lowest memory: {', '.join(least)}." if least else text)
    return tuple(sentences)


def _led(leads: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, int]], int, int]:
    """How often each strategy led alone, most often first, how many comparisons were ties, and how many are not
    ranked.
    """
    alone = Counter(names[0] for names in leads if len(names) == 1)
    ordered = sorted(alone.items(), key=lambda item: (-item[1], item[0]))
    return ordered, sum(len(names) > 1 for names in leads), sum(not names for names in leads)


def notes(evidence: Evidence) -> list[str]:
    """What a reader has to know of the cases: the network, what was not measured, what failed, and doubts."""
    return [*network(evidence), *modelled(evidence), *unranked(evidence), *caveats(evidence)]


def network(evidence: Evidence) -> tuple[str, ...]:
    """A sentence for each network between hosts."""
    joined = dict.fromkeys(run.header.environment.network for run in evidence.runs)
    return tuple(f"The ranks ran on {name}." for name in joined if name)


def modelled(evidence: Evidence) -> tuple[str, ...]:
    """A sentence for every cluster on which cases were not measured."""
    kinds = dict.fromkeys(
        (case.fidelity, case.spec.job.cluster) for case in evidence.cases if case.fidelity != "measured"
    )
    return tuple(
        f"Not measured, but {'dry-run' if fidelity == 'dryrun' else fidelity} on {cluster}: {FIDELITY[fidelity]}."
        for fidelity, cluster in kinds
    )


def unranked(evidence: Evidence) -> tuple[str, ...]:
    """A sentence for every case that did not end ok."""
    return tuple(_unranked(case) for case in evidence.cases if not case.ok)


def _unranked(case: CaseResult) -> str:
    ended = sum(launch.state == case.state for launch in case.launches)
    rounds = f" in {ended} of {len(case.launches)} rounds" if len(case.launches) > 1 else ""
    state, error = STATES[case.state], plain(next(iter((case.error or "").strip().splitlines()), ""))
    error = error.removeprefix(f"{state}: ")
    if len(error) > _ERROR_LENGTH:
        error = f"{error[: _ERROR_LENGTH - 3]}..."
    return f"{case.full_label}: {state}{rounds}{f' ({error})' if error else ''}."


def caveats(evidence: Evidence) -> list[str]:
    """What weakens the findings, each doubt once, and the first of the launches' warnings."""
    doubts = dict.fromkeys(doubt for finding in findings(evidence) for doubt in finding.caveats)
    left = [(case, warning) for case in evidence.cases for launch in case.launches for warning in launch.warnings]
    sentences = [f"Caution: {doubt}." for doubt in doubts]
    if left:
        case, warning = left[0]
        others = len({case.full_label for case, _ in left}) - 1
        more = f"; {others} more {'case has' if others == 1 else 'cases have'} warnings: see --json" if others else ""
        sentences.append(f"Caution: {case.full_label}: {plain(warning)}{more}.")
    return sentences


def unfinished(evidence: Evidence) -> tuple[str, ...]:
    """A sentence for each run that did not end by itself: what is missing may change the verdict."""
    found = [(run.header.run_id, sentence) for run in evidence.runs if (sentence := _unfinished(run))]
    return tuple(f"{name}: {sentence}" if len(evidence.runs) > 1 else sentence for name, sentence in found)


def _unfinished(run: Run) -> str:
    """Empty for a run that ended by itself. A gate's run does not know how many launches it will need."""
    if run.end is not None and not run.end.interrupted:
        return "" if run.launches else "Nothing was launched."
    why = "the run was interrupted" if run.end else "the run was cut off, or is still under way"
    done = f"{len(run.launches)} of {run.header.planned}" if run.header.planned else f"{len(run.launches)}"
    return f"Not finished: {done} launches are done; {why}."


def _lead(ranking: Ranking) -> str:
    """Speed and memory in one sentence."""
    least = [case.strategy for case in ranking.lowest_memory]
    if ranking.winner is None or len(ranking.candidates) < 2:
        return _speed(ranking)
    times = _between([step_time(case) for case in ranking.fastest])
    fastest = [case.strategy for case in ranking.fastest]
    need = ""
    if len(ranking.peaks) > 1 and len(least) < len(ranking.peaks):
        memory = format_bytes(min(ranking.peaks.values()))
        if fastest == least and len(least) == 1:
            return f"{fastest[0]} is fastest ({times} per step) and needs the least memory ({memory})."
        need = f"; {_counted(least)} {'needs' if len(least) == 1 else 'need'} the least memory ({memory})"
    verb = "is fastest" if len(fastest) == 1 else "tie for fastest"
    return f"{_counted(fastest)} {verb} ({times} per step){need}."


def _counted(names: Sequence[str]) -> str:
    return listed(names) if len(names) <= _MOST_NAMED else f"{len(names)} strategies"


def _between(seconds: Sequence[float]) -> str:
    """The range of step times."""
    low, high = format_seconds(min(seconds)), format_seconds(max(seconds))
    return high if low == high else span(low, high)


def _speed(ranking: Ranking) -> str:
    if not ranking.candidates:
        return "No strategy finished, so there is nothing to rank."
    if len(ranking.candidates) == 1:
        (alone,) = ranking.candidates
        time = format_seconds(step_time(alone))
        return f"{alone.strategy} is the only strategy here that finished: {time} per step{_few((alone,))}."
    if ranking.winner is None:
        return _by_time(ranking.candidates)
    if not ranking.tied:
        return f"{ranking.winner.strategy} is fastest at {format_seconds(step_time(ranking.winner))} per step."
    names = listed([case.strategy for case in ranking.fastest])
    return f"{names} tie for fastest: {_between([step_time(case) for case in ranking.fastest])} per step."


def _margin(ranking: Ranking) -> str:
    """Why the tied ones are tied, how much slower the next one is, and which cases are not ranked."""
    sentences = []
    if ranking.tied:
        assert ranking.winner is not None
        sentences.append(_tied(ranking.winner, ranking.tied[-1]))
    if ranking.runner_up:
        sentences.append(_behind(ranking.runner_up))
    if ranking.winner and len(ranking.ranked) < len(ranking.candidates):
        sentences.append(_by_time([case for case in ranking.candidates if case not in ranking.ranked]))
    return " ".join(sentences)


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


def _tied(winner: CaseResult, last: Rival) -> str:
    """Why the slowest of those that tie is not called slower."""
    comparison = last.comparison
    if comparison is None:
        return f"Differences under {ALIKE:.0%} are within the model's error.".replace("%", " %")
    lead = f"{last.case.strategy} takes {last.ratio:.3f} times as long as {winner.strategy}{_pairing(comparison)}"
    if not comparison.bounded:
        return f"{lead} ({no_interval(comparison)})."
    return f"{lead} ({_interval(comparison, as_ratio=True)}, which includes 1; more rounds would narrow it)."


def _behind(rival: Rival) -> str:
    longer = (
        f"{rival.ratio:.1f} times as long" if rival.ratio >= _TIMES else f"{format_percent(rival.ratio - 1)} longer"
    )
    time = format_seconds(step_time(rival.case))
    sentence = f"Next: {rival.case.strategy} takes {time}, {longer}{_pairing(rival.comparison)}"
    if rival.comparison is None:
        return f"{sentence}."
    interval = _interval(rival.comparison, as_ratio=rival.ratio >= _TIMES)
    size = "significant" if abs(rival.ratio - 1) >= RELEVANT else f"significant, but under {RELEVANT:.0%}"
    return f"{sentence} ({interval}; {size})."


def _interval(comparison: Comparison, *, as_ratio: bool) -> str:
    """An interval of ratios, or of what they exceed 1 by."""
    if as_ratio:
        return f"95 % interval {comparison.low:.3f} to {comparison.high:.3f}"
    return f"95 % interval {span(format_percent(comparison.low - 1), format_percent(comparison.high - 1))}"


def _pairing(comparison: Comparison | None) -> str:
    """How a ratio came about, after a comma, if it is not the ratio of the medians."""
    return ", paired by round" if comparison and comparison.paired else ""


def listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _memory(ranking: Ranking) -> str:
    peaks = ranking.peaks
    if len(peaks) < 2:
        return ""
    equal = [case.strategy for case in ranking.lowest_memory]
    least = min(peaks.values())
    kind = "reserved" if ranking.memory_metric == "peak_reserved_bytes" else "peak"
    verb = "needs" if len(equal) == 1 else "need"
    sentence = f"{listed(equal)} {verb} the least memory: {format_bytes(least)} per rank ({kind})."
    for case, peak in list(peaks.items())[len(equal) :][:1]:
        sentence += f" Next: {case.strategy} with {format_bytes(peak)}, {format_percent(peak / least - 1)} more."
    return sentence


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
