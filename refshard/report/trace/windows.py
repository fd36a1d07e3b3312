"""The section on windows that a user chose in place of steps: a row for each kind of them."""

from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Section
from refshard.report.trace.cut import cut_middle
from refshard.report.trace.section import section
from refshard.tracing.figures import TraceFigures, WindowGroup

_LONGEST_NAME = 60


def windows_section(figures: TraceFigures) -> Section | None:
    """Mean times of each kind of window."""
    chosen = figures.windows
    if chosen is None:
        return None
    return section(
        title=f"Windows of --window '{chosen.asked}'",
        caption="Means over the windows of a kind; # stands for numbers that differ. Percentages are of the window.",
        rows=[_row(group) for group in chosen.groups],
        brief=True,
        shown=20,
    )


def _row(group: WindowGroup) -> dict[str, str]:
    def mean(ns: int) -> str:
        share = f" ({format_percent(ns / group.span_ns, 0)})" if group.span_ns else ""
        return f"{format_ns(ns / group.count)}{share}"

    return {
        "window": cut_middle(group.name, _LONGEST_NAME),
        "count": f"{group.count:,}",
        "mean": format_ns(group.span_ns / group.count),
        "shortest": format_ns(group.shortest_ns),
        "longest": format_ns(group.longest_ns),
        "compute": mean(group.compute_ns),
        "comm.": mean(group.comm_ns),
        "exposed": mean(group.exposed_ns),
        "idle": mean(group.idle_ns),
    }
