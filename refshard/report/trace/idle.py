"""Why a device idled, in words: the name of each cause, and a table of what was waited for."""

from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Section
from refshard.report.trace.jobs import parts
from refshard.report.trace.per_step import is_alone, per
from refshard.report.trace.section import section
from refshard.tracing.figures import Cause, TraceFigures
from refshard.tracing.names import name_in_words

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


def _number(count: int, steps: int) -> str:
    return f"{count // steps:,}" if count % steps == 0 else f"{count / steps:,.1f}"


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
            "gaps" if is_alone(figures) else f"gaps {per(figures)}": _number(one.count, steps),
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
