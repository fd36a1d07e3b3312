"""The answer of ``refshard plan``: what to use, the next best configurations, and what does not fit."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from refshard.plan.memory import PARTS
from refshard.plan.plan import TIME_PARTS, Plan, Row, Size, Spread
from refshard.plan.space import FIELDS
from refshard.report.blocks import Answer, Block, Cell, Charts, Cover, Notes, Quantity, Section, Table, Verdict, table
from refshard.report.plan import text

if TYPE_CHECKING:
    from refshard.report.draw.charts import Chart

SHOWN_UNFIT = 4
"""Configurations that do not fit, listed if some fit."""
COLUMNS = (
    *FIELDS, "dp_shard", "microbatch",
    *(name for name in Row.__struct_fields__ if name not in ("job", "parts", "memory")),
    *(f"{part}_s" for part in TIME_PARTS), *(f"{part}_bytes" for part in PARTS),
)  # fmt: skip
"""Columns of CSV."""


def plan_answer(plan: Plan, spread: Spread, title: str, *, model: str, cluster: str) -> Answer:
    """What to use first, then tables of configurations, sizes, the Pareto front and what does not fit; the status is 1
    if nothing fits.
    """
    shown = next((size for size in reversed(plan.sizes) if size.rows), plan.largest)
    rows, varied = shown.rows, plan.varied
    ranks = f"{shown.gpus:,} rank{'s' if shown.gpus > 1 else ''}"
    fidelity = "dry run" if rows and rows[0].dry_step_s else "closed form"
    about = "nothing was run: every figure follows from the cluster's profile"
    if any(row.dry_step_s for row in rows):
        about = (
            "a few layers of the real code of the first configurations ran on fake GPUs; the others are in closed form"
        )
    numbers = range(1, len(rows) + 1)
    verdict, warnings, assumptions = text.verdict(plan, spread), text.warnings(plan, spread), text.assumptions(plan)
    blocks: list[Block] = [Verdict(sentences=verdict, style="strong" if rows else "bad")]

    def section(title: str, identity: str, inside: Table, chart: str = "", *, heading: bool = True) -> None:
        charts = [Charts(draw=partial(_charts, chart, shown, plan, spread), titled=False)] if chart else []
        nav, inside = re.split(r",| \(", title)[0], replace(inside, caption=title)
        blocks.append(Section(title=title, id=identity, nav=nav, heading=heading, blocks=[*charts, inside]))

    if rows:
        blocks.append(Charts(draw=partial(_charts, "tradeoff", shown, plan, spread)))
        summary = table(_summary(rows, varied), left=2, title=f"{title}, {ranks} ({fidelity})")
        blocks.append(replace(summary, numbers=numbers))
        if len(plan.sizes) > 1:
            several = sum(bool(size.rows) for size in plan.sizes) > 1
            section("By number of ranks", "sizes", table(_scaling(plan)), "scaling" if several else "")
    if len(shown.front) > 1:
        front = [
            {
                **_which(row, varied),
                "step time": Quantity(row.time_s, "s"),
                "peak memory": Quantity(row.memory_bytes, "B"),
            }
            for row in shown.front
        ]
        places = [text.numbered(shown).index(row) + 1 for row in shown.front]
        section("Step time against memory (Pareto front)", "front", replace(table(front, left=2), numbers=places))
    if rows:
        closed = " (closed form)" if fidelity == "dry run" else ""
        for name, inside in (("Time of a step", _time_by_part), ("Memory at the peak", _memory_by_part)):
            kind = name.partition(" ")[0].lower()
            found = replace(inside(rows, varied), numbers=numbers)
            section(f"{name}{closed}", f"{kind}-part", found, kind, heading=False)
    if shown.unfit:
        unfit = shown.unfit[:SHOWN_UNFIT] if rows else shown.unfit
        needs = [{**_which(row, varied), "needs": Quantity(row.memory_bytes, "B")} for row in unfit]
        section("Out of memory, smallest first", "unfit", table(needs, left=2))
    considered = f"{shown.considered:,} configurations considered for {ranks}; {shown.fitting:,} fit."
    limits = [Notes(sentences=assumptions, where="detail"), Notes(sentences=[considered, *warnings])]
    blocks.append(Section(title="What the model leaves out", id="limits", nav="Limits", heading=False, blocks=limits))
    return Answer(
        data={
            "model": model, "cluster": cluster, "fidelity": "plan", "seq_len": plan.seq_len,
            "global_batch": plan.global_batch, "tokens_per_step": plan.global_batch * plan.seq_len,
            "available_bytes": plan.available_bytes, "usable_bytes": shown.usable_bytes,
            "price_usd_per_gpu_hour": plan.price_usd, "failures": msgspec.to_builtins(plan.failures),
            "sizes": [msgspec.to_builtins(size) for size in plan.sizes], "verdict": verdict,
            "warnings": [*warnings, *assumptions],
        },
        rows=[_flat(row) for size in plan.sizes for row in size.rows],
        columns=COLUMNS,
        blocks=blocks,
        status=0 if rows else 1,
        cover=Cover(title=title, about=about, fidelity=fidelity),
    )  # fmt: skip


def _charts(name: str, size: Size, plan: Plan, spread: Spread) -> "list[Chart]":
    from refshard.report.plan import charts  # plotly takes a second to import

    if name == "tradeoff":
        return [charts.tradeoff(size, plan, spread)]
    if name == "scaling":
        return [charts.scaling_chart(plan)]
    return [charts.time_chart(size.rows) if name == "time" else charts.memory_chart(size)]


def _flat(row: Row) -> dict[str, Any]:
    """A row for CSV: the configuration's fields, and the figures."""
    found: dict[str, Any] = msgspec.structs.asdict(row)
    job, parts, memory = found.pop("job"), found.pop("parts"), found.pop("memory")
    fields = {**msgspec.structs.asdict(job), **msgspec.structs.asdict(job.implementation)}
    return {
        **{name: fields[name] for name in FIELDS}, "dp_shard": job.dp_shard, "microbatch": job.microbatch, **found,
        **{f"{part}_s": seconds for part, seconds in parts.items()},
        **{f"{part}_bytes": size for part, size in memory.items()},
    }  # fmt: skip


def _which(row: Row, varied: Sequence[str], head: str = "strategy", *, batch: bool = True) -> dict[str, Cell]:
    """The columns that say which configuration a row is about; the first has the heading ``head``."""
    one = row.job
    found: dict[str, Cell] = {head: one.strategy, "mesh": text.mesh_text(one), **text.variant_columns(one, varied)}
    if batch:
        layers = "selective" if one.checkpointing == "selective" else f"{row.checkpointed} of {row.layers}"
        found |= {"batch": text.short_batch_text(one), "checkpointed": layers}
    return found


def _summary(rows: Sequence[Row], varied: Sequence[str]) -> list[Mapping[str, Cell]]:
    """Best first. Memory of a dry run is what its allocator reserved."""
    dry = any(row.dry_step_s for row in rows)
    return [
        {
            **_which(row, varied),
            "step time": Quantity(row.time_s, "s"),
            "8 of 10 within": text.range_text(row),
            **({"by": "dry run" if row.dry_step_s else "closed form only"} if dry else {}),
            "MFU": Quantity(row.mfu, "share"),
            "peak memory": Quantity(row.memory_bytes, "B"),
            "headroom": Quantity(row.headroom_bytes, "B"),
            "tokens/s/GPU": Quantity(row.tokens_per_s_gpu, "rate"),
            "TFLOPS": Quantity(row.tflops, "rate"),
            "USD for 10^12 tokens": f"{row.cost_usd:,.0f}",
        }
        for row in rows
    ]


def _scaling(plan: Plan) -> list[Mapping[str, Cell]]:
    """The best configuration of each size, and how much of the smallest one's speed each GPU keeps."""
    best = [(size, size.rows[0]) for size in plan.sizes if size.rows]
    first = best[0][1]
    return [
        {
            "ranks": size.gpus,
            **_which(row, plan.varied, batch=False),
            "step time": Quantity(row.time_s, "s"),
            "tokens/s": Quantity(row.tokens_per_s_gpu * size.gpus, "rate"),
            "scaling efficiency": Quantity(row.tokens_per_s_gpu / first.tokens_per_s_gpu, "share"),
            "goodput": Quantity(row.goodput, "share"),
            "days for 10^12 tokens": f"{row.gpu_hours / size.gpus / 24:,.1f}",
            "USD for 10^12 tokens": f"{row.cost_usd:,.0f}",
        }
        for size, row in best
    ]


def _time_by_part(rows: Sequence[Row], varied: Sequence[str]) -> Table:
    cells = [
        {**_which(row, varied, "seconds of a step", batch=False),
         **{part: Quantity(seconds, "s") for part, seconds in row.parts.items()}}
        for row in rows
    ]  # fmt: skip
    return table(cells, left=2, where="detail")


def _memory_by_part(rows: Sequence[Row], varied: Sequence[str]) -> Table:
    """Parts that no row has are left out."""
    shown = dict.fromkeys(name for row in rows for name, size in row.memory.items() if size)
    cells = [
        {**_which(row, varied, "memory at the peak", batch=False),
         **{name: Quantity(row.memory[name], "B") for name in shown}}
        for row in rows
    ]  # fmt: skip
    return table(cells, left=2, where="detail")
