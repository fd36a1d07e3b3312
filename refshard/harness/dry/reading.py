"""Read the figures of a dry run's last step from its recording."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from refshard.dryrun.as_trace import as_trace
from refshard.dryrun.memory import account_memory
from refshard.dryrun.recording import Flag, Kind, Recording
from refshard.dryrun.replay import NS, Replayed
from refshard.dryrun.steps import Step
from refshard.harness.dry.result import StepResult
from refshard.quantities import format_times
from refshard.records import Census, CollectiveCount, StepTrace
from refshard.tracing.kineto import timeline_of
from refshard.tracing.overlap import collectives_per_step, step_breakdowns
from refshard.tracing.recording import highest_of


def read_step(recording: Recording, replayed: Replayed, steps: Sequence[Step]) -> StepResult:
    """The figures of the last of ``steps``: two or more consecutive steps.

    The last step's window begins where the previous one ends, because the device is not drained between steps.
    """
    timeline, last = timeline_of(as_trace(recording, replayed, device="", steps=steps)), steps[-1]
    found = step_breakdowns(timeline)[-1]
    issued = collectives_per_step(timeline)[last.number]
    return StepResult(
        step_s=found.span_ns / NS,
        trace=StepTrace(
            rank=recording.rank,
            step=last.number,
            span_ns=found.span_ns,
            compute_ns=found.compute_ns,
            comm_ns=found.comm_ns,
            exposed_ns=found.exposed_ns,
            idle_ns=found.span_ns - found.compute_ns - found.exposed_ns,
        ),
        issued=tuple(CollectiveCount(op=op, count=count, bytes=size) for op, count, size in issued),
        census=census_of(recording, last),
        memory_course_bytes=highest_of(account_memory(recording).allocated[last.first : last.end].tolist()),
        host_waits=dict(sorted(Counter(_names(recording, _rows(recording, last, Kind.SYNCHRONISE))).items())),
    )


def census_of(recording: Recording, step: Step) -> Census:
    """Count a step's launches and collectives, stream waits and allocations; sizes are as the allocator rounds them.

    The order covers launches, collectives, event records and waits in host order, each with its stream. Streams are
    numbered by their first use in the step.
    """
    asked = _rows(recording, step, Kind.LAUNCH, Kind.COLLECTIVE)
    ordered = _rows(recording, step, Kind.LAUNCH, Kind.COLLECTIVE, Kind.RECORD, Kind.WAIT)
    numbers: dict[int, int] = {}
    streams = [numbers.setdefault(stream, len(numbers)) for stream in recording.streams[ordered].tolist()]
    order = "\n".join(f"{name} {stream}" for name, stream in zip(_names(recording, ordered), streams))
    allocations = _rows(recording, step, Kind.ALLOCATE)
    return Census(
        operators=len(asked),
        allocations=len(allocations),
        allocated_bytes=int(recording.sizes[allocations].sum()),
        order_sha256=hashlib.sha256(order.encode()).hexdigest(),
        stream_waits=len(_rows(recording, step, Kind.WAIT)),
    )


def remarks(recording: Recording, retries: int) -> Iterator[str]:
    """Warnings about a rank's figures; ``retries`` counts how often the allocator emptied its cache."""
    if unknown := int((recording.flags & Flag.VALUE_UNKNOWN != 0).sum()):
        values = "a value" if unknown == 1 else f"{unknown:,} values"
        yield f"the host reads {values} that a dry run does not compute; a GPU run may branch differently"
    yield from retried(retries)


def retried(retries: int) -> Iterator[str]:
    """A warning if the allocator emptied its cache."""
    if retries:
        yield f"the allocator emptied its cache {format_times(retries)} for an allocation; the host waits each time"


def _rows(recording: Recording, step: Step, *kinds: Kind) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.isin(recording.kinds[step.first : step.end], kinds)) + step.first


def _names(recording: Recording, rows: npt.NDArray[np.int64]) -> list[str]:
    return [recording.name_table[name] for name in recording.names[rows].tolist()]
