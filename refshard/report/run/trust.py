"""How far to trust a run: facts, each a value with its meaning."""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations

from refshard.analysis.busy import loads, within_launch
from refshard.analysis.cases import FIDELITY, CaseResult
from refshard.analysis.evidence import Evidence
from refshard.analysis.rankings import rankings
from refshard.analysis.ratios import compared
from refshard.analysis.rehearsal import Noise
from refshard.analysis.sample import MIN_LAUNCHES
from refshard.quantities import format_percent
from refshard.report.blocks import Fact, Style
from refshard.report.run.cells import metric_text, no_interval
from refshard.specs.case import REPEATING, spelled
from refshard.specs.job import REFERENCE_STRATEGY

PERTURBATION_LIMIT = 1.2
"""Traced over untraced step time above which the breakdown describes the tracer too."""
NOISE_LIMIT = 0.05
"""Relative half-width of a step time's interval above which small differences are invisible."""
_IN_SHORT = ("Fidelity", "Proof of run", "Loss parity", "Noise", "Machine drift")
"""Facts that the line on trust names."""

_Told = tuple[str, str, bool | None]
"""A fact's value, its detail, and whether it is good: False if readers should hesitate, None if it is neutral."""


def trust(evidence: Evidence, noise: Noise | None = None) -> tuple[Fact, ...]:
    """The facts that a sceptic asks for first, doubtful ones marked; ``noise`` is the machine's, if it was measured."""
    finished = [case for case in evidence.cases if case.ok]
    several = len({run.header.environment.id for run in evidence.runs}) > 1
    of_cases: dict[str, Callable[[Sequence[CaseResult]], _Told]] = {
        "Proof of run": _proof, "Loss parity": _parity, "Bit-identical to DDP": _bits,
        "Slow-down by tracing": _perturbation, "Fidelity": _fidelity, "Noise": _noise,
    }  # fmt: skip
    found = {label: of(finished) for label, of in of_cases.items()}
    found["Smallest visible difference"] = _visible(evidence)
    found["Machine drift"] = _drift(finished)
    found[f"Same code against itself{', latest machine' if several else ''}"] = _itself(noise)
    found["Launches that ended ok"] = _completeness(evidence)
    styles: dict[bool | None, Style] = {None: "plain", True: "good", False: "doubtful"}
    return tuple(
        Fact(label=label, value=value, detail=detail, style=styles[good])
        for label, (value, detail, good) in found.items()
    )


def in_short(facts: Sequence[Fact]) -> list[Fact]:
    """The facts for one line, without empty ones."""
    known = {fact.label: fact for fact in facts}
    found = [known[label] for label in _IN_SHORT]
    return [fact for fact in found if fact.style != "plain" or not fact.value.startswith(("not ", "none"))]


def _proof(finished: Sequence[CaseResult]) -> _Told:
    """Simulated cases, of older records, ran nothing that could be proved."""
    ran = [case for case in finished if case.fidelity != "simulated"]
    if finished and not ran:
        return "nothing ran", "simulated cases follow their plan by construction", None
    proved = sum(case.proof_summary == "proved" for case in ran)
    losses = any(case.fidelity == "measured" for case in ran)
    detail = f"units{', collectives and losses' if losses else ' and collectives'} match the strategy's plan"
    if len(ran) < len(finished):
        detail += "; simulated cases did not run"
    return f"{proved} of {len(ran)} finished cases", detail, proved == len(ran) > 0


def _parity(finished: Sequence[CaseResult]) -> _Told:
    meaning = "largest relative difference of a loss from one unsharded rank"
    known = [(value, case) for case in finished if (value := case.metrics["loss_parity"]) is not None]
    measured = [case for case in finished if case.fidelity == "measured"]
    if finished and not measured:
        return "not compared", finished[0].proof_note("parity") or meaning, None
    if not known:
        why = measured[0].proof_note("parity") if measured else ""
        return "unknown", f"{meaning}; {why}" if why else meaning, False
    parity, case = max(known, key=lambda pair: pair[0] / pair[1].parity_tolerance)
    detail = meaning if parity == 0 else f"{meaning} ({case.full_label}; the limit is {case.parity_tolerance:g})"
    if reduced := sum(bool(case.parity_of) for _, case in known):
        detail += f"; {_cases(reduced)} compared at reduced size, because the model does not fit one rank"
    if unknown := len(measured) - len(known):
        detail += f"; unknown for {_cases(unknown)}"
    return metric_text(case, "loss_parity"), detail, parity <= case.parity_tolerance and not unknown


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def _bits(finished: Sequence[CaseResult]) -> _Told:
    known = [answer for case in finished if (answer := case.bit_identical) is not None]
    value = f"{sum(known)} of {len(known)} compared cases" if known else "not compared"
    return value, "losses and final parameters; the proof table gives the reasons for differences", None


def _perturbation(finished: Sequence[CaseResult]) -> _Told:
    detail = "traced over untraced step time; reported step times are untraced"
    known = [(value, case) for case in finished if (value := case.metrics["perturbation"]) is not None]
    if not known:
        return "not traced", detail, None
    ratio, case = max(known, key=lambda pair: pair[0])
    return f"up to {ratio:.2f} times", f"{detail} ({case.full_label})", ratio < PERTURBATION_LIMIT


def _fidelity(finished: Sequence[CaseResult]) -> _Told:
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
    return " and ".join(map(spelled, present)) or "none", detail, None if present else False


def _noise(finished: Sequence[CaseResult]) -> _Told:
    if finished and all(case.fidelity in REPEATING for case in finished):
        return "none", "times are calculated", None
    summaries = [case.step_time for case in finished if case.step_time and case.fidelity not in REPEATING]
    bounded = [summary for summary in summaries if math.isfinite(summary.high)]
    if not bounded:
        few = min(summaries, key=lambda summary: summary.launches, default=None)
        detail = f"{no_interval(few)}; {MIN_LAUNCHES} rounds give one" if few else "no step was sampled"
        return "unknown", detail, False
    typical = statistics.median(summary.high / summary.median - 1 for summary in bounded)
    detail = "typical half-width of a step time's 95 % interval"
    if without := len(summaries) - len(bounded):
        detail += f"; {without} {'case has' if without == 1 else 'cases have'} none"
    rounds = min(summary.launches for summary in bounded)
    return f"± {format_percent(typical)} over {rounds} rounds", detail, not without and typical <= NOISE_LIMIT


def _visible(evidence: Evidence) -> _Told:
    """From the intervals of the ratios of all pairs in each comparison."""
    detail = "typical half-width of the 95 % interval of the ratio of two step times"
    widths = []
    for ranking in rankings(evidence):
        entered = [case for case in ranking.cases if case.ok and case.strategy != REFERENCE_STRATEGY]
        found = (compared(a, b) for a, b in combinations(entered, 2))
        widths += [one.high / one.ratio - 1 for one in found if one and one.low < one.high and one.bounded]
    if not widths:
        return "unknown", f"{detail}; no two cases have an interval", None
    typical = statistics.median(widths)
    return f"± {format_percent(typical)}", detail, typical <= NOISE_LIMIT


def _drift(finished: Sequence[CaseResult]) -> _Told:
    """How much the machine drifted while launches were timed."""
    drifts = [drift.size for case in finished if (drift := within_launch(case))]
    if not drifts:
        return "not recorded", "times are calculated, or the record predates the probe", None
    detail = "change of a fixed matrix product from before to after the timed steps of a launch"
    others = [load for case in finished for load in loads(case).values() if load.other_cores is not None]
    if most := max(others, key=lambda load: load.other_cores or 0.0, default=None):
        detail += f"; other processes used at most {most.other_cores:.1f} of {most.cores} cores"
    return f"up to {format_percent(max(drifts))}", detail, None


def _itself(noise: Noise | None) -> _Told:
    """The same code against itself, on the latest run's machine."""
    if noise is None:
        return "not measured", "`refshard noise` measures it", None
    seen = [case.smallest_visible for case in noise.cases.values()]
    detail = (
        f"over {noise.launches:,} launches; a gate here detects slow-downs from {format_percent(min(seen))} to "
        f"{format_percent(max(seen))}, depending on the case"
    )
    return f"{noise.failing_gates:,} of {noise.gates:,} gates failed", detail, None


def _completeness(evidence: Evidence) -> _Told:
    ok = sum(record.state == "ok" for run in evidence.runs for record in run.launches)
    planned = sum(run.header.planned for run in evidence.runs)
    cut_off = any(run.end is None for run in evidence.runs)
    interrupted = any(run.end is not None and run.end.interrupted for run in evidence.runs)
    one, every = ("the run", "the run") if len(evidence.runs) == 1 else ("a run", "every run")
    if cut_off:
        detail = f"{one} was cut off: it has no closing record"
    elif interrupted:
        detail = f"{one} was interrupted"
    else:
        detail = "the case states list the others" if ok < planned else f"{every} ended normally"
    return f"{ok} of {planned}", detail, ok == planned and not cut_off and not interrupted
