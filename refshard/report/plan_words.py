"""What a plan says in sentences: which strategy to take, why, and what the model behind it leaves out."""

from collections.abc import Sequence

from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.simulate.account import Account
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan, PlanRow

ALIKE = 0.01
"""Relative difference of step times below which the model cannot tell two strategies apart."""
_SHOWN = 0.2
"""Part of the difference that a cause must make up to be named."""
LEFT_OUT = (
    "ranks that straggle, and other jobs on the network",
    "reading data, clipping gradients and saving checkpoints",
    "fragmentation of the allocator, beyond a fixed allowance",
    "tensor, pipeline and context parallelism",
)


def verdict(plan: Plan) -> list[str]:
    """Sentences: the recommendation, why it is ahead, and what does not fit."""
    fitting = [row for row in plan.rows if row.fits]
    told = [] if not fitting else [_first(fitting), *_ahead(fitting)]
    if not fitting:
        least = min(plan.rows, key=lambda row: row.memory.peak)
        told.append(
            f"Nothing fits in {format_bytes(plan.available_bytes)}: {least.strategy}, the leanest, needs "
            f"{format_bytes(least.memory.peak)} with {least.checkpointed} layers checkpointed; use more ranks, a "
            "shorter sequence, or tensor parallelism beside it."
        )
    left = [row for row in plan.rows if not row.fits]
    if fitting and left:
        needs = ", ".join(f"{row.strategy} ({format_bytes(row.memory.peak)})" for row in left)
        told.append(f"Too large for {format_bytes(plan.available_bytes)}: {needs}.")
    return told


def warnings(job: Job) -> list[str]:
    """What the model behind the figures leaves out, and assumes of this job."""
    told = [f"The model leaves out: {'; '.join(LEFT_OUT)}."]
    told.append(
        f"It takes parameters in {job.dtype}, gradients reduced in {job.reduction}, fp32 masters, fused AdamW, flash "
        f"attention, and {'compiled' if job.compiled else 'eager'} blocks."
    )
    return told


def _first(fitting: Sequence[PlanRow]) -> str:
    best = fitting[0]
    layers = f", {best.checkpointed} layers checkpointed" if best.checkpointed else ""
    waits = best.step.account.waits_s
    return (
        f"{best.strategy} takes {format_seconds(best.step.step_time_s)} a step{layers}: MFU "
        f"{format_percent(best.step.mfu)}, {format_percent(waits / best.step.step_time_s)} of the time waiting for "
        f"collectives, {format_bytes(best.memory.peak)} at its peak."
    )


def _ahead(fitting: Sequence[PlanRow]) -> list[str]:
    best = fitting[0]
    alike = [r for r in fitting[1:] if r.step.step_time_s / best.step.step_time_s - 1 < ALIKE]
    told = []
    if alike:
        names = ", ".join(row.strategy for row in alike)
        leanest = min((best, *alike), key=lambda row: row.memory.peak)
        told.append(
            f"The model cannot tell it from {names} in time; of these, {leanest.strategy} needs least memory, "
            f"{format_bytes(leanest.memory.peak)}."
        )
    if rest := [row for row in fitting[1:] if row not in alike]:
        slower = rest[0].step.step_time_s / best.step.step_time_s - 1
        told.append(f"The next, {rest[0].strategy}, takes {format_percent(slower)} longer{_because(best, rest[0])}.")
    return told


def _because(best: PlanRow, other: PlanRow) -> str:
    more = other.step.step_time_s - best.step.step_time_s
    mine, theirs = parts(best.step.account), parts(other.step.account)
    differences = sorted(((theirs[name] - mine[name], name) for name in mine), reverse=True)
    named = [f"{format_seconds(d)} more on {name}" for d, name in differences if d >= _SHOWN * more]
    return f": {' and '.join(named[:2])}" if named else ""


def parts(account: Account) -> dict[str, float]:
    """Seconds of a step by what they are spent on; they add up to the step."""
    waits = {f"waiting for {_WAITS[cause]}": seconds for cause, seconds in account.exposed_s.items()}
    return {
        "compute": account.compute_s,
        "copies": account.copies_s,
        "compute slowed by collectives": account.contention_s,
        "the optimizer": account.optimizer_s,
        **waits,
    }


_WAITS = {
    "first gather": "the first gathers",
    "gather in forward": "gathers in forward",
    "gather in backward": "gathers in backward",
    "reduction in backward": "reductions in backward",
    "last reductions": "the last reductions",
}
