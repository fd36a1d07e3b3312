"""Device events of a trace become spans: of which class, launched when, in which step and for which unit."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.timeline import KINDS, UNKNOWN, Kind, Meaning, Spans, Window
from refshard.tracing.communication import communicates, is_peer_copy
from refshard.tracing.difference.inputs import input_table
from refshard.tracing.files.events import HOST, KERNEL, LAUNCH, TraceFile
from refshard.tracing.labels import Labels
from refshard.tracing.operators.nesting import innermost_on
from refshard.tracing.steps import step_at

AUTOGRAD = "autograd::engine::evaluate_function"
"""What the names of operators begin with that autograd's engine evaluates in a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launches:
    """When and on which thread the host launched each device event, and which operator did.

    ``calls`` are the rows of :class:`HostEvents` that launched, ``points`` when they began,
    ``queued`` when they returned, at the latest when the event started. In the order of the spans; :data:`UNKNOWN`
    where the trace does not tell. ``operator_rows`` are the rows of the operators, ``in_autograd`` says which launches
    autograd's engine made.
    """

    calls: npt.NDArray[np.int64]
    points: npt.NDArray[np.int64]
    queued: npt.NDArray[np.int64]
    threads: npt.NDArray[np.int32]
    operators: npt.NDArray[np.int32]
    operator_rows: npt.NDArray[np.int64]
    in_autograd: npt.NDArray[np.bool_]


def find_launches(trace: TraceFile) -> Launches:
    """Match device events with the host's calls by correlation id, and with operators by external id.

    Where an operator's id tells nothing, as in traces of 2022, it is the innermost one around the call.
    """
    host, device, order = trace.host, trace.device, device_order(trace)
    if not len(host.starts):
        return _unknown_launches(len(order))
    calls = np.flatnonzero((host.categories == LAUNCH) & (host.correlations > 0))
    call = _match(trace, device.correlations[order], host.correlations[calls], calls)
    ops = np.flatnonzero((host.categories == HOST) & (host.externals > 0))
    op = _match(trace, device.externals[order], host.externals[ops], ops)
    launched = call != UNKNOWN
    # Ids of another numbering may coincide: an operator that was over when its kernel was launched did not launch it.
    point = host.starts[call]
    wrong = launched & (op != UNKNOWN) & ((point < host.starts[op]) | (point >= host.ends[op]))
    op = np.where(wrong, UNKNOWN, op)
    around = launched & (op == UNKNOWN)
    op[around] = _operators_around(trace, point[around], host.threads[call[around]])
    known = launched | (op != UNKNOWN)
    source = np.where(launched, call, op)
    # An operator goes on after its launches, so that only a call tells when it returned.
    returned = np.where(launched, host.ends[source], host.starts[source])
    points = np.where(known, host.starts[source], UNKNOWN)
    threads = np.where(known, host.threads[source], UNKNOWN).astype(np.int32)
    return Launches(
        calls=np.where(known, source, UNKNOWN),
        points=points,
        queued=np.where(known, np.maximum(host.starts[source], np.minimum(returned, device.starts[order])), UNKNOWN),
        threads=threads,
        operators=np.where(op != UNKNOWN, host.names[op], UNKNOWN).astype(np.int32),
        operator_rows=op,
        in_autograd=in_autograd(trace, points, threads),
    )


def _unknown_launches(count: int) -> Launches:
    """Of a trace without host events."""
    unknown = np.full(count, UNKNOWN, np.int64)
    narrow = unknown.astype(np.int32)
    return Launches(
        calls=unknown, points=unknown, queued=unknown, threads=narrow, operators=narrow, operator_rows=unknown,
        in_autograd=np.zeros(count, np.bool_),
    )  # fmt: skip


def _operators_around(
    trace: TraceFile, points: npt.NDArray[np.int64], threads: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """The rows of the innermost operators that ran on ``threads[i]`` at ``points[i]``."""
    host = trace.host
    # In 2021 the profiler wrote its steps, and an optimizer's, as operators.
    marks = [code for code, name in enumerate(trace.names) if "#" in name]
    rows = np.flatnonzero((host.categories == HOST) & ~np.isin(host.names, marks))
    found = innermost_on(host.threads[rows], host.starts[rows], host.ends[rows], threads, points)
    return np.where(found == UNKNOWN, UNKNOWN, rows[found]) if len(rows) else found


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
    inputs = input_table(trace.operands)
    return Spans(
        starts=starts,
        ends=device.ends[order],
        kinds=_kinds(trace, order, under, communication),
        lanes=device.lanes[order],
        names=names,
        operators=np.where(launches.operators == UNKNOWN, names, launches.operators),
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
        calls=launches.operator_rows.astype(np.int32),
        inputs=inputs.at(trace.host.operands, launches.operator_rows),
        in_autograd=launches.in_autograd,
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
