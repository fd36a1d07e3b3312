"""What a plan says in sentences: which configuration to take, what ties with it, what is next, and what does not
fit.
"""

from collections.abc import Sequence

from refshard.plan.plan import Plan, Row, cheapest, fastest, ranked
from refshard.plan.space import OWN_KERNELS
from refshard.plan.spread import Spread
from refshard.plan.ways import find_way
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.specs.configuration import Configuration

_SCHEDULES = {"1f1b": "1F1B", "interleaved": "interleaved", "zero-bubble": "zero bubble"}
_MOST_TIES = 3
LEFT_OUT = (
    "other jobs on the network",
    "reading data and saving checkpoints",
    "fragmentation of the allocator, beyond a fixed allowance",
    "uneven routing of tokens to experts",
)


def layout_words(configuration: Configuration) -> str:
    """The mesh in the field's shorthand, innermost axis first.

    >>> layout_words(Configuration(strategy="fsdp2", tensor=8, pipeline=16, shard=64, replicate=2))
    'TP 8 x HSDP 2 x 64 x PP 16 (1F1B)'
    """
    one = configuration
    parts = [f"TP {one.tensor}"] * (one.tensor > 1) + [f"CP {one.context}"] * (one.context > 1)
    parts.append(_data_words(one))
    parts += [f"EP {one.expert}"] * (one.expert > 1)
    if one.pipeline > 1:
        stages = f", {one.interleave} stages each" if one.interleave > 1 else ""
        parts.append(f"PP {one.pipeline} ({_SCHEDULES[one.schedule]}{stages})")
    return " x ".join(part for part in parts if part)


def _data_words(one: Configuration) -> str:
    way = find_way(one.strategy)
    if not way.shards_optimizer:
        return f"DP {one.data_ranks}"
    if one.replicate == 1:
        return f"{'FSDP' if way.by_unit else 'ZeRO-1'} {one.shard}"
    return f"{'HSDP' if way.by_unit else 'ZeRO-1'} {one.replicate} x {one.shard}"


def batch_words(configuration: Configuration) -> str:
    """The batch of one data-parallel rank: microbatches of so many sequences."""
    one = configuration
    count, size = one.microbatches, one.microbatch
    each = "sequence" if size == 1 else "sequences"
    return f"{count} {'microbatch' if count == 1 else 'microbatches'} of {size} {each}{_once(one)}"


def short_batch_words(configuration: Configuration) -> str:
    """The same for a table's cell."""
    return f"{configuration.microbatches} x {configuration.microbatch}{_once(configuration)}"


def _once(one: Configuration) -> str:
    return "" if one.reduce_each or one.microbatches == 1 else ", reduced once"


def checkpoint_words(row: Row) -> str:
    """How many of a rank's layers recompute."""
    if row.configuration.checkpointing == "selective":
        return "selective checkpointing"
    if row.checkpointed == row.layers:
        return "full checkpointing"
    return f"{row.checkpointed} of {row.layers} layers checkpointed" if row.checkpointed else "no checkpointing"


def range_words(row: Row) -> str:
    """A step time with its bounds.

    >>> from refshard.quantities import format_seconds
    >>> f"{format_seconds(8.9)} ({format_seconds(8.4)} to {format_seconds(9.6)})"
    '8.90 s (8.40 s to 9.60 s)'
    """
    return f"{format_seconds(row.time_s)} ({format_seconds(row.low_s)} to {format_seconds(row.high_s)})"


def verdict(plan: Plan, spread: Spread) -> list[str]:
    """Sentences: the recommendation first, then what ties with it, what is next, and what does not fit."""
    best = fastest(plan)
    if best is None:
        return _nothing_fits(plan)
    size = next(size for size in plan.sizes if size.rows and size.rows[0] is best)
    told = [_use(best, plan), *_others(size.rows, spread, plan.varied)]
    cheap = cheapest(plan)
    if cheap is not None and cheap is not best:
        told.append(
            f"Cheapest: {cheap.configuration.world_size:,} ranks, {cheap.cost_usd:,.0f} USD per 10^12 tokens "
            f"(here {best.cost_usd:,.0f})."
        )
    return told


def _use(row: Row, plan: Plan) -> str:
    on = f" on {row.configuration.world_size:,} ranks" if len(plan.sizes) > 1 else ""
    return (
        f"Use {row.configuration.strategy}{variant_words(row.configuration, plan.varied)}{on} with "
        f"{layout_words(row.configuration)}, {batch_words(row.configuration)}, {checkpoint_words(row)}: "
        f"{range_words(row)} per step, {format_percent(row.mfu, 0)} MFU, {_memory_words(row, plan)}."
    )


def _memory_words(row: Row, plan: Plan) -> str:
    if row.reserved_bytes is None:
        return f"{format_bytes(row.peak_bytes)} of {format_bytes(plan.usable_bytes)} usable"
    return f"{format_bytes(row.reserved_bytes)} reserved of {format_bytes(plan.usable_bytes)} usable"


def _others(rows: Sequence[Row], spread: Spread, varied: Sequence[str]) -> list[str]:
    """What ties with the first within the median error of its kind, the first that does not, and the best in other
    precisions.
    """
    best = rows[0]
    closed = [row for row in rows if best.dry_step_s and not row.dry_step_s]
    beside = [row for row in rows if row not in closed]
    tied, after = ranked(rows, spread)
    told = []
    if tied:
        names = "; ".join(short_words(row.configuration, varied) for row in tied[:_MOST_TIES])
        more = f"; and {len(tied) - _MOST_TIES} more below" if len(tied) > _MOST_TIES else ""
        told.append(f"Tied within the model's error: {names}{more}.")
    if after is not None:
        told.append(f"Next: {short_words(after.configuration, varied)}, {_slower(after, best)}.")
    named = [best, *tied[:_MOST_TIES], *([after] if after is not None else [])]
    told += [
        f"Best {variant}: {row.configuration.strategy} with {layout_words(row.configuration)}, {_slower(row, best)}."
        for variant, row in _other_variants(beside, named, varied).items()
    ]
    faster = next((row for row in closed if row.step_s < best.step_s), None)
    if faster is not None:
        gain = 1 - faster.step_s / best.step_s
        told.append(
            f"{short_words(faster.configuration, varied)} would be {format_percent(gain, 0)} faster in closed form, "
            f"but has no dry run: {faster.not_dry}."
        )
    return told


def _slower(row: Row, best: Row) -> str:
    return f"{format_percent(row.time_s / best.time_s - 1, 0)} slower"


def _other_variants(rows: Sequence[Row], named: Sequence[Row], varied: Sequence[str]) -> dict[str, Row]:
    """The best row in each value of what is ``varied`` that no row ``named`` has, by that value in words."""
    known = {"", *(variant_words(row.configuration, varied).strip(" ,") for row in named)}
    found: dict[str, Row] = {}
    for row in rows:
        variant = variant_words(row.configuration, varied).strip(" ,")
        if variant not in known:
            found.setdefault(variant, row)
    return found


def short_words(configuration: Configuration, varied: Sequence[str] = ()) -> str:
    """Strategy, what is ``varied``, and mesh."""
    return f"{configuration.strategy}{variant_words(configuration, varied)} with {layout_words(configuration)}"


def variant_words(configuration: Configuration, varied: Sequence[str]) -> str:
    """What follows the strategy's name, of fields that are ``varied``.

    >>> variant_words(Configuration(strategy="fsdp2", precision="fp8", compiled=True), ["precision", "compiled"])
    ' in fp8, compiled,'
    """
    precision = f" in {configuration.precision}" if "precision" in varied else ""
    if "compiled" not in varied or configuration.strategy in OWN_KERNELS:
        return precision
    return f"{precision}, {'compiled' if configuration.compiled else 'eager'},"


def variant_columns(configuration: Configuration, varied: Sequence[str]) -> dict[str, str]:
    """A table's columns of fields that are ``varied``."""
    compiled = "own kernels" if configuration.strategy in OWN_KERNELS else "yes" if configuration.compiled else "no"
    columns = {"precision": configuration.precision, "compiled": compiled}
    return {field: columns[field] for field in varied}


def _nothing_fits(plan: Plan) -> list[str]:
    size = plan.largest
    if not size.considered:
        return [
            "No configuration can run: no choice of axes divides the ranks and the global batch of "
            f"{plan.global_batch:,} sequences; change --tokens-per-step or the axes."
        ]
    told = [f"Nothing fits: {format_bytes(plan.usable_bytes)} of {format_bytes(plan.available_bytes)} are usable."]
    if size.unfit:
        least = size.unfit[0]
        told.append(
            f"Closest: {short_words(least.configuration, plan.varied)}, {checkpoint_words(least)}, needs "
            f"{format_bytes(least.peak_bytes)}. Use more nodes, a smaller microbatch, or --search."
        )
    return told


def warnings(plan: Plan, spread: Spread) -> list[str]:
    """What limits the figures, in short."""
    rows = [row for size in plan.sizes for row in size.rows[:1]]
    kinds = dict.fromkeys(row.kind for row in rows)
    told = ["MFU is of each precision's own peak."] if "precision" in plan.varied else []
    for kind in kinds:
        found = spread.of(kind)
        which = f"of this kind ({kind.replace(',', ' parallel,')})" if kind in spread.kinds else "of all kinds"
        told.append(
            f"Error bars: {found.count} published runs {which} were held out of the fit: median error "
            f"{format_percent(found.median)}; 8 of 10 lie within the range."
        )
    if any(row.configuration.offload for row in rows):
        told.append("With --offload the host runs AdamW. That is not in the step time, so steps take longer than this.")
    dry = [row for size in plan.sizes for row in size.rows if row.dry_step_s]
    if not dry:
        return [*told, "Closed form only: nothing was run. -v lists what the model assumes and leaves out."]
    far = max(abs((row.dry_step_s or 0.0) / row.step_s - 1) for row in dry)
    return [
        *told,
        f"{len(dry)} configurations were dry-run: a few layers of the real code on fake GPUs, extrapolated. Closed "
        f"forms are within {format_percent(far, 0)} of them. -v lists what the model assumes and leaves out.",
    ]


def assumptions(plan: Plan) -> list[str]:
    """What the model leaves out and assumes."""
    failures = plan.failures
    return [
        f"The model leaves out: {'; '.join(LEFT_OUT)}.",
        "It assumes fp32 masters, fused AdamW, clipped gradients, and synthetic data. Megatron has Transformer "
        "Engine's fused kernels and cuDNN's attention; other strategies have eager blocks, unless --compile yes, and "
        "FlashAttention-2.",
        f"Tensors can use {format_bytes(plan.usable_bytes)} of {format_bytes(plan.available_bytes)}; the rest is for "
        "the CUDA context, NCCL's buffers and fragmentation.",
        f"Cost: {plan.price_usd:g} USD per GPU-hour (--price), at the goodput with one failure per GPU every "
        f"{failures.mtbf_hours:,.0f} hours (--mtbf), {failures.save_s:g} s to save a checkpoint and "
        f"{failures.restart_s:g} s to restart.",
    ]
