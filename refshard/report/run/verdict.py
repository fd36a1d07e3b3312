"""The findings of a run in words: who is fastest and leanest, by how much, why, and how far to trust it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from refshard.analysis.cases import FIDELITY, CaseResult, plain, ranks
from refshard.analysis.contests import ALIKE, RELEVANT, Contest, Rival, contests, step_time
from refshard.analysis.evidence import Evidence
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.records import Run
from refshard.report.run.busy import busy_in
from refshard.report.run.intervals import interval_text, no_interval, pairing
from refshard.specs.case import REFERENCE_STRATEGY, REPEATING, spelled
from refshard.stats.compare import Comparison
from refshard.stats.sample import too_few

MANY = 4
"""Contests from which on a sentence sums them up."""
_ERROR_LENGTH = 120
_TIMES = 2  # ratio from which "2.3 times as long" reads better than "130 % longer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one contest: a title, sentences, and doubts about them.

    ``cases`` are those of the contest, references and those that did not end ok included. ``fastest`` and ``leanest``
    name who leads, several where none is alone; empty where nothing is ranked.
    """

    title: str
    cases: tuple[CaseResult, ...]
    fastest: tuple[str, ...]
    leanest: tuple[str, ...]
    speed: str
    margin: str
    memory: str
    why: str
    busy: str
    caveats: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The outcome's sentences that are there."""
        return tuple(sentence for sentence in (self.speed, self.margin, self.busy, self.memory, self.why) if sentence)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """The outcome of every contest."""
    return tuple(map(_finding, contests(evidence)))


def overview(found: Sequence[Finding]) -> tuple[str, ...]:
    """Who leads how often, a sentence per fidelity that holds :data:`MANY` contests or more."""
    told = []
    for fidelity in dict.fromkeys(finding.cases[0].fidelity for finding in found):
        ranked = [finding for finding in found if finding.cases[0].fidelity == fidelity and _has_rivals(finding)]
        if len(ranked) >= MANY:
            speed, memory = (_tally([getattr(f, lead) for f in ranked]) for lead in ("fastest", "leanest"))
            told.append(f"Of {len(ranked)} {spelled(fidelity)} contests, fastest: {speed}; leanest: {memory}.")
    return tuple(told)


def _has_rivals(finding: Finding) -> bool:
    """Whether two strategies or more finished."""
    return sum(case.ok and case.strategy != REFERENCE_STRATEGY for case in finding.cases) > 1


def _tally(leads: Sequence[tuple[str, ...]]) -> str:
    """How often who led alone, most often first, and in how many contests nobody did, or nobody was ranked."""
    alone = Counter(names[0] for names in leads if len(names) == 1)
    told = [f"{name} in {count}" for name, count in sorted(alone.items(), key=lambda item: (-item[1], item[0]))]
    shared, unranked = sum(len(names) > 1 for names in leads), sum(not names for names in leads)
    told += [f"nobody alone in {shared}"] if shared else []
    return ", ".join([*told, *([f"not ranked in {unranked}"] if unranked else [])])


def unranked(evidence: Evidence) -> tuple[str, ...]:
    """A sentence for every case that did not end ok."""
    return tuple(_unranked(case) for case in evidence.cases if not case.ok)


def verdict(evidence: Evidence) -> list[str]:
    """All findings as sentences: by contest if there are several, the network, what is modelled, failures, doubts."""
    found = findings(evidence)
    several = len(found) > 1
    told = [sentence for finding in found for sentence in finding.sentences]
    if several:
        told = [f"{finding.title}: {' '.join(finding.sentences)}" for finding in found if finding.sentences]
    parts = (unfinished(evidence), told, network(evidence), modelled(evidence), unranked(evidence), caveats(evidence))
    return [*overview(found), *(sentence for part in parts for sentence in part)]


def network(evidence: Evidence) -> tuple[str, ...]:
    """A sentence that names each network between hosts, if there were several."""
    joined = dict.fromkeys(run.header.environment.network for run in evidence.runs)
    return tuple(f"The ranks ran on {words}." for words in joined if words)


def modelled(evidence: Evidence) -> tuple[str, ...]:
    """A sentence for every cluster on which cases were not measured."""
    kinds = dict.fromkeys((case.fidelity, case.spec.cluster) for case in evidence.cases if case.fidelity != "measured")
    return tuple(
        f"{'A dry run' if fidelity == 'dryrun' else f'What is {fidelity}'} on {cluster} is no measurement: "
        f"{FIDELITY[fidelity]}."
        for fidelity, cluster in kinds
    )


def unfinished(evidence: Evidence) -> tuple[str, ...]:
    """A sentence for each run that did not end by itself: what is missing may change the verdict."""
    told = ((run, _unfinished(run)) for run in evidence.runs)
    several = len(evidence.runs) > 1
    return tuple(f"{run.header.run_id}: {words}" if several else words for run, words in told if words)


def _unfinished(run: Run) -> str:
    """A gate's run does not know how many launches it will need."""
    if run.end is not None and not run.end.interrupted:
        return "" if run.launches else "Nothing was launched."
    why = "the run was interrupted" if run.end else "the run was cut off, or is still under way"
    done = f"{len(run.launches)} of {run.header.planned}" if run.header.planned else f"{len(run.launches)}"
    return f"Not finished: {done} launches are done; {why}."


def caveats(evidence: Evidence) -> list[str]:
    """What weakens the findings, each doubt once; of the warnings that launches left, the first."""
    doubts = dict.fromkeys(doubt for finding in findings(evidence) for doubt in finding.caveats)
    left = [(case, warning) for case in evidence.cases for launch in case.launches for warning in launch.warnings]
    told = [f"Caution: {doubt}." for doubt in doubts]
    if left:
        case, warning = left[0]
        others = len({case.full_label for case, _ in left}) - 1
        more = f"; {others} more {'case has' if others == 1 else 'cases have'} warnings too, which --json shows"
        told.append(f"Caution: {case.full_label}: {plain(warning)}{more if others else ''}.")
    return told


def _finding(contest: Contest) -> Finding:
    return Finding(
        title=f"{contest.setting.label}, {ranks(contest.world_size)}",
        cases=contest.cases,
        fastest=tuple(case.strategy for case in contest.fastest),
        leanest=tuple(case.strategy for case in contest.leanest),
        speed=_speed(contest),
        margin=_margin(contest),
        memory=_memory(contest),
        why=_why(contest),
        busy=busy_in(contest),
        caveats=tuple(dict.fromkeys((*_apart(contest.contenders), *_doubts(contest.rivals)))),
    )


def _apart(contenders: Sequence[CaseResult]) -> tuple[str, ...]:
    """A doubt where contenders come from several runs."""
    if len({id(case.header) for case in contenders if case.fidelity not in REPEATING}) < 2:
        return ()
    return ("cases of several runs were not measured in turns, so a drift of the machine looks like a difference",)


def _doubts(rivals: Sequence[Rival]) -> tuple[str, ...]:
    return tuple(doubt for rival in rivals if rival.comparison for doubt in rival.comparison.warnings)


def _speed(contest: Contest) -> str:
    if not contest.contenders:
        return "No strategy finished, so there is nothing to rank."
    if len(contest.contenders) == 1:
        (alone,) = contest.contenders
        time = format_seconds(step_time(alone))
        return f"{alone.strategy} is the only strategy here that finished: {time} per step{_few((alone,))}."
    if contest.winner is None:
        return _by_time(contest.contenders)
    time = format_seconds(step_time(contest.winner))
    if not contest.tied:
        return f"{contest.winner.strategy} is fastest at {time} per step."
    names = listed([case.strategy for case in contest.fastest])
    times = f"{time} and {format_seconds(step_time(contest.fastest[-1]))} per step"
    return f"{names} cannot be told apart as the fastest: {times if len(contest.tied) == 1 else f'between {times}'}."


def _margin(contest: Contest) -> str:
    """By how much the first rival that is beaten is slower, how narrowly the tied ones are not, and who is unranked."""
    told = []
    if contest.tied:
        last = contest.tied[-1]
        told.append(
            f"{last.case.strategy} takes {last.ratio:.3f} times as long as the first{pairing(last.comparison)}, "
            f"{_tied(last.comparison)}."
        )
    if contest.runner_up:
        told.append(_behind("The next" if contest.tied else "The runner-up", contest.runner_up))
    if contest.winner and len(contest.ranked) < len(contest.contenders):
        told.append(_by_time([case for case in contest.contenders if case not in contest.ranked]))
    return " ".join(told)


def _by_time(cases: Sequence[CaseResult]) -> str:
    """Step times of cases that nothing ranks, in the suite's order."""
    times = listed([f"{case.strategy} {format_seconds(step_time(case))}" for case in cases])
    return f"Not ranked by time{_few(cases)}: {times} per step."


def _few(cases: Sequence[CaseResult]) -> str:
    """In brackets, of how few launches the cases are; nothing of what is calculated."""
    launches = [len(case.samples) for case in cases if case.fidelity not in REPEATING]
    return "".join(f" ({words})" for words in too_few(min(launches))) if launches else ""


def _tied(comparison: Comparison | None) -> str:
    """Why a ratio does not count."""
    if comparison is None:
        return f"and under {1 + ALIKE:g} times the model cannot tell them apart"
    if not comparison.bounded:
        return no_interval(comparison)
    return f"but the {interval_text(comparison, as_ratio=True)} includes 1; more rounds narrow it"


def _behind(place: str, rival: Rival) -> str:
    time = format_seconds(step_time(rival.case))
    sentence = f"{place}, {rival.case.strategy}, takes {time}, {_longer(rival.ratio)}{pairing(rival.comparison)}"
    if rival.comparison is None:
        return f"{sentence} ({spelled(rival.case.fidelity)}, so there is no interval)."
    interval = interval_text(rival.comparison, as_ratio=rival.ratio >= _TIMES)
    size = "significant" if abs(rival.ratio - 1) >= RELEVANT else f"significant, but under {RELEVANT:.0%}"
    return f"{sentence} ({interval}; {size})."


def _longer(ratio: float) -> str:
    if ratio >= _TIMES:
        return f"{ratio:.1f} times as long"
    return f"{format_percent(ratio - 1)} longer"


def listed(names: Sequence[str]) -> str:
    """Names as a list in words.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _memory(contest: Contest) -> str:
    peaks = contest.peaks
    if len(peaks) < 2:
        return ""
    equal = [case.strategy for case in contest.leanest]
    rest = list(peaks)[len(equal) :]
    least = min(peaks.values())
    lead = f"{listed(equal)} {'is leanest' if len(equal) == 1 else 'are equally lean'}"
    what = "reserved memory" if contest.memory_metric == "peak_reserved_bytes" else "peak memory"
    told = f"{lead} at {format_bytes(least)} of {what} per rank."
    if not rest:
        return told
    more = format_percent(peaks[rest[0]] / least - 1)
    return f"{told} The next, {rest[0].strategy}, needs {format_bytes(peaks[rest[0]])}, {more} more."


_PARTS = {"compute": "compute_s", "exposed communication": "exposed_comm_s", "idle time": "idle_s"}


def _why(contest: Contest) -> str:
    """Where the first beaten rival loses the most, from the traced pass of both; empty where tracing does not tell:
    there the traced steps of the two overlap in that part.
    """
    winner, beaten = contest.winner, contest.runner_up
    if winner is None or beaten is None or winner.breakdown is None or beaten.case.breakdown is None:
        return ""
    parts, others = (
        {part: case.metrics[name] or 0.0 for part, name in _PARTS.items()} for case in (winner, beaten.case)
    )
    total = sum(others.values()) - sum(parts.values())
    most = max(parts, key=lambda part: others[part] - parts[part])
    lost = others[most] - parts[most]
    if total <= 0 or lost <= 0 or _overlap(winner, beaten.case, _PARTS[most]):
        return ""
    share = "Most" if lost > total / 2 else "The largest part"
    return (
        f"{share} of what {beaten.case.strategy} loses to {winner.strategy} in the traced pass is {most}: "
        f"{format_seconds(others[most])} against {format_seconds(parts[most])} per step."
    )


def _overlap(winner: CaseResult, beaten: CaseResult, metric: str) -> bool:
    """Whether a traced step of the one that lost took no longer in this part than one of the winner's."""
    mine, theirs = winner.traced_range.get(metric), beaten.traced_range.get(metric)
    return mine is not None and theirs is not None and theirs[0] <= mine[1]


def _unranked(case: CaseResult) -> str:
    ended = sum(launch.state == case.state for launch in case.launches)
    rounds = f" in {ended} of {len(case.launches)} rounds" if len(case.launches) > 1 else ""
    lines = (case.error or "").strip().splitlines()
    reason = f" ({_shortened(lines[0])})" if lines else ""
    return f"{case.full_label}: not ranked, state {case.state}{rounds}{reason}."


def _shortened(text: str) -> str:
    return text if len(text) <= _ERROR_LENGTH else f"{text[: _ERROR_LENGTH - 3]}..."
