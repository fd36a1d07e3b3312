"""What pointing at a case in a chart says: the figures that its label leaves out."""

import math

from refshard.analysis.cases import CaseResult, ranks
from refshard.quantities import format_bytes, format_part, format_percent, format_seconds
from refshard.report.draw.charts import label_text
from refshard.report.run import views
from refshard.report.run.device_limit import Limit
from refshard.specs.case import REPEATING, spelled


def tip(case: CaseResult, memory_metric: str, limit: Limit | None = None) -> str:
    """A line each: the case, its step time with interval and samples, its memory, its throughput."""
    lines = [f"<b>{label_text(case.strategy)}</b>, {ranks(case.spec.world_size)}, {spelled(case.fidelity)}"]
    lines += [_time(case), _memory(case, memory_metric, limit)]
    rate, mfu = case.metrics["tokens_per_s_gpu"], case.metrics["mfu"]
    if rate is not None:
        share = f", MFU {format_percent(mfu)}" if mfu is not None else ""
        lines.append(f"{views.format_metric('tokens_per_s_gpu', rate)} tokens/s/GPU{share}")
    if case.exposed_share is not None:
        lines.append(f"exposed communication {format_percent(case.exposed_share)} of a traced step")
    return "<br>".join(lines)


def _time(case: CaseResult) -> str:
    told = f"step time {format_seconds(case.metrics['step_time_s'])}"
    summary = case.step_time
    if case.fidelity in REPEATING or summary is None:
        return f"{told}, calculated"
    samples = f"{summary.launches} {'round' if summary.launches == 1 else 'rounds'}, {summary.n} steps"
    if not math.isfinite(summary.high):
        return f"{told}, no interval ({samples})"
    return f"{told}, 95 % interval {format_seconds(summary.low)} to {format_seconds(summary.high)} ({samples})"


def _memory(case: CaseResult, metric: str, limit: Limit | None) -> str:
    name = "reserved" if metric == "peak_reserved_bytes" else "peak memory"
    value = case.metrics[metric]
    if value is None:
        return f"{name} unknown"
    return f"{name} {format_part(value, limit.bytes) if limit else format_bytes(value)}"
