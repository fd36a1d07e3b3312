"""Why a device idled, and copies beside which it does nothing else: the name of each cause, tables, and remedies."""

from collections.abc import Sequence

from refshard.analysis.figures import Cause, StepFigures, TraceFigures
from refshard.analysis.names import name_in_words
from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Section
from refshard.report.trace.wording import count_per, in_each, is_alone, parts, per, section

NAMES = {
    Cause.LAUNCH: "idle, launch-bound",
    Cause.CALL: "idle, blocked call",
    Cause.BACK_TO_BACK: "idle, back to back",
    Cause.DEPENDENCY: "idle, waiting for a stream",
    Cause.UNKNOWN: "idle, cause unknown",
}
"""Of the parts of a step in charts and tables."""


BETWEEN_OPERATORS = "between operators"
"""What launch-bound is called on a CPU."""


def names(device: str) -> dict[Cause, str]:
    """The same for a device: nothing is launched on a CPU, where the thread does something else between operators."""
    return NAMES if device != "cpu" else {**NAMES, Cause.LAUNCH: f"idle, {BETWEEN_OPERATORS}"}


_CAPTION = (
    "Gaps in which nothing runs. What: the operator launched too late, the call that took most of the gap, or the "
    "streams; the whole gap counts for it"
)
_CAPTION_OF_CPU = "Gaps in which neither an operator nor a collective runs. What: the operator that ends the gap"


def idle_section(figures: TraceFigures) -> Section | None:
    """What the device waited for."""
    if figures.host_only:
        return None
    steps = len(parts(figures))
    span = sum(part.breakdown.span_ns for part in parts(figures))
    rows = [
        {
            "cause": names(figures.device)[one.cause].removeprefix("idle, "), "what": name_in_words(one.what or "-"),
            per(figures): format_ns(one.ns / steps), "share": format_percent(one.ns / span),
            "gaps" if is_alone(figures) else f"gaps {per(figures)}": count_per(one.count, steps),
            "longest": format_ns(one.longest_ns),
        }
        for one in figures.idle
        if one.ns
    ]  # fmt: skip
    if not rows:
        return None
    return section(
        title="Idle time by cause",
        caption=_CAPTION_OF_CPU if figures.device == "cpu" else _CAPTION,
        rows=rows, text=("what",),
    )  # fmt: skip


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


def lone_copy_sentences(one: TraceFigures, parts: Sequence[StepFigures], on: str) -> list[str]:
    """The kind of copies that accounts for most of the time of ``parts``, and what to do about it."""
    if not one.lone_copies:
        return [f"To reduce copies alone, try: {_ELSE}."]
    most, total = one.lone_copies[0], sum(step.breakdown.lone_copy_ns for step in parts)
    remedy = next((text for parts, text in _REMEDIES if any(part in most.name for part in parts)), _ELSE)
    # Copies at once, in both directions or of several devices, count each.
    at_once = sum(copy.ns for copy in one.lone_copies) > total
    share = "sum over concurrent copies" if at_once else f"{format_percent(most.ns / total, 0)} of it"
    return [
        f"Most of the time of copies alone{on}: {most.name}, {format_ns(most.ns / len(parts))} {in_each(one)}, {share} "
        f"({most.count:,} in all).",
        f"To reduce copies alone, try: {remedy}.",
    ]


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
