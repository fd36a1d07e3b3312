"""Why a device idled, in words: the name of each cause, and a table of what was waited for."""

from refshard.quantities import format_ns, format_percent
from refshard.report.trace.section import Section
from refshard.report.trace.words import parts
from refshard.tracing.figures import Cause, TraceFigures
from refshard.tracing.operators.kernel_names import name_in_words

NAMES = {
    Cause.LAUNCH: "idle, launch-bound",
    Cause.CALL: "idle, blocked call",
    Cause.BACK_TO_BACK: "idle, back to back",
    Cause.DEPENDENCY: "idle, waiting for a stream",
    Cause.UNKNOWN: "idle, cause unknown",
}
"""Of the parts of a step in charts and tables."""


def idle_section(figures: TraceFigures) -> Section | None:
    """What the device waited for."""
    if figures.host_only:
        return None
    steps = len(parts(figures))
    span = sum(part.breakdown.span_ns for part in parts(figures))
    rows = [
        {
            "cause": NAMES[Cause(one.cause)].removeprefix("idle, "), "what": name_in_words(one.what or "-"),
            "per step": format_ns(one.ns / steps), "share": format_percent(one.ns / span),
            "gaps per step": f"{one.count / steps:,.1f}", "longest": format_ns(one.longest_ns),
        }
        for one in figures.idle
        if one.ns
    ]  # fmt: skip
    if not rows:
        return None
    return Section(
        title="Idle time by cause",
        caption="Gaps in which nothing runs. What: the operator launched too late, the call that blocked, the streams",
        rows=rows, text=("what",),
    )  # fmt: skip
