"""What a plan says in sentences: which strategy to take, why, and what the model behind it leaves out."""

from collections.abc import Sequence

from refshard.analysis.rankings import ALIKE
from refshard.plan.recipe import no_closed_form
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.simulate.account import Account
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan, PlanRow

_SHOWN = 0.2
"""Part of the difference that a cause must make up to be named."""
LEFT_OUT = (
    "ranks that straggle, and other jobs on the network",
    "reading data, clipping gradients and saving checkpoints",
    "fragmentation of the allocator, beyond a fixed allowance",
    "tensor, pipeline and context parallelism",
)


def verdict(plan: Plan, job: Job) -> list[str]:
    """Sentences: the recommendation, why it is ahead, and what does not fit."""
    fitting = [row for row in plan.rows if row.fits]
    told = [_first(fitting), *_ahead(fitting)] if fitting else [_too_large(plan, job)]
    left = [row for row in plan.rows if not row.fits]
    if fitting and left:
        needs = ", ".join(
            f"{row.strategy} {'needs ' if not place else ''}{format_bytes(row.memory.peak)}"
            for place, row in enumerate(left)
        )
        told.append(f"Out of memory ({_room(plan)}): {needs}.")
    return told


def warnings(plan: Plan) -> list[str]:
    """What limits the figures, in short."""
    doubts = dict.fromkeys(doubt for row in plan.rows for doubt in row.memory.warnings)
    return [
        *(f"Not planned: {no_closed_form(name)}." for name in plan.unplanned),
        *(f"Memory: {doubt}." for doubt in doubts),
        "Median error of the step time on published results: 6 %; -v lists what the model assumes and leaves out.",
    ]


def assumptions(plan: Plan, job: Job) -> list[str]:
    """What the model leaves out and assumes of this job."""
    return [
        f"The model leaves out: {'; '.join(LEFT_OUT)}.",
        f"It assumes parameters in {job.dtype}, gradients reduced in {job.reduction}, fp32 masters, fused AdamW, flash "
        f"attention, and {'compiled blocks and loss' if job.compiled else 'eager blocks'}.",
        f"Tensors can use {format_bytes(plan.usable_bytes)} of {format_bytes(plan.available_bytes)}; the rest is for "
        "the CUDA context, NCCL's buffers and fragmentation.",
        f"Price: {plan.price_usd:g} USD per GPU-hour (--price).",
        "The order of strategies is less certain than their times: see docs/explanation/validation.md.",
    ]


def _room(plan: Plan) -> str:
    usable = format_bytes(plan.usable_bytes).removesuffix(" GiB")
    return f"{usable} of {format_bytes(plan.available_bytes)} usable"


def _too_large(plan: Plan, job: Job) -> str:
    """What is missing where nothing fits, and what would help the strategy that needs least."""
    least = min(plan.rows, key=lambda row: row.memory.peak)
    remedies = ["shorter sequences", "tensor parallelism"]
    if least.sharded:
        remedies.insert(0, "more ranks")
    if job.replicas > 1:
        remedies.insert(0, "fewer replicas")
    if job.sequences > 1:
        remedies.insert(0, "a smaller microbatch, accumulated")
    if least.checkpointed < least.layers:
        remedies.insert(0, "more checkpointed layers")
    elif least.checkpointing.by_op:
        remedies.insert(0, "whole layers checkpointed")
    return (
        f"Nothing fits ({_room(plan)}): {least.strategy} needs least, {format_bytes(least.memory.peak)} with "
        f"{least.checkpointed} of {least.layers} layers checkpointed. "
        f"Try: {', '.join(remedies[:-1])} or {remedies[-1]}."
    )


def _first(fitting: Sequence[PlanRow]) -> str:
    best = fitting[0]
    layers = f" with {best.checkpointed} of {best.layers} layers checkpointed" if best.checkpointed else ""
    return (
        f"Fastest: {best.strategy}, {format_seconds(best.step.step_time_s)} per step{layers}; MFU "
        f"{format_percent(best.step.mfu)}, peak memory {format_bytes(best.memory.peak)}."
    )


def _ahead(fitting: Sequence[PlanRow]) -> list[str]:
    best = fitting[0]
    alike = [r for r in fitting[1:] if r.step.step_time_s / best.step.step_time_s - 1 < ALIKE]
    told = []
    if alike:
        names = ", ".join(row.strategy for row in alike)
        smallest = min((best, *alike), key=lambda row: row.memory.peak)
        told.append(
            f"Within the model's error of: {names}. Lowest memory among them: {smallest.strategy}, "
            f"{format_bytes(smallest.memory.peak)}."
        )
    if rest := [row for row in fitting[1:] if row not in alike]:
        slower = rest[0].step.step_time_s / best.step.step_time_s - 1
        told.append(f"Next: {rest[0].strategy}, {format_percent(slower)} slower{_because(best, rest[0])}.")
    return told


def _because(best: PlanRow, other: PlanRow) -> str:
    more = other.step.step_time_s - best.step.step_time_s
    mine, theirs = parts(best.step.account), parts(other.step.account)
    if best.checkpointed != other.checkpointed:
        theirs["compute"], theirs["recomputation in more layers"] = mine["compute"], theirs["compute"]
        mine["recomputation in more layers"] = mine["compute"]
    differences = sorted(((theirs[name] - mine[name], name) for name in mine), reverse=True)
    named = [f"{name} (+{format_seconds(d)})" for d, name in differences if d >= _SHOWN * more]
    return f", because of {' and '.join(named[:2])}" if named else ""


def parts(account: Account) -> dict[str, float]:
    """Seconds of a step by what they are spent on; they add up to the step."""
    waits = {f"waiting for {_WAITS[cause]}": seconds for cause, seconds in account.waits_by_cause_s.items()}
    return {
        "compute": account.compute_s,
        "copies": account.copies_s,
        "contention between compute and collectives": account.contention_s,
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
