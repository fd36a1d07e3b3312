"""The collectives of a trace: what the host announced, and what ran for it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.timeline import UNKNOWN, Collective, Kind, Spans, Window
from refshard.tracing.device import Launches, device_order
from refshard.tracing.events import ANNOTATION, TraceFile
from refshard.tracing.labels import Labels, innermost
from refshard.tracing.messages import (
    BARRIERS,
    EMULATED,
    GLOO,
    OF_SHARDS,
    OPERATORS,
    Args,
    bytes_of_message,
    dtype_of,
    element_bytes,
    group_of,
    groups_of,
    operation_of,
    run_of,
    shape_of,
)
from refshard.tracing.steps import step_at

_C10D, _NCCL = "c10d::", "nccl:"
_NAME = "Collective name"


@dataclass(slots=True, kw_only=True)
class _Announced:
    """A collective as the host's own operators tell of it, and the spans that ran for it.

    ``shapes`` are those of the unsharded tensors, or ``of_shards``: each of the group's ranks has as many elements.
    """

    op: str
    rows: list[int]
    shapes: list[tuple[int | None, Any]]
    of_shards: bool = False
    spans: list[int] = field(default_factory=list)


def find_collectives(
    trace: TraceFile, spans: Spans, labels: Labels, windows: tuple[Window, ...], launches: Launches | None
) -> tuple[Collective, ...]:
    """Every collective that the host announced or that ran, in the order of announcement.

    ``launches`` are those of a device's events, in the order of ``spans``; None for a CPU trace.
    """
    announced = _announced(trace)
    ran = np.flatnonzero(spans.of_kind(Kind.COMM))
    args: _CpuArgs | _DeviceArgs
    if launches is None:
        args = _CpuArgs(trace, spans)
        alone = _match_in_order(trace, spans, ran, announced)
    else:
        args = _DeviceArgs(trace, launches)
        alone = _match_by_launch(trace, launches, ran, announced)
        alone = _match_coalesced(trace, launches, alone, announced, args)
        announced = [one for one in announced if one.rows]
    describe = _Describe(trace, spans, labels, windows, args)
    found = [*describe.announced(announced), *(describe.unannounced(row) for row in alone)]
    return tuple(sorted(found, key=lambda c: c.start if c.launched is None else c.launched))  # type: ignore[arg-type,return-value]


def _announced(trace: TraceFile) -> list[_Announced]:
    host = trace.host
    name_of = {row: trace.names[host.names[row]].removeprefix(_C10D) for row in trace.host_args
               if trace.names[host.names[row]].startswith(_C10D)}  # fmt: skip
    found = []
    for row in sorted(name_of, key=lambda row: host.starts[row]):
        name = name_of[row]
        if name in BARRIERS:
            continue
        # One that is not known must not vanish: it goes by its own name, with its first tensor's bytes.
        op, argument = OPERATORS.get(name, (_C10D + name, 0))
        shapes = [shape_of(trace.host_args[row], argument)]
        found.append(_Announced(op=op, rows=[row], shapes=shapes, of_shards=name in OF_SHARDS))
    return found


def _match_by_launch(
    trace: TraceFile, launches: Launches, ran: npt.NDArray[np.int64], announced: Sequence[_Announced]
) -> list[int]:
    """Give each kernel to the innermost operator of its thread during which it was launched; return the others."""
    host, alone = trace.host, np.ones(len(ran), np.bool_)
    for thread, mine in _by_thread(trace, announced).items():
        rows = [one.rows[0] for one in mine]
        cuts, owners = innermost(host.starts[rows].tolist(), host.ends[rows].tolist())
        there = np.flatnonzero(launches.threads[ran] == thread)
        owner = owners[np.searchsorted(cuts, launches.points[ran[there]], side="right")]
        alone[there] = owner < 0
        for row, place in zip(ran[there].tolist(), owner.tolist()):
            if place >= 0:
                mine[place].spans.append(row)
    return [int(row) for row in ran[alone]]


def _match_coalesced(
    trace: TraceFile, launches: Launches, alone: list[int], announced: Sequence[_Announced], args: "_DeviceArgs"
) -> list[int]:
    """Give a coalesced kernel to the operators of its thread that wait for one: together they are one collective."""
    waiting = _by_thread(trace, [one for one in reversed(announced) if not one.spans])
    left = []
    for row in sorted(alone, key=lambda row: launches.points[row]):
        queue, members = waiting.get(int(launches.threads[row]), []), list[_Announced]()
        if "coalesced" in str(args.of(row).get(_NAME)):
            while queue and trace.host.starts[queue[-1].rows[0]] <= launches.points[row]:
                members.append(queue.pop())
        if not members:
            left.append(row)
            continue
        members[0].spans.append(row)
        for other in members[1:]:
            members[0].shapes += other.shapes
            other.rows = []
    return left


def _by_thread(trace: TraceFile, announced: Sequence[_Announced]) -> dict[int, list[_Announced]]:
    found: dict[int, list[_Announced]] = defaultdict(list)
    for one in announced:
        found[int(trace.host.threads[one.rows[0]])].append(one)
    return found


def _match_in_order(
    trace: TraceFile, spans: Spans, ran: npt.NDArray[np.int64], announced: Sequence[_Announced]
) -> list[int]:
    """Give the first of each kind that ran to the first announced: queues are first in, first out, on a CPU.

    What ran before the first of its kind was announced was announced before the trace began.
    """
    names = [spans.name_table[name] for name in spans.names[ran].tolist()]
    emulated = any(name.startswith(EMULATED) for name in names)
    waiting: dict[str, list[_Announced]] = defaultdict(list)
    for one in reversed(announced):
        waiting[run_of(one.op, emulated=emulated)].append(one)
    alone = []
    for row, name in zip(ran.tolist(), names):
        queue = waiting[name]
        if queue and trace.host.starts[queue[-1].rows[0]] <= spans.starts[row]:
            queue.pop().spans.append(row)
        else:
            alone.append(row)
    return alone


class _CpuArgs:
    """Arguments of the spans in which collectives run on a CPU."""

    def __init__(self, trace: TraceFile, spans: Spans) -> None:
        host = trace.host
        rows = np.array(
            [r for r in trace.host_args if trace.names[host.names[r]].startswith((GLOO, EMULATED))], np.int64
        )
        rows = rows[host.categories[rows] == ANNOTATION]
        self._rows = np.full(len(spans), UNKNOWN, np.int64)
        self._rows[spans.of_kind(Kind.COMM)] = rows[np.lexsort((host.ends[rows], host.starts[rows]))]
        self._args = trace.host_args

    def of(self, row: int) -> Args:
        return self._args[int(self._rows[row])]


class _DeviceArgs:
    """Arguments of kernels that communicate: their own, or those of the host's annotation around their launch."""

    def __init__(self, trace: TraceFile, launches: Launches) -> None:
        host = trace.host
        rows = [
            row for row, args in trace.host_args.items()
            if _NAME in args or trace.names[host.names[row]].startswith(_NCCL)
        ]  # fmt: skip
        rows.sort(key=lambda row: host.starts[row])
        self._annotations = [
            {_NAME: trace.names[host.names[row]].removeprefix(_NCCL), **trace.host_args[row]} for row in rows
        ]
        self._starts, self._ends = host.starts[rows], host.ends[rows]
        self._points = launches.points
        self._rows = device_order(trace)
        self._own = trace.device_args

    def of(self, row: int) -> Args:
        own = self._own.get(int(self._rows[row]))
        if own is not None:
            return own
        point = self._points[row]
        place = int(np.searchsorted(self._starts, point, side="right")) - 1
        return self._annotations[place] if place >= 0 and point < self._ends[place] else {}


class _Describe:
    """Joins what host and device tell of one collective."""

    def __init__(
        self, trace: TraceFile, spans: Spans, labels: Labels, windows: tuple[Window, ...], args: _CpuArgs | _DeviceArgs
    ) -> None:
        self._trace, self._spans, self._labels, self._windows, self._args = trace, spans, labels, windows, args
        self._groups = groups_of(trace.metadata.get("distributedInfo"))

    def announced(self, every: Sequence[_Announced]) -> list[Collective]:
        host, rows = self._trace.host, [one.rows[0] for one in every]
        units = self._labels.unit_at(host.threads[rows], host.starts[rows]).tolist()
        steps = step_at(host.starts[rows], self._windows).tolist()
        dtype_at = {
            numel: dtype_of(self._args.of(one.spans[0])) for one in every for numel, _ in one.shapes if one.spans
        }
        found = []
        for one, unit, step, launched in zip(every, units, steps, host.starts[rows].tolist()):
            args = self._args.of(one.spans[0]) if one.spans else {}
            size = _bytes(one, dtype_of(args) or dtype_at.get(one.shapes[0][0]))
            if one.of_shards and size is not None:
                ranks = group_of(args, self._groups).size
                size = None if ranks is None else size * ranks
            collective = self._described(one.op, args, one.spans, unit=unit, step=step, launched=launched, size=size)
            found.append(collective)
        return found

    def unannounced(self, row: int) -> Collective:
        args, spans = self._args.of(row), self._spans
        name = args.get(_NAME)
        op = operation_of(name if isinstance(name, str) and name else spans.name_table[spans.names[row]])
        unit, step, launched = int(spans.units[row]), int(spans.steps[row]), int(spans.launches[row])
        return self._described(op, args, [row], unit=unit, step=step, launched=launched, announced=False)

    def _described(
        self, op: str, args: Args, rows: list[int], *, unit: int, step: int, launched: int,
        size: int | None = None, announced: bool = True,
    ) -> Collective:  # fmt: skip
        group = group_of(args, self._groups)
        spans = self._spans
        return Collective(
            op=op,
            bytes=bytes_of_message(op, args) if size is None else size,
            step=None if step == UNKNOWN else step,
            group=group.name,
            group_size=group.size,
            dtype=dtype_of(args),
            unit=None if unit == UNKNOWN else self._labels.unit_names[unit],
            lane=spans.lane_names[spans.lanes[rows[0]]] if rows else None,
            launched=None if launched == UNKNOWN else launched,
            start=int(spans.starts[rows].min()) if rows else None,
            end=int(spans.ends[rows].max()) if rows else None,
            announced=announced,
            rows=tuple(rows),
        )


def _bytes(one: _Announced, dtype: str | None) -> int | None:
    """Bytes of the unsharded tensors; what runs tells the dtype that a list of tensors hides."""
    total = 0
    for numel, own in one.shapes:
        element = element_bytes(own) or element_bytes(dtype)
        if numel is None or element is None:
            return None
        total += numel * element
    return total
