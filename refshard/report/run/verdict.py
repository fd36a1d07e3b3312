"""The verdict of a run: which strategy to use, how certain that is, and how the others compare."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from refshard.analysis.cases import FIDELITY, CaseResult, ranks
from refshard.analysis.compare import Comparison
from refshard.analysis.evidence import Evidence
from refshard.analysis.rankings import Ranking, rankings, step_time
from refshard.analysis.ratios import ALIKE, Ratio, ratio_of
from refshard.analysis.sample import MIN_LAUNCHES, too_few
from refshard.plain import plain
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.report.run.cells import STATES, no_interval, ratio_text, span
from refshard.report.verdict import SAME_SPEED, TIMES, longer, use
from refshard.specs.case import REPEATING, spelled
from refshard.specs.choice import EQUAL_MEMORY, OWN

MANY = 4
"""Comparisons from which on a sentence sums them up."""
_MOST_NAMED = 3
"""Strategies that a list names; of more it gives the number."""
_FAMILIAR = "fsdp2"
"""What users have: the strategy to use is compared with it if possible."""
_ERROR_LENGTH = 120
_PARTS = {"compute": "compute_s", "exposed communication": "exposed_comm_s", "idle time": "idle_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one comparison in sentences, "" if there is nothing to say.

    ``lead`` says what to use, ``margin`` how sure that is and how the others compare, ``why`` what the traces say;
    ``caveats`` weaken them.
    """

    ranking: Ranking
    lead: str
    margin: str
    why: str
    caveats: tuple[str, ...]

    @property
    def title(self) -> str:
        """The setting and the world size."""
        return f"{self.ranking.setting.label}, {ranks(self.ranking.world_size)}"

    @property
    def decides(self) -> bool:
        """Whether it says what to use."""
        return len(self.ranking.choices) == 1

    @property
    def summary(self) -> str:
        """The outcome without its reasons."""
        return f"{self.lead} {self.margin}".strip()


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """The outcome of every comparison."""
    return tuple(map(finding_of, rankings(evidence)))


def finding_of(ranking: Ranking) -> Finding:
    """The outcome of one comparison."""
    caveats = [warning for rival in ranking.rivals if rival.step_time for warning in rival.step_time.warnings]
    if len({id(case.header) for case in ranking.candidates if case.fidelity not in REPEATING}) > 1:
        caveats.insert(0, "the cases come from several runs, so machine drift between them looks like a difference")
    return Finding(
        ranking=ranking, lead=_lead(ranking), margin=" ".join(_margin(ranking)), why=_why(ranking),
        caveats=tuple(dict.fromkeys(caveats)),
    )  # fmt: skip


def _lead(ranking: Ranking) -> str:
    """What to use, or why that is not decided."""
    if not ranking.candidates:
        return "No verdict: no strategy finished."
    choices = ranking.choices
    if not choices:
        return f"No verdict: {_few(ranking.candidates)} ({MIN_LAUNCHES} launches of each give one)."
    used = choices[0]
    if len(choices) > 1:
        each = [f"{case.strategy} ({', '.join(_figures(ranking, case))})" for case in choices]
        rival = next((rival for rival in ranking.undecided if rival.case in choices), ranking.undecided[0])
        return f"No verdict: {' or '.join(each)}; {rival.case.strategy} takes {_undecided(rival)}."
    if len(ranking.candidates) == 1:
        alone = len({case.strategy for case in ranking.cases}) == 1
        return f"Nothing to compare: {used.strategy} ran alone." if alone else (
            f"Use {used.strategy}: no other strategy here finished."
        )  # fmt: skip
    other, ratio = _compared_with(ranking, used)
    speed = SAME_SPEED if used.fidelity in REPEATING else "; their step times tie"
    if other in [rival.case for rival in ranking.undecided]:
        speed = "; which one is faster is not decided"
    return use(used.strategy, other.strategy, _sizes(ranking, used, other), ratio, speed)


def _sizes(ranking: Ranking, a: CaseResult, b: CaseResult) -> tuple[float, float] | None:
    """The memory of two candidates, if it is known of both."""
    return (ranking.peaks[a], ranking.peaks[b]) if {a, b} <= ranking.peaks.keys() else None


def _compared_with(ranking: Ranking, used: CaseResult) -> tuple[CaseResult, float | None]:
    """The strategy that the one to use is compared with, and its step time over that of the one to use, None if both
    are among the fastest. One that needs more memory if possible, then what users have, then a peer, then the fastest.
    """
    others = dict[CaseResult, float | None]()
    for case in (*ranking.fastest, *(rival.case for rival in ranking.rivals)):
        ratio = ratio_of(used, case)
        if case is not used and (case in ranking.fastest or ratio.outcome == "slower"):
            others[case] = None if case in ranking.fastest else ratio.time

    def order(case: CaseResult) -> tuple[bool, ...]:
        mine, its = _sizes(ranking, used, case) or (0, 0)
        saves = its > mine * (1 + EQUAL_MEMORY)
        return not saves, case.strategy != _FAMILIAR, case.strategy.startswith(OWN)

    other = min(others, key=order)
    return other, others[other]


def _figures(ranking: Ranking, case: CaseResult) -> list[str]:
    """Step time, and memory if it is known."""
    peak = ranking.peaks.get(case)
    return [format_seconds(step_time(case)), *([] if peak is None else [format_bytes(peak)])]


def _margin(ranking: Ranking) -> Iterator[str]:
    """How sure the verdict is; then what ties, what is not decided, what is slower, and who needs the least memory."""
    kind = "reserved" if ranking.memory_metric == "peak_reserved_bytes" else "peak"
    choices, unclear = ranking.choices, list(ranking.undecided)
    if len(choices) == 1:
        (used,) = choices
        time, *memory = _figures(ranking, used)
        count = len(used.samples)
        how = f"{used.fidelity} in {count} launch{'' if count == 1 else 'es'}"
        how = f"by {spelled(used.fidelity)}" if used.fidelity in REPEATING else how
        yield f"{time} per step{''.join(f' and {size} per rank ({kind})' for size in memory)}, {how}."
    if ties := [rival for rival in ranking.unbeaten if rival not in unclear]:
        first, timed = ranking.fastest[0], [one.step_time for one in ties if one.step_time]
        how = f"ratio and 95 % interval{_pairing(timed[0])}" if timed else f"within {format_percent(ALIKE, 0)}"
        each = [f"{one.case.strategy}{f' {ratio_text(one.step_time, 3)}' if one.step_time else ''}" for one in ties]
        yield f"Ties with {first.strategy} ({format_seconds(step_time(first))} per step; {how}): {_shortened(each)}."
    if len(choices) == 1 and unclear:
        rival = unclear.pop(0)
        yield f"{rival.case.strategy} takes {_undecided(rival)}."
    if unclear := [rival for rival in unclear if rival.case not in choices]:
        yield f"Not decided either: {_shortened([rival.case.strategy for rival in unclear])}."
    if (next_ := ranking.runner_up) is not None and next_.time:
        interval = f" ({_interval(next_.step_time)})" if next_.step_time else ""
        time = format_seconds(step_time(next_.case))
        yield f"Next: {next_.case.strategy} takes {time}, {longer(next_.time)}{interval}."
    if len(ranking.candidates) > 1 and (rest := [case for case in ranking.candidates if case not in ranking.ranked]):
        yield f"{f'Not ranked by time ({_few(rest)})' if ranking.ranked else 'Not ranked'}: {_by_time(rest)}"
    if len(ranking.peaks) > 1:
        least, (size, *_) = [case.strategy for case in ranking.lowest_memory], ranking.peaks.values()
        after = [
            f"; next {case.strategy}, {format_percent(peak / size - 1)} more"
            for case, peak in list(ranking.peaks.items())[len(least) :][:1]
        ]
        within = format_percent(EQUAL_MEMORY, 0)
        yield f"Least memory, within {within}: {listed(least)} ({format_bytes(size)}, {kind}){''.join(after)}."


def _undecided(rival: Ratio) -> str:
    """By how much a rival's step is longer, and why that decides nothing."""
    interval = f" ({_interval(rival.step_time)})" if rival.step_time and rival.step_time.bounded else ""
    return f"{longer(rival.time or 1.0)}{interval}, not decided: {undecided(rival)}"


def undecided(rival: Ratio) -> str:
    """Why a difference decides nothing."""
    found, drift = rival.step_time, rival.drift
    if found is None or not found.bounded:
        return "not compared" if found is None else no_interval(found)
    if not found.significant or drift is None:
        return "the interval is too wide, and more rounds would narrow it"
    what = f"the machine's speed drifted by {format_percent(drift.size)}"
    if drift.of == "other processes":
        what = f"other processes took {format_percent(drift.size)} more of the machine during one of the two"
    return f"{what}, more than the difference of {format_percent(abs(found.ratio - 1))}"


def _shortened(names: Sequence[str]) -> str:
    """The names, or the first ones and how many more there are."""
    more = len(names) - _MOST_NAMED
    return listed([*names[:_MOST_NAMED], f"{more} more"] if more > 1 else names)


def _by_time(cases: Sequence[CaseResult]) -> str:
    """Step times of cases, in the suite's order, or of many cases their range."""
    seconds = [step_time(case) for case in cases]
    if len(cases) > _MOST_NAMED:
        times = f"{len(cases)} strategies, {_between(seconds)}"
    else:
        times = listed([f"{case.strategy} {format_seconds(time)}" for case, time in zip(cases, seconds, strict=True)])
    return f"{times} per step."


def _few(cases: Sequence[CaseResult]) -> str:
    """That there are too few launches."""
    return "".join(too_few(min(len(case.samples) for case in cases)))


def _between(seconds: Sequence[float]) -> str:
    """The range of step times."""
    low, high = format_seconds(min(seconds)), format_seconds(max(seconds))
    return high if low == high else span(low, high)


def _interval(comparison: Comparison) -> str:
    """The interval of what a ratio exceeds 1 by, or of a large ratio."""
    if comparison.ratio >= TIMES:
        return f"95 % interval {comparison.low:.3f} to {comparison.high:.3f}{_pairing(comparison)}"
    ends = span(format_percent(comparison.low - 1), format_percent(comparison.high - 1))
    return f"95 % interval {ends}{_pairing(comparison)}"


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


def overview(found: Sequence[Finding]) -> tuple[str, ...]:
    """How often to use each strategy, a sentence per fidelity that has :data:`MANY` comparisons or more."""
    sentences = []
    fidelities = dict.fromkeys(one.ranking.cases[0].fidelity for one in found)
    for fidelity in fidelities:
        here = [one.ranking for one in found if one.ranking.cases[0].fidelity == fidelity]
        ranked = [ranking for ranking in here if len(ranking.candidates) > 1]
        if len(ranked) < MANY:
            continue
        count = f"{len(ranked)} {f'{spelled(fidelity)} ' if len(fidelities) > 1 else ''}comparisons"
        used, open_ = _led([ranking.choices for ranking in ranked])
        each = [f"{name} in {times}{'' if place else f' of {count}'}" for place, (name, times) in enumerate(used)]
        text = f"Use {', '.join(each)}" if used else f"No verdict in any of {count}"
        text += f"; no verdict in {open_}." if used and open_ else "."
        alone, ties = _led([ranking.lowest_memory for ranking in ranked])
        least = [f"{name} in {times}" for name, times in alone]
        least += [f"{ties} {'tie' if ties == 1 else 'ties'}"] if ties else []
        within = format_percent(EQUAL_MEMORY, 0)
        sentences.append(f"{text} Least memory, within {within}: {', '.join(least)}." if least else text)
    return tuple(sentences)


def _led(leads: Sequence[tuple[CaseResult, ...]]) -> tuple[list[tuple[str, int]], int]:
    """How often each strategy led alone, most often first, and how often none did."""
    alone = Counter(cases[0].strategy for cases in leads if len(cases) == 1)
    return sorted(alone.items(), key=lambda item: (-item[1], item[0])), sum(len(cases) != 1 for cases in leads)


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
