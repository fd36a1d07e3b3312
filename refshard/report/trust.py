"""How far to trust a run: the facts of its trust strip, each a value with what it means."""

import statistics
from dataclasses import dataclass

from refshard.quantities import format_percent
from refshard.records import PARITY_TOLERANCE, Run
from refshard.report.cases import FIDELITY, Case, cases
from refshard.report.proof import bit_identical, parity_note, proof_summary
from refshard.report.views import format_metric
from refshard.stats.sample import MIN_LAUNCHES

PERTURBATION_LIMIT = 1.2
"""Traced over untraced step time from which on the breakdown describes the tracer too."""
NOISE_LIMIT = 0.05
"""Half-interval of the step time, relative, over which a small difference drowns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One statement about a run; ``good`` is False where readers should hesitate, None if it is neutral."""

    label: str
    value: str
    detail: str
    good: bool | None = None


def trust(run: Run) -> tuple[Fact, ...]:
    """The facts that a sceptic asks for first."""
    found = cases(run)
    finished = tuple(case for case in found if case.ok)
    return (
        _proof(finished),
        _parity(finished),
        _bits(finished),
        _perturbation(finished),
        _fidelity(finished, run),
        _noise(finished),
        _completeness(run),
    )


def _proof(finished: tuple[Case, ...]) -> Fact:
    proved = sum(proof_summary(case) == "proved" for case in finished)
    return Fact(
        label="Proof of run",
        value=f"{proved} of {len(finished)} finished cases",
        detail=f"units{_proved(finished)} are what the strategy's plan announced",
        good=proved == len(finished) > 0,
    )


def _proved(finished: tuple[Case, ...]) -> str:
    return ", collectives and losses" if any(case.fidelity == "measured" for case in finished) else " and collectives"


def _worst(finished: tuple[Case, ...], metric: str) -> tuple[float, Case] | None:
    found = [(value, case) for case in finished if (value := case.metrics[metric]) is not None]
    return max(found, key=lambda pair: pair[0]) if found else None


def _parity(finished: tuple[Case, ...]) -> Fact:
    label, meaning = "Worst loss parity", "largest relative difference of a loss from one unsharded rank"
    worst = _worst(finished, "loss_parity")
    if finished and not any(case.fidelity == "measured" for case in finished):
        return Fact(label=label, value="not compared", detail=parity_note(finished[0]) or meaning)
    if worst is None:
        return Fact(label=label, value="unknown", detail=meaning, good=False)
    parity, case = worst
    detail = meaning if parity == 0 else f"{meaning} ({case.full_label})"
    return Fact(label=label, value=format_metric("loss_parity", parity), detail=detail, good=parity <= PARITY_TOLERANCE)


def _bits(finished: tuple[Case, ...]) -> Fact:
    known = [answer for case in finished if (answer := bit_identical(case)) is not None]
    detail = "losses and final parameters; the proof table says why others differ"
    if not known:
        return Fact(label="Bit-identical to DDP", value="not compared", detail=detail)
    return Fact(label="Bit-identical to DDP", value=f"{sum(known)} of {len(known)} compared cases", detail=detail)


def _perturbation(finished: tuple[Case, ...]) -> Fact:
    worst = _worst(finished, "perturbation")
    detail = "traced over untraced step time; step times come from untraced steps"
    if worst is None:
        return Fact(label="Perturbation by tracing", value="not traced", detail=detail)
    ratio, case = worst
    return Fact(
        label="Perturbation by tracing",
        value=f"at most {ratio:.2f} times",
        detail=f"{detail} ({case.full_label})",
        good=ratio < PERTURBATION_LIMIT,
    )


def _fidelity(finished: tuple[Case, ...], run: Run) -> Fact:
    present = list(dict.fromkeys(case.fidelity for case in finished))
    where = dict.fromkeys(
        f"{launch.device} with {launch.backend}{f' on {case.spec.cluster}' if case.spec.cluster else ''}"
        for case in finished
        for launch in case.launches
        if launch.device and launch.backend
    )
    if finished and run.header.environment.network:
        where[run.header.environment.network] = None
    meaning = "; ".join(f"{name}: {FIDELITY[name]}" if len(present) > 1 else FIDELITY[name] for name in present)
    detail = f"{meaning} ({', '.join(where)})" if where else meaning
    return Fact(
        label="Fidelity",
        value=" and ".join(present) or "none",
        detail=detail,
        good=None if present else False,
    )


def _noise(finished: tuple[Case, ...]) -> Fact:
    summaries = [case.step_time for case in finished if case.step_time]
    if not summaries:
        return Fact(label="Noise", value="unknown", detail="no step was sampled", good=False)
    typical = statistics.median(summary.high / summary.median - 1 for summary in summaries)
    rounds = min(summary.launches for summary in summaries)
    launches = f"{rounds} round{'' if rounds == 1 else 's'}"
    enough = rounds >= MIN_LAUNCHES
    remark = "" if enough else f"; under {MIN_LAUNCHES} rounds, launch-to-launch variation is under-sampled"
    return Fact(
        label="Noise",
        value=f"± {format_percent(typical)} over {launches}",
        detail=f"typical half-width of a step time's 95 % interval{remark}",
        good=enough and typical <= NOISE_LIMIT,
    )


def _completeness(run: Run) -> Fact:
    ok = sum(record.state == "ok" for record in run.cases)
    planned = run.header.planned
    by_itself = run.end is not None and not run.end.interrupted
    if run.end is None:
        detail = "the run was cut off: it has no closing record"
    elif not by_itself:
        detail = "the run was interrupted"
    else:
        detail = "the run ended by itself" if ok == planned else "the others are listed under case states"
    return Fact(
        label="Launches ended ok",
        value=f"{ok} of {planned}",
        detail=detail,
        good=ok == planned and by_itself,
    )
