"""What a plan looks like in a terminal, and as JSON."""

import textwrap
from typing import Any

import msgspec
from tabulate import tabulate

from refshard.quantities import format_bytes, format_percent, format_rate, format_seconds
from refshard.report.plan import words as plan_words
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan, PlanRow

_WIDTH = 120
_NARROW = 14


def as_object(plan: Plan, job: Job, *, model: str, cluster: str) -> dict[str, Any]:
    """The whole plan: seconds, bytes and fractions; ``strategies`` in the order of the ranking."""
    return {
        "model": model,
        "cluster": cluster,
        "fidelity": "simulated",
        "world_size": plan.world_size,
        "available_bytes": plan.available_bytes,
        "usable_bytes": plan.usable_bytes,
        "job": {
            "seq_len": job.seq_len,
            "microbatch": job.sequences,
            "accumulate": job.microbatches,
            "replicas": job.replicas,
            "dtype": job.dtype,
            "reduction": job.reduction,
            "compiled": job.compiled,
        },
        "tokens_per_step": job.tokens_per_rank * plan.world_size,
        "price_usd_per_gpu_hour": plan.price_usd,
        "strategies": [_as_object(row) for row in plan.rows],
        "unplanned": plan.unplanned,
        "verdict": plan_words.verdict(plan, job),
        "warnings": plan_words.warnings(plan, job),
    }


def _as_object(row: PlanRow) -> dict[str, Any]:
    step = msgspec.to_builtins(row.step)
    account = step.pop("account")
    return {
        "strategy": row.strategy,
        "fits": row.fits,
        "checkpointed_layers": row.checkpointed,
        "checkpointed": sorted(row.checkpointing.layers),
        "checkpointed_by_op": row.checkpointing.by_op,
        **step,
        **account,
        "waits_s": row.step.account.waits_s,
        "peak_memory_bytes": row.memory.peak,
        "memory_bytes": msgspec.to_builtins(row.memory.at_peak),
        "gpu_hours_per_trillion_tokens": row.gpu_hours,
        "cost_usd_per_trillion_tokens": row.cost_usd,
    }


def terminal_plan(plan: Plan, job: Job, title: str) -> str:
    """Tables of the strategies, of their time and their memory by part, and sentences."""
    sentences = [_wrapped(s) for s in (*plan_words.verdict(plan, job), *plan_words.warnings(plan, job))]
    tables = [_table(summary(plan)), _table(time_by_part(plan)), _table(memory_by_part(plan))]
    return "\n\n".join([f"{title} (simulated)", *tables, "\n".join(sentences)])


def summary(plan: Plan) -> list[dict[str, str]]:
    """A row for each strategy, best first; text for people."""
    return [
        {
            "strategy": row.strategy,
            "fits": "yes" if row.fits else "no",
            "checkpointed layers": str(row.checkpointed),
            "peak memory": format_bytes(row.memory.peak),
            "step time": format_seconds(row.step.step_time_s),
            "exposed comm. (of step)": _share(row.step.exposed_comm_s, row.step.step_time_s),
            "tokens/s/GPU": format_rate(row.step.tokens_per_s_gpu),
            "TFLOPS": format_rate(row.step.tflops),
            "MFU": format_percent(row.step.mfu),
            "GPU hours of 10^12 tokens": f"{row.gpu_hours:,.0f}",
            "USD": f"{row.cost_usd:,.0f}",
        }
        for row in plan.rows
    ]


def time_by_part(plan: Plan) -> list[dict[str, str]]:
    """What each strategy's step is spent on; parts that no strategy has are left out."""
    by_row = [plan_words.parts(row.step.account) for row in plan.rows]
    shown = [part for part in by_row[0] if any(parts[part] > 0 for parts in by_row)]
    prepares = any(row.step.preparation_s > 0 for row in plan.rows)
    return [
        {
            "seconds of a step": row.strategy,
            **{part: format_seconds(parts[part]) for part in shown},
            **({"lost to preparation": format_seconds(row.step.preparation_s)} if prepares else {}),
        }
        for row, parts in zip(plan.rows, by_row)
    ]


def memory_by_part(plan: Plan) -> list[dict[str, str]]:
    """What each strategy's peak is made of."""
    shown = dict.fromkeys(name for row in plan.rows for name, size in row.memory.at_peak.items() if size)
    return [
        {"memory at the peak": row.strategy, **{name: format_bytes(row.memory.at_peak.get(name, 0)) for name in shown}}
        for row in plan.rows
    ]


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, _WIDTH, initial_indent="* ", subsequent_indent="  ")


def _share(part: float, whole: float) -> str:
    return f"{format_seconds(part)} ({format_percent(part / whole, 0)})"


def _table(rows: list[dict[str, str]]) -> str:
    headers = {key: _heading(key) for key in rows[0]}
    aligned = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=aligned)


def _heading(name: str) -> str:
    """A column's name over as many lines as keep the column narrow."""
    return "\n".join(textwrap.wrap(name, _NARROW, break_long_words=False))
