"""What a plan looks like in a terminal, and as JSON."""

from collections.abc import Sequence
from typing import Any

import msgspec

from refshard.plan.memory import PARTS
from refshard.plan.plan import TIME_PARTS, Plan, Row, Size
from refshard.plan.spread import Spread
from refshard.quantities import format_bytes, format_percent, format_rate, format_seconds
from refshard.report.blocks import Answer, Notes, Verdict, table
from refshard.report.plan import words
from refshard.specs.configuration import Configuration


def plan_answer(plan: Plan, spread: Spread, title: str, *, model: str, cluster: str) -> Answer:
    """The answer first, then tables of configurations, sizes, the Pareto front and what does not fit; status 1 if
    nothing fits.
    """
    fits = any(size.rows for size in plan.sizes)
    shown = next((size for size in reversed(plan.sizes) if size.rows), plan.largest)
    blocks: list[Any] = []
    if shown.rows:
        blocks.append(
            table(summary(shown.rows, plan.varied), left=2, title=f"{title}, {_ranks(shown)} ({_fidelity(shown)})")
        )
    if len(plan.sizes) > 1 and fits:
        blocks.append(table(scaling(plan), title="By number of ranks"))
    if len(shown.front) > 1:
        blocks.append(table(front(shown.front, plan.varied), left=2, title="Step time against memory (Pareto front)"))
    if shown.rows:
        blocks += [
            table(time_by_part(shown.rows, plan.varied), left=2, where="detail"),
            table(memory_by_part(shown.rows, plan.varied), left=2, where="detail"),
        ]
    if shown.unfit:
        listed = shown.unfit[:SHOWN_UNFIT] if shown.rows else shown.unfit
        blocks.append(table(unfit(listed, plan.varied), left=2, title="Out of memory, smallest first"))
    return Answer(
        data=as_object(plan, spread, model=model, cluster=cluster),
        rows=[flat(row) for size in plan.sizes for row in size.rows],
        columns=COLUMNS,
        blocks=[
            Verdict(sentences=words.verdict(plan, spread), style="strong" if fits else "bad"),
            *blocks,
            Notes(sentences=words.assumptions(plan), where="detail"),
            Notes(sentences=[_considered(shown), *words.warnings(plan, spread)]),
        ],
        status=0 if fits else 1,
    )


def as_object(plan: Plan, spread: Spread, *, model: str, cluster: str) -> dict[str, Any]:
    """The whole plan: seconds, bytes and fractions; rows in the order of the ranking."""
    return {
        "model": model,
        "cluster": cluster,
        "fidelity": "plan",
        "seq_len": plan.seq_len,
        "global_batch": plan.global_batch,
        "tokens_per_step": plan.global_batch * plan.seq_len,
        "available_bytes": plan.available_bytes,
        "usable_bytes": plan.usable_bytes,
        "price_usd_per_gpu_hour": plan.price_usd,
        "failures": msgspec.to_builtins(plan.failures),
        "sizes": [msgspec.to_builtins(size) for size in plan.sizes],
        "verdict": words.verdict(plan, spread),
        "warnings": [*words.warnings(plan, spread), *words.assumptions(plan)],
    }


def flat(row: Row) -> dict[str, Any]:
    """A row for CSV: the configuration's fields, and the figures."""
    found: dict[str, Any] = msgspec.structs.asdict(row)
    configuration, parts, memory = found.pop("configuration"), found.pop("parts"), found.pop("memory")
    return {
        "world_size": configuration.world_size, "global_batch": configuration.global_batch,
        **msgspec.structs.asdict(configuration), **found,
        **{f"{part}_s": seconds for part, seconds in parts.items()},
        **{f"{part}_bytes": size for part, size in memory.items()},
    }  # fmt: skip


SHOWN_UNFIT = 4
"""Configurations that do not fit, listed beside those that do."""
COLUMNS = (
    "world_size", "global_batch", *Configuration.__struct_fields__,
    *(name for name in Row.__struct_fields__ if name not in ("configuration", "parts", "memory")),
    *(f"{part}_s" for part in TIME_PARTS), *(f"{part}_bytes" for part in PARTS),
)  # fmt: skip
"""Of CSV."""


def summary(rows: Sequence[Row], varied: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row for each configuration, best first; text for people. Memory of a dry run is what its allocator reserved."""
    dry = any(row.dry_step_s for row in rows)
    return [
        {
            "strategy": row.configuration.strategy,
            "mesh": words.layout_words(row.configuration),
            **words.variant_columns(row.configuration, varied),
            "batch": words.short_batch_words(row.configuration),
            "checkpointed": _checkpointed(row),
            "step time": format_seconds(row.time_s),
            "8 of 10 within": f"{format_seconds(row.low_s)} to {format_seconds(row.high_s)}",
            **({"by": "dry run" if row.dry_step_s else "closed form only"} if dry else {}),
            "MFU": format_percent(row.mfu),
            "peak memory": format_bytes(row.memory_bytes),
            "tokens/s/GPU": format_rate(row.tokens_per_s_gpu),
            "TFLOPS": format_rate(row.tflops),
            "USD for 10^12 tokens": f"{row.cost_usd:,.0f}",
        }
        for row in rows
    ]


def _checkpointed(row: Row) -> str:
    return "selective" if row.configuration.checkpointing == "selective" else f"{row.checkpointed} of {row.layers}"


def scaling(plan: Plan) -> list[dict[str, Any]]:
    """The best configuration of each size, and how much of the smallest one's speed each GPU keeps."""
    best = [(size, size.rows[0]) for size in plan.sizes if size.rows]
    first = best[0][1]
    found = []
    for size, row in best:
        found.append({
            "ranks": f"{size.world_size:,}", "strategy": row.configuration.strategy,
            "mesh": words.layout_words(row.configuration),
            **words.variant_columns(row.configuration, plan.varied), "step time": format_seconds(row.time_s),
            "tokens/s": format_rate(row.tokens_per_s_gpu * size.world_size),
            "scaling efficiency": format_percent(row.tokens_per_s_gpu / first.tokens_per_s_gpu),
            "goodput": format_percent(row.goodput),
            "days for 10^12 tokens": f"{row.gpu_hours / size.world_size / 24:,.1f}",
            "USD for 10^12 tokens": f"{row.cost_usd:,.0f}",
        })  # fmt: skip
    return found


def front(rows: Sequence[Row], varied: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Configurations of which none is both faster and smaller."""
    return [
        {
            "strategy": row.configuration.strategy, "mesh": words.layout_words(row.configuration),
            **words.variant_columns(row.configuration, varied),
            "batch": words.short_batch_words(row.configuration),
            "checkpointed": _checkpointed(row), "step time": format_seconds(row.step_s),
            "peak memory": format_bytes(row.peak_bytes),
        }
        for row in rows
    ]  # fmt: skip


def unfit(rows: Sequence[Row], varied: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Configurations that do not fit: what they need."""
    return [
        {
            "strategy": row.configuration.strategy, "mesh": words.layout_words(row.configuration),
            **words.variant_columns(row.configuration, varied),
            "batch": words.short_batch_words(row.configuration),
            "checkpointed": _checkpointed(row), "needs": format_bytes(row.memory_bytes),
        }
        for row in rows
    ]  # fmt: skip


def time_by_part(rows: Sequence[Row], varied: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What each step is spent on."""
    return [
        {"seconds of a step": row.configuration.strategy, "mesh": words.layout_words(row.configuration),
         **words.variant_columns(row.configuration, varied),
         **{part: format_seconds(seconds) for part, seconds in row.parts.items()}}
        for row in rows
    ]  # fmt: skip


def memory_by_part(rows: Sequence[Row], varied: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What each peak is made of; parts that no row has are left out."""
    shown = dict.fromkeys(name for row in rows for name, size in row.memory.items() if size)
    return [
        {"memory at the peak": row.configuration.strategy, "mesh": words.layout_words(row.configuration),
         **words.variant_columns(row.configuration, varied),
         **{name: format_bytes(row.memory[name]) for name in shown}}
        for row in rows
    ]  # fmt: skip


def _fidelity(size: Size) -> str:
    return "dry run" if size.rows and size.rows[0].dry_step_s else "closed form"


def _ranks(size: Size) -> str:
    return f"{size.world_size:,} rank{'s' if size.world_size > 1 else ''}"


def _considered(size: Size) -> str:
    return f"{size.considered:,} configurations considered for {_ranks(size)}; {size.fitting:,} fit."
