"""The CUDA and HIP graphs of a trace: how often each was replayed, and which of them it captured."""

from refshard.quantities import format_ns
from refshard.report.blocks import Section
from refshard.report.trace.section import section
from refshard.tracing.figures import TraceFigures


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
