"""Turns the events of a trace into a timeline: spans with class, launch, step and unit; collectives as the host
announced them and as they ran; and the waits of streams that the profiler recorded (``enable_cuda_sync_events``).

In a trace without device events, threads of gloo's run loop or of an emulated backend communicate, and the thread with
the steps computes. Arguments of events may have any form: those that the profiler would not write are ignored.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from refshard.analysis.labels import Labels, column_at, find_labels, innermost_on, named, operators_of, outermost_of
from refshard.analysis.names import (
    BLOCKS,
    LONG_NS,
    PEER_COPY,
    STREAM_WAITS,
    communicates,
    custom_operation,
    dtype_named,
)
from refshard.analysis.windows import (
    WindowOptions,
    chosen_windows,
    cut_to,
    device_windows,
    device_windows_apart,
    host_steps,
    recorded_windows,
    step_at,
)
from refshard.errors import TraceError
from refshard.events.reader import read_events
from refshard.events.table import (
    ANNOTATION,
    DRY_RUN,
    EMULATED,
    GLOO,
    HOST,
    KERNEL,
    LAUNCH,
    STREAM_WAIT,
    WRITER,
    Operands,
    TraceFile,
    is_peer_copy,
    whole,
)
from refshard.events.timeline import (
    KINDS,
    UNKNOWN,
    Collective,
    HostCalls,
    Inputs,
    Intervals,
    Ints,
    Kind,
    Mask,
    Meaning,
    Nanoseconds,
    Rows,
    Spans,
    Timeline,
    Window,
)

LONGEST_INPUTS = 512
"""Bytes of "Input Dims" that are spelled out: lists of hundreds of tensors tell nothing."""
_NO_DTYPES = ("Scalar", "ScalarList", "TensorList", "GenericList")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputTable:
    """The inputs of a trace, each once, and which of :attr:`TraceFile.operands` each is."""

    names: tuple[Inputs, ...]
    codes: Ints

    def at(self, operands: Ints, rows: Rows) -> Ints:
        """The inputs of the host's events in these rows; :data:`UNKNOWN` where a row or its operands are."""
        if not len(operands):
            return np.full(len(rows), UNKNOWN, np.int32)
        of_row = np.where(rows == UNKNOWN, UNKNOWN, operands[rows])
        return np.append(self.codes, np.int32(UNKNOWN))[of_row]


def input_table(operands: Sequence[Operands]) -> InputTable:
    """Operands as text; operands that differ only in strides or values are the same inputs."""
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
    columns: list[list[object]] = [[], []]
    for place, raw in enumerate((dims, types)):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            columns[place] = msgspec.json.decode(raw, type=list[object])
    shapes, names = columns
    found = [(shape, names[place] if place < len(names) else "") for place, shape in enumerate(shapes) if shape]
    telling = [name for _, name in found if isinstance(name, str) and name not in _NO_DTYPES]
    dtypes = [known[0] if (known := dtype_named(name)) else name.rpartition("::")[2] for name in telling]
    text = "x".join(msgspec.json.encode(shape).decode() for shape, _ in found)
    return Inputs(text, ",".join(name for name in dict.fromkeys(dtypes) if name))


AUTOGRAD = "autograd::engine::evaluate_function"
"""What the names of operators begin with that autograd's engine evaluates in a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launches:
    """When and on which thread the host launched each device event.

    ``calls`` are the rows of :class:`HostEvents` that launched, ``points`` when they began,
    ``queued`` when they returned, at the latest when the event started. In the order of the spans; :data:`UNKNOWN`
    where the trace does not tell.
    """

    calls: Rows
    points: Rows
    queued: Rows
    threads: Ints


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


def in_autograd(trace: TraceFile, points: Rows, threads: Ints) -> Mask:
    """Whether autograd's engine evaluated a function on ``threads[i]`` at ``points[i]``."""
    host = trace.host
    codes = [code for code, name in enumerate(trace.names) if name.startswith(AUTOGRAD)]
    rows = np.flatnonzero(np.isin(host.names, codes))
    found = innermost_on(host.threads[rows], host.starts[rows], host.ends[rows], threads, points)
    return np.asarray(found != UNKNOWN, np.bool_)


def _match(trace: TraceFile, wanted: Rows, ids: Rows, rows: Rows) -> Rows:
    """The host's row with each wanted id, :data:`UNKNOWN` without one.

    If several have one id, which a recorder must not write, take the last to begin before the device event.
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
    """All device events of a trace, ordered by start; names with one of ``communication`` communicate."""
    device, order = trace.device, device_order(trace)
    starts, names = device.starts[order], device.names[order]
    units, under = labels.of_work(launches.threads, launches.points)
    # Where the trace holds no launch at all, an event belongs to the step in which it ran.
    in_time = launches.points if (launches.points != UNKNOWN).any() else starts
    inputs, operators = input_table(trace.operands), operators_of(trace, launches.calls)
    is_kernel = device.categories[order] == KERNEL

    def are(test: Callable[[str], bool]) -> Mask:
        found = np.zeros(len(trace.names), np.bool_)
        for code in np.unique(names).tolist():
            found[code] = test(trace.names[code])
        return np.asarray(found[names], np.bool_)

    own = are(lambda name: any(pattern.search(name) for pattern in communication))
    conditions = (  # in the order of precedence of the definitions
        device.is_collective[order] | own | np.where(is_kernel, are(communicates), are(is_peer_copy))
        | (under & Meaning.COLLECTIVE > 0),
        under & Meaning.REDUCE > 0, ~is_kernel | (under & (Meaning.COPY_IN | Meaning.COPY_OUT) > 0), are(bool),
    )  # fmt: skip
    classes = [KINDS.index(kind) for kind in (Kind.COMM, Kind.PREP, Kind.COPY, Kind.COMPUTE)]
    kinds = np.select(conditions, classes, KINDS.index(Kind.UNCLASSIFIED)).astype(np.int8)
    several = len({number for number, _ in trace.lanes}) > 1
    return Spans(
        starts=starts, ends=device.ends[order], kinds=kinds,
        lanes=device.lanes[order], names=names,
        operators=np.where(operators == UNKNOWN, names, column_at(trace.host.names, operators)),
        launches=launches.points, queued=launches.queued, steps=step_at(in_time, host_windows),
        units=units.astype(np.int32), under=under, signatures=device.signatures[order],
        lane_names=tuple(
            f"device {number} stream {stream}" if several else f"stream {stream}"
            for number, stream in ((number, stream.removeprefix("stream ")) for number, stream in trace.lanes)
        ),
        name_table=trace.names, unit_names=labels.unit_names, signature_names=trace.signatures,
        calls=operators.astype(np.int32), inputs=inputs.at(trace.host.operands, operators),
        in_autograd=in_autograd(trace, launches.points, launches.threads), input_names=inputs.names,
    )  # fmt: skip


def device_order(trace: TraceFile) -> Rows:
    """The rows of :attr:`TraceFile.device` in the order of the spans."""
    return np.lexsort((trace.device.ends, trace.device.starts))


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
    outermost = outermost_of(host, np.flatnonzero(computes))
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
        starts=starts, ends=ends, kinds=kinds.astype(np.int8), lanes=lanes.astype(np.int32), names=host.names[rows],
        operators=host.names[rows], launches=np.where(communicates, UNKNOWN, starts),
        queued=np.where(communicates, UNKNOWN, starts), steps=step_at(starts, windows),
        units=np.where(communicates, UNKNOWN, units).astype(np.int32), under=under, signatures=host.names[rows],
        lane_names=tuple(
            "main" if place == main else f"{'emulated' if place in emulated else 'gloo'} {tid}"
            for place, (_, tid) in enumerate(trace.threads)
        ),
        name_table=trace.names, unit_names=labels.unit_names, signature_names=trace.names,
        calls=np.where(communicates, UNKNOWN, rows).astype(np.int32),
        inputs=inputs.at(host.operands, np.where(communicates, UNKNOWN, rows)),
        in_autograd=in_autograd(trace, starts, host.threads[rows]), input_names=inputs.names,
    )  # fmt: skip


def main_thread(trace: TraceFile, step_rows: Rows) -> int:
    """The thread that holds the steps; without steps, the one with most operators; :data:`UNKNOWN` without either."""
    if len(step_rows):
        return int(trace.host.threads[step_rows[0]])
    computes = named(trace, COMPUTE_OP) & (trace.host.categories == HOST)
    return int(np.argmax(np.bincount(trace.host.threads[computes]))) if computes.any() else UNKNOWN


Args = dict[str, Any]

OPERATORS = {
    # c10d operator: (operation, argument that holds the unsharded tensor)
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
"""torch's operators that communicate, without ``c10d::``; barriers move nothing and are left out."""

OF_SHARDS = frozenset(("allgather_", "reduce_scatter_"))
"""Operators that take the shards; the unsharded tensors are nested lists, which traces leave out."""
BARRIERS = frozenset(("barrier", "monitored_barrier_"))
_GLOO_RUNS_AS = {"reduce_scatter": "all_reduce"}
"""What gloo calls the run of an operation, where that is another."""

_NAMES = (
    # What a kernel's name or "Collective name" contains, without underscores and in lower case; first match wins.
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("send", "send"),
    ("recv", "recv"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as far as it is known: a name with its ranks, how many and which these are, what it is for."""

    name: str | None = None
    size: int | None = None
    ranks: tuple[int, ...] = ()
    description: str | None = None


_C10D, _NCCL = "c10d::", "nccl:"
_NAME = "Collective name"
_SEQUENCE = "Seq"
"""The number of a collective in its group, alike on all ranks (pytorch pull request 177148, kineto 1296; in 2.13)."""


@dataclass(slots=True, kw_only=True)
class _Announced:
    """A collective as the host's operators describe it, and the spans that ran for it.

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
    host, announced, annotations = trace.host, list[_Announced](), _Annotations(trace)
    for row in sorted(trace.host_args, key=lambda row: host.starts[row]):
        name = trace.names[host.names[row]]
        if name.startswith(_C10D) and (plain := name.removeprefix(_C10D)) not in BARRIERS:
            # One that is not known must not vanish: it goes by its own name, with its first tensor's bytes.
            op, argument = OPERATORS.get(plain, (name, 0))
            arguments = (0, 1) if op == "all_to_all" else (argument,)  # ranks may get more than they send
            shapes = [max((shape_of(trace.host_args[row], one) for one in arguments), key=lambda shape: shape[0] or 0)]
            announced.append(_Announced(op=op, rows=[row], shapes=shapes, of_shards=plain in OF_SHARDS))
    ran, groups = np.flatnonzero(spans.of_kind(Kind.COMM)), groups_of(trace.metadata.get("distributedInfo"))
    if launches is None:
        runs = [r for r in trace.host_args if trace.names[host.names[r]].startswith((GLOO, EMULATED))]
        rows = np.array([r for r in runs if host.categories[r] == ANNOTATION], np.int64)
        rows = rows[np.lexsort((host.ends[rows], host.starts[rows]))]
        row_of = dict(zip(ran.tolist(), rows.tolist()))

        def args_at(row: int) -> Args:
            return trace.host_args[row_of[row]]

        alone = _match_in_order(trace, spans, ran, announced)
    else:
        order, points = device_order(trace), launches.points

        def args_at(row: int) -> Args:
            own = trace.device_args.get(int(order[row]))
            return annotations.around(int(points[row])) if own is None else own

        # A kernel belongs to the innermost operator of its thread during which it was launched.
        rows = np.array([one.rows[0] for one in announced], np.int64)
        places = innermost_on(
            host.threads[rows], host.starts[rows], host.ends[rows], launches.threads[ran], launches.points[ran]
        )
        for row, place in zip(ran.tolist(), places.tolist()):
            if place != UNKNOWN:
                announced[place].spans.append(row)
        alone = _match_coalesced(trace, launches, ran[places == UNKNOWN].tolist(), announced, args_at)
        announced = [one for one in announced if one.rows]

    def described(
        op: str, args: Args, rows: list[int], unit: int, step: int, launched: int, size: int | None, announced: bool
    ) -> Collective:
        group = group_of(args, groups)
        return Collective(
            op=op, bytes=bytes_of_message(op, args) if size is None else size, step=None if step == UNKNOWN else step,
            group=group.name, group_size=group.size, dtype=dtype_of(args),
            unit=None if unit == UNKNOWN else labels.unit_names[unit],
            lane=spans.lane_names[spans.lanes[rows[0]]] if rows else None,
            launched=None if launched == UNKNOWN else launched, start=int(spans.starts[rows].min()) if rows else None,
            end=int(spans.ends[rows].max()) if rows else None, announced=announced, rows=tuple(rows),
            group_ranks=group.ranks, group_description=group.description, sequence=whole(args.get(_SEQUENCE)),
        )  # fmt: skip

    firsts = [one.rows[0] for one in announced]
    units = labels.unit_at(host.threads[firsts], host.starts[firsts]).tolist()
    steps = step_at(host.starts[firsts], windows).tolist()
    dtype_at = {numel: dtype_of(args_at(one.spans[0])) for one in announced for numel, _ in one.shapes if one.spans}
    found = []
    for one, unit, step, launched in zip(announced, units, steps, host.starts[firsts].tolist()):
        # NCCL launches no kernel for a group of one rank: the annotation is all there is.
        args = args_at(one.spans[0]) if one.spans else annotations.within(one.rows[0])
        # What runs tells the dtype that a list of tensors hides.
        other = dtype_named(dtype_of(args) or dtype_at.get(one.shapes[0][0]))
        sizes = [(numel, dtype_named(dtype) or other) for numel, dtype in one.shapes]
        known = [numel * element[1] for numel, element in sizes if numel is not None and element is not None]
        size = sum(known) if len(known) == len(sizes) else None
        if one.of_shards and size is not None:
            ranks = group_of(args, groups).size
            size = None if ranks is None else size * ranks
        found.append(described(one.op, args, one.spans, unit, step, launched, size, announced=True))
    for row in alone:
        args, kernel = args_at(row), spans.name_table[spans.names[row]]
        name = args.get(_NAME)
        op = operation_of(name) if isinstance(name, str) and name else custom_operation(kernel) or operation_of(kernel)
        unit, step, launched = int(spans.units[row]), int(spans.steps[row]), int(spans.launches[row])
        size = whole(args.get("bytes")) if op == PEER_COPY else None
        found.append(described(op, args, [row], unit, step, launched, size, announced=False))
    return tuple(sorted(found, key=lambda c: c.start if c.launched is None else c.launched))  # type: ignore[arg-type,return-value]


def _match_coalesced(
    trace: TraceFile, launches: Launches, alone: list[int], announced: Sequence[_Announced],
    args_at: Callable[[int], Args],
) -> list[int]:  # fmt: skip
    """Give a coalesced kernel to the operators of its thread that wait for one: together they are one collective."""
    waiting, left = defaultdict[int, list[_Announced]](list), []
    for one in reversed(announced):
        if not one.spans:
            waiting[int(trace.host.threads[one.rows[0]])].append(one)
    for row in sorted(alone, key=lambda row: launches.points[row]):
        queue, members = waiting[int(launches.threads[row])], list[_Announced]()
        if "coalesced" in str(args_at(row).get(_NAME)):
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


def _match_in_order(trace: TraceFile, spans: Spans, ran: Rows, announced: Sequence[_Announced]) -> list[int]:
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


class _Annotations:
    """The host's annotations of collectives: ``record_param_comms`` and ``nccl:*`` of torch, ``emulated:*``."""

    def __init__(self, trace: TraceFile) -> None:
        host = trace.host
        rows = [
            row for row, args in trace.host_args.items()
            if _NAME in args or trace.names[host.names[row]].startswith((_NCCL, EMULATED))
        ]  # fmt: skip
        rows.sort(key=lambda row: host.starts[row])
        self._args = [{_NAME: trace.names[host.names[row]].removeprefix(_NCCL), **trace.host_args[row]} for row in rows]
        self._starts, self._ends, self._threads = host.starts[rows], host.ends[rows], host.threads[rows]
        self._host = host

    def around(self, point: int) -> Args:
        """The arguments of the innermost annotation at a point in time."""
        place = int(np.searchsorted(self._starts, point, side="right")) - 1
        return self._args[place] if place >= 0 and point < self._ends[place] else {}

    def within(self, row: int) -> Args:
        """The arguments of the first annotation inside an operator of the host."""
        first, last = np.searchsorted(self._starts, [self._host.starts[row], self._host.ends[row]])
        own = np.flatnonzero(self._threads[first:last] == self._host.threads[row])
        return self._args[first + own[0]] if len(own) else {}


def operation_of(name: str) -> str:
    """The operation of a kernel or annotation.

    >>> operation_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)"), operation_of("_allgather_base")
    ('reduce_scatter', 'all_gather')
    """
    plain = name.lower().replace("_", "").partition("(")[0]
    return next((op for part, op in _NAMES if part in plain), _identifier(name))


def _identifier(name: str) -> str:
    """The name of a function without its result, namespaces, template and arguments.

    >>> _identifier("void (anonymous namespace)::ring::exchange<float, 4>(float*, int)"), _identifier("what")
    ('exchange', 'what')
    """
    plain = name.replace("(anonymous namespace)::", "").partition("(")[0].partition("<")[0]
    return plain.rpartition("::")[2].rpartition(" ")[2] or name


def run_of(op: str, *, emulated: bool) -> str:
    """The name of the span in which an operation runs on a CPU.

    >>> run_of("reduce_scatter", emulated=False), run_of("reduce_scatter", emulated=True)
    ('gloo:all_reduce', 'emulated:reduce_scatter')
    """
    return EMULATED + op if emulated else GLOO + _GLOO_RUNS_AS.get(op, op)


def shape_of(args: Args, argument: int) -> tuple[int | None, Any]:
    """Elements of an operator's argument, over all tensors of a list, and its dtype; None where that is not recorded.

    A list hides its tensors' dtype.
    """
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(dims, list) and isinstance(types, list) and min(len(dims), len(types)) > argument):
        return None, None
    shapes = dims[argument] if types[argument] == "TensorList" else [dims[argument]]
    known = isinstance(shapes, list) and all(isinstance(shape, list) for shape in shapes)
    if not known or not shapes or any(whole(n) is None for shape in shapes for n in shape):
        return None, types[argument]
    return sum(map(math.prod, shapes)), types[argument]


def dtype_of(args: Args) -> str | None:
    """The elements' type."""
    dtype = args.get("dtype")
    if not isinstance(dtype, str):
        types = args.get("Input type")
        dtype = types[0] if isinstance(types, list) and types else None
    return dtype if isinstance(dtype, str) and dtype != "TensorList" else None


def bytes_of_message(op: str, args: Args) -> int | None:
    """Size of the unsharded tensor: the larger of what goes in and what comes out; None if only a shard is known.

    NCCL's annotation gives the elements of both; of gloo's, the first tensor's stand for them.
    """
    sent, received = (whole(args.get(key)) for key in ("In msg nelems", "Out msg nelems"))
    if sent is None and received is None:
        sent, _ = shape_of(args, 0)
    element, counts = dtype_named(dtype_of(args)), [n for n in (sent, received) if n is not None]
    if element is None or not counts or (op in ("all_gather", "gather") and received is None):
        return None
    return element[1] * max(counts)


def groups_of(info: Any) -> dict[str, list[int]]:
    """Ranks of the process groups by name, as the trace's distributed metadata gives them."""
    config = info.get("pg_config") if isinstance(info, dict) else None
    found = {}
    for group in config if isinstance(config, list) else ():
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            found[str(group.get("pg_name"))] = [rank for rank in group["ranks"] if whole(rank) is not None]
    return found


def group_of(args: Args, groups: dict[str, list[int]]) -> Group:
    """The process group that a collective's arguments name; its ranks come from them or from the metadata.

    Where all groups hold the same ranks, one that is not named has as many.
    """
    name, listed = args.get("Process Group Name"), str(args.get("Process Group Ranks") or "")
    members = _ranks_in(listed) if "..." not in listed else ()
    if not members and isinstance(name, str):
        members = tuple(groups.get(name, ()))
    size = whole(args.get("Group size")) or len(members) or None
    if size is None and len({tuple(every) for every in groups.values()}) == 1:
        size = len(next(iter(groups.values()))) or None
    about = args.get("Process Group Description")
    about = about if isinstance(about, str) and about not in ("", "undefined") else None
    full = f"{name} [{_ranges(members)}]" if members else name
    return Group(name=full if isinstance(name, str) else None, size=size, ranks=members, description=about)


@lru_cache(maxsize=256)
def _ranks_in(listed: str) -> tuple[int, ...]:
    """The ranks in a list as text; the collectives of a group share one tuple."""
    return tuple(map(int, re.findall(r"\d{1,9}", listed)))


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks in few words.

    >>> _ranges([0, 1, 2, 3, 8])
    '0-3, 8'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


Pairs = tuple[Rows, Rows]
"""What waits, and the span that it waits for."""

LOWEST = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """The spans of each lane in the order in which they run, and when they had been launched at the latest."""

    rows: tuple[Rows, ...]
    launches: tuple[Nanoseconds, ...]
    ends: Nanoseconds

    @classmethod
    def of(cls, spans: Spans) -> "Streams":
        """A lane runs in the order of its launches, so a span of unknown launch counts as launched with the last."""
        order = np.argsort(spans.lanes, kind="stable")
        cuts = np.searchsorted(spans.lanes[order], np.arange(1, len(spans.lane_names)))
        rows = tuple(np.split(order, cuts))
        launches = np.where(spans.launches == UNKNOWN, LOWEST, spans.launches)
        ordered = tuple(np.maximum.accumulate(launches[mine]) if len(mine) else launches[mine] for mine in rows)
        return cls(rows=rows, launches=ordered, ends=spans.ends)

    def last_before(self, lane: int, points: Nanoseconds) -> Rows:
        """The last span of a lane launched before each point, :data:`UNKNOWN` without one."""
        place = np.searchsorted(self.launches[lane], points, "left")
        return np.append(self.rows[lane], UNKNOWN)[place - 1]

    def first_after(self, lane: int, points: Nanoseconds) -> Rows:
        """The first span of a lane launched at each point or later, :data:`UNKNOWN` without one."""
        return np.append(self.rows[lane], UNKNOWN)[np.searchsorted(self.launches[lane], points, "left")]


def recorded_waits(trace: TraceFile, spans: Spans) -> Pairs:
    """Streams' waits that the profiler recorded: the first span that waits, and the last that it waits for.

    Where it does not say which call recorded the event (until 2023), the event is taken to have been recorded just
    before the wait, as ``torch.cuda.Stream.wait_stream`` does.
    """
    syncs, numbers = trace.syncs, lane_numbers(trace)
    rows = np.flatnonzero(syncs.kinds == STREAM_WAIT)
    if not len(rows):
        return rows, rows
    streams = Streams.of(spans)
    waiting, sources = (
        np.array([numbers.get(key, UNKNOWN) for key in zip(syncs.devices[rows].tolist(), of[rows].tolist())], np.int64)
        for of in (syncs.streams, syncs.sources)
    )
    begins = begins_by_correlation(trace, np.concatenate((syncs.correlations[rows], syncs.records[rows])))
    called, recorded = begins[: len(rows)], begins[len(rows) :]
    recorded = np.where(syncs.records[rows] < 0, called, recorded)
    usable = (waiting != UNKNOWN) & (sources != UNKNOWN) & (waiting != sources)
    usable &= (called != UNKNOWN) & (recorded != UNKNOWN)
    first, last = np.full(len(rows), UNKNOWN, np.int64), np.full(len(rows), UNKNOWN, np.int64)
    for lane in range(len(streams.rows)):
        mine, theirs = usable & (waiting == lane), usable & (sources == lane)
        first[mine] = streams.first_after(lane, called[mine])
        last[theirs] = streams.last_before(lane, recorded[theirs])
    known = (first != UNKNOWN) & (last != UNKNOWN)
    return first[known], last[known]


def lane_numbers(trace: TraceFile) -> dict[tuple[int, int], int]:
    """Lanes by device and stream."""
    return {
        (int(device), int(stream)): lane
        for lane, (device, stream) in enumerate(trace.lanes)
        if device.isdigit() and stream.isdigit()
    }


def begins_by_correlation(trace: TraceFile, correlations: Rows) -> Nanoseconds:
    """When the call with each correlation id began; :data:`UNKNOWN` without such a call."""
    host = trace.host
    rows = np.flatnonzero((host.categories == LAUNCH) & (host.correlations > 0))
    rows = rows[np.isin(host.correlations[rows], correlations)]
    rows = rows[np.argsort(host.correlations[rows], kind="stable")]
    ids = np.append(host.correlations[rows], UNKNOWN)
    place = np.searchsorted(ids[:-1], correlations)
    return np.where(ids[place] == correlations, np.append(host.starts[rows], UNKNOWN)[place], UNKNOWN)


def find_calls(trace: TraceFile, launches: Launches, spans: Spans) -> HostCalls:
    """What the calls of a trace say about waits, for its device events in the order of the spans."""
    host = trace.host
    calls = host.categories == LAUNCH
    long = host.ends - host.starts >= LONG_NS
    rows = np.flatnonzero(calls & (long | named(trace, BLOCKS)))
    rows = rows[np.argsort(host.starts[rows], kind="stable")]
    # Before which spans a wait was called, on the span's thread, since the last launch on the span's stream.
    awaits, waits = np.zeros(len(launches.points), np.bool_), np.flatnonzero(calls & named(trace, STREAM_WAITS))
    lanes, known = trace.device.lanes[device_order(trace)], np.flatnonzero(launches.points != UNKNOWN)
    order = known[np.lexsort((launches.points[known], lanes[known]))]
    before, same = np.full(len(order), LOWEST), lanes[order][1:] == lanes[order][:-1]
    before[1:][same] = launches.points[order][:-1][same]
    for thread in np.unique(host.threads[waits]):
        times = np.sort(host.starts[waits[host.threads[waits] == thread]])
        mine = np.flatnonzero(launches.threads[order] == thread)
        until = np.searchsorted(times, launches.points[order[mine]], side="left")
        awaits[order[mine]] = until > np.searchsorted(times, before[mine], side="left")
    waiting, sources = recorded_waits(trace, spans)
    return HostCalls(
        threads=launches.threads, awaits=awaits,
        starts=host.starts[rows], ends=host.ends[rows], callers=host.threads[rows], names=host.names[rows],
        waiting=waiting, sources=sources,
    )  # fmt: skip


def read_timeline(path: Path) -> Timeline:
    """Read one rank's trace (``.json`` or ``.json.gz``).

    Raises:
        TraceError: the file is missing, damaged, no trace, or holds no step.
    """
    timeline = timeline_of(read_events(path))
    if timeline.windows[0].step is None:
        raise TraceError(f"{path}: holds no ProfilerStep; call profiler.step() after every training step")
    return timeline


def timeline_of(
    trace: TraceFile, options: WindowOptions | None = None, *, communication: Sequence["re.Pattern[str]"] = ()
) -> Timeline:
    """What the rank of this trace did, with windows by ``options`` in place of its steps.

    A trace without steps is one window, from its first span to its last.

    Device events with one of ``communication`` in their names communicate, besides the known ones.

    Raises:
        TraceError: the trace holds nothing that can be analysed, or nothing that was requested.
    """
    host_windows, step_rows = host_steps(trace) if options is None else chosen_windows(trace, options)
    labels = find_labels(trace)
    on_device = len(trace.device.starts) > 0
    launches = find_launches(trace) if on_device else None
    if launches is not None:
        spans = device_spans(trace, labels, host_windows, launches, communication)
    else:
        spans = cpu_spans(trace, labels, host_windows, main_thread(trace, step_rows))
    if not len(spans) and not host_windows:
        if count := trace.skipped.get("without_category"):
            raise TraceError(
                f"{trace.path}: {count:,} events have no category (cat), as in Ascend's trace_view.json, so that what "
                "they are is unknown; refshard reads the traces that torch.profiler writes with Kineto"
            )
        raise TraceError(
            f"{trace.path}: holds no kernels and copies, no gloo:* or emulated:* spans, no steps and no operators; "
            "record it with ProfilerActivity.CPU, and CUDA where there is a GPU"
        )
    recorded = device_windows if trace.metadata.get(WRITER) == DRY_RUN else recorded_windows
    lived = recorded if options is None else device_windows_apart
    windows = lived(spans, host_windows) if on_device else host_windows
    collectives = find_collectives(trace, spans, labels, host_windows, launches)
    if not on_device:  # only the operator that announced a collective knows when that was, and for which unit
        at, units, steps = spans.launches.copy(), spans.units.copy(), spans.steps.copy()
        number = {name: place for place, name in enumerate(spans.unit_names)}
        for one in collectives:
            if one.announced:
                rows = list(one.rows)
                at[rows] = UNKNOWN if one.launched is None else one.launched
                units[rows] = number.get(one.unit or "", UNKNOWN)
                steps[rows] = UNKNOWN if one.step is None else one.step
        spans = replace(spans, launches=at, queued=at, units=units, steps=steps)
    timeline = Timeline(
        rank=rank_of(trace),
        windows=windows or (Window(step=None, start=int(spans.starts.min()), end=int(spans.ends.max())),),
        host_windows=host_windows, spans=spans,
        collectives=collectives, labels=labels.as_labels(), on_device=on_device,
        calls=find_calls(trace, launches, spans) if launches is not None else None,
    )  # fmt: skip
    return timeline if options is None or options.pattern is not None else cut_to(timeline, trace, options)


def rank_of(trace: TraceFile) -> int | None:
    """The rank that the trace's metadata names."""
    info = trace.metadata.get("distributedInfo")
    return whole(info.get("rank")) if isinstance(info, dict) else None
