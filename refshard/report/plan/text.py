"""A plan in sentences: which configuration to use, what ties with it, what is next, and what does not fit."""

from collections.abc import Sequence

from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.plan.cost_models import find_cost_model
from refshard.plan.memory import FRAGMENTATION
from refshard.plan.plan import Plan, Row, Size, Spread, cheapest, fastest, ranked
from refshard.plan.space import OWN_KERNELS
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.report.verdict import use
from refshard.specs.choice import EQUAL_MEMORY, OWN
from refshard.specs.job import Job

_SCHEDULES = {"1f1b": "1F1B", "interleaved": "interleaved", "zero-bubble": "zero bubble"}
_MOST_TIES = 3


def mesh_text(one: Job) -> str:
    """The mesh in the field's shorthand, innermost axis first.

    >>> mesh = {"tp": 8, "pp": 16, "dp_replicate": 2, "gpus": 8 * 16 * 128}
    >>> mesh_text(Job(strategy="fsdp2", model="llama3-405b", global_batch=2048, microbatches=16, **mesh))
    'TP 8 x HSDP 2 x 64 x PP 16 (1F1B)'
    """
    way = find_cost_model(one.strategy)
    if one.gpus == 1:
        return "1 GPU"
    if not way.shards_optimizer:
        data = f"DP {one.data_ranks}"
    elif not way.by_unit:
        data = f"ZeRO-1 {one.dp_shard}" if one.dp_replicate == 1 else f"ZeRO-1 {one.dp_replicate} x {one.dp_shard}"
    else:
        data = f"FSDP {one.dp_shard}" if one.dp_replicate == 1 else f"HSDP {one.dp_replicate} x {one.dp_shard}"
    parts = [f"TP {one.tp}"] * (one.tp > 1) + [f"CP {one.cp}"] * (one.cp > 1) + [data]
    parts += [f"EP {one.ep}"] * (one.ep > 1)
    if one.pp > 1:
        stages = f", {one.interleave} stages each" if one.interleave > 1 else ""
        parts.append(f"PP {one.pp} ({_SCHEDULES[one.schedule]}{stages})")
    return " x ".join(parts)


def batch_text(one: Job) -> str:
    """The batch of one data-parallel rank."""
    count = "1 microbatch" if one.microbatches == 1 else f"{one.microbatches} microbatches"
    return f"{count} of {one.microbatch} sequence{'s' if one.microbatch > 1 else ''}{_once(one)}"


def short_batch_text(one: Job) -> str:
    """The same for a table's cell."""
    return f"{one.microbatches} x {one.microbatch}{_once(one)}"


def _once(one: Job) -> str:
    return "" if one.implementation.reduce_each or one.microbatches == 1 else ", reduced once"


def checkpointing_text(row: Row) -> str:
    """How many of a rank's layers recompute."""
    if row.job.checkpointing == "selective":
        return "selective checkpointing"
    if row.checkpointed == row.layers:
        return "full checkpointing"
    return f"{row.checkpointed} of {row.layers} layers checkpointed" if row.checkpointed else "no checkpointing"


def short_text(job: Job, varied: Sequence[str] = ()) -> str:
    """Strategy, the fields that are ``varied``, and mesh; on one GPU, where these are alike, the batch."""
    if job.gpus == 1:
        return f"{batch_text(job)}{variant_text(job, varied).rstrip(',')}"
    return f"{job.strategy}{variant_text(job, varied)} with {mesh_text(job)}"


def variant_text(job: Job, varied: Sequence[str]) -> str:
    """The fields that are ``varied``, as they follow the strategy's name.

    >>> job = Job(strategy="fsdp2", model="llama3-8b", gpus=8, global_batch=8, precision="fp8")
    >>> variant_text(job, ["precision", "compiled"])
    ' in fp8, eager,'
    """
    precision = f" in {job.precision}" if "precision" in varied else ""
    if "compiled" not in varied or job.strategy in OWN_KERNELS:
        return precision
    return f"{precision}, {'compiled' if job.implementation.compiled else 'eager'},"


def variant_columns(job: Job, varied: Sequence[str]) -> dict[str, str]:
    """A table's columns of the fields that are ``varied``."""
    compiled = "own kernels" if job.strategy in OWN_KERNELS else "yes" if job.implementation.compiled else "no"
    columns = {"precision": job.precision, "compiled": compiled}
    return {field: columns[field] for field in varied}


def range_text(row: Row, unknown: str = "not known") -> str:
    """The range of a row's step time."""
    if row.low_s is None or row.high_s is None:
        return unknown
    return f"{format_seconds(row.low_s)} to {format_seconds(row.high_s)}"


def numbered(size: Size) -> list[Row]:
    """The rows that charts show, by their numbers, which begin at 1."""
    return [*size.rows, *(row for row in size.front if row not in size.rows)]


def usable_text(size: Size) -> str:
    """What the configurations that are shown can use: communicators take more memory in some."""
    ends = {format_bytes(end(row.usable_bytes for row in (*size.rows, *size.unfit))): None for end in (min, max)}
    return " to ".join(ends)


def verdict(plan: Plan, spread: Spread) -> list[str]:
    """The recommendation first, then what ties with it, what is next, and what does not fit."""
    best, cheap = fastest(plan), cheapest(plan)
    if best is None or cheap is None:
        return _nothing_fits(plan)
    rows = next(size.rows for size in plan.sizes if size.rows and size.rows[0] is best)
    one = best.job
    on = f" on {one.gpus:,} ranks" if len(plan.sizes) > 1 else ""
    reserved = "" if best.reserved_bytes is None else " reserved"
    cheapest_text = (
        f"Cheapest: {cheap.job.gpus:,} ranks, {cheap.cost_usd:,.0f} USD per 10^12 tokens (here {best.cost_usd:,.0f})."
    )
    which = f"{one.strategy}{variant_text(one, plan.varied)}{on} with {mesh_text(one)}, {batch_text(one)}"
    which = f"{short_text(one, plan.varied) if one.gpus == 1 else which}, {checkpointing_text(best)}"
    figures = (
        f"{format_seconds(best.time_s)} ({range_text(best, 'error not known')}) per step, "
        f"{format_percent(best.mfu, 0)} MFU, {format_bytes(best.memory_bytes)}{reserved} of "
        f"{format_bytes(best.usable_bytes)} usable."
    )
    first = [f"Use {which}: {figures}"]
    if (other := _larger(rows, spread)) is not None:
        first = [use(which, other.job.strategy, (best.memory_bytes, other.memory_bytes), None), figures]
    return [
        *first,
        *_others(rows, spread, plan.varied),
        *([cheapest_text] if cheap is not best else []),
    ]


def _larger(rows: Sequence[Row], spread: Spread) -> Row | None:
    """A peer's row that ties with the first on the same mesh, but needs more memory."""
    best, most = rows[0], rows[0].memory_bytes * (1 + EQUAL_MEMORY)
    larger = (row for row in ranked(rows, spread)[0] if row.same_mesh(best) and row.memory_bytes > most)
    return next((row for row in larger if not row.job.strategy.startswith(OWN)), None)


def _others(rows: Sequence[Row], spread: Spread, varied: Sequence[str]) -> list[str]:
    """Jobs within the median error of the first, the first beyond it, and the best of each other variant."""
    best = rows[0]
    tied, after = ranked(rows, spread)
    found = []
    if tied:
        names = "; ".join(short_text(row.job, varied) for row in tied[:_MOST_TIES])
        more = f"; and {len(tied) - _MOST_TIES} more" if len(tied) > _MOST_TIES else ""
        found.append(f"Tied within the model's error: {names}{more}.")
    if after is not None:
        sure = spread.of(best.kind) and spread.of(after.kind)
        doubt = "" if sure else " by the model, whose error is not known for this kind"
        found.append(f"Next: {short_text(after.job, varied)}, {_slower(after, best)}{doubt}.")
    # A closed form does not compete with a dry run: one may be too fast by what the other has measured.
    closed = [row for row in rows if best.dry_step_s and not row.dry_step_s]
    named = [best, *tied[:_MOST_TIES], *([after] if after is not None else [])]
    known = {"", *(variant_text(row.job, varied).strip(" ,") for row in named)}
    for row in rows:
        variant = variant_text(row.job, varied).strip(" ,")
        if variant not in known and row not in closed:
            known.add(variant)
            one = row.job
            found.append(f"Best {variant}: {one.strategy} with {mesh_text(one)}, {_slower(row, best)}.")
    faster = next((row for row in closed if row.step_s < best.step_s), None)
    if faster is not None:
        gain = format_percent(1 - faster.step_s / best.step_s, 0)
        name = short_text(faster.job, varied)
        found.append(f"{name} would be {gain} faster in closed form, but has no dry run: {faster.not_dry}.")
    return found


def _slower(row: Row, best: Row) -> str:
    """How much longer its step takes; a row that was not measured may be named second though its step is shorter."""
    more = row.time_s / best.time_s - 1
    share = format_percent(abs(more), 0)
    return "as fast" if share == format_percent(0, 0) else f"{share} {'slower' if more >= 0 else 'faster'}"


def _nothing_fits(plan: Plan) -> list[str]:
    size = plan.largest
    if not size.considered:
        return [
            "No configuration can run: no choice of axes divides the ranks and the global batch of "
            f"{plan.global_batch:,} sequences; change --tokens-per-step or the axes."
        ]
    free = f"{format_percent(FRAGMENTATION, 0)} of which stay free for fragmentation"
    usable = f"{format_bytes(size.usable_bytes)} of {format_bytes(plan.available_bytes)}"
    found = [f"Nothing fits: {usable} are usable, {free}."]
    if size.unfit:
        least = size.unfit[0]
        remedy = "more nodes, a smaller microbatch, or --search"
        if least.job.gpus == 1:
            remedy = f"more GPUs, {'--tuning qlora, ' if least.job.tuning != 'qlora' else ''}or a smaller --seq-len"
        found.append(
            f"Closest: {short_text(least.job, plan.varied)}, {checkpointing_text(least)}, needs "
            f"{format_bytes(least.peak_bytes)}. Use {remedy}."
        )
    return found


def warnings(plan: Plan, spread: Spread) -> list[str]:
    """What limits the figures, in short."""
    rows = [size.rows[0] for size in plan.sizes if size.rows]
    found = ["MFU is of each precision's own peak."] if "precision" in plan.varied else []
    listed = next((size.rows for size in reversed(plan.sizes) if size.rows), ())
    unknown = [row for row in listed if spread.of(row.kind) is None]
    for kind in dict.fromkeys(row.kind for row in (*rows, *unknown)):
        error = spread.of(kind)
        if error is None:
            found.append(f"Error bars: not known: {spread.why_unknown(kind)} ({kind}). No tie is claimed.")
            continue
        found.append(
            f"Error bars: published runs of this kind ({kind}), {error.count} of them held out of the fit, from "
            f"{error.sources} source{'s' * (error.sources > 1)}: median error {format_percent(error.median, 0)}; 8 of "
            "10 lie within the range."
        )
    if fixed := max((row.fixed_segments for row in rows), default=0.0):
        found.append(
            f"Memory assumes {EXPANDABLE_SEGMENTS}: without it, dry runs of this kind need up to "
            f"{format_percent(fixed, 0)} more."
        )
    if any(row.job.offload for row in rows):
        found.append("With --offload the host runs AdamW, at the rate of its memory: with few threads it takes longer.")
    far = [abs(row.dry_step_s / row.step_s - 1) for size in plan.sizes for row in size.rows if row.dry_step_s]
    more = "-v lists what the model assumes and leaves out."
    if not far:
        return [*found, f"Closed form only: nothing was run. {more}"]
    return [
        *found,
        f"{len(far)} configurations were dry-run: a few layers of the real code on fake GPUs, extrapolated. Closed "
        f"forms are within {format_percent(max(far), 0)} of them. {more}",
    ]


def assumptions(plan: Plan) -> list[str]:
    """What the model leaves out and assumes."""
    failures = plan.failures
    return [
        "The model leaves out: other jobs on the network; reading data and saving checkpoints.",
        "It assumes fp32 masters (with adapters bf16 ones), a fused optimizer, clipped gradients, synthetic data, and "
        "balanced routing of tokens to experts (refshard dryrun --routing has other assumptions). Megatron has "
        "Transformer Engine's fused kernels and cuDNN's attention; others have eager blocks, unless --compile "
        "yes, and FlashAttention-2.",
        f"torch's allocator can reserve {format_bytes(plan.largest.usable_bytes)} of "
        f"{format_bytes(plan.available_bytes)}; the rest is for the CUDA context and NCCL's communicators. A plan "
        f"leaves {format_percent(FRAGMENTATION, 0)} of it free, for fragmentation.",
        f"Cost: {plan.price_usd:g} USD per GPU-hour (--usd-per-gpu-hour), at the goodput with one failure per GPU "
        f"every {failures.mtbf_hours:,.0f} hours (--mtbf), {failures.save_s:g} s to save a checkpoint and "
        f"{failures.restart_s:g} s to restart.",
    ]
