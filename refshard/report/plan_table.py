"""What a plan looks like in a terminal, and as JSON."""

import textwrap
from typing import Any

import msgspec
from tabulate import tabulate

from refshard.quantities import format_bytes, format_percent, format_rate, format_seconds
from refshard.report import plan_words
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan, PlanRow

_WIDTH = 120


def as_object(plan: Plan, job: Job, title: str) -> dict[str, Any]:
    """The whole plan: seconds, bytes and fractions; ``strategies`` in the order of the ranking."""
    return {
        "plan": title,
        "fidelity": "simulated",
        "world_size": plan.world_size,
        "available_bytes": plan.available_bytes,
        "tokens_per_step": job.tokens_per_rank * plan.world_size,
        "price_usd_per_gpu_hour": plan.price_usd,
        "strategies": [_as_object(row) for row in plan.rows],
        "verdict": plan_words.verdict(plan),
        "warnings": plan_words.warnings(job),
    }


def _as_object(row: PlanRow) -> dict[str, Any]:
    step = msgspec.to_builtins(row.step)
    account = step.pop("account")
    return {
        "strategy": row.strategy,
        "fits": row.fits,
        "checkpointed_layers": row.checkpointed,
        **step,
        **account,
        "exposed_total_s": row.step.account.waits_s,
        "peak_memory_bytes": row.memory.peak,
        "memory_bytes": msgspec.to_builtins(row.memory.at_peak),
        "gpu_hours_per_trillion_tokens": row.gpu_hours,
        "cost_usd_per_trillion_tokens": row.cost_usd,
    }


def terminal_plan(plan: Plan, job: Job, title: str) -> str:
    """The table, memory and time by part, and sentences."""
    sentences = [_wrapped(s) for s in (*plan_words.verdict(plan), *plan_words.warnings(job))]
    return "\n\n".join([f"{title} (simulated)", _summary(plan), _time(plan), _memory(plan), "\n".join(sentences)])


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, _WIDTH, initial_indent="* ", subsequent_indent="  ")


def _summary(plan: Plan) -> str:
    rows = [
        {
            "strategy": row.strategy,
            "fits": "yes" if row.fits else "no",
            "checkpointed\nlayers": row.checkpointed,
            "peak\nmemory": format_bytes(row.memory.peak),
            "step\ntime": format_seconds(row.step.step_time_s),
            "exposed comm.\n(of step)": _share(row.step.account.waits_s, row.step.step_time_s),
            "tokens/s\n/GPU": format_rate(row.step.tokens_per_s_gpu),
            "TFLOPS": format_rate(row.step.tflops),
            "MFU": format_percent(row.step.mfu),
            "a trillion tokens\nGPU hours": f"{row.gpu_hours:,.0f}",
            "\nUSD": f"{row.cost_usd:,.0f}",
        }
        for row in plan.rows
    ]
    return _table(rows)


def _time(plan: Plan) -> str:
    columns = [name for name in plan_words.parts(plan.rows[0].step.account) if _any(plan, name)]
    rows = [
        {
            "seconds of a step": row.strategy,
            **{_heading(c): format_seconds(plan_words.parts(row.step.account)[c]) for c in columns},
            **({"of it\ngive-way": format_seconds(row.step.give_way_s)} if _gives_way(plan) else {}),
        }
        for row in plan.rows
    ]
    return _table(rows)


def _any(plan: Plan, part: str) -> bool:
    return any(plan_words.parts(row.step.account)[part] > 0 for row in plan.rows)


def _gives_way(plan: Plan) -> bool:
    return any(row.step.give_way_s > 0 for row in plan.rows)


def _heading(part: str) -> str:
    return (
        part.replace("waiting for the ", "wait for\n")
        .replace("waiting for ", "wait for\n")
        .replace(" slowed", "\nslowed")
    )


def _memory(plan: Plan) -> str:
    categories = list(dict.fromkeys(name for row in plan.rows for name, size in row.memory.at_peak.items() if size))
    rows = [
        {"memory at the peak": row.strategy, **{c: format_bytes(row.memory.at_peak.get(c, 0)) for c in categories}}
        for row in plan.rows
    ]
    return _table(rows)


def _share(part: float, whole: float) -> str:
    return f"{format_seconds(part)} ({format_percent(part / whole, 0)})"


def _table(rows: list[dict[str, Any]]) -> str:
    return tabulate(rows, headers="keys", disable_numparse=True, colalign=["left"] + ["right"] * (len(rows[0]) - 1))
