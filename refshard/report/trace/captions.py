"""What each chart of a trace shows, in a sentence that stands in for it."""

from collections.abc import Sequence

from refshard.quantities import format_bytes, format_ns, format_percent
from refshard.report.trace.jobs import counted, parts, who
from refshard.report.trace.per_step import each, has_steps
from refshard.tracing.figures import MemoryPoint, TraceFigures


def ranks(shown: Sequence[TraceFigures], whole: int, names: dict[int, str]) -> str:
    """What the bars of all ranks show, and which of them are left out."""
    shortest, longest = min(shown, key=mean_span), max(shown, key=mean_span)
    left_out = f" Of {whole} ranks, the {len(shown)} with the longest step are drawn." if len(shown) < whole else ""
    return (
        f"Mean {each(longest)} of each rank: from {format_ns(mean_span(shortest))} on {_where(shortest, names)} to "
        f"{format_ns(mean_span(longest))} on {_where(longest, names)}.{left_out}"
    )


def _where(one: TraceFigures, names: dict[int, str]) -> str:
    return who(one) if len(names) == 1 or one.rank is None else f"{who(one)} of {names[one.job]}"


def mean_span(one: TraceFigures) -> float:
    """Nanoseconds of a step of one rank, in the mean."""
    spans = [part.breakdown.span_ns for part in parts(one)]
    return sum(spans) / len(spans)


def timeline(label: str, whose: str, cell_ns: int, undrawn_lanes: int) -> str:
    """What a timeline shows, what it leaves out, and how to read it."""
    told = [f"{label[0].upper()}{label[1:]}, of {whose}."]
    if cell_ns:
        told.append(
            f"There are too many spans to draw: those under {format_ns(cell_ns)} that begin within that time of each "
            "other are one block."
        )
    if undrawn_lanes:
        told.append(
            f"{counted(undrawn_lanes, 'more lane')}, the least busy, {'is' if undrawn_lanes == 1 else 'are'} not drawn."
        )
    return " ".join([*told, "Point at a block for its name and duration; drag to zoom; double-click to zoom out."])


def steps(figures: TraceFigures) -> str:
    """What the bars of the steps show."""
    every = [part.breakdown for part in parts(figures)]
    exposed = [part.exposed_ns / part.span_ns for part in every if part.span_ns]
    idle = [part.idle_ns / part.span_ns for part in every if part.span_ns]
    if not exposed:
        return "The trace holds no time."
    what = counted(len(every), each(figures)) if has_steps(figures) else "The whole trace, which has no steps"
    return f"{what}: exposed communication takes {_range(exposed)}, idle time {_range(idle)} of it."


def gaps(collective: Sequence[int], blocking: int, idle: Sequence[int]) -> str:
    """What the histogram of gaps shows."""
    between = _gaps("gap{} between collectives", collective)
    blocks = f"; {blocking} blocking" if collective else ""
    return f"Over the whole trace. {between}{blocks}. {_gaps('idle gap{}', idle)}."


def _gaps(noun: str, lengths: Sequence[int]) -> str:
    if not lengths:
        return f"No {noun.format('')}"
    middle, longest = sorted(lengths)[len(lengths) // 2], max(lengths)
    return (
        f"{len(lengths):,} {noun.format('' if len(lengths) == 1 else 's')}, {format_ns(sum(lengths))} together, median "
        f"{format_ns(middle)}, longest {format_ns(longest)}"
    )


def memory(points: Sequence[MemoryPoint]) -> str:
    """The peak of every device."""
    told = []
    for device in dict.fromkeys(point.device for point in points):
        mine = [point.bytes for point in points if point.device == device]
        told.append(f"{device}: from {format_bytes(mine[0])} at first to a peak of {format_bytes(max(mine))}.")
    return f"Bytes that torch's allocator holds. {' '.join(told)}"


def _range(shares: Sequence[float]) -> str:
    ends = format_percent(min(shares)), format_percent(max(shares))
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
