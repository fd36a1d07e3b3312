"""The events of a trace become spans: of which class, launched when, in which step and for which unit.

Without device events, gloo's run-loop threads communicate, or those of an emulated backend, and the thread that holds
the steps computes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis.labels import Labels
from refshard.analysis.names import communicates, dtype_named
from refshard.analysis.owners import column_at, innermost_on, named, operators_of
from refshard.analysis.windows import step_at
from refshard.events.table import ANNOTATION, EMULATED, GLOO, HOST, KERNEL, LAUNCH, Operands, TraceFile, is_peer_copy
from refshard.events.timeline import KINDS, UNKNOWN, Inputs, Intervals, Kind, Meaning, Spans, Window

LONGEST_INPUTS = 512
"""Bytes of "Input Dims" that are spelled out: lists of hundreds of tensors tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputTable:
    """The inputs of a trace, each once, and which of :attr:`TraceFile.operands` each is."""

    names: tuple[Inputs, ...]
    codes: npt.NDArray[np.int32]

    def at(self, operands: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The inputs of the host's events in these rows; :data:`UNKNOWN` where a row or its operands are."""
        if not len(operands):
            return np.full(len(rows), UNKNOWN, np.int32)
        of_row = np.where(rows == UNKNOWN, UNKNOWN, operands[rows])
        return np.append(self.codes, np.int32(UNKNOWN))[of_row]


def input_table(operands: Sequence[Operands]) -> InputTable:
    """What operands are in words; those that differ in strides or values alone are the same inputs."""
    numbers: dict[Inputs, int] = {}
    codes = [
        numbers.setdefault(inputs_of(one.dims, one.types), len(numbers)) if 2 < len(one.dims) <= LONGEST_INPUTS else -1
        for one in operands
    ]
    return InputTable(names=tuple(numbers), codes=np.array(codes, np.int32))


def inputs_of(dims: bytes, types: bytes) -> Inputs:
    """The tensors among an operator's arguments; scalars and absent arguments are left out.

    Both are JSON as the profiler writes "Input Dims" and "Input type": a list with an element per argument. What is no
    such list tells nothing.

    >>> inputs_of(b'[[8192, 4096], [4096, 14336], []]', b'["c10::BFloat16", "c10::BFloat16", "Scalar"]')
    Inputs(dims='[8192,4096]x[4096,14336]', dtype='bf16')
    """
    shapes, names = _list(dims), _list(types)
    found = [(shape, names[place] if place < len(names) else "") for place, shape in enumerate(shapes) if shape]
    dtypes = dict.fromkeys(_dtype(name) for _, name in found)
    return Inputs(
        "x".join(msgspec.json.encode(shape).decode() for shape, _ in found), ",".join(name for name in dtypes if name)
    )


def _list(text: bytes) -> list[object]:
    try:
        return msgspec.json.decode(text, type=list[object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _dtype(name: object) -> str:
    if not isinstance(name, str) or name in ("Scalar", "ScalarList", "TensorList", "GenericList"):
        return ""
    known = dtype_named(name)
    return known[0] if known else name.rpartition("::")[2]


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
        unknown = np.full(len(order), UNKNOWN, np.int64)
        return Launches(calls=unknown, points=unknown, queued=unknown, threads=unknown.astype(np.int32))
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
    several = len({number for number, _ in trace.lanes}) > 1
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
        lane_names=tuple(
            f"device {number} stream {stream}" if several else f"stream {stream}"
            for number, stream in ((number, stream.removeprefix("stream ")) for number, stream in trace.lanes)
        ),
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


_COMPILED = re.compile(r"^(## Call CompiledFxGraph|Torch-Compiled Region)")
"""What torch.compile made into one: what is fused there has no operators, so it computes wherever it does not wait."""
_RUNS = re.compile(f"^(?:{GLOO}|{EMULATED})")
COMPUTE_OP = re.compile(rf"^(aten::|fsdp::)|{_COMPILED.pattern}")
IN_GRAPH = re.compile(r"^_c10d_functional::")
"""Operators by which compiled graphs and DTensors issue collectives, and wait for them."""


def cpu_spans(trace: TraceFile, labels: Labels, windows: tuple[Window, ...], main: int) -> Spans:
    """Communication and the main thread's outermost operators, ordered by start.

    Autograd's and the hooks' wrappers enclose waits, so only operators count, and not under a wait: there they are part
    of a collective's own arithmetic, and stand as preparation. What is compiled, or an operator on DTensors, is cut
    where it issues a collective or waits for one, and is a span for each piece.
    """
    host = trace.host
    is_run = named(trace, _RUNS) & (host.categories == ANNOTATION)
    computes = named(trace, COMPUTE_OP) & (host.threads == main)
    computes &= np.isin(host.categories, (HOST, ANNOTATION))
    outermost = _outermost(host.starts, host.ends, np.flatnonzero(computes))
    is_cut = named(trace, IN_GRAPH) & (host.threads == main)
    cuts, (first, last) = np.sort(host.starts[is_cut]), (host.starts[outermost], host.ends[outermost])
    encloses = np.searchsorted(cuts, first) < np.searchsorted(cuts, last)
    whole = np.concatenate((np.flatnonzero(is_run), outermost[~encloses]))
    left = Intervals.union(first[encloses], last[encloses])
    left -= Intervals.union(host.starts[is_cut], host.ends[is_cut])
    pieces = outermost[encloses][np.searchsorted(first[encloses], left.starts, side="right") - 1]
    rows = np.concatenate((whole, pieces))
    starts, ends = np.concatenate((host.starts[whole], left.starts)), np.concatenate((host.ends[whole], left.ends))
    order = np.lexsort((ends, starts))
    rows, starts, ends = rows[order], starts[order], ends[order]
    communicates = is_run[rows]
    units, under = labels.of_work(host.threads[rows], starts)
    kinds = np.where(
        communicates,
        KINDS.index(Kind.COMM),
        np.where(under & Meaning.WAIT > 0, KINDS.index(Kind.PREP), KINDS.index(Kind.COMPUTE)),
    )
    lanes = np.where(communicates, host.threads[rows], main)
    inputs = input_table(trace.operands)
    emulated = set(host.threads[is_run & named(trace, re.compile(f"^{EMULATED}"))].tolist())
    return Spans(
        starts=starts,
        ends=ends,
        kinds=kinds.astype(np.int8),
        lanes=lanes.astype(np.int32),
        names=host.names[rows],
        operators=host.names[rows],
        launches=np.where(communicates, UNKNOWN, starts),
        queued=np.where(communicates, UNKNOWN, starts),
        steps=step_at(starts, windows),
        units=np.where(communicates, UNKNOWN, units).astype(np.int32),
        under=under,
        signatures=host.names[rows],
        lane_names=tuple(
            "main" if place == main else f"{'emulated' if place in emulated else 'gloo'} {tid}"
            for place, (_, tid) in enumerate(trace.threads)
        ),
        name_table=trace.names,
        unit_names=labels.unit_names,
        signature_names=trace.names,
        calls=np.where(communicates, UNKNOWN, rows).astype(np.int32),
        inputs=inputs.at(host.operands, np.where(communicates, UNKNOWN, rows)),
        in_autograd=in_autograd(trace, starts, host.threads[rows]),
        input_names=inputs.names,
    )


def main_thread(trace: TraceFile, step_rows: npt.NDArray[np.int64]) -> int:
    """The thread that holds the steps; without steps, the one with most operators; :data:`UNKNOWN` without either."""
    if len(step_rows):
        return int(trace.host.threads[step_rows[0]])
    computes = named(trace, COMPUTE_OP) & (trace.host.categories == HOST)
    return int(np.argmax(np.bincount(trace.host.threads[computes]))) if computes.any() else UNKNOWN


def _outermost(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Those of one thread's operators that no other of them encloses."""
    rows = rows[np.lexsort((-ends[rows], starts[rows]))]
    reach = np.maximum.accumulate(ends[rows]) if len(rows) else ends[rows]
    is_outermost = np.ones(len(rows), np.bool_)
    is_outermost[1:] = ends[rows][1:] > reach[:-1]
    return np.asarray(rows[is_outermost], np.int64)
