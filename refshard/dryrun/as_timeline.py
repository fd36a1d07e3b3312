"""A replayed recording as a :class:`~refshard.timeline.Timeline`, like that of any trace.

Each launch and each collective that ran on a stream is a span, launched a nanosecond before the host was done with it,
as a launch is the last thing that an operator's host code does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.dryrun.purposes import LABELS, Purposes, purposes
from refshard.dryrun.recording import Kind, Recording
from refshard.dryrun.replay import NEVER, Replayed
from refshard.dryrun.signatures import parse
from refshard.dryrun.steps import Step, device_windows, host_windows, steps_of
from refshard.timeline import UNKNOWN, Collective, Spans, Timeline

DTYPES = {
    "bf16": ("BFloat16", 2), "fp16": ("Half", 2), "fp32": ("Float", 4), "fp64": ("Double", 8), "int64": ("Long", 8),
    "int32": ("Int", 4), "int16": ("Short", 2), "int8": ("Char", 1), "uint8": ("Byte", 1), "bool": ("Bool", 1),
    "fp8e4m3": ("Float8_e4m3fn", 1), "fp8e5m2": ("Float8_e5m2", 1),
}  # fmt: skip
"""What NCCL's annotations call the dtypes of signatures, and bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """The events of some steps that ran on a stream: ``rows`` of the recording, in the host's order.

    ``steps`` (int32) are the numbers of their steps, ``launches`` (int64) when the host launched them.
    """

    rows: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int32]
    launches: npt.NDArray[np.int64]


def as_timeline(recording: Recording, replayed: Replayed, *, steps: Sequence[Step] | None = None) -> Timeline:
    """The timeline of these steps, by default of all; times are those of the replay."""
    steps = steps_of(recording) if steps is None else steps
    chosen = chosen_rows(replayed, steps)
    about = purposes(recording, replayed.main_stream)
    order = np.lexsort((replayed.ends[chosen.rows], replayed.starts[chosen.rows]))
    spans = _spans(recording, replayed, chosen, about, order)
    return Timeline(
        rank=recording.rank,
        windows=device_windows(steps, spans),
        host_windows=host_windows(steps, replayed),
        spans=spans,
        collectives=_collectives(recording, replayed, chosen, spans, order),
        on_device=True,
    )


def chosen_rows(replayed: Replayed, steps: Sequence[Step]) -> Chosen:
    """The events of these steps that ran on a stream."""
    numbers = np.full(len(replayed.starts), UNKNOWN, np.int32)
    for step in steps:
        numbers[step.first : step.end] = step.number
    rows = np.flatnonzero((numbers != UNKNOWN) & (replayed.starts != NEVER))
    launches = np.maximum(replayed.host_starts[rows], replayed.host_ends[rows] - 1)
    return Chosen(rows=rows, steps=numbers[rows], launches=launches)


def lane_name(stream: int) -> str:
    """What traces call a stream."""
    return f"stream {stream}"


def dtype_of(recording: Recording, row: int) -> str:
    """The dtype, as signatures spell it, of all that a collective moves; ``uint8`` where there are several or none."""
    found = parse(recording.signature_table[recording.signatures[row]])
    dtypes = {tensor.dtype for tensor in (*found.inputs, *found.results)}
    known = dtypes.pop() if len(dtypes) == 1 else ""
    whole = known in DTYPES and int(recording.sizes[row]) % DTYPES[known][1] == 0
    return known if whole else "uint8"


def group_of(recording: Recording, row: int) -> tuple[str, int]:
    """Name and size of the group that a collective runs in."""
    group = recording.groups[int(recording.subjects[row]) & 0xFFFFFFFF]
    return group.name, len(group.ranks)


def _spans(
    recording: Recording, replayed: Replayed, chosen: Chosen, about: Purposes, order: npt.NDArray[np.int64]
) -> Spans:
    rows = chosen.rows[order]
    streams = recording.streams[chosen.rows].tolist()
    lanes = {stream: lane for lane, stream in enumerate(dict.fromkeys(streams))}
    pairs = np.stack((recording.names[rows], recording.signatures[rows]), axis=1)
    distinct, signatures = np.unique(pairs, axis=0, return_inverse=True)
    spelled = (f"{recording.name_table[n]} {recording.signature_table[s]}" for n, s in distinct.tolist())
    return Spans(
        starts=replayed.starts[rows],
        ends=replayed.ends[rows],
        kinds=about.kinds[rows],
        lanes=np.array([lanes[stream] for stream in streams], np.int32)[order],
        names=recording.names[rows],
        operators=recording.names[rows],
        launches=chosen.launches[order],
        queued=chosen.launches[order],
        steps=chosen.steps[order],
        units=about.units[rows],
        under=np.array([int(label.meaning) for label in LABELS], np.int16)[about.labels[rows]],
        signatures=signatures.reshape(-1).astype(np.int32),
        lane_names=tuple(lane_name(stream) for stream in lanes),
        name_table=recording.name_table,
        unit_names=about.unit_names,
        signature_names=tuple(spelled),
    )


def _collectives(
    recording: Recording, replayed: Replayed, chosen: Chosen, spans: Spans, order: npt.NDArray[np.int64]
) -> tuple[Collective, ...]:
    """In the host's order, which is that of their launches."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    found = []
    for at in np.flatnonzero(recording.kinds[chosen.rows] == Kind.COLLECTIVE).tolist():
        found.append(_collective(recording, replayed, int(chosen.rows[at]), spans, int(places[at])))
    return tuple(found)


def _collective(recording: Recording, replayed: Replayed, row: int, spans: Spans, place: int) -> Collective:
    op = recording.name_table[recording.names[row]]
    group, size = group_of(recording, row)
    unit = int(spans.units[place])
    announced = op != "barrier"  # which readers of traces leave out
    return Collective(
        op=op,
        bytes=int(recording.sizes[row]),
        step=int(spans.steps[place]),
        group=group,
        group_size=size,
        dtype=DTYPES[dtype_of(recording, row)][0],
        unit=None if unit == UNKNOWN else spans.unit_names[unit],
        lane=spans.lane_names[spans.lanes[place]],
        launched=int(replayed.host_starts[row]) if announced else int(spans.launches[place]),
        start=int(spans.starts[place]),
        end=int(spans.ends[place]),
        announced=announced,
        rows=(place,),
    )
