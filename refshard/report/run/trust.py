"""How far to trust a run: facts, each a value with its meaning."""

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

from refshard.analysis.busy import loads, within_launch
from refshard.analysis.cases import FIDELITY, CaseResult
from refshard.analysis.compared import compared
from refshard.analysis.evidence import Evidence
from refshard.analysis.proof import bit_identical, parity_note, parity_of, proof_summary, tolerance
from refshard.analysis.rehearsal import Noise
from refshard.analysis.sample import MIN_LAUNCHES
from refshard.quantities import format_percent
from refshard.report.blocks import Fact, Style
from refshard.report.run.cells import metric_text, no_interval
from refshard.report.run.verdict import findings
from refshard.specs.case import REPEATING, spelled
from refshard.specs.job import REFERENCE_STRATEGY

PERTURBATION_LIMIT = 1.2
"""Traced over untraced step time above which the breakdown describes the tracer too."""
NOISE_LIMIT = 0.05
"""Relative half-width of a step time's interval above which small differences are invisible."""
_IN_SHORT = ("Fidelity", "Proof of run", "Loss parity", "Noise", "Machine drift")
"""Facts that the line on trust names."""


def trust(evidence: Evidence, noise: Noise | None = None) -> tuple[Fact, ...]:
    """The facts that a sceptic asks for first, doubtful ones marked; ``noise`` is the machine's, if it was measured."""
    finished = [case for case in evidence.cases if case.ok]
    return (
        _proof(finished),
        _parity(finished),
        _bits(finished),
        _perturbation(finished),
        _fidelity(finished),
        _noise(finished),
        _visible(evidence),
        _busy(finished),
        _itself(noise, several=len({run.header.environment.id for run in evidence.runs}) > 1),
        _completeness(evidence),
    )


def in_short(facts: Sequence[Fact]) -> list[Fact]:
    """The facts for one line, without those that say nothing."""
    known = {fact.label: fact for fact in facts}
    found = [known[label] for label in _IN_SHORT if label in known]
    return [fact for fact in found if fact.style != "plain" or not fact.value.startswith(("not ", "none"))]


def _fact(label: str, value: str, detail: str, good: bool | None = None) -> Fact:
    """``good`` is False where readers should hesitate, None if the fact is neutral."""
    style: Style = "plain" if good is None else "good" if good else "doubtful"
    return Fact(label=label, value=value, detail=detail, style=style)


def _proof(finished: Sequence[CaseResult]) -> Fact:
    """Simulated cases, of older records, ran nothing that could be proved."""
    ran = [case for case in finished if case.fidelity != "simulated"]
    if finished and not ran:
        return _fact("Proof of run", "nothing ran", "simulated cases follow their plan by construction")
    proved = sum(proof_summary(case) == "proved" for case in ran)
    measured = any(case.fidelity == "measured" for case in ran)
    detail = f"units{', collectives and losses' if measured else ' and collectives'} match the strategy's plan"
    if len(ran) < len(finished):
        detail += "; simulated cases did not run"
    return _fact("Proof of run", f"{proved} of {len(ran)} finished cases", detail, proved == len(ran) > 0)


def _parity(finished: Sequence[CaseResult]) -> Fact:
    label, meaning = "Loss parity", "largest relative difference of a loss from one unsharded rank"
    known = [(value, case) for case in finished if (value := case.metrics["loss_parity"]) is not None]
    measured = [case for case in finished if case.fidelity == "measured"]
    if finished and not measured:
        return _fact(label, "not compared", parity_note(finished[0]) or meaning)
    if not known:
        why = parity_note(measured[0]) if measured else ""
        return _fact(label, "unknown", f"{meaning}; {why}" if why else meaning, good=False)
    parity, case = max(known, key=lambda pair: pair[0] / tolerance(pair[1]))
    largest = tolerance(case)
    detail = meaning if parity == 0 else f"{meaning} ({case.full_label}; the limit is {largest:g})"
    if reduced := sum(bool(parity_of(case)) for _, case in known):
        detail += f"; {_cases(reduced)} compared at reduced size, because the model does not fit one rank"
    if unknown := len(measured) - len(known):
        detail += f"; unknown for {_cases(unknown)}"
    return _fact(label, metric_text(case, "loss_parity"), detail, parity <= largest and not unknown)


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def _bits(finished: Sequence[CaseResult]) -> Fact:
    known = [answer for case in finished if (answer := bit_identical(case)) is not None]
    detail = "losses and final parameters; the proof table gives the reasons for differences"
    value = f"{sum(known)} of {len(known)} compared cases" if known else "not compared"
    return _fact("Bit-identical to DDP", value, detail)


def _perturbation(finished: Sequence[CaseResult]) -> Fact:
    label, detail = "Slow-down by tracing", "traced over untraced step time; reported step times are untraced"
    known = [(value, case) for case in finished if (value := case.metrics["perturbation"]) is not None]
    if not known:
        return _fact(label, "not traced", detail)
    ratio, case = max(known, key=lambda pair: pair[0])
    return _fact(label, f"up to {ratio:.2f} times", f"{detail} ({case.full_label})", ratio < PERTURBATION_LIMIT)


def _fidelity(finished: Sequence[CaseResult]) -> Fact:
    present = list(dict.fromkeys(case.fidelity for case in finished))
    where = dict.fromkeys(
        f"{launch.device} with {launch.backend}{f' on {case.spec.job.cluster}' if case.spec.job.cluster else ''}"
        for case in finished
        for launch in case.launches
        if launch.device and launch.backend
    )
    where |= dict.fromkeys(joined for case in finished if (joined := case.header.environment.network))
    several = len(present) > 1
    detail = "; ".join(f"{spelled(name)}: {FIDELITY[name]}" if several else FIDELITY[name] for name in present)
    if where:
        detail += f" ({', '.join(where)})"
    return _fact("Fidelity", " and ".join(map(spelled, present)) or "none", detail, None if present else False)


def _noise(finished: Sequence[CaseResult]) -> Fact:
    label, detail = "Noise", "typical half-width of a step time's 95 % interval"
    if finished and all(case.fidelity in REPEATING for case in finished):
        return _fact(label, "none", "times are calculated")
    summaries = [case.step_time for case in finished if case.step_time and case.fidelity not in REPEATING]
    bounded = [summary for summary in summaries if math.isfinite(summary.high)]
    if not bounded:
        few = min(summaries, key=lambda summary: summary.launches, default=None)
        detail = f"{no_interval(few)}; {MIN_LAUNCHES} rounds give one" if few else "no step was sampled"
        return _fact(label, "unknown", detail, good=False)
    typical = statistics.median(summary.high / summary.median - 1 for summary in bounded)
    if without := len(summaries) - len(bounded):
        detail += f"; {without} {'case has' if without == 1 else 'cases have'} none"
    rounds = min(summary.launches for summary in bounded)
    good = not without and typical <= NOISE_LIMIT
    return _fact(label, f"± {format_percent(typical)} over {rounds} rounds", detail, good)


def _visible(evidence: Evidence) -> Fact:
    """From the intervals of the ratios of all pairs in each comparison."""
    label = "Smallest visible difference"
    detail = "typical half-width of the 95 % interval of the ratio of two step times"
    widths = []
    for finding in findings(evidence):
        entered = [case for case in finding.cases if case.ok and case.strategy != REFERENCE_STRATEGY]
        ratios = (compared(a, b) for a, b in combinations(entered, 2))
        widths += [ratio.high / ratio.ratio - 1 for ratio in ratios if ratio and ratio.low < ratio.high]
    if not (known := [width for width in widths if math.isfinite(width)]):
        return _fact(label, "unknown", f"{detail}; no two cases have an interval")
    typical = statistics.median(known)
    return _fact(label, f"± {format_percent(typical)}", detail, typical <= NOISE_LIMIT)


def _busy(finished: Sequence[CaseResult]) -> Fact:
    """How much the machine drifted while launches were timed."""
    label = "Machine drift"
    drifts = [drift.size for case in finished if (drift := within_launch(case))]
    if not drifts:
        return _fact(label, "not recorded", "times are calculated, or the record predates the probe")
    detail = "change of a fixed matrix product from before to after the timed steps of a launch"
    others = [load for case in finished for load in loads(case).values() if load.other_cores is not None]
    if most := max(others, key=lambda load: load.other_cores or 0.0, default=None):
        detail += f"; other processes used at most {most.other_cores:.1f} of {most.cores} cores"
    return _fact(label, f"up to {format_percent(max(drifts))}", detail)


def _itself(noise: Noise | None, *, several: bool) -> Fact:
    """The same code against itself, on the latest run's machine."""
    label = "Same code against itself, latest machine" if several else "Same code against itself"
    if noise is None:
        return _fact(label, "not measured", "`refshard noise` measures it")
    seen = [case.smallest_visible for case in noise.cases.values()]
    detail = (
        f"over {noise.launches:,} launches; a gate here detects slow-downs from {format_percent(min(seen))} to "
        f"{format_percent(max(seen))}, depending on the case"
    )
    return _fact(label, f"{noise.failing_gates:,} of {noise.gates:,} gates failed", detail)


def _completeness(evidence: Evidence) -> Fact:
    ok = sum(record.state == "ok" for run in evidence.runs for record in run.launches)
    planned = sum(run.header.planned for run in evidence.runs)
    whole = all(run.end is not None and not run.end.interrupted for run in evidence.runs)
    single = len(evidence.runs) == 1
    if any(run.end is None for run in evidence.runs):
        detail = f"{'the run' if single else 'a run'} was cut off: it has no closing record"
    elif not whole:
        detail = f"{'the run' if single else 'a run'} was interrupted"
    elif ok < planned:
        detail = "the case states list the others"
    else:
        detail = f"{'the run' if single else 'every run'} ended normally"
    return _fact("Launches that ended ok", f"{ok} of {planned}", detail, ok == planned and whole)
