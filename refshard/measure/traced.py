"""What the traces of a launch's ranks show: where each step went, and which collectives it issued."""

from dataclasses import dataclass
from pathlib import Path

from refshard.errors import TraceError
from refshard.measure.rank import trace_file
from refshard.records import CollectiveCount, StepTrace
from refshard.tracing.figures import Breakdown
from refshard.tracing.kineto import read_timeline
from refshard.tracing.overlap import collectives_per_step, mean_ratio, step_breakdowns


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What the traces of all ranks say; ``per_step`` are rank and collectives of every traced step.

    ``unread`` says why a rank's collectives are not among them.
    """

    steps: tuple[StepTrace, ...] = ()
    overlap_ratio: float | None = None
    per_step: tuple[tuple[int, tuple[CollectiveCount, ...]], ...] = ()
    unread: str = ""


def read_traces(folder: Path, processes: int) -> Traces:
    """Read the trace of every rank.

    Raises:
        TraceError: a trace is missing, damaged, or holds no step.
    """
    steps: list[StepTrace] = []
    found: list[Breakdown] = []
    per_step: list[tuple[int, tuple[CollectiveCount, ...]]] = []
    unread = ""
    for rank in range(processes):
        timeline = read_timeline(trace_file(folder, rank))
        of_rank = step_breakdowns(timeline)
        found += of_rank
        steps += [step_trace(rank, window.step, b) for window, b in zip(timeline.windows, of_rank)]
        try:
            issued = collectives_per_step(timeline)
        except TraceError as error:
            unread = unread or f"rank {rank}: {error}"
            continue
        per_step += [
            (rank, tuple(CollectiveCount(op=op, count=count, bytes=size) for op, count, size in counts))
            for counts in issued.values()
        ]
    return Traces(steps=tuple(steps), overlap_ratio=mean_ratio(found), per_step=tuple(per_step), unread=unread)


def step_trace(rank: int, step: int | None, breakdown: Breakdown) -> StepTrace:
    """A traced step as a record keeps it.

    Raises:
        TraceError: the trace has no steps.
    """
    if step is None:
        raise TraceError(f"the trace of rank {rank} holds no ProfilerStep; call profiler.step() after every step")
    return StepTrace(
        rank=rank,
        step=step,
        span_ns=breakdown.span_ns,
        compute_ns=breakdown.compute_ns,
        comm_ns=breakdown.comm_ns,
        exposed_ns=breakdown.exposed_ns,
        idle_ns=_neither(breakdown),
    )


def _neither(step: Breakdown) -> int:
    """Nanoseconds with neither compute nor communication; what prepares a collective may run in them."""
    return step.span_ns - step.compute_ns - step.exposed_ns
