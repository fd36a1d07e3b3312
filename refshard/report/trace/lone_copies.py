"""What to do about copies beside which the device does nothing else: which they are, and a remedy for their kind."""

from collections.abc import Sequence

from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Section
from refshard.report.trace.per_step import in_each, per
from refshard.report.trace.section import section
from refshard.tracing.figures import LoneCopy, StepFigures, TraceFigures

_REMEDIES = (
    (
        ("HtoD", "HostToDevice"),
        "copy from pinned memory (pin_memory=True) with non_blocking=True, on a stream of its own and a step ahead, or "
        "keep the data on the device",
    ),
    (
        ("DtoH", "DeviceToHost"),
        "copy to pinned memory with non_blocking=True on a stream of its own, copy less often, or compute on the "
        "device what the host needs it for",
    ),
    (("Memset",), "fill less: zero_grad(set_to_none=True), and torch.empty where all is written anyway"),
)
"""By a part of the copy's name."""
_SMALL = 0.001
"""Less of the steps' time is in no table."""
_ELSE = "copy less: write results where they are needed, or copy on a stream of its own"


def sentences(one: TraceFigures, parts: Sequence[StepFigures], on: str) -> list[str]:
    """The kind of copies that accounts for most of the time of ``parts``, and what to do about it."""
    if not one.lone_copies:
        return [f"To reduce copies alone, try: {_ELSE}."]
    most, total = one.lone_copies[0], sum(step.breakdown.lone_copy_ns for step in parts)
    # Copies at once, in both directions or of several devices, count each.
    at_once = sum(copy.ns for copy in one.lone_copies) > total
    share = "sum over concurrent copies" if at_once else f"{format_percent(most.ns / total, 0)} of it"
    return [
        f"Most of the time of copies alone{on}: {most.name}, {format_ns(most.ns / len(parts))} {in_each(one)}, {share} "
        f"({most.count:,} in all).",
        f"To reduce copies alone, try: {remedy(most)}.",
    ]


def remedy(copy: LoneCopy) -> str:
    """What makes less of such copies run alone."""
    return next((told for parts, told in _REMEDIES if any(part in copy.name for part in parts)), _ELSE)


def lone_copy_section(figures: TraceFigures) -> Section | None:
    """The copies beside which nothing else runs, by name."""
    parts = [step.breakdown for step in figures.steps] or [figures.whole]
    span = sum(part.span_ns for part in parts)
    rows = [
        {
            "copies": copy.name, per(figures): format_ns(copy.ns / len(parts)),
            "share": format_percent(copy.ns / span), "count in all": f"{copy.count:,}",
        }
        for copy in figures.lone_copies
    ]  # fmt: skip
    if not rows or figures.host_only or sum(part.lone_copy_ns for part in parts) < _SMALL * span:
        return None
    return section(title="Copies alone", caption="Copies and fills beside which nothing else runs", rows=rows)
