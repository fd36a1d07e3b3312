"""The section on windows that a user chose in place of steps: a row for each kind of them."""

from collections.abc import Callable

from refshard.analysis.figures import TraceFigures, WindowGroup
from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Section
from refshard.report.trace.communication import exposed_section, messages_section
from refshard.report.trace.host_stalls import host_stalls_section
from refshard.report.trace.idle import idle_section, lone_copy_section
from refshard.report.trace.memory import memory_at_peak, memory_by_unit
from refshard.report.trace.operators import (
    class_section,
    contention_section,
    kernel_section,
    operator_section,
    shape_section,
)
from refshard.report.trace.whatif import what_if_section
from refshard.report.trace.wording import cut_middle, section

_LONGEST_NAME = 60


def windows_section(figures: TraceFigures) -> Section | None:
    """Mean times of each kind of window."""
    chosen = figures.windows
    if chosen is None:
        return None
    return section(
        title=f"Windows of --window '{chosen.window}'",
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


def graphs(figures: TraceFigures) -> Section | None:
    """The replays of graphs, and what of the trace is their capture."""
    found = figures.graphs
    if found is None:
        return None
    captures = found.captures
    rows = [
        {
            "graph": "capture not in the trace" if one.capture is None else f"capture {one.capture + 1}",
            "captured launches": "-" if one.capture is None else f"{captures[one.capture].launches:,}",
            "replays": f"{one.count:,}",
            "device events each": f"{one.events:,}",
            "device busy": format_ns(one.busy_ns),
        }
        for one in found.replays
    ]
    sentences = []
    if captures:
        length = format_ns(sum(one.end_ns - one.start_ns for one in captures))
        launches = sum(one.launches for one in captures)
        sentences.append(
            f"Captures: {len(captures):,}, of {launches:,} kernel launches, within {length} of the host. "
            "What is captured runs only when it is replayed."
        )
    if rows:
        sentences.append("All kernels of a replay count as launched by the call that replays their graph.")
    return section(
        title="Graphs",
        caption="Replays of CUDA or HIP graphs, those with equally many device events in one row",
        rows=rows,
        sentences=sentences,
        text=("graph",),
    )


SECTIONS: tuple[Callable[[TraceFigures], Section | None], ...] = (
    windows_section,
    exposed_section,
    messages_section,
    idle_section,
    lone_copy_section,
    what_if_section,
    host_stalls_section,
    class_section,
    operator_section,
    shape_section,
    kernel_section,
    contention_section,
    memory_at_peak,
    memory_by_unit,
    graphs,
)
"""What makes each section of a trace, in the order of reading; None where the trace cannot tell."""


def sections_of(figures: TraceFigures) -> tuple[Section, ...]:
    """The sections of one trace."""
    return tuple(found for make in SECTIONS if (found := make(figures)) is not None)
