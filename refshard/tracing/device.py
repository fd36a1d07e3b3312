"""Device events of a trace become spans: of which class, launched when, in which step and for which unit."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.table import HOST, KERNEL, LAUNCH, TraceFile, is_peer_copy
from refshard.events.timeline import KINDS, UNKNOWN, Kind, Meaning, Spans, Window
from refshard.tracing.communication import communicates
from refshard.tracing.difference.inputs import input_table
from refshard.tracing.labels import Labels
from refshard.tracing.operators.nesting import innermost_on
from refshard.tracing.operators.owners import column_at, operators_of
from refshard.tracing.steps import step_at

AUTOGRAD = "autograd::engine::evaluate_function"
"""What the names of operators begin with that autograd's engine evaluates in a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launches:
    """When and on which thread the host launched each device event.

    ``calls`` are the rows of :class:`HostEvents` that launched, ``points`` when they began,
    ``queued`` when they returned, at the latest when the event started. In the order of the spans; :data:`UNKNOWN`
    where the trace does not tell.
    """

    calls: npt.NDArray[np.int64]
    points: npt.NDArray[np.int64]
    queued: npt.NDArray[np.int64]
    threads: npt.NDArray[np.int32]


def find_launches(trace: TraceFile) -> Launches:
    """Match device events with the host's calls by correlation id, and those left over with operators by external id.

    An operator then stands for the call that the trace lacks.
    """
    host, device, order = trace.host, trace.device, device_order(trace)
    if not len(host.starts):
        return _unknown_launches(len(order))
    rows = np.flatnonzero((host.categories == LAUNCH) & (host.correlations > 0))
    calls = _match(trace, device.correlations[order], host.correlations[rows], rows)
    launched = calls != UNKNOWN
    if not launched.all():
        rows = np.flatnonzero((host.categories == HOST) & (host.externals > 0))
        calls = np.where(launched, calls, _match(trace, device.externals[order], host.externals[rows], rows))
    known = calls != UNKNOWN
    # An operator goes on after its launches, so that only a call tells when it returned.
    returned = np.where(launched, host.ends[calls], host.starts[calls])
    return Launches(
        calls=calls,
        points=np.where(known, host.starts[calls], UNKNOWN),
        queued=np.where(known, np.maximum(host.starts[calls], np.minimum(returned, device.starts[order])), UNKNOWN),
        threads=np.where(known, host.threads[calls], UNKNOWN).astype(np.int32),
    )


def _unknown_launches(count: int) -> Launches:
    """Of a trace without host events."""
    unknown = np.full(count, UNKNOWN, np.int64)
    return Launches(calls=unknown, points=unknown, queued=unknown, threads=unknown.astype(np.int32))


def in_autograd(
    trace: TraceFile, points: npt.NDArray[np.int64], threads: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Whether autograd's engine evaluated a function on ``threads[i]`` at ``points[i]``."""
    host = trace.host
    codes = [code for code, name in enumerate(trace.names) if name.startswith(AUTOGRAD)]
    rows = np.flatnonzero(np.isin(host.names, codes))
    found = innermost_on(host.threads[rows], host.starts[rows], host.ends[rows], threads, points)
    return np.asarray(found != UNKNOWN, np.bool_)


def _match(
    trace: TraceFile, wanted: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The host's row with each wanted id, :data:`UNKNOWN` without one.

    Of several with one id, which a recorder must not write, the last to begin before the device event does.
    """
    if not len(ids):
        return np.full(len(wanted), UNKNOWN, np.int64)
    order = np.lexsort((trace.host.starts[rows], ids))
    rows, ids = rows[order], ids[order]
    first, last = np.searchsorted(ids, wanted, side="left"), np.searchsorted(ids, wanted, side="right")
    found = np.where(first < last, rows[np.minimum(first, len(ids) - 1)], UNKNOWN)
    starts = trace.device.starts[device_order(trace)]
    for place in np.flatnonzero(last - first > 1).tolist():
        candidates = rows[first[place] : last[place]]
        before = int(np.searchsorted(trace.host.starts[candidates], starts[place], side="right"))
        found[place] = candidates[max(0, before - 1)]
    return found


def device_spans(
    trace: TraceFile,
    labels: Labels,
    host_windows: tuple[Window, ...],
    launches: Launches,
    communication: Sequence["re.Pattern[str]"] = (),
) -> Spans:
    """All device events of a trace, ordered by start; those whose name holds one of ``communication`` communicate."""
    device, order = trace.device, device_order(trace)
    starts, names = device.starts[order], device.names[order]
    units, under = labels.of_work(launches.threads, launches.points)
    # Where the trace holds no launch at all, an event belongs to the step in which it ran.
    in_time = launches.points if (launches.points != UNKNOWN).any() else starts
    inputs, operators = input_table(trace.operands), operators_of(trace, launches.calls)
    return Spans(
        starts=starts,
        ends=device.ends[order],
        kinds=_kinds(trace, order, under, communication),
        lanes=device.lanes[order],
        names=names,
        operators=np.where(operators == UNKNOWN, names, column_at(trace.host.names, operators)),
        launches=launches.points,
        queued=launches.queued,
        steps=step_at(in_time, host_windows),
        units=units.astype(np.int32),
        under=under,
        signatures=device.signatures[order],
        lane_names=_lane_names(trace),
        name_table=trace.names,
        unit_names=labels.unit_names,
        signature_names=trace.signatures,
        calls=operators.astype(np.int32),
        inputs=inputs.at(trace.host.operands, operators),
        in_autograd=in_autograd(trace, launches.points, launches.threads),
        input_names=inputs.names,
    )


def device_order(trace: TraceFile) -> npt.NDArray[np.int64]:
    """The rows of :attr:`TraceFile.device` in the order of the spans."""
    return np.lexsort((trace.device.ends, trace.device.starts))


def _kinds(
    trace: TraceFile,
    order: npt.NDArray[np.int64],
    under: npt.NDArray[np.int16],
    communication: Sequence["re.Pattern[str]"],
) -> npt.NDArray[np.int8]:
    """Classes in the order of precedence of the definitions."""
    names, is_collective = trace.device.names[order], trace.device.is_collective[order]
    is_kernel = trace.device.categories[order] == KERNEL

    def named(test: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(trace.names), np.bool_)
        for code in np.unique(names).tolist():
            found[code] = test(trace.names[code])
        return np.asarray(found[names], np.bool_)

    own = named(lambda name: any(pattern.search(name) for pattern in communication))
    code = {kind: KINDS.index(kind) for kind in Kind}
    conditions = (
        is_collective
        | own
        | np.where(is_kernel, named(communicates), named(is_peer_copy))
        | (under & Meaning.COLLECTIVE > 0),
        under & Meaning.REDUCE > 0,
        ~is_kernel | (under & (Meaning.COPY_IN | Meaning.COPY_OUT) > 0),
        named(bool),
    )
    classes = (code[Kind.COMM], code[Kind.PREP], code[Kind.COPY], code[Kind.COMPUTE])
    return np.select(conditions, classes, code[Kind.UNCLASSIFIED]).astype(np.int8)


def _lane_names(trace: TraceFile) -> tuple[str, ...]:
    """Streams, with their device where there are several."""
    several = len({device for device, _ in trace.lanes}) > 1
    return tuple(
        f"device {device} stream {stream}" if several else f"stream {stream}"
        for device, stream in ((device, stream.removeprefix("stream ")) for device, stream in trace.lanes)
    )
