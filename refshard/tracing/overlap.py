"""How much of the communication hides behind compute: pure functions of a timeline."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from refshard.errors import TraceError
from refshard.timeline import Intervals, Kind, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverlap:
    """One step of one rank, in nanoseconds.

    ``exposed`` is communication during which no compute runs; ``idle`` is the part of the window in which nothing that
    was classified runs.
    """

    step: int
    span: int
    compute: int
    comm: int
    exposed: int
    idle: int

    @property
    def overlap_ratio(self) -> float | None:
        """1 - exposed / communication; None, not 0, without communication."""
        return None if self.comm == 0 else 1 - self.exposed / self.comm


def step_overlaps(timeline: Timeline) -> tuple[StepOverlap, ...]:
    """Overlap of every step of one rank, the last one included."""
    comm_all, compute_all = timeline.busy(Kind.COMM), timeline.busy(Kind.COMPUTE)
    busy_all = timeline.busy(*Kind)
    found = []
    for window in timeline.windows:
        inside = Intervals.of([(window.start, window.end)])
        comm, compute, busy = comm_all & inside, compute_all & inside, busy_all & inside
        found.append(
            StepOverlap(
                step=window.step,
                span=inside.length,
                compute=compute.length,
                comm=comm.length,
                exposed=(comm - compute).length,
                idle=(inside - busy).length,
            )
        )
    return tuple(found)


def collectives_per_step(timeline: Timeline) -> dict[int, tuple[tuple[str, int, int], ...]]:
    """Per step the collectives issued, as sorted ``(op, count, bytes)``; steps without any have an empty entry.

    Raises:
        TraceError: the trace was recorded without shapes.
    """
    counts: dict[int, Counter[str]] = {w.step: Counter() for w in timeline.windows}
    sizes: dict[int, Counter[str]] = {w.step: Counter() for w in timeline.windows}
    for collective in timeline.collectives:
        if collective.bytes is None:
            raise TraceError(f"{collective.op} has no shapes; record the trace with record_shapes=True")
        counts[collective.step][collective.op] += 1
        sizes[collective.step][collective.op] += collective.bytes
    return {step: tuple((op, counts[step][op], sizes[step][op]) for op in sorted(counts[step])) for step in counts}


def mean_ratio(steps: Sequence[StepOverlap]) -> float | None:
    """Overlap ratio over several steps: of their sums, so that a step with little communication weighs little."""
    comm = sum(s.comm for s in steps)
    return None if comm == 0 else 1 - sum(s.exposed for s in steps) / comm
