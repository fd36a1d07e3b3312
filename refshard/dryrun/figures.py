"""What a replay says of each step beyond what any timeline does: operators, FLOPs, and what the host costs.

Overlap, gaps between collectives and all else that a trace tells come from the timeline, by the code that reads traces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.dryrun.price import Prices
from refshard.dryrun.recording import Kind, Recording
from refshard.dryrun.replay import NEVER, NS, Replayed
from refshard.dryrun.steps import Step
from refshard.timeline import Kind as Spent
from refshard.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFigures:
    """All launches of one operator, or all collectives of one name: how many, and how long they ran in all."""

    name: str
    seconds: float
    count: int
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait:
    """What the host waited for at one line of the script (empty where unknown): how often, and how long in all."""

    why: str
    site: str
    seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step of one rank, as the device runs it.

    ``step_s`` is its window. ``compute_s`` and ``comm_s`` are unions of what runs in it, ``exposed_comm_s`` is
    communication while no compute runs, ``idle_s`` when nothing does. ``host_bound_s`` is how long the stream that
    computes most stood still because its next kernel had not been launched. ``tflops`` are 10^12 floating-point
    operations that ran a second, what is computed twice counted twice. ``operators`` come by time, ``waits`` by the
    host's time, which is not the device's: a wait costs a step only where the device runs out of work.
    """

    step: int
    step_s: float
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    idle_s: float
    host_bound_s: float
    tflops: float
    operators: tuple[OperatorFigures, ...]
    waits: tuple[HostWait, ...]


def step_figures(
    recording: Recording, prices: Prices, replayed: Replayed, timeline: Timeline, steps: Sequence[Step]
) -> tuple[StepFigures, ...]:
    """The figures of each step that has a window in the timeline, in order."""
    of_number = {step.number: step for step in steps}
    starts = np.array([window.start for window in timeline.windows], np.int64)
    ends = np.array([window.end for window in timeline.windows], np.int64)
    compute, comm = timeline.busy(Spent.COMPUTE), timeline.busy(Spent.COMM)
    busy = timeline.busy(*Spent).within(starts, ends)
    columns = zip(
        compute.within(starts, ends),
        comm.within(starts, ends),
        (comm - compute).within(starts, ends),
        busy,
        ends - starts,
    )
    found = []
    for window, (computing, communicating, exposed, running, length) in zip(timeline.windows, columns):
        step = of_number[window.step if window.step is not None else 0]
        rows = np.arange(step.first, step.end)
        operators = _operators(recording, prices, replayed, rows)
        flops = sum(one.flops for one in operators)
        found.append(
            StepFigures(
                step=step.number,
                step_s=length / NS,
                compute_s=computing / NS,
                comm_s=communicating / NS,
                exposed_comm_s=exposed / NS,
                idle_s=(length - running) / NS,
                host_bound_s=_host_bound_ns(recording, replayed, rows, window.start) / NS,
                tflops=flops / 1e12 / (length / NS) if length else 0.0,
                operators=operators,
                waits=_waits(recording, replayed, rows),
            )
        )
    return tuple(found)


def _operators(
    recording: Recording, prices: Prices, replayed: Replayed, rows: npt.NDArray[np.int64]
) -> tuple[OperatorFigures, ...]:
    rows = rows[replayed.starts[rows] != NEVER]
    names, size = recording.names[rows], len(recording.name_table)
    counts = np.bincount(names, minlength=size)
    seconds = np.bincount(names, weights=(replayed.ends - replayed.starts)[rows] / NS, minlength=size)
    flops = np.bincount(names, weights=prices.flops[rows], minlength=size)
    found = (
        OperatorFigures(name=name, seconds=float(seconds[n]), count=int(counts[n]), flops=float(flops[n]))
        for n, name in enumerate(recording.name_table)
        if counts[n]
    )
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.name)))


def _waits(recording: Recording, replayed: Replayed, rows: npt.NDArray[np.int64]) -> tuple[HostWait, ...]:
    seconds, counts = dict[tuple[str, str], float](), dict[tuple[str, str], int]()
    for row in rows[recording.kinds[rows] == Kind.SYNCHRONISE].tolist():
        about = recording.name_table[recording.names[row]], recording.site_table[recording.sites[row]]
        waited = int(replayed.host_ends[row] - replayed.host_starts[row]) / NS
        seconds[about], counts[about] = seconds.get(about, 0.0) + waited, counts.get(about, 0) + 1
    found = (HostWait(why=why, site=site, seconds=s, count=counts[why, site]) for (why, site), s in seconds.items())
    return tuple(sorted(found, key=lambda wait: (-wait.seconds, wait.why, wait.site)))


def _host_bound_ns(recording: Recording, replayed: Replayed, rows: npt.NDArray[np.int64], start: int) -> int:
    """From the end of each kernel, or the start of the step, until the host had launched the next one."""
    on_main = np.flatnonzero((recording.streams == replayed.main_stream) & (replayed.starts != NEVER))
    free = np.concatenate(([start], replayed.ends[on_main]))[:-1]
    late = np.maximum(0, replayed.host_ends[on_main] - np.maximum(free, start))
    return int(late[np.isin(on_main, rows)].sum())
