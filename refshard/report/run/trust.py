"""How far to trust a run: facts, each a value with its meaning."""

import math
import statistics
from dataclasses import dataclass
from itertools import combinations

from refshard.analysis.busy import loads, within_launch
from refshard.analysis.cases import FIDELITY, CaseResult
from refshard.analysis.compared import compared
from refshard.analysis.evidence import Evidence
from refshard.analysis.proof import bit_identical, parity_note, parity_of, proof_summary, tolerance
from refshard.quantities import format_percent
from refshard.report.run.intervals import no_interval
from refshard.report.run.verdict import findings
from refshard.report.run.views import format_metric
from refshard.specs.case import REFERENCE_STRATEGY, REPEATING, spelled
from refshard.stats.rehearsal import Noise
from refshard.stats.sample import MIN_LAUNCHES

PERTURBATION_LIMIT = 1.2
"""Traced over untraced step time above which the breakdown describes the tracer too."""
NOISE_LIMIT = 0.05
"""Relative half-width of a step time's interval above which small differences are invisible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One statement about the evidence; ``good`` is False where readers should hesitate, None if it is neutral."""

    label: str
    value: str
    detail: str
    good: bool | None = None


def trust(evidence: Evidence, noise: Noise | None = None) -> tuple[Fact, ...]:
    """The facts that a sceptic asks for first; ``noise`` is the machine's, if it was measured."""
    found = evidence.cases
    finished = tuple(case for case in found if case.ok)
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


def _proof(finished: tuple[CaseResult, ...]) -> Fact:
    """Simulated cases, of older records, ran nothing that could be proved."""
    ran = tuple(case for case in finished if case.fidelity != "simulated")
    proved = sum(proof_summary(case) == "proved" for case in ran)
    detail = f"units{_proved(ran)} match the strategy's plan"
    if finished and not ran:
        return Fact(
            label="Proof of run", value="nothing ran", detail="simulated cases follow their plan by construction"
        )
    return Fact(
        label="Proof of run",
        value=f"{proved} of {len(ran)} finished cases",
        detail=detail if len(ran) == len(finished) else f"{detail}; simulated cases did not run",
        good=proved == len(ran) > 0,
    )


def _proved(finished: tuple[CaseResult, ...]) -> str:
    return ", collectives and losses" if any(case.fidelity == "measured" for case in finished) else " and collectives"


def _worst(finished: tuple[CaseResult, ...], metric: str) -> tuple[float, CaseResult] | None:
    found = [(value, case) for case in finished if (value := case.metrics[metric]) is not None]
    return max(found, key=lambda pair: pair[0]) if found else None


def _parity(finished: tuple[CaseResult, ...]) -> Fact:
    label, meaning = "Loss parity", "largest relative difference of a loss from one unsharded rank"
    known = [(value, case) for case in finished if (value := case.metrics["loss_parity"]) is not None]
    measured = [case for case in finished if case.fidelity == "measured"]
    if finished and not measured:
        return Fact(label=label, value="not compared", detail=parity_note(finished[0]) or meaning)
    if not known:
        why = parity_note(measured[0]) if measured else ""
        return Fact(label=label, value="unknown", detail=f"{meaning}; {why}" if why else meaning, good=False)
    parity, case = max(known, key=lambda pair: pair[0] / tolerance(pair[1]))
    largest = tolerance(case)
    detail = meaning if parity == 0 else f"{meaning} ({case.full_label}; the limit is {largest:g})"
    if reduced := sum(bool(parity_of(case)) for _, case in known):
        detail += f"; {_cases(reduced)} compared at reduced size, because the model does not fit one rank"
    if unknown := len(measured) - len(known):
        detail += f"; unknown for {_cases(unknown)}"
    good = parity <= largest and not unknown
    return Fact(label=label, value=format_metric("loss_parity", parity), detail=detail, good=good)


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def _bits(finished: tuple[CaseResult, ...]) -> Fact:
    known = [answer for case in finished if (answer := bit_identical(case)) is not None]
    detail = "losses and final parameters; the proof table gives the reasons for differences"
    if not known:
        return Fact(label="Bit-identical to DDP", value="not compared", detail=detail)
    return Fact(label="Bit-identical to DDP", value=f"{sum(known)} of {len(known)} compared cases", detail=detail)


def _perturbation(finished: tuple[CaseResult, ...]) -> Fact:
    worst = _worst(finished, "perturbation")
    detail = "traced over untraced step time; reported step times are untraced"
    if worst is None:
        return Fact(label="Slow-down by tracing", value="not traced", detail=detail)
    ratio, case = worst
    return Fact(
        label="Slow-down by tracing",
        value=f"up to {ratio:.2f} times",
        detail=f"{detail} ({case.full_label})",
        good=ratio < PERTURBATION_LIMIT,
    )


def _fidelity(finished: tuple[CaseResult, ...]) -> Fact:
    present = list(dict.fromkeys(case.fidelity for case in finished))
    words = {name: spelled(name) for name in present}
    where = dict.fromkeys(
        f"{launch.device} with {launch.backend}{f' on {case.spec.cluster}' if case.spec.cluster else ''}"
        for case in finished
        for launch in case.launches
        if launch.device and launch.backend
    )
    where |= dict.fromkeys(joined for case in finished if (joined := case.header.environment.network))
    meaning = "; ".join(f"{words[name]}: {FIDELITY[name]}" if len(present) > 1 else FIDELITY[name] for name in present)
    detail = f"{meaning} ({', '.join(where)})" if where else meaning
    return Fact(
        label="Fidelity",
        value=" and ".join(words.values()) or "none",
        detail=detail,
        good=None if present else False,
    )


def _noise(finished: tuple[CaseResult, ...]) -> Fact:
    sampled = [case for case in finished if case.step_time and case.fidelity not in REPEATING]
    summaries = [summary for case in sampled if (summary := case.step_time)]
    calculated = finished and all(case.fidelity in REPEATING for case in finished)
    detail = "typical half-width of a step time's 95 % interval"
    if calculated:
        return Fact(label="Noise", value="none", detail="times are calculated")
    widths = [summary.high / summary.median - 1 for summary in summaries if math.isfinite(summary.high)]
    if not widths:
        few = min(summaries, key=lambda summary: summary.launches, default=None)
        told = f"{no_interval(few)}; {MIN_LAUNCHES} rounds give one" if few else "no step was sampled"
        return Fact(label="Noise", value="unknown", detail=told, good=False)
    typical, rounds = statistics.median(widths), min(s.launches for s in summaries if math.isfinite(s.high))
    without = len(summaries) - len(widths)
    remark = f"; {without} {'case has' if without == 1 else 'cases have'} none" if without else ""
    return Fact(
        label="Noise",
        value=f"± {format_percent(typical)} over {rounds} rounds",
        detail=f"{detail}{remark}",
        good=not without and typical <= NOISE_LIMIT,
    )


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
        return Fact(label=label, value="unknown", detail=f"{detail}; no two cases have an interval")
    typical = statistics.median(known)
    return Fact(label=label, value=f"± {format_percent(typical)}", detail=detail, good=typical <= NOISE_LIMIT)


def _busy(finished: tuple[CaseResult, ...]) -> Fact:
    """How much the machine drifted while launches were timed."""
    label = "Machine drift"
    drifts = [drift.size for case in finished if (drift := within_launch(case))]
    if not drifts:
        return Fact(label=label, value="not recorded", detail="times are calculated, or the record predates the probe")
    others = [load for case in finished for load in loads(case).values() if load.other_cores is not None]
    most = max(others, key=lambda load: load.other_cores or 0.0, default=None)
    told = f"; other processes used at most {most.other_cores:.1f} of {most.cores} cores" if most else ""
    return Fact(
        label=label,
        value=f"up to {format_percent(max(drifts))}",
        detail=f"change of a fixed matrix product from before to after the timed steps of a launch{told}",
    )


def _itself(noise: Noise | None, *, several: bool) -> Fact:
    """The same code against itself, on the latest run's machine."""
    label = "Same code against itself, latest machine" if several else "Same code against itself"
    if noise is None:
        return Fact(label=label, value="not measured", detail="`refshard noise` measures it")
    seen = [case.smallest_visible for case in noise.cases.values()]
    return Fact(
        label=label,
        value=f"{noise.failing_gates:,} of {noise.gates:,} gates failed",
        detail=f"over {noise.launches:,} launches; a gate here detects slow-downs from {format_percent(min(seen))} to "
        f"{format_percent(max(seen))}, depending on the case",
    )


def _completeness(evidence: Evidence) -> Fact:
    ok = sum(record.state == "ok" for run in evidence.runs for record in run.launches)
    planned = sum(run.header.planned for run in evidence.runs)
    by_itself = all(run.end is not None and not run.end.interrupted for run in evidence.runs)
    which = "the run" if len(evidence.runs) == 1 else "a run"
    if any(run.end is None for run in evidence.runs):
        detail = f"{which} was cut off: it has no closing record"
    elif not by_itself:
        detail = f"{which} was interrupted"
    elif ok < planned:
        detail = "the case states list the others"
    else:
        detail = f"{'the run' if len(evidence.runs) == 1 else 'every run'} ended normally"
    return Fact(
        label="Launches that ended ok",
        value=f"{ok} of {planned}",
        detail=detail,
        good=ok == planned and by_itself,
    )
