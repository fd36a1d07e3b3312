"""Figures of a case as cells and as text, the same in every table, tip and sentence."""

import math
from collections.abc import Callable

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import Comparison
from refshard.analysis.sample import Summary, too_few
from refshard.quantities import format_part, format_percent, format_seconds
from refshard.records import METRICS
from refshard.report.blocks import Cell, Marked, Quantity, Style, Unit, cell_text
from refshard.specs.case import REPEATING

_UNITS: dict[str, Unit] = {"s": "s", "B": "B", "fraction": "share"}
STATES: dict[str, str] = {
    "ok": "ok", "oom": "out of memory", "timeout": "timed out", "failed": "failed", "unsupported": "not supported",
    "skipped": "skipped",
}  # fmt: skip
"""Case states in full."""
_STATE_STYLES: dict[str, Style] = {"ok": "plain", "unsupported": "doubtful", "skipped": "doubtful"}


def metric(case: CaseResult, name: str) -> Cell:
    """A case's metric."""
    value = case.metrics[name]
    if value is None or not math.isfinite(value):
        return None
    if name == "loss_parity":
        return "0" if value == 0 else f"{value:.1e}"
    return Quantity(value, _UNITS.get(METRICS[name].unit, "rate"))


def metric_text(case: CaseResult, name: str) -> str:
    """A case's metric, as part of a sentence."""
    return cell_text(metric(case, name))


def state(name: str) -> Cell:
    """A state, highlighted unless it is ok."""
    style = _STATE_STYLES.get(name, "bad")
    return name if style == "plain" else Marked(name, style)


def step_time(case: CaseResult) -> str:
    """The median step time, and its 95 % interval on a line of its own; a calculated time has no interval."""
    found = case.step_time
    if case.fidelity in REPEATING or found is None:
        return metric_text(case, "step_time_s")
    median, bounded = format_seconds(found.median), math.isfinite(found.high)
    ends = span(format_seconds(found.low), format_seconds(found.high), median) if bounded else no_interval(found)
    return f"{median}\n({ends})"


def span(low: str, high: str, like: str = "") -> str:
    """A range of two quantities; the unit is written once, or not at all after a quantity ``like`` of the same unit.

    >>> span("1.00 s", "2.00 s"), span("999 ms", "2.00 s"), span("1.00 s", "2.00 s", "1.50 s")
    ('1.00 to 2.00 s', '999 ms to 2.00 s', '1.00 to 2.00')
    """
    unit = f" {high.rpartition(' ')[2]}"
    if low.endswith(unit) and like.endswith(unit):
        return f"{low.removesuffix(unit)} to {high.removesuffix(unit)}"
    return f"{low.removesuffix(unit)} to {high}"


def reserved(case: CaseResult) -> Cell:
    """Peak reserved memory, and the GPU's size if the case ran on one."""
    gpu = case.gpu_memory
    return metric(case, "peak_reserved_bytes") if gpu is None else format_part(gpu.reserved_bytes, gpu.total_bytes)


def exposed(case: CaseResult, *, share: bool = True) -> Cell:
    """Exposed communication, its share of the traced step and the range over the traced steps; None for a case that
    does not communicate.
    """
    if not case.metrics["comm_s"]:
        return None
    of_step = f" ({format_percent(case.exposed_share)})" if share and case.exposed_share is not None else ""
    return f"{metric_text(case, 'exposed_comm_s')}{of_step}{_traced_range(case, 'exposed_comm_s', format_seconds)}"


def overlap(case: CaseResult) -> Cell:
    """Overlap ratio and its range over the traced steps."""
    ends = _traced_range(case, "overlap_ratio", lambda ratio: format_percent(ratio, 0))
    return f"{metric_text(case, 'overlap_ratio')}{ends}" if ends else metric(case, "overlap_ratio")


def _traced_range(case: CaseResult, name: str, text: Callable[[float], str]) -> str:
    """The smallest and the largest of the traced steps, on a line of their own."""
    low, high = map(text, case.traced_range.get(name, (0.0, 0.0)))
    return "" if low == high else f"\n[{span(low, high)}]"


def no_interval(found: Comparison | Summary) -> str:
    """Why there is no interval."""
    return ", ".join(too_few(found.launches)) or "no interval"


def ratio_text(comparison: Comparison, digits: int = 2) -> str:
    """A ratio with its interval, or with the reason why it has none.

    >>> ratio_text(Comparison(ratio=1.0925, low=1.011, high=1.182, launches=3, paired=True))
    '1.09 (1.01 to 1.18)'
    >>> ratio_text(Comparison(ratio=1.82, low=0.0, high=float("inf"), launches=1, paired=True))
    '1.82 (n = 1: no interval)'
    """
    ends = f"{comparison.low:.{digits}f} to {comparison.high:.{digits}f}"
    return f"{comparison.ratio:.{digits}f} ({ends if comparison.bounded else no_interval(comparison)})"


def times(ratio: float | None) -> Cell:
    """A ratio without an interval."""
    return None if ratio is None else f"{ratio:.2f}"
