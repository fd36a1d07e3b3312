"""What a plan looks like in a terminal, and as JSON."""

from dataclasses import replace
from typing import Any

import msgspec

from refshard.quantities import format_bytes, format_percent, format_rate, format_seconds
from refshard.report.answer import Answer, Marked, Notes, Table, Verdict, table
from refshard.report.plan import words as plan_words
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan, PlanRow


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
        "warnings": [*plan_words.warnings(plan), *plan_words.assumptions(plan, job)],
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


def plan_answer(plan: Plan, job: Job, title: str, *, model: str, cluster: str) -> Answer:
    """Tables of the strategies, of their time and their memory by part, and the verdict; status 1 if nothing fits."""
    data = as_object(plan, job, model=model, cluster=cluster)
    fits = any(row.fits for row in plan.rows)
    return Answer(
        data=data,
        rows=[_flat(row) for row in data["strategies"]],
        blocks=[
            _summary_table(plan, f"{title} (simulated)"),
            table(time_by_part(plan), detail=True),
            table(memory_by_part(plan), detail=True),
            Notes(sentences=plan_words.assumptions(plan, job), detail=True),
            Notes(sentences=plan_words.warnings(plan)),
            Verdict(sentences=plan_words.verdict(plan, job), style="strong" if fits else "bad"),
        ],
        status=0 if fits else 1,
    )


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what is nested in it; memory by part gets a column each."""
    parts = {f"memory_{part.replace(' ', '_')}_bytes": size for part, size in row["memory_bytes"].items()}
    return {key: value for key, value in row.items() if not isinstance(value, dict)} | parts


def _summary_table(plan: Plan, title: str) -> Table:
    found = table(summary(plan), title=title)
    rows = [[row[0], Marked(str(row[1]), "good" if row[1] == "yes" else "bad"), *row[2:]] for row in found.rows]
    return replace(found, rows=rows)


def summary(plan: Plan) -> list[dict[str, str]]:
    """A row for each strategy, best first; text for people."""
    return [
        {
            "strategy": row.strategy,
            "fits": "yes" if row.fits else "no",
            "step time": format_seconds(row.step.step_time_s),
            "peak memory": format_bytes(row.memory.peak),
            "checkpointed layers": str(row.checkpointed),
            "MFU": format_percent(row.step.mfu),
            "exposed comm. (of step)": _share(row.step.exposed_comm_s, row.step.step_time_s),
            "tokens/s/GPU": format_rate(row.step.tokens_per_s_gpu),
            "TFLOPS": format_rate(row.step.tflops),
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


def _share(part: float, whole: float) -> str:
    return f"{format_seconds(part)} ({format_percent(part / whole, 0)})"
